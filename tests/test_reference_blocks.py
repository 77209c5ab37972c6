"""The reference decoder layer and positions in layers: loops, torch's modules, what a token may see, edges."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import close, converted, layer_from_torch, random_layer, random_module

from veriformer.reference import (
    alibi_bias,
    attend,
    decoder_layer,
    deep_norm,
    encoder_layer,
    keys_values,
    layer_norm,
    loops_models,
    rotary_embedding,
)
from veriformer.reference.layers import block, enter, leave, places

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=60, deadline=None, database=None, derandomize=True)
POSITIONS = (None, "rotary", "alibi")


@st.composite
def layers(draw, cross):
    """(x, params) or (x, memory, params), keywords."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    length, other = draw(st.sampled_from([(1, 1), (3, 2), (4, 5)]))
    params = random_layer(draw(st.integers(0, 9)), cross=cross, groups=draw(st.sampled_from([1, 2, 4])))
    keywords = {
        "heads": 4,
        "norm": draw(st.sampled_from(["post", "pre"])),
        "alpha": draw(st.sampled_from([1.0, 1.7])),
        "mask": draw(st.sampled_from([None, generator.random((2, 1, 1, length)) < 0.7])),
        "window": draw(st.sampled_from([None, (1, 0), (0, 2), (2, None)])),
        "positions": draw(st.sampled_from(POSITIONS)),
    }
    x, memory = generator.normal(size=(2, length, 8)), generator.normal(size=(2, other, 8))
    if not cross:
        return (x, params), keywords
    keywords["memory_mask"] = draw(st.sampled_from([None, generator.random((2, 1, 1, other)) < 0.7]))
    return (x, memory, params), keywords


def by_loops(arrays, keywords):
    """The layer as loops, batch row by batch row."""
    x, *memory, params = arrays
    masks = {name: keywords[name] for name in ("mask", "memory_mask") if keywords.get(name) is not None}
    rest = {name: a for name, a in keywords.items() if name not in ("mask", "memory_mask")}
    return [
        loops_models.layer(
            x[b], memory[0][b] if memory else None, params, causal=bool(memory),
            **rest, **{name: mask[b, 0, 0] for name, mask in masks.items()},
        )
        for b in range(len(x))
    ]  # fmt: skip


LAYERS = [(encoder_layer, layers(cross=False)), (decoder_layer, layers(cross=True))]


@pytest.mark.parametrize(("function", "recipe"), LAYERS, ids=["encoder", "decoder"])
@settings(SEARCH)
@given(data=st.data())
def test_equals_the_loops(function, recipe, data):
    arrays, keywords = data.draw(recipe)
    close(function(*arrays, **keywords), by_loops(arrays, keywords))


@pytest.mark.parametrize(("function", "recipe"), LAYERS, ids=["encoder", "decoder"])
@settings(SEARCH)
@given(data=st.data())
def test_frameworks_agree(function, recipe, data):
    case = data.draw(recipe)
    wanted = function(*case[0], **case[1])
    there, those = converted(strict.asarray, case)
    np.testing.assert_array_equal(np.asarray(function(*there, **those)), wanted)
    there, those = converted(torch.tensor, case)
    close(function(*there, **those), wanted)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_torchs_decoder_layer_and_its_gradients(norm, masked):
    module = random_module(
        torch.nn.TransformerDecoderLayer(
            12, 4, 20, 0.0, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
        )
    )
    torch.manual_seed(0)
    x, memory = (torch.randn(2, length, 12, dtype=torch.float64) for length in (5, 4))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding, absent = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    padding[1, 3:] = absent[0, 1] = masked
    theirs = module(x, memory, later, tgt_key_padding_mask=padding, memory_key_padding_mask=absent)
    masks = {"mask": ~padding[:, None, None, :], "memory_mask": ~absent[:, None, None, :]} if masked else {}
    ours = decoder_layer(x, memory, layer_from_torch(module), heads=4, norm=norm, **masks)
    close(ours.detach(), theirs.detach())
    weights, parameters = torch.randn_like(ours), list(module.parameters())
    gradients = [torch.autograd.grad((y * weights).sum(), parameters) for y in (ours, theirs)]
    largest = max(g.abs().max() for g in gradients[1])
    for mine, yours in zip(*gradients, strict=True):
        np.testing.assert_allclose(mine, yours, rtol=0, atol=1e-13 * largest)


# what a token sees


def problem(seed=3, length=5, other=4):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(2, length, 8)), generator.normal(size=(2, other, 8)), random_layer(seed, cross=True)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_token_is_reached_by_earlier_ones_and_itself_alone(positions, norm):
    x, memory, params = problem()
    before = decoder_layer(x, memory, params, heads=4, norm=norm, positions=positions)
    for j in range(5):
        changed = x.copy()
        changed[:, j] += 1.0 + np.arange(8)
        moved = np.abs(decoder_layer(changed, memory, params, heads=4, norm=norm, positions=positions) - before)
        assert not moved[:, :j].any() and moved[:, j:].max(axis=2).all()


