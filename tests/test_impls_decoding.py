"""Decoding in torch: grouped heads, windows by blocks, caches written in place, the lean model; and Hugging Face's."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from reference_models import VOCABULARY, close, converted, random_lm
from toys import ROOT

from veriformer import reference

torch = pytest.importorskip("torch")

from veriformer.impls import torch_grouped, torch_lean  # noqa: E402

Kernel = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def tokens_of(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (batch, length))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Any]]]:
    """Queries and keys of every call of torch's kernel."""
    calls: list[tuple[Any, Any]] = []
    kernel: Kernel = torch.nn.functional.scaled_dot_product_attention

    def recorded(q: Any, k: Any, *rest: Any, **words: Any) -> Any:
        calls.append((q, k))
        return kernel(q, k, *rest, **words)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    yield calls


SIGHTS = (
    {}, {"causal": True}, {"window": (9, 0)}, {"window": (70, 5)}, {"window": (3, None)}, {"window": (None, 4)},
    {"window": (0, 0), "causal": True}, {"window": (80, None), "causal": True, "scale": -0.3},
)  # fmt: skip


@pytest.mark.parametrize("words", SIGHTS, ids=str)
@pytest.mark.parametrize("masked", ["", "keys", "heads", "rows"])
def test_grouped_attention_equals_the_reference_beyond_one_block(words: dict[str, Any], masked: str) -> None:
    mask = {"": None, "keys": (2, 1, 1), "heads": (1, 4, 1), "rows": (1, 1, "queries")}[masked]
    for queries, keys in ((1, 150), (150, 150), (130, 150), (150, 130)):
        arrays = [draw(2, 4, queries, 6), draw(2, 2, keys, 6), draw(2, 2, keys, 5, seed=1)]
        given = dict(words)
        if mask is not None:
            shape = (*(queries if size == "queries" else size for size in mask), keys)
            given["mask"] = draw(*shape) > -0.5
        got = torch_grouped.attention(*map(torch.tensor, arrays), **converted(torch.tensor, given))
        close(got, reference.attention(*arrays, **given))


@pytest.mark.parametrize("words", SIGHTS[:5], ids=str)
def test_no_queries_and_no_samples_give_nothing(words: dict[str, Any]) -> None:
    for batch, queries, keys in ((2, 0, 5), (2, 0, 0), (0, 3, 5)):
        arrays = [draw(batch, 4, queries, 6), draw(batch, 2, keys, 6), draw(batch, 2, keys, 5)]
        got = torch_grouped.attention(*map(torch.tensor, arrays), **words)
        assert got.shape == reference.attention(*arrays, **words).shape
    given = [torch.tensor(array) for array in cached_inputs(0)]
    assert torch_grouped.cached_attention(*given, torch.tensor([1, 0, 2]), **words)[0].shape == (3, 4, 0, 5)


def test_heads_and_windows_that_make_no_sense_are_refused() -> None:
    q, three, two = (torch.zeros(1, heads, 2, 4) for heads in (4, 3, 2))
    with pytest.raises(ValueError, match="heads: got 4 of queries and 3 of keys"):
        torch_grouped.attention(q, three, three)
    with pytest.raises(ValueError, match=r"window: got \(-1, 3\), wanted two numbers of keys >= 0"):
        torch_grouped.attention(q, two, two, window=(-1, 3))


def test_a_window_costs_what_it_shows(seen: list[tuple[Any, Any]]) -> None:
    q, k = torch.zeros(1, 4, 640, 8), torch.zeros(1, 2, 640, 8)
    torch_grouped.attention(q, k, k, causal=True, window=(31, 0))
    assert len(seen) == 640 // torch_grouped.BLOCK
    assert max(keys.shape[2] for _, keys in seen) == torch_grouped.BLOCK + 31
    seen.clear()
    torch_grouped.attention(q[:, :, :1], k, k, causal=True, window=(31, 0))
    assert [(rows.shape, keys.shape) for rows, keys in seen] == [((1, 2, 2, 8), (1, 2, 32, 8))]


