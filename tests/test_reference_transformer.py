"""The reference models: loops, torch's modules and their conventions, what reaches a logit, golden numbers, errors."""

import warnings

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import (
    VOCABULARY,
    close,
    converted,
    random_lm,
    random_module,
    random_transformer,
    stack_from_torch,
)

from veriformer.reference import (
    decoder,
    decoder_lm,
    encoder,
    encoder_layer,
    layer_norm,
    loops_models,
    sinusoidal_positions,
    transformer,
)

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=40, deadline=None, database=None, derandomize=True)
POSITIONS = (None, "sinusoidal", "rotary", "alibi")
NORMS = ("post", "pre")


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape)


# against the loops and other frameworks


@st.composite
def language_models(draw):
    """(tokens, params), keywords."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.sampled_from([1, 3, 5]))
    params = random_lm(
        draw(st.integers(0, 9)),
        layers=draw(st.sampled_from([1, 2])),
        groups=draw(st.sampled_from([1, 2, 4])),
        head=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 2.5])),
    )
    keywords = {
        "heads": 4,
        "norm": draw(st.sampled_from(NORMS)),
        "alpha": draw(st.sampled_from([1.0, 1.7])),
        "mask": draw(st.sampled_from([None, generator.random((2, length)) < 0.7])),
        "window": draw(st.sampled_from([None, (1, 0), (2, None)])),
        "positions": draw(st.sampled_from(POSITIONS)),
        "at": draw(st.sampled_from([None, generator.integers(0, 9, (2, length))])),
    }
    return (generator.integers(0, VOCABULARY, (2, length)), params), keywords


@st.composite
def translators(draw):
    """(source, target, params), keywords."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    source, target = draw(st.sampled_from([(1, 1), (3, 2), (2, 4)]))
    norm = draw(st.sampled_from(NORMS))
    keywords = {
        "heads": 4,
        "norm": norm,
        "alpha": draw(st.sampled_from([(1.0, 1.0), (1.3, 1.9)])),
        "mask": draw(st.sampled_from([None, generator.random((2, source)) < 0.7])),
        "positions": draw(st.sampled_from(POSITIONS)),
    }
    params = random_transformer(draw(st.integers(0, 9)), norm=norm)
    return (*(generator.integers(0, VOCABULARY, (2, n)) for n in (source, target)), params), keywords


def rows(array):
    """What belongs to each batch row."""
    return [None, None] if array is None else array


@SEARCH
@given(language_models())
def test_decoder_lm_equals_the_loops(case):
    (ids, params), keywords = case
    rest = {name: a for name, a in keywords.items() if name not in ("mask", "at")}
    wanted = [
        loops_models.decoder_lm(row, params, mask=mask, at=at, **rest)
        for row, mask, at in zip(ids, rows(keywords["mask"]), rows(keywords["at"]), strict=True)
    ]
    close(decoder_lm(ids, params, **keywords), wanted)


@SEARCH
@given(translators())
def test_transformer_equals_the_loops(case):
    (source, target, params), keywords = case
    rest = {name: a for name, a in keywords.items() if name != "mask"}
    wanted = [
        loops_models.transformer(x, y, params, mask=mask, **rest)
        for x, y, mask in zip(source, target, rows(keywords["mask"]), strict=True)
    ]
    close(transformer(source, target, params, **keywords), wanted)


@pytest.mark.parametrize(
    ("function", "recipe"), [(decoder_lm, language_models()), (transformer, translators())], ids=["lm", "translator"]
)
@settings(SEARCH)
@given(data=st.data())
def test_frameworks_agree(function, recipe, data):
    case = data.draw(recipe)
    wanted = function(*case[0], **case[1])
    there, those = converted(strict.asarray, case)
    np.testing.assert_array_equal(np.asarray(function(*there, **those)), wanted)
    there, those = converted(torch.tensor, case)
    close(function(*there, **those), wanted)


# against torch's modules


def torch_layer(kind, norm):
    return kind(12, 4, 20, 0.0, batch_first=True, norm_first=norm == "pre", dtype=torch.float64)


def torch_norm():
    return torch.nn.LayerNorm(12, dtype=torch.float64)