def test_every_token_sees_all_of_the_memory():
    x, memory, params = problem()
    before = decoder_layer(x, memory, params, heads=4)
    for j in range(4):
        changed = memory.copy()
        changed[:, j] += np.arange(8)
        assert np.abs(decoder_layer(x, changed, params, heads=4) - before).max(axis=2).all()


def test_the_order_of_the_memory_does_not_matter():
    x, memory, params = problem()
    seen = np.asarray([[True, False, True, True], [True] * 4])[:, None, None, :]
    order = [2, 0, 3, 1]
    for positions in POSITIONS:
        close(
            decoder_layer(
                x, memory[:, order], params, heads=4, memory_mask=seen[..., order], positions=positions, window=(1, 0)
            ),
            decoder_layer(x, memory, params, heads=4, memory_mask=seen, positions=positions, window=(1, 0)),
        )


def test_hidden_memory_may_be_nan():
    x, memory, params = problem()
    seen = np.asarray([True, False, True, True])[None, None, None]
    wanted = decoder_layer(x, memory, params, heads=4, memory_mask=seen)
    memory[:, 1] = np.nan
    np.testing.assert_array_equal(decoder_layer(x, memory, params, heads=4, memory_mask=seen), wanted)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("cuts", [(5,), (1, 1, 1, 1, 1), (3, 1, 1), (1, 4), (2, 0, 3)])
def test_a_block_beside_kept_tokens_is_the_whole(cross, positions, cuts):
    x, memory, params = problem()
    seen = keys_values(memory, params["cross_attention"], heads=4) if cross else None
    params = params if cross else random_layer(3)
    keywords = {"heads": 4, "norm": "pre", "causal": True, "window": (2, 0), "positions": positions}
    whole, kv = block(x, params, memory=seen, **keywords)
    past, parts, n = None, [], 0
    for m in cuts:
        y, past = block(x[:, n : n + m], params, past, seen, **keywords)
        parts.append(y)
        n += m
    close(np.concatenate(parts, axis=1), whole)
    for kept, wanted in zip(past, kv, strict=True):
        close(kept, wanted)


def test_the_decoder_layer_is_its_parts():
    x, memory, params = problem()

    def normed(x, which):
        return layer_norm(x, **params[which])

    def attending(x, memory, which, causal):
        kv = keys_values(memory, params[which], heads=4)
        return attend(x, kv, params[which], heads=4, causal=causal)

    z = normed(x, "norm1")
    y = x + attending(z, z, "attention", True)
    y = y + attending(normed(y, "norm2"), memory, "cross_attention", False)
    inner = params["feed_forward"]
    hidden = np.maximum(normed(y, "norm3") @ inner["w1"] + inner["b1"], 0)
    close(decoder_layer(x, memory, params, heads=4, norm="pre"), y + (hidden @ inner["w2"] + inner["b2"]))


# positions


def test_rotary_turns_queries_and_keys_but_not_values():
    x, _, params = problem()
    weights, at = params["attention"], np.arange(5)
    k, v = keys_values(x, weights, heads=4)
    turned = keys_values(x, weights, heads=4, at=np.broadcast_to(at, (2, 5)))
    np.testing.assert_array_equal(turned[0], rotary_embedding(k, at))
    np.testing.assert_array_equal(turned[1], v)


def test_each_row_is_turned_by_its_own_positions():
    x, _, params = problem()
    at = np.asarray([[0, 1, 2, 3, 4], [9, 3, 3, -2, 0]])
    k, _ = keys_values(x, params["attention"], heads=4)
    turned, _ = keys_values(x, params["attention"], heads=4, at=at)
    for b in range(2):
        np.testing.assert_array_equal(turned[b], rotary_embedding(k[b], at[b]))


@pytest.mark.parametrize("causal", [False, True])
def test_a_common_offset_of_rotary_positions_changes_nothing(causal):
    x, _, params = problem()
    outs = [
        block(x, random_layer(1), heads=4, positions="rotary", causal=causal, at=at)[0]
        for at in (None, np.arange(5), np.arange(5) + 7, np.arange(5) + np.asarray([[3], [100]]))
    ]
    np.testing.assert_array_equal(outs[1], outs[0])
    close(outs[2], outs[0])
    close(outs[3], outs[0], 1e-12)


def test_causal_alibi_is_the_signed_bias_and_otherwise_it_is_symmetric():
    x, _, params = problem()
    weights = params["attention"]
    kv = keys_values(x, weights, heads=4)
    signed = alibi_bias(4, 5, 5, like=x)[None]
    causal = attend(x, kv, weights, heads=4, causal=True, bias=signed)
    params = random_layer(3) | {"attention": weights}
    y, _ = block(x, params, heads=4, causal=True, positions="alibi")
    np.testing.assert_array_equal(y, _rest(x, causal, params))
    both = attend(x, kv, weights, heads=4, bias=-np.abs(signed))
    np.testing.assert_array_equal(encoder_layer(x, params, heads=4, positions="alibi"), _rest(x, both, params))


