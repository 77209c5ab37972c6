"""Fast NumPy implementations against the reference at edges of their tiles, their memory, and what they never touch."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference_models import VOCABULARY, close, random_lm

from veriformer import reference
from veriformer.impls import numpy_fused, numpy_lean, numpy_plain, numpy_rows, numpy_tiled

RNG = np.random.default_rng
Q, K, V = (2, 4, 7, 4), (2, 2, 9, 4), (2, 2, 9, 3)
"""Queries, keys and values; two query heads share a key head."""
SIGHTS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (2, 1)},
    "ahead": {"window": (None, 1), "scale": -0.7},
    "mask": {"mask": RNG(1).random((2, 1, 7, 9)) < 0.6, "softcap": 1.5},
    "heads": {"mask": RNG(2).random((1, 4, 1, 9)) < 0.6, "causal": True},
    "empty": {"mask": np.zeros((1, 1, 1, 9), bool)},
    "bias": {"bias": RNG(3).standard_normal((1, 4, 1, 9)), "softcap": 2.0, "causal": True},
    "sink": {"sink": RNG(4).standard_normal(4), "bias": RNG(5).standard_normal((2, 1, 7, 1)), "window": (1, 0)},
}


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that even short inputs need several of."""
    monkeypatch.setattr(numpy_tiled, "QUERIES", 4)
    monkeypatch.setattr(numpy_tiled, "KEYS", 3)
    monkeypatch.setattr(numpy_fused, "NUMBERS", 20)


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [RNG(7).standard_normal(shape) for shape in shapes]


def like(results: Any) -> list[np.ndarray]:
    """Of each result a cotangent."""
    return [RNG(8).standard_normal(result.shape) for result in results]


def agree(got: Any, wanted: Any) -> None:
    """Several results, each equal to its own; minus infinity at the same places."""
    for one, other in zip(got, wanted, strict=True):
        if other is None:
            assert one is None
            continue
        np.testing.assert_array_equal(np.isneginf(one), np.isneginf(other))
        close(np.where(np.isneginf(one), 0, one), np.where(np.isneginf(other), 0, other))


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("sight", SIGHTS)
def test_attention_equals_the_reference_within_and_across_tiles(
    sight: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        small_tiles(monkeypatch)
    arrays, words = drawn(Q, K, V), SIGHTS[sight]
    agree(numpy_tiled.attention_with_lse(*arrays, **words), reference.attention_with_lse(*arrays, **words))
    agree([numpy_tiled.attention(*arrays, **words)], [reference.attention(*arrays, **words)])


@pytest.mark.parametrize("sight", SIGHTS)
def test_gradients_of_attention_equal_those_of_the_whole_matrix(sight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    arrays, words = drawn(Q, K, V), SIGHTS[sight]
    results = numpy_tiled.attention_with_lse(*arrays, **words)
    given = like(results)
    for name, cotangent in {"attention": given[0], "attention_with_lse": given}.items():
        vjp = f"{name}_vjp"
        wanted = getattr(numpy_plain, vjp)(cotangent, *arrays, **words)
        agree(getattr(numpy_tiled, vjp)(cotangent, *arrays, **words), wanted)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0)])
def test_attention_without_queries_or_without_keys(queries: int, keys: int) -> None:
    q, k, v, bias = drawn((2, 4, queries, 3), (2, 2, keys, 3), (2, 2, keys, 5), (1, 4, queries, keys))
    out, lse = numpy_tiled.attention_with_lse(q, k, v, bias=bias)
    assert out.shape == (2, 4, queries, 5) and lse.shape == (2, 4, queries)
    assert not out.any() and np.isneginf(lse).all()


def test_tiles_of_keys_that_are_hidden_whole_are_not_read() -> None:
    q, k, v = (RNG(0).standard_normal((1, 1, 600, 4)) for _ in range(3))
    k[:, :, 512:], v[:, :, 512:] = np.nan, np.nan
    out = numpy_tiled.attention(q, k, v, causal=True)
    assert np.isfinite(out[:, :, :512]).all() and np.isnan(out[:, :, 512:]).all()
    out = numpy_tiled.attention(q, k[:, :, ::-1], v[:, :, ::-1], causal=True, window=(3, 0))
    assert np.isfinite(out[:, :, 128:]).all()