def cached_inputs(new: int) -> list[np.ndarray]:
    found = [draw(3, 4, new, 6), draw(3, 2, new, 6), draw(3, 2, new, 5), draw(3, 2, 40, 6), draw(3, 2, 40, 5)]
    return found


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("lengths", [(7, 7, 7), (0, 37, 12)])
@pytest.mark.parametrize("words", [{}, {"causal": False}, {"window": (4, 0)}, {"window": (2, None), "causal": False}])
def test_appending_attends_to_views_and_equals_the_reference(
    new: int, lengths: tuple[int, ...], words: dict[str, Any], seen: list[tuple[Any, Any]]
) -> None:
    arrays = [*cached_inputs(new), np.array(lengths)]
    given = [torch.tensor(array) for array in arrays]
    got = torch_grouped.cached_attention(*given, **words)
    for one, wanted in zip(got, reference.cached_attention(*arrays, **words), strict=True):
        close(one, wanted)
    assert [one.data_ptr() for one in got[1:]] == [one.data_ptr() for one in given[3:5]]
    place = given[3].untyped_storage().data_ptr()
    assert seen and all(keys.untyped_storage().data_ptr() == place for _, keys in seen)


def test_a_block_table_is_followed_as_far_as_there_are_rows() -> None:
    arrays = [draw(2, 4, 2, 6), draw(2, 2, 2, 6), draw(2, 2, 2, 5), draw(9, 2, 4, 6), draw(9, 2, 4, 5)]
    table, lengths = np.array([[3, 8, 1], [5, 0, 7]]), np.array([9, 2])
    wanted = reference.cached_attention(*arrays, lengths, block_table=table)
    table[1, 1:] = 10**6  # listed as anything: no row lies there
    got = torch_grouped.cached_attention(
        *map(torch.tensor, arrays), torch.tensor(lengths), block_table=torch.tensor(table)
    )
    for one, other in zip(got, wanted, strict=True):
        close(one, other)


def test_what_does_not_fit_a_cache_is_refused_and_leaves_it_as_it_was() -> None:
    given = [torch.tensor(array) for array in cached_inputs(2)]
    before = given[3].clone()
    with pytest.raises(ValueError, match="got 39 rows beside 2 new ones, wanted at most 40"):
        torch_grouped.cached_attention(*given, torch.tensor([1, 39, 2]))
    with pytest.raises(ValueError, match="lengths: got -1, wanted numbers of rows >= 0"):
        torch_grouped.cached_attention(*given, torch.tensor([1, 3, -1]))
    assert torch.equal(given[3], before)


def as_torch(tree: Any) -> Any:
    return converted(torch.tensor, tree)


def bare(params: Any) -> Any:
    """Without biases, and hence with rms norms."""
    if isinstance(params, dict):
        return {name: bare(part) for name, part in params.items() if name[0] != "b"}
    return [bare(part) for part in params] if isinstance(params, list) else params