def inputs(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, length, 12, dtype=torch.float64, generator=generator) for length in lengths]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_encoder_agrees_with_torchs(norm, final, masked):
    """torch puts a final norm where it is told to, in post-norm and in pre-norm; here it is where params have one."""
    layer = torch_layer(torch.nn.TransformerEncoderLayer, norm)
    module = torch.nn.TransformerEncoder(layer, 2, torch_norm() if final else None, enable_nested_tensor=False)
    (x,), absent = inputs(5), torch.zeros(2, 5, dtype=torch.bool)
    absent[1, 3:] = masked
    theirs = random_module(module)(x, src_key_padding_mask=absent)
    params = stack_from_torch(module)
    assert ("norm" in params) == final
    ours = encoder(x, params, heads=4, norm=norm, mask=~absent[:, None, None, :])
    close(ours.detach(), theirs.detach())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("final", [False, True])
def test_decoder_agrees_with_torchs(norm, final):
    layer = torch_layer(torch.nn.TransformerDecoderLayer, norm)
    module = random_module(torch.nn.TransformerDecoder(layer, 2, torch_norm() if final else None))
    (x, memory), absent = inputs(5, 4), torch.zeros(2, 4, dtype=torch.bool)
    absent[0, 2] = True
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    theirs = module(x, memory, later, memory_key_padding_mask=absent)
    ours = decoder(x, memory, stack_from_torch(module), heads=4, norm=norm, memory_mask=~absent[:, None, None, :])
    close(ours.detach(), theirs.detach())