def peak(call: Callable[[], Any]) -> int:
    """Bytes that were held at once, at most."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("module", "linear"), [(numpy_tiled, True), (numpy_plain, False)])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_tiled_attention_grows_with_the_length_and_not_its_square(
    module: Any, linear: bool, backward: bool
) -> None:
    def held(length: int) -> int:
        q, k, v, g = (RNG(0).standard_normal((1, 2, length, 16), np.float32) for _ in range(4))
        if backward:
            return peak(lambda: module.attention_vjp(g, q, k, v, causal=True))
        return peak(lambda: module.attention(q, k, v, causal=True))

    grown = held(2048) / held(512)
    assert (grown < 4.2) is linear and (grown > 12) is not linear


NORMS: dict[str, list[tuple[int, ...]]] = {"layer_norm": [(5, 3, 7), (7,), (7,)], "rms_norm": [(5, 3, 7), (7,)]}


@pytest.mark.parametrize("operation", NORMS)
def test_norms_equal_the_reference_in_several_blocks(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    arrays = drawn(*NORMS[operation])
    wanted = getattr(reference, operation)(*arrays)
    close(getattr(numpy_fused, operation)(*arrays), wanted)
    cotangent = like([wanted])[0]
    got = getattr(numpy_fused, f"{operation}_vjp")(cotangent, *arrays)
    agree(got, getattr(numpy_rows, f"{operation}_vjp")(cotangent, *arrays))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_softmax_equals_the_reference_in_several_blocks(
    axis: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tiles(monkeypatch)
    x, g = drawn((5, 3, 7), (5, 3, 7))
    words: Any = {"axis": axis, "temperature": temperature}
    close(numpy_fused.softmax(x, **words), reference.softmax(x, **words))
    close(numpy_fused.softmax_vjp(g, x, **words)[0], numpy_plain.softmax_vjp(g, x, **words)[0])


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan])
def test_softmax_refuses_a_temperature_that_is_not_above_0(temperature: float) -> None:
    for call in (lambda: numpy_fused.softmax(np.ones(3), temperature=temperature),
                 lambda: numpy_fused.softmax_vjp(np.ones(3), np.ones(3), temperature=temperature)):  # fmt: skip
        with pytest.raises(ValueError, match="temperature: got"):
            call()


@pytest.mark.parametrize("lengths", [(4, 4), (6, 1)])
@pytest.mark.parametrize("blocks", [False, True])
def test_caches_are_written_where_they_lie(lengths: tuple[int, int], blocks: bool) -> None:
    new, cache = (2, 2, 2, 4), ((8, 2, 3, 4) if blocks else (2, 2, 12, 4))
    q, k_new, v_new, k_cache, v_cache = drawn((2, 4, 2, 4), new, new, cache, cache)
    words: Any = {"block_table": np.array([[5, 1, 7, 0], [2, 4, 3, 6]])} if blocks else {}
    arrays = (q, k_new, v_new, k_cache, v_cache, np.array(lengths))
    wanted = reference.cached_attention(*(a.copy() for a in arrays), **words)
    got = numpy_tiled.cached_attention(*arrays, **words)
    assert got[1] is k_cache and got[2] is v_cache
    agree(got, wanted)


def test_a_cache_without_room_stays_as_it_was() -> None:
    arrays = drawn((2, 4, 2, 4), (2, 2, 2, 4), (2, 2, 2, 4), (2, 2, 8, 4), (2, 2, 8, 4))
    before = [a.copy() for a in arrays]
    with pytest.raises(ValueError, match="got 7 rows beside 2 new ones, wanted at most 8"):
        numpy_tiled.cached_attention(*arrays, np.array([1, 7]))
    agree(arrays, before)


def test_loops_for_numba_equal_the_reference() -> None:
    numba_rows = pytest.importorskip("veriformer.impls.numba_rows", reason="needs numba", exc_type=ImportError)
    x, w, b = drawn((5, 3, 7), (7,), (7,))
    close(numba_rows.layer_norm(x, w, b), reference.layer_norm(x, w, b))
    close(numba_rows.rms_norm(x, w), reference.rms_norm(x, w))
    shapes = ((2, 4, 2, 4), (2, 2, 2, 4), (2, 2, 2, 3), (2, 2, 12, 4), (2, 2, 12, 3))
    for words in ({}, {"causal": False, "window": (2, 0)}, {"window": (0, None), "scale": -0.5}):
        arrays = (*drawn(*shapes), np.array([0, 9]))
        wanted = reference.cached_attention(*(a.copy() for a in arrays), **words)
        agree(numba_rows.cached_attention(*arrays, **words), wanted)
    with pytest.raises(ValueError, match="got 9 rows beside 2 new ones, wanted at most 10"):
        numba_rows.cached_attention(*arrays[:3], *(a[:, :, :10] for a in arrays[3:5]), arrays[5])


def gated(params: Any) -> Any:
    """The same weights with rms norms, without biases and with a gate in every feed-forward."""
    layers = []
    for one in params["layers"]:
        layer = {part: {n: a for n, a in w.items() if n[0] != "b"} for part, w in one.items()}
        layer["feed_forward"]["w3"] = layer["feed_forward"]["w1"][:, ::-1].copy()
        layers.append(layer)
    return {"embedding": params["embedding"], "layers": layers, "norm": {"weight": 1 + np.arange(8) / 8}}


def gated_logits(tokens: np.ndarray, params: Any, eps: float) -> np.ndarray:
    """What a Llama gives, by the reference's parts."""

    def normed(x: np.ndarray, w: Any) -> np.ndarray:
        return np.asarray(reference.rms_norm(x, w["weight"], eps=eps))

    x = params["embedding"][tokens]
    for layer in params["layers"]:
        y, w = normed(x, layer["norm1"]), layer["attention"]
        q, k, v = ((y @ w["w" + n]).reshape(*tokens.shape, -1, 2).swapaxes(1, 2) for n in "qkv")
        q, k = (reference.rotary_embedding(a, np.arange(tokens.shape[1])) for a in (q, k))
        y = reference.attention(q, k, v, causal=True).swapaxes(1, 2).reshape(x.shape)
        x = x + y @ w["wo"]
        y, w = normed(x, layer["norm2"]), layer["feed_forward"]
        gate = y @ w["w1"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["w3"])) @ w["w2"]
    return normed(x, params["norm"]) @ params["embedding"].T


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_a_lean_llama_is_what_its_parts_say(eps: float) -> None:
    params, tokens = gated(random_lm()), RNG(0).integers(0, VOCABULARY, (2, 9))
    model = numpy_lean.DecoderLM(params, heads=4, epsilon=eps)
    wanted = gated_logits(tokens, params, eps)
    close(model.full(tokens), wanted)
    logits, cache = model.step(tokens[:, :4], None)
    for n in range(4, 9):
        close(logits[:, -1], wanted[:, n - 1])
        logits, cache = model.step(tokens[:, n : n + 1], cache)
    close(logits[:, -1], wanted[:, -1])


