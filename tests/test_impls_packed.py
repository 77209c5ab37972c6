"""Layers that hold their weights packed: equal to the reference, padding or not, and packed once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from reference_models import close, converted, random_layer, random_transformer

from veriformer import reference

torch = pytest.importorskip("torch")
from veriformer.impls import torch_packed, torch_packed_models  # noqa: E402

LAYERED = ("encoder_layer", "decoder_layer", "encoder", "decoder")
SIGHTS = ({}, {"positions": "rotary"}, {"positions": "alibi", "window": (1, 0)}, {"window": (None, 1)})
LENGTHS = {
    "behind": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]],
    "in front": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    "between": [[1, 0, 1, 0, 1], [1, 1, 0, 1, 0], [0, 1, 1, 0, 1]],
    "alone": [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]],
    "none": [[1, 1, 1, 1, 1]] * 3,
}
REAL = {name: np.array(rows, dtype=bool) for name, rows in LENGTHS.items()}


def as_torch(tree: Any) -> Any:
    return converted(torch.tensor, tree)


def bare(params: Any) -> Any:
    """Without biases, and hence with rms norms."""
    return {part: {name: a for name, a in w.items() if name[0] != "b"} for part, w in params.items()}


def weights(operation: str, *, groups: int = 2, biases: bool = True) -> Any:
    cross = operation.startswith("decoder")
    layers = [random_layer(seed, cross=cross, groups=groups) for seed in (1, 2, 3)]
    layers = layers if biases else [bare(layer) for layer in layers]
    return layers[0] if operation.endswith("layer") else {"layers": layers[:2], "norm": layers[2]["norm1"]}


def inputs(operation: str) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal((3, 5, 8)), rng.standard_normal((3, 5, 8))]
    return arrays if operation.startswith("decoder") else arrays[:1]


def masks(operation: str, kind: str) -> dict[str, np.ndarray]:
    """None, one of queries and keys for every head, or one of keys alone."""
    if not kind:
        return {}
    rng = np.random.default_rng(0)
    mask = rng.random((3, 4, 5, 5)) < 0.6 if kind == "each" else REAL["between"][:, None, None]
    return {"mask": mask, "memory_mask": np.flip(mask, 0).copy()} if operation.startswith("decoder") else {"mask": mask}


def calls(operation: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    kinds = itertools.cycle(("", "each", "keys"))
    for norm, biases, sight, groups in itertools.product(("post", "pre"), (True, False), SIGHTS, (2, 4)):
        words = {"heads": 4, "norm": norm, "alpha": 1.5, **sight, **masks(operation, next(kinds))}
        yield weights(operation, biases=biases, groups=groups), words


@pytest.mark.parametrize("operation", LAYERED)
def test_layers_and_stacks_equal_the_reference(operation: str) -> None:
    arrays = inputs(operation)
    for params, words in calls(operation):
        wanted = getattr(reference, operation)(*arrays, params, **words)
        made = getattr(torch_packed, operation)(as_torch(params), **as_torch(words))
        close(made(*as_torch(arrays)), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_itself_is_attention_to_an_equal_memory(causal: bool) -> None:
    params, x = weights("encoder_layer", groups=4)["attention"], inputs("encoder")[0]
    made = torch_packed.PackedAttention(as_torch(params), 4)
    for mask in (None, REAL["between"][:, None, None]):
        wanted = reference.multi_head_attention(x, x, params, heads=4, mask=mask, causal=causal)
        one, seen = torch.tensor(x), as_torch(mask)
        close(made(one, one, seen, causal), wanted)
        close(made(one, one.clone(), seen, causal), wanted)


def padded(operation: str) -> Iterator[tuple[Any, dict[str, Any], np.ndarray]]:
    for norm, sight, real in itertools.product(("post", "pre"), SIGHTS, REAL.values()):
        yield weights(operation, groups=4 if sight else 2), {"heads": 4, "norm": norm, **sight}, real


def test_real_tokens_without_padding_equal_those_with_it_and_padding_is_zero() -> None:
    x = inputs("encoder")[0]
    for params, words, real in padded("encoder"):
        wanted = reference.encoder(x, params, **words, mask=real[:, None, None])
        made = torch_packed.PackedEncoder(as_torch(params), **words)
        got = made.real(torch.tensor(x), torch.tensor(real))
        close(got[real], wanted[real])
        assert got.shape == x.shape and not got[~real].any()


def test_samples_that_are_not_there_give_nothing() -> None:
    none = torch.ones(0, 5, dtype=torch.bool)
    made = torch_packed.PackedEncoder(as_torch(weights("encoder")), heads=4, positions="alibi")
    assert made.real(torch.zeros(0, 5, 8, dtype=torch.float64), none).shape == (0, 5, 8)
    model = torch_packed_models.PackedTransformer(as_torch(random_transformer()), heads=4)
    tokens = torch.zeros(0, 5, dtype=torch.int64)
    assert model(tokens, tokens[:, :2], none).shape == (0, 2, 7)


def test_shapes_that_do_not_fit_and_tokens_that_are_none_are_refused() -> None:
    made = torch_packed.PackedEncoder(as_torch(weights("encoder")), heads=4)
    for shape in ((3, 4), (2, 5)):
        with pytest.raises(ValueError, match=r"real: got shape .*, wanted \[3, 5\], as of x"):
            made.real(torch.zeros(3, 5, 8).double(), torch.ones(shape, dtype=torch.bool))
    model, ids = torch_packed_models.PackedTransformer(as_torch(random_transformer()), heads=4), torch.ones(3, 5).long()
    for given in ((ids, ids[:2]), (ids, ids, ids[:, :4] > 0), (ids, ids, ids[:2] > 0)):
        with pytest.raises(ValueError, match=r"source, target, real: got shapes .*, wanted \[B,S\], \[B,T\], \[B,S\]"):
            model(*given)
    for given in ((7 * ids, ids), (ids, -ids)):
        with pytest.raises(ValueError, match="tokens: got one outside the vocabulary, wanted 0 to 6"):
            model(*given)


def test_no_row_of_padding_is_calculated(monkeypatch: pytest.MonkeyPatch) -> None:
    real, rows, product = REAL["between"], [], torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda added, x, matrix, **more: rows.append(len(x)) or product(added, x, matrix, **more)
    )
    made = torch_packed.PackedEncoder(as_torch(weights("encoder")), heads=4)
    made.real(torch.tensor(inputs("encoder")[0]), torch.tensor(real))
    assert rows and set(rows) == {int(real.sum())} and rows[0] < real.size


def test_nothing_in_padding_reaches_a_real_token() -> None:
    x, real = torch.tensor(inputs("encoder")[0]), torch.tensor(REAL["in front"])
    made = torch_packed.PackedEncoder(as_torch(weights("encoder")), heads=4)
    poisoned = x.masked_fill(~real[..., None], torch.nan)
    assert torch.equal(made.real(poisoned, real), made.real(x, real))


def gradients(out: Any, params: Any, x: Any) -> list[Any]:
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return list(torch.autograd.grad(out, [x, *leaves(params)], cotangent))


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def wanting(params: Any) -> Any:
    return converted(lambda a: torch.tensor(a, requires_grad=True), params)


def test_gradients_without_padding_are_those_of_real_tokens_with_it() -> None:
    for params, words, real in padded("encoder"):
        found = []
        for without in (True, False):
            mine, x = wanting(params), torch.tensor(inputs("encoder")[0], requires_grad=True)
            made, seen = torch_packed.PackedEncoder(mine, **words), torch.tensor(real)
            out = made.real(x, seen) if without else made(x, seen[:, None, None]) * seen[..., None]
            found.append(gradients(out, mine, x))
        for got, wanted in zip(*found, strict=True):
            assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-11)


def models() -> Iterator[tuple[Any, dict[str, Any]]]:
    rng = np.random.default_rng(0)
    for positions, real, tied in itertools.product((None, "sinusoidal", "rotary", "alibi"), REAL, (False, True)):
        params = random_transformer(norm="pre") | ({} if tied else {"embedding_scale": np.array(2.0)})
        params |= {} if tied else {"head": {"w": rng.normal(size=(8, 5)), "b": rng.normal(size=5)}}
        words = {"heads": 4, "norm": "pre" if tied else "post", "alpha": (0.5, 2.0), "positions": positions}
        yield params, words | ({} if real == "none" else {"mask": REAL[real]})


def test_the_encoder_decoder_without_padding_equals_the_reference() -> None:
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, 7, shape) for shape in ((3, 5), (3, 4))]
    for params, words in models():
        wanted = reference.transformer(*tokens, params, **words)
        made = torch_packed_models.transformer(as_torch(params), **as_torch(words))
        close(made(*as_torch(tokens)), wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_at_a_time_without_gradients_are_all_rows_at_once(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor(inputs("encoder")[0])
    for norm, biases in itertools.product(("post", "pre"), (True, False)):
        params = as_torch(weights("encoder", biases=biases))
        whole = torch_packed.PackedEncoder(params, heads=4, norm=norm, alpha=1.5)(x)
        monkeypatch.setattr(torch_packed, "INNER_NUMBERS", 41)  # 4 rows of 10, of 15: the last part is smaller
        parts = torch_packed.PackedEncoder(params, heads=4, norm=norm, alpha=1.5)
        monkeypatch.undo()
        assert parts.layers[0].chunk == 4
        with mode():
            close(parts(x), whole.numpy())


def test_weights_are_put_together_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params, x, memory = as_torch(weights("decoder")), *as_torch(inputs("decoder"))
    before, joined, cat = [leaf.clone() for leaf in leaves(params)], [], torch.cat
    made = torch_packed.PackedDecoder(params, heads=4)
    monkeypatch.setattr(torch, "cat", lambda *given: joined.append(given) or cat(*given))
    out = made(x, memory)
    made(x, memory)
    assert not joined
    torch_packed.PackedDecoder(params, heads=4)
    assert joined
    assert all(torch.equal(a, b) for a, b in zip(before, leaves(params), strict=True))
    assert all(out.untyped_storage().data_ptr() != a.untyped_storage().data_ptr() for a in (x, memory))


def test_gradients_reach_the_weights_that_were_given_in_every_step() -> None:
    mine, x = wanting(weights("encoder")), torch.tensor(inputs("encoder")[0], requires_grad=True)
    made = torch_packed.PackedEncoder(mine, heads=4)
    first, again = (gradients(made(x), mine, x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(bool(a.any()) for a in first[:1])


@pytest.mark.parametrize("operation", LAYERED)
def test_what_is_not_supported_is_refused(operation: str) -> None:
    params, make = as_torch(weights(operation)), getattr(torch_packed, operation)
    for words, said in (({"norm": "sandwich"}, "norm"), ({"positions": "sinusoidal"}, "positions"), ({}, "heads")):
        with pytest.raises(ValueError, match=said):
            make(params, heads=3 if not words else 4, **words)
    with pytest.raises(ValueError, match="positions"):
        torch_packed_models.transformer(as_torch(random_transformer()), heads=4, positions="learned")


def test_widths_that_heads_do_not_divide_are_refused() -> None:
    good = as_torch(weights("encoder_layer")["attention"])
    for name, said in (("wk", "wk: got width 3"), ("wv", "wv: got width 3")):
        wrong = {**good, name: good[name][:, :3], f"b{name[1]}": good[f"b{name[1]}"][:3]}
        for kind in (torch_packed.PackedAttention, torch_packed_models._Attention):
            with pytest.raises(ValueError, match=said):
                kind(wrong, 4)