def models(norm):
    """nn.Transformer between embeddings and a head of its own, and its parameters in our layout."""
    inner = torch.nn.Transformer(
        12, 4, 2, 3, 20, dropout=0.0, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    tables = [torch.nn.Embedding(VOCABULARY, 12, dtype=torch.float64) for _ in range(2)]
    module = random_module(torch.nn.ModuleList([inner, *tables, torch.nn.Linear(12, 9, dtype=torch.float64)]))
    inner, source, target, head = module
    params = {
        "source_embedding": source.weight,
        "target_embedding": target.weight,
        "embedding_scale": 12**0.5,
        "encoder": stack_from_torch(inner.encoder),
        "decoder": stack_from_torch(inner.decoder),
        "head": {"w": head.weight.T, "b": head.bias},
    }
    return module, params


def by_torch(module, source, target, absent):
    inner, *tables, head = module
    x, y = (
        table(ids) * 12**0.5 + sinusoidal_positions(ids.shape[1], 12, like=ids)
        for ids, table in zip((source, target), tables, strict=True)
    )
    later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    masks = {"src_key_padding_mask": absent, "memory_key_padding_mask": absent}
    return head(inner(x, y, tgt_mask=later, tgt_is_causal=True, **masks))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("evaluating", [False, True])
def test_transformer_agrees_with_torchs(norm, evaluating):
    """nn.Transformer has a final norm in both stacks, also in post-norm; evaluating, it takes its fused path."""
    source, target = torch.tensor(tokens(0, 2, 5)), torch.tensor(tokens(1, 2, 4))
    absent = torch.tensor([[False] * 5, [False, False, False, True, True]])
    with torch.set_grad_enabled(not evaluating), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested tensors
        module, params = models(norm)
        theirs = by_torch(module.train(not evaluating), source, target, absent)
    ours = transformer(source, target, params, heads=4, norm=norm, mask=~absent)
    close(ours.detach(), theirs.detach())
    if norm == "post":
        params["encoder"].pop("norm")
        assert (transformer(source, target, params, heads=4, mask=~absent) - ours).abs().max() > 0.01


# wiring


@pytest.mark.parametrize("norm", NORMS)
def test_cross_attention_looks_at_the_finished_encoder(norm):
    """Of depths that differ, with the encoder's final norm."""
    params = random_transformer(2, layers=(1, 3), norm=norm)
    source, target = tokens(0, 2, 4), tokens(1, 2, 3)
    x, y = (
        params[name][ids] * params["embedding_scale"] + sinusoidal_positions(ids.shape[1], 8, like=ids)
        for name, ids in (("source_embedding", source), ("target_embedding", target))
    )
    memory = encoder(x, params["encoder"], heads=4, norm=norm)
    out = decoder(y, memory, params["decoder"], heads=4, norm=norm)
    close(transformer(source, target, params, heads=4, norm=norm), out @ params["target_embedding"].T)


def test_the_head_is_the_embedding_without_its_scale_unless_there_is_one():
    params, ids = random_lm(1, scale=3.0), tokens(0, 1, 4)
    eye = {"w": np.eye(8)}
    hidden = decoder_lm(ids, params | {"head": eye}, heads=4)
    close(decoder_lm(ids, params, heads=4), hidden @ params["embedding"].T)
    biased = decoder_lm(ids, params | {"head": eye | {"b": np.arange(8.0)}}, heads=4)
    close(biased, hidden + np.arange(8.0))
    unscaled = {name: part for name, part in params.items() if name != "embedding_scale"}
    larger = unscaled | {"embedding": 3.0 * params["embedding"], "head": {"w": params["embedding"].T}}
    close(decoder_lm(ids, larger, heads=4), decoder_lm(ids, params, heads=4))


def test_a_decoder_only_model_is_encoder_layers_under_a_causal_mask():
    params, ids = random_lm(1), tokens(0, 2, 5)
    x = params["embedding"][ids]
    for layer in params["layers"]:
        x = encoder_layer(x, layer, heads=4, norm="pre", mask=np.tri(5, dtype=bool)[None, None], positions="rotary")
    wanted = layer_norm(x, **params["norm"]) @ params["embedding"].T
    close(decoder_lm(ids, params, heads=4), wanted)


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_prefix_has_the_logits_of_the_whole(positions):
    params, ids = random_lm(1), tokens(0, 2, 6)
    whole = decoder_lm(ids, params, heads=4, positions=positions)
    for length in range(7):
        close(decoder_lm(ids[:, :length], params, heads=4, positions=positions), whole[:, :length])


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_logit_depends_on_every_token_up_to_its_own(positions):
    params, ids = random_lm(1), tokens(0, 1, 5)
    before = decoder_lm(ids, params, heads=4, positions=positions)
    for j in range(5):
        changed = ids.copy()
        changed[0, j] = (ids[0, j] + 1) % VOCABULARY
        moved = np.abs(decoder_lm(changed, params, heads=4, positions=positions) - before).max(axis=2)[0]
        assert not moved[:j].any() and moved[j:].all()


def test_layers_of_a_window_reach_as_far_as_all_of_them_together():
    """Two layers that see 1 token back reach 2 back, and no further."""
    params, ids = random_lm(1, layers=2), tokens(0, 1, 6)
    before = decoder_lm(ids, params, heads=4, window=(1, 0))
    changed = ids.copy()
    changed[0, 1] = (ids[0, 1] + 1) % VOCABULARY
    moved = np.abs(decoder_lm(changed, params, heads=4, window=(1, 0)) - before).max(axis=2)[0]
    np.testing.assert_array_equal(moved > 0, [False, True, True, True, False, False])


@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_in_front_changes_nothing_if_positions_are_told(positions):
    params, ids = random_lm(1), tokens(0, 1, 4)
    plain = decoder_lm(ids, params, heads=4, positions=positions, window=(2, 0))
    padded, mask = np.concatenate([tokens(5, 1, 3), ids], axis=1), np.arange(7)[None] >= 3
    at = np.maximum(np.arange(7)[None] - 3, 0)
    got = decoder_lm(padded, params, heads=4, positions=positions, window=(2, 0), mask=mask, at=at)
    assert np.isfinite(got).all()
    close(got[:, 3:], plain)
    untold = decoder_lm(padded, params, heads=4, positions=positions, window=(2, 0), mask=mask)[:, 3:]
    if positions == "sinusoidal":
        assert np.abs(untold - plain).max() > 0.01
    else:
        close(untold, plain)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_padding_of_the_source_and_other_rows_of_the_batch_change_nothing(norm, positions):
    params, source, target = random_transformer(1, norm=norm), tokens(0, 1, 3), tokens(1, 1, 4)
    plain = transformer(source, target, params, heads=4, norm=norm, positions=positions)
    sources = np.concatenate([np.concatenate([source, tokens(2, 1, 2)], axis=1), tokens(3, 1, 5)])
    targets, mask = np.concatenate([target, tokens(4, 1, 4)]), np.arange(5)[None] < np.asarray([[3], [5]])
    got = transformer(sources, targets, params, heads=4, norm=norm, positions=positions, mask=mask)
    close(got[:1], plain)


def test_changing_the_source_changes_every_logit():
    params, source, target = random_transformer(1), tokens(0, 1, 3), tokens(1, 1, 4)
    before = transformer(source, target, params, heads=4)
    changed = source.copy()
    changed[0, 2] = (source[0, 2] + 1) % VOCABULARY
    assert np.abs(transformer(changed, target, params, heads=4) - before).max(axis=2).all()


def test_an_alpha_for_each_stack():
    params, source, target = random_transformer(1), tokens(0, 1, 3), tokens(1, 1, 4)
    outs = [transformer(source, target, params, heads=4, alpha=a) for a in (1.5, (1.5, 1.5), (1.5, 1.0), (1.0, 1.5))]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert np.abs(outs[2] - outs[1]).max() > 0.01 and np.abs(outs[3] - outs[1]).max() > 0.01


def test_a_model_without_layers_is_embedding_and_head():
    params, ids = {"embedding": np.random.default_rng(0).normal(size=(3, 4)), "layers": []}, np.asarray([[2, 0]])
    close(decoder_lm(ids, params, heads=1, positions=None), params["embedding"][ids] @ params["embedding"].T)


# gradients


def test_gradients_of_the_models():
    params = converted(torch.tensor, random_lm(1, scale=1.5))
    table, wv = params["embedding"], params["layers"][0]["attention"]["wv"]

    def lm(table, wv):
        first = params["layers"][0] | {"attention": params["layers"][0]["attention"] | {"wv": wv}}
        changed = params | {"embedding": table, "layers": [first, params["layers"][1]]}
        return decoder_lm(torch.tensor(tokens(0, 1, 3)), changed, heads=4)

    assert torch.autograd.gradcheck(lm, [array.requires_grad_() for array in (table, wv)])
    whole = converted(torch.tensor, random_transformer(1))
    source, target = torch.tensor(tokens(0, 1, 3)), torch.tensor(tokens(1, 1, 2))

    def translator(source_table, target_table):
        changed = whole | {"source_embedding": source_table, "target_embedding": target_table}
        return transformer(source, target, changed, heads=4, mask=torch.tensor([[True, True, False]]))

    tables = [whole[name].requires_grad_() for name in ("source_embedding", "target_embedding")]
    assert torch.autograd.gradcheck(translator, tables)


def test_the_gradient_of_a_tied_table_is_that_of_both_its_uses():
    params, ids = converted(torch.tensor, random_lm(1)), torch.tensor(tokens(0, 1, 4))
    table, first, second = (params["embedding"].clone().requires_grad_() for _ in range(3))
    weights = torch.randn(1, 4, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (decoder_lm(ids, params | {"embedding": table}, heads=4) * weights).sum().backward()
    untied = params | {"embedding": first, "head": {"w": second.T}}
    (decoder_lm(ids, untied, heads=4) * weights).sum().backward()
    close(table.grad, first.grad + second.grad)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi"])
def test_gradients_of_a_stack_of_parameters_equal_those_of_each(positions):
    """The budgets differentiate the reference on many perturbed parameters at once."""
    params, models = converted(torch.tensor, random_transformer(1)), converted(torch.tensor, random_lm(1))
    ids, weights = torch.tensor(tokens(0, 1, 3)), torch.linspace(-1, 1, 3 * VOCABULARY, dtype=torch.float64)

    def loss(table, wq):
        layer = models["layers"][0] | {"attention": models["layers"][0]["attention"] | {"wq": wq}}
        lm = decoder_lm(ids, models | {"embedding": table, "layers": [layer]}, heads=4, positions=positions)
        both = params | {"target_embedding": table}
        return ((lm + transformer(ids, ids, both, heads=4, positions=positions)).reshape(-1) * weights).sum()

    generator = torch.Generator().manual_seed(0)
    stacks = [torch.randn(3, *shape, dtype=torch.float64, generator=generator) for shape in ((VOCABULARY, 8), (8, 8))]
    together = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(*stacks)
    for i in range(3):
        for got, wanted in zip(together, torch.func.grad(loss, argnums=(0, 1))(*(s[i] for s in stacks)), strict=True):
            close(got[i], wanted)


# golden numbers


def waves(*shape, start=0.0):
    """Numbers that can be made anywhere without a random generator: cos(start), cos(start + 1), …"""
    return np.cos(start + np.arange(float(np.prod(shape)))).reshape(shape)


def wave_layer(cross, start):
    parts = {"attention": {name: waves(4, 4, start=start + i) for i, name in enumerate(("wq", "wk", "wv", "wo"))}}
    if cross:
        parts["cross_attention"] = {
            name: waves(4, 4, start=start + 4 + i) for i, name in enumerate(("wq", "wk", "wv", "wo"))
        }
    parts["feed_forward"] = {"w1": waves(4, 6, start=start + 8), "w2": waves(6, 4, start=start + 9)}
    return parts | {f"norm{i + 1}": {"weight": waves(4) + 2, "bias": waves(4, start=1.0)} for i in range(len(parts))}


def test_golden_logits():
    """Also made by the loops; a change of these numbers is a change of what the models mean."""
    params = {"embedding": waves(5, 4), "layers": [wave_layer(False, 0.5)], "norm": {"weight": waves(4) + 2}}
    ids = np.asarray([[3, 0, 4]])
    for positions, wanted in GOLDEN.items():
        got = decoder_lm(ids, params, heads=2, positions=positions)[0, -1]
        np.testing.assert_allclose(got, wanted, atol=5e-9)
        close(got, loops_models.decoder_lm(ids[0], params, heads=2, positions=positions)[-1])
    both = {
        "source_embedding": waves(5, 4),
        "target_embedding": waves(5, 4, start=2.0),
        "embedding_scale": 2.0,
        "encoder": {"layers": [wave_layer(False, 0.5)]},
        "decoder": {"layers": [wave_layer(True, 1.5)]},
    }
    got = transformer(np.asarray([[1, 4]]), ids, both, heads=2)[0, -1]
    np.testing.assert_allclose(got, GOLDEN_TRANSFORMER, atol=5e-9)
    close(got, loops_models.transformer([1, 4], ids[0], both, heads=2)[-1])


GOLDEN = {
    None: [0.471443691, -3.95492053, 4.69877346, -2.187726066, -1.838787086],
    "sinusoidal": [-5.210971893, 1.870943851, 2.765110868, -5.48573801, 4.406324444],
    "rotary": [1.377757285, 2.93179475, -5.210455158, 3.879766801, 0.138485518],
    "alibi": [0.454039141, -3.946723418, 4.70546203, -2.20466706, -1.82332891],
}
GOLDEN_TRANSFORMER = [-3.094830564, 6.483462845, -5.380917696, 0.550942207, 4.660677977]


# errors


@pytest.mark.parametrize(
    ("ids", "change", "message"),
    [
        (np.asarray([1, 2]), {}, r"embedding: tokens: got shape \(2,\), wanted 2 axes"),
        (np.asarray([[1, 7]]), {}, r"embedding: ids: got 1 to 7, wanted 0 to 6"),
        (np.asarray([[-1, 2]]), {}, r"embedding: ids: got -1 to 2, wanted 0 to 6"),
        (np.asarray([[1.0, 2.0]]), {}, r"embedding: ids: got float64, wanted integers"),
        (np.asarray([[1, 2]]), {"embedding": np.ones((0, 8))}, r"embedding: got shape \(0, 8\), wanted \[V, d\]"),
        (np.asarray([[1, 2]]), {"embedding": np.ones((7, 6))}, r"memory: got shape \(1, 2, 6\)"),
    ],
)
def test_errors_of_tokens(ids, change, message):
    with pytest.raises(ValueError, match=message):
        decoder_lm(ids, random_lm() | change, heads=4, norm="post")


def test_errors_of_models():
    params, ids = random_lm(), tokens(0, 2, 3)
    with pytest.raises(ValueError, match="heads: got 3, wanted a divisor of 8, the width of wq"):
        decoder_lm(ids, params, heads=3)
    with pytest.raises(ValueError, match="positions: got 'learned', wanted None, 'rotary' or 'alibi'"):
        decoder_lm(ids, params, heads=4, positions="learned")
    with pytest.raises(ValueError, match=r"mask: got shape \(2, 1\), wanted \(2, 3\), one entry for each token"):
        decoder_lm(ids, params, heads=4, mask=np.ones((2, 1), dtype=bool))
    with pytest.raises(ValueError, match=r"mask: got int64, wanted booleans"):
        decoder_lm(ids, params, heads=4, mask=np.ones((2, 3), dtype=np.int64))
    with pytest.raises(ValueError, match=r"at: got shape \(3, 2\), wanted \(3,\) or \(2, 3\)"):
        decoder_lm(ids, params, heads=4, at=np.ones((3, 2), dtype=int))
    with pytest.raises(ValueError, match=r"mask: got shape \(2, 3\), wanted \(2, 4\)"):
        transformer(tokens(0, 2, 4), ids, random_transformer(), heads=4, mask=np.ones((2, 3), dtype=bool))
    with pytest.raises(ValueError, match=r"attention: k: got shape \(1, 4, 4, 2\), wanted \(2, 4, 4, 2\)"):
        transformer(tokens(0, 1, 4), ids, random_transformer(), heads=4)