def _rest(x, y, params):
    """What a post-norm layer makes of its first sublayer's output."""
    x = leave(x, y, params["norm1"], "post")
    inner = params["feed_forward"]
    hidden = np.where(x @ inner["w1"] + inner["b1"] <= 0, 0, x @ inner["w1"] + inner["b1"])
    return leave(x, hidden @ inner["w2"] + inner["b2"], params["norm2"], "post")


def test_reversing_an_encoder_with_symmetric_positions_reverses_its_output():
    """Only distances count in alibi; rotary knows direction."""
    x, _, _ = problem()
    params = random_layer(1)
    y = {p: encoder_layer(x, params, heads=4, positions=p) for p in POSITIONS}
    backward = {p: encoder_layer(x[:, ::-1], params, heads=4, positions=p)[:, ::-1] for p in POSITIONS}
    close(backward[None], y[None])
    close(backward["alibi"], y["alibi"])
    assert np.abs(backward["rotary"] - y["rotary"]).max() > 0.01


def test_places():
    x = np.zeros((2, 3, 4))
    np.testing.assert_array_equal(places(x, 4), [[4, 5, 6]] * 2)
    np.testing.assert_array_equal(places(x, 4, np.asarray([2, 0, 1])), [[2, 0, 1]] * 2)
    np.testing.assert_array_equal(places(x, 4, np.asarray([[2, 0, 1], [1, 2, 3]])), [[2, 0, 1], [1, 2, 3]])


# DeepNorm


def test_deep_norm_golden():
    """The table of the paper for 6 layers, and powers that come out even."""
    alpha, beta = deep_norm(6, 6)
    np.testing.assert_allclose([*alpha, *beta], [1.4179, 2.0598, 0.4970, 0.3433], atol=5e-5)
    np.testing.assert_allclose(deep_norm(6), [1.8612, 0.3799], atol=5e-5)
    assert deep_norm(8) == deep_norm(0, 8) == (2.0, 64**-0.25)
    assert deep_norm(16, 1)[0][0] == 0.81 * 2.0 and deep_norm(16, 1)[1][0] == 0.87 / 2.0
    assert deep_norm(1, 27)[0][1] == 3.0


def test_alpha_is_an_eps_and_a_scale():
    """norm_eps(alpha x + F) = norm_(eps / alpha^2)(x + F / alpha)."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 3, 8)) * 1e-2
    params = {"weight": generator.normal(size=8), "bias": generator.normal(size=8)}
    close(leave(x, y, params, "post", 4.0), layer_norm(x + y / 4, **params, eps=1e-5 / 16))
    np.testing.assert_array_equal(leave(x, y, params, "pre", 4.0), x + y)
    assert enter(x, params, "post") is x


@pytest.mark.parametrize("depths", [(0, 0), (-1, 2), (3, -1)])
def test_depths_that_are_none(depths):
    with pytest.raises(ValueError, match=f"deep_norm: layers: got {depths[0]} and {depths[1]}, wanted"):
        deep_norm(*depths)


# gradients


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_gradients_of_the_decoder_layer(norm, positions):
    params = converted(torch.tensor, random_layer(5, cross=True))
    generator = torch.Generator().manual_seed(0)
    x, memory = (torch.randn(1, n, 8, dtype=torch.float64, generator=generator) for n in (2, 3))
    inputs = [x, memory, params["attention"]["wq"], params["cross_attention"]["wk"], params["norm2"]["weight"]]
    seen = torch.tensor([False, True, True])[None, None, None]

    def function(x, memory, wq, wk, weight):
        changed = params | {
            "attention": params["attention"] | {"wq": wq},
            "cross_attention": params["cross_attention"] | {"wk": wk},
            "norm2": params["norm2"] | {"weight": weight},
        }
        return decoder_layer(x, memory, changed, heads=4, norm=norm, positions=positions, memory_mask=seen)

    assert torch.autograd.gradcheck(function, [array.requires_grad_() for array in inputs])


# errors


def test_errors():
    x, memory, params = problem()
    with pytest.raises(ValueError, match="layer: positions: got 'sinusoidal', wanted None, 'rotary' or 'alibi'"):
        decoder_layer(x, memory, params, heads=4, positions="sinusoidal")
    with pytest.raises(ValueError, match="layer: norm: got 'deep', wanted 'post' or 'pre'"):
        decoder_layer(x, memory, params, heads=4, norm="deep")
    with pytest.raises(ValueError, match="heads: got 3, wanted a divisor of 8"):
        decoder_layer(x, memory, params, heads=3)
    with pytest.raises(ValueError, match=r"memory: got shape \(2, 4, 7\), wanted 3 axes"):
        decoder_layer(x, memory[..., :7], params, heads=4)
    with pytest.raises(ValueError, match=r"mask: got shape \(2, 1, 1, 4\), wanted \(2, 4, 5, 5\)"):
        decoder_layer(x, memory, params, heads=4, mask=np.ones((2, 1, 1, 4), dtype=bool))
    with pytest.raises(ValueError, match=r"layer: at: got shape \(2, 1\), wanted \(5,\) or \(2, 5\)"):
        block(x, random_layer(), heads=4, positions="rotary", at=np.ones((2, 1), dtype=int))