def models() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Weights and keywords of every two dialects together."""
    for norm, positions, left in itertools.product(
        ("pre", "post"), (None, "sinusoidal", "rotary", "alibi"), (None, 0, 3, 75)
    ):
        for strip in (False, True):
            params = random_lm(3, groups=1 if left == 0 else 2, head=left is None, scale=1.5)
            window = None if left is None else (left, 0)
            yield (
                bare(params) if strip else params,
                {"heads": 4, "norm": norm, "alpha": 1.5, "positions": positions, "window": window},
            )


def stepped(model: Any, tokens: Any, cuts: tuple[int, ...]) -> tuple[Any, Any]:
    """Logits of tokens given in parts, and the last cache."""
    logits, cache = [], None
    for start, end in itertools.pairwise((0, *cuts, tokens.shape[1])):
        given, cache = model.step(tokens[:, start:end], cache)
        logits.append(given)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", [None, "sinusoidal", "rotary", "alibi"])
def test_the_lean_model_equals_the_reference_in_every_dialect(norm: str, positions: str | None) -> None:
    tokens = tokens_of(2, 90)
    for params, words in models():
        if (words["norm"], words["positions"]) == (norm, positions):
            wanted = reference.decoder_lm(tokens, params, **words)
            model = torch_lean.decoder_lm(as_torch(params), **words)
            close(model.full(torch.tensor(tokens)), wanted, 1e-12)
            close(stepped(model, torch.tensor(tokens), (5, 6, 7, 80))[0], wanted, 1e-12)


@pytest.mark.parametrize("values", [2, 3, 7])
def test_values_of_another_width_than_keys(values: int) -> None:
    params = random_lm(groups=2)
    for number, layer in enumerate(params["layers"]):
        shapes = {"wv": (8, 2 * values), "bv": (2 * values,), "wo": (4 * values, 8)}
        layer["attention"] |= {name: draw(*shape, seed=number) for name, shape in shapes.items()}
    tokens = tokens_of(2, 5)
    wanted = reference.decoder_lm(tokens, params, heads=4)
    model = torch_lean.decoder_lm(as_torch(params), heads=4)
    close(stepped(model, torch.tensor(tokens), (3, 4))[0], wanted, 1e-12)


def test_the_lean_models_mask_and_positions_are_the_references() -> None:
    params, tokens = random_lm(), tokens_of(2, 9)
    mask = np.ones((2, 9), bool)
    mask[0, :4], mask[1, :2] = False, False
    at = np.maximum(np.cumsum(mask, 1) - 1, 0)
    for positions, window in itertools.product(("sinusoidal", "rotary"), (None, (2, 0))):
        words: dict[str, Any] = {"heads": 4, "positions": positions, "window": window}
        wanted = reference.decoder_lm(tokens, params, mask=mask, at=at, **words)
        model = torch_lean.decoder_lm(as_torch(params), **words)
        rows, cache = [], None
        for start, end in ((0, 6), (6, 7), (7, 9)):
            given = [torch.tensor(a) for a in (tokens[:, start:end], mask[:, :end], at[:, start:end])]
            logits, cache = model.step(given[0], cache, mask=given[1], positions=given[2])
            rows.append(logits)
        got = torch.cat(rows, 1)
        for row, first in ((0, 4), (1, 2)):
            close(got[row, first:], wanted[row, first:], 1e-12)


def test_the_lean_cache_is_written_in_place_and_doubled_where_it_is_full() -> None:
    model = torch_lean.decoder_lm(as_torch(random_lm()), heads=4)
    cache, rooms, places = None, [], []
    for _ in range(20):
        _, cache = model.step(torch.tensor([[1]]), cache)
        rooms.append(cache.rows.shape[3])
        places.append(cache.rows.data_ptr())
    assert rooms == [2] * 2 + [6] * 4 + [14] * 8 + [30] * 6
    assert len(set(places)) == 4
    fixed = torch_lean.decoder_lm(as_torch(random_lm()), heads=4, max_length=11)
    assert fixed.step(torch.tensor([[1]]), None)[1].rows.shape[3] == 11


def test_a_window_reads_its_rows_alone(seen: list[tuple[Any, Any]]) -> None:
    model = torch_lean.decoder_lm(as_torch(random_lm()), heads=4, window=(5, 0))
    stepped(model, torch.tensor(tokens_of(1, 200)), (199,))
    assert {(tuple(q.shape[1:3]), k.shape[2]) for q, k in seen[-2:]} == {((2, 2), 6)}
    assert max(k.shape[2] for _, k in seen) == torch_lean.BLOCK + 5


def test_logits_of_the_lean_model_are_ordinary_tensors_and_weights_its_own() -> None:
    params, tokens = as_torch(random_lm()), torch.tensor(tokens_of(1, 4))
    model = torch_lean.decoder_lm(params, heads=4)
    logits, _ = model.step(tokens, None)
    weight = torch.ones(VOCABULARY, dtype=torch.float64, requires_grad=True)
    (weight * logits * logits).sum().backward()  # logits are kept for the gradient
    before = model.full(tokens)
    for layer in params["layers"]:
        for array in itertools.chain.from_iterable(part.values() for part in layer.values()):
            array.zero_()
    params["embedding"].zero_()
    assert torch.equal(model.full(tokens), before)


def cache_of(**words: int) -> Any:
    """The cache of one token and another model."""
    return torch_lean.decoder_lm(as_torch(random_lm(**words)), heads=4).step(torch.tensor([[1]]), None)[1]


def test_no_tokens_give_no_logits_and_leave_the_cache_as_it_was() -> None:
    model = torch_lean.decoder_lm(as_torch(random_lm()), heads=4)
    tokens = torch.tensor(tokens_of(2, 5))
    for none in (tokens[:, :0], tokens[:0]):
        assert model.full(none).shape == (*none.shape, VOCABULARY)
    close(stepped(model, tokens, (0, 3, 3))[0], model.full(tokens), 1e-12)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "vocabulary": (lambda m: m.full(torch.tensor([[VOCABULARY]])), "outside the vocabulary, wanted 0 to 6"),
    "negative": (lambda m: m.step(torch.tensor([[-1]]), None), "outside the vocabulary, wanted 0 to 6"),
    "shape": (lambda m: m.full(torch.tensor([1])), r"got torch.int64 \[1\], wanted int64 or int32"),
    "type": (lambda m: m.full(torch.tensor([[1.0]])), "got torch.float32"),
    "small": (lambda m: m.full(torch.tensor([[1]], dtype=torch.uint8)), "got torch.uint8"),
    "length": (lambda m: m.full(torch.ones(1, 9, dtype=torch.int64)), "got 9 after 0, wanted at most 8"),
    "batch": (
        lambda m: m.step(torch.tensor([[1], [2]]), m.step(torch.tensor([[1]]), None)[1]),
        r"got layers, batch, heads \(2, 1, 4\), wanted \(2, 2, 4\)",
    ),
    "layers": (
        lambda m: m.step(torch.tensor([[1]]), cache_of(layers=1)), r"\(1, 1, 4\), wanted \(2, 1, 4\)"
    ),
    "groups": (
        lambda m: m.step(torch.tensor([[1]]), cache_of(groups=4)), r"\(2, 1, 8\), wanted \(2, 1, 4\)"
    ),
    "mask": (
        lambda m: m.step(torch.tensor([[1]]), None, mask=torch.ones(1, 2, dtype=torch.bool)), r"got shape \[1, 2\]"
    ),
    "positions": (lambda m: m.step(torch.tensor([[1]]), None, positions=torch.tensor([[1, 2]])), r"wanted \[1, 1\]"),
    "crop": (lambda m: m.crop(m.step(torch.tensor([[1]]), None)[1], 2), "got 2, wanted 0 to 1"),
    "reorder": (lambda m: m.reorder(m.step(torch.tensor([[1]]), None)[1], [1]), "wanted numbers from 0 to 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_the_lean_model_does_not_take_is_refused_in_a_line(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call(torch_lean.decoder_lm(as_torch(random_lm()), heads=4, max_length=8))


@pytest.mark.parametrize(
    "words",
    [
        {"norm": "none"},
        {"positions": "learned"},
        {"window": (-1, 0)},
        {"heads": 8, "positions": "rotary"},
        {"heads": 0},
        {"heads": 3},
        {"heads": 16, "positions": None},
    ],
)
def test_what_the_lean_model_is_not_made_of(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="decoder_lm: "):
        torch_lean.decoder_lm(as_torch(random_lm(groups=4)), **{"heads": 4, **words})


@pytest.fixture
def contests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of contests that maps Hugging Face's weights to ours."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "contests"))
    yield importlib.import_module("decoding")
    for name in ("decoding", "contest"):
        sys.modules.pop(name, None)


EPSILON, BASE = 1e-3, 500.0


def hugging_face(groups: int) -> Any:
    """A Llama of random weights, float64 as far as Hugging Face goes: norms and angles are float32 in its code."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with torch.random.fork_rng([]):
        torch.manual_seed(groups)
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=groups, initializer_range=0.3, rms_norm_eps=EPSILON,
            rope_parameters={"rope_type": "default", "rope_theta": BASE},
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).double().eval()
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(weight, 1, 0.2)
    return model