@pytest.mark.parametrize("positions", [None, "sinusoidal", "rotary", "alibi"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("left", [None, 2])
def test_a_lean_model_equals_the_reference_in_blocks_of_queries(
    positions: str | None, norm: str, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numpy_lean, "BLOCK", 4)
    params, tokens = random_lm(head=True, scale=1.5), RNG(0).integers(0, VOCABULARY, (2, 9))
    words: Any = {"heads": 4, "norm": norm, "positions": positions, "window": left if left is None else (left, 0)}
    model, wanted = numpy_lean.decoder_lm(params, **words), reference.decoder_lm(tokens, params, **words)
    close(model.full(tokens), wanted)
    first, cache = model.step(tokens[:, :6], None)
    rest, _ = model.step(tokens[:, 6:], cache)
    close(np.concatenate([first, rest], 1), wanted)


def test_matrices_that_come_transposed_are_packed_in_rows_and_later_changes_of_weights_have_no_influence() -> None:
    def transposed(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: transposed(part) for name, part in tree.items()}
        return [transposed(part) for part in tree] if isinstance(tree, list) else np.asfortranarray(tree)

    params, tokens = transposed(random_lm()), np.array([[1, 2, 3]])
    model = numpy_lean.decoder_lm(params, heads=4)
    before = model.full(tokens)
    for layer in model.layers:
        for weight, _ in (layer.packed, layer.out, layer.inner, layer.outer):
            assert weight.flags.c_contiguous
    assert model.head[0].flags.c_contiguous
    for layer in params["layers"]:
        for part in layer.values():
            for array in part.values():
                array[...] = 0
    np.testing.assert_array_equal(model.full(tokens), before)


def test_what_a_lean_model_refuses() -> None:
    params, word = random_lm(), np.array([[1]])
    model = numpy_lean.decoder_lm(params, heads=4, max_length=2)
    _, cache = model.step(np.array([[1, 2]]), None)
    assert cache is not None
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: numpy_lean.decoder_lm(params, heads=4, norm="deep"), "got norm 'deep'"),
        (lambda: numpy_lean.decoder_lm(params, heads=4, window=(-1, 0)), "left: got -1"),
        (lambda: model.full(word * -1), "wanted 0 to 6"),
        (lambda: model.full(word * VOCABULARY), "wanted 0 to 6"),
        (lambda: model.full(word / 2), "wanted integers"),
        (lambda: model.step(word, cache), "got 1 after 2, wanted at most 2"),
        (lambda: model.step(np.ones((2, 1), int), numpy_lean.Cache(cache.rows, 1)), "got 2 rows, wanted 1"),
        (lambda: model.step(word, None, mask=np.ones((1, 2), bool)), "mask: got shape"),
        (lambda: model.step(word, None, positions=np.ones((1, 2), int)), "positions: got shape"),
        (lambda: model.crop(cache, 3), "wanted 0 to 2"),
        (lambda: model.reorder(cache, np.array([1])), "wanted numbers from 0 to 0"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def test_nothing_here_imports_torch() -> None:
    code = """
import sys
import numpy as np
from veriformer.impls import numpy_fused, numpy_lean, numpy_tiled
a = np.ones((1, 1, 3, 2))
numpy_tiled.attention(a, a, a, causal=True)
numpy_fused.layer_norm(a, a[0, 0, 0], a[0, 0, 0])
numpy_lean.llama().full(np.ones((1, 3), int))
assert not {"torch", "numba", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