def in_float64(model: Any) -> Any:
    """The same with norms and angles in float64 too, which leaves all of the wiring Hugging Face's."""

    class Rotary(torch.nn.Module):
        def forward(self, x: Any, position_ids: Any) -> tuple[Any, Any]:
            angle = position_ids[..., None] * BASE ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
            return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    def norm(old: Any) -> Any:
        new = torch.nn.RMSNorm(32, EPSILON, dtype=torch.float64)
        new.weight = old.weight
        return new

    model.model.rotary_emb, model.model.norm = Rotary(), norm(model.model.norm)
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = (
            norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
        )  # fmt: skip
    return model


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_lean_llama_is_hugging_faces(groups: int, contests: Any) -> None:
    theirs, tokens = hugging_face(groups), torch.tensor(np.random.default_rng(0).integers(0, 50, (2, 12)))
    ours = torch_lean.DecoderLM(contests.weights(theirs), heads=4, epsilon=EPSILON, base=BASE)
    for model, tolerance in ((theirs, 1e-5), (in_float64(theirs), 1e-10)):
        with torch.no_grad():
            wanted = model(tokens).logits
        close(ours.full(tokens), wanted, tolerance)
        close(stepped(ours, tokens, (7, 8, 9))[0], wanted, tolerance)
        chosen = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False)
        assert torch.equal(contests.greedy(ours, tokens, 20), chosen)
