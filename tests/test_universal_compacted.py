"""The compacted Universal Transformer: equal to the reference, its shortcut proved and refused, work that shrinks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import close, converted, random_layer
from universal_models import HEADS, WIDTH, random_states, random_universal

from veriformer.impls import torch_universal
from veriformer.impls.torch_universal_compacted import BLOCK, UniversalTransformer, shortcut, universal_transformer
from veriformer.reference import universal
from veriformer.reference.universal_decoding import universal_step

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=40, deadline=None, database=None, derandomize=True)
LENGTH, DEEP = 7, 5
VARIED = (4, 7, 13, 17)
"""Seeds whose positions halt at different steps."""
WORDS = {"heads": HEADS, "max_steps": DEEP}
NORMS = st.sampled_from(["post", "pre"])


def model(seed: int, cross: bool = False, biases: bool = True, groups: int = 2):
    """params of universal_transformer; without biases the norms are rms_norms."""
    params = random_universal(seed, cross=cross)
    other = random_layer(seed, cross=cross, groups=groups)
    params["layer"] |= {name: part for name, part in other.items() if name.endswith("attention")}
    if not biases:
        bare = {
            name: {key: array for key, array in part.items() if not key.startswith("b")}
            for name, part in params["layer"].items()
        }
        params = {"layer": bare, "halt": {"w": params["halt"]["w"]}}
    return params


def words(seed: int, norm: str, causal: bool, cross: bool, padded: bool):
    """Keywords; with padding one sequence has gaps and leading padding, and sees no memory, and one is all padding."""
    rng = np.random.default_rng(seed)
    found = {"norm": norm, "causal": causal, **WORDS}
    if padded:
        found["mask"] = np.asarray([[True] * LENGTH, rng.random(LENGTH) < 0.6, [False] * LENGTH])
        found["mask"][1, 0] = False
    if cross:
        found["memory"] = random_states(seed + 1, 3, 4)
        if padded:
            found["memory_mask"] = np.asarray([rng.random(4) < 0.6, [False] * 4, [True] * 4])
    return found


def tensors(tree):
    return converted(lambda array: torch.from_numpy(array.copy()), tree)


@SEARCH
@given(
    st.sampled_from([*VARIED, 1, 20]), NORMS, st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_equals_the_reference(seed, norm, causal, cross, padded, biases, groups):
    x, params = random_states(seed, 3, LENGTH), model(seed, cross, biases, groups)
    chosen = words(seed, norm, causal, cross, padded)
    wanted = universal.universal_transformer(x, params, **chosen)
    found = universal_transformer(*tensors((x, params)), **tensors(chosen))
    for got, one in zip(found, wanted, strict=True):
        close(got, one, 1e-10)
    assert np.array_equal(found[1], wanted[1])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_more_steps_than_constants_are_made_for_at_a_time(norm):
    x, params, steps = random_states(4, 2, LENGTH), model(4), 2 * BLOCK + 3
    params["halt"] = {"w": params["halt"]["w"] / 50, "b": params["halt"]["b"] * 0 - 4}
    wanted = universal.universal_transformer(x, params, heads=HEADS, norm=norm, max_steps=steps)
    found = universal_transformer(*tensors((x, params)), heads=HEADS, norm=norm, max_steps=steps)
    assert wanted[1].max() > 2 * BLOCK
    for got, one in zip(found, wanted, strict=True):
        close(got, one, 1e-10)


def leaves(tree, path=""):
    if isinstance(tree, torch.Tensor):
        return {path: tree.requires_grad_(True)}
    return {key: leaf for name, part in tree.items() for key, leaf in leaves(part, f"{path}.{name}").items()}


def gradients(function, x, params, chosen):
    """Those of a random combination of output and remainder, by x, memory and all weights; None counts as 0."""
    x, params, chosen = tensors((x, params, chosen))
    wanted = {**leaves(params), "x": x.requires_grad_(True)}
    if "memory" in chosen:
        wanted["memory"] = chosen["memory"].requires_grad_(True)
    output, _, remainder = function(x, params, **chosen)
    weights = torch.from_numpy(np.random.default_rng(5).normal(size=output.shape))
    loss = (weights * output).sum() + (weights[..., 0] * remainder).sum()
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(wanted.items(), found, strict=True)
    }


@SEARCH
@given(
    st.sampled_from(VARIED), NORMS, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 2])
)
def test_gradients_equal_those_of_the_dense_one(seed, norm, causal, cross, padded, biases, groups):
    x, params = random_states(seed, 3, LENGTH), model(seed, cross, biases, groups)
    chosen = words(seed, norm, causal, cross, padded)
    wanted = gradients(torch_universal.universal_transformer, x, params, chosen)
    found = gradients(universal_transformer, x, params, chosen)
    largest = max(g.abs().max() for g in wanted.values())
    for name, one in wanted.items():
        assert (found[name] - one).abs().max() <= 1e-10 * largest, name


def test_only_the_bias_that_cancels_has_no_gradient():
    x, params = tensors((random_states(4, 2, LENGTH), model(4)))
    for norm, none in (("post", ["layer.attention.bk"]), ("pre", [])):
        found = {name.lstrip("."): leaf for name, leaf in leaves(params).items()}
        output, _, _ = universal_transformer(x, params, norm=norm, **WORDS)
        given = torch.autograd.grad((output**3).sum(), list(found.values()), allow_unused=True)
        assert [name for name, one in zip(found, given, strict=True) if one is None] == none


@st.composite
def partitions(draw):
    """Sizes of chunks, 0 among them, that make up LENGTH."""
    cuts = sorted(draw(st.lists(st.integers(0, LENGTH), max_size=4)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)]


@SEARCH
@given(partitions(), st.sampled_from([*VARIED, 1]), NORMS, st.booleans(), st.booleans())
def test_chunks_with_a_cache_give_what_the_reference_gives(chunks, seed, norm, cross, padded):
    x, params = random_states(seed, 3, LENGTH), model(seed, cross)
    chosen = words(seed, norm, True, cross, padded)
    mask, memory = chosen.pop("mask", None), {k: chosen.pop(k) for k in ("memory", "memory_mask") if k in chosen}
    chosen.pop("causal")
    stepper = UniversalTransformer(tensors(params), **chosen)
    cache, mine, start, once = None, None, 0, tensors(memory)
    for size in chunks:
        new, seen = x[:, start : start + size], None if mask is None else mask[:, : start + size]
        wanted, cache = universal_step(new, cache, params, mask=seen, **memory, **chosen)
        found, mine = stepper.step(*tensors((new,)), mine, mask=tensors(seen), **once)
        for got, one in zip(found, wanted, strict=True):
            close(got, one, 1e-10)
        assert np.array_equal(found[1], wanted[1])
        start, once = start + size, {}


@pytest.mark.parametrize("seed", [4, 13])
def test_halted_tokens_share_one_row_of_the_cache(seed):
    x, params = tensors((random_states(seed, 2, LENGTH), model(seed)))
    rows = {}
    for norm in ("post", "pre"):
        (_, steps, _), cache = UniversalTransformer(params, norm=norm, **WORDS).step(x)
        rows[norm] = len(cache.rows) - 1
        if norm == "post":
            for b, i in np.ndindex(2, LENGTH):
                assert len(set(cache.at[:, b, i].tolist())) == min(int(steps[b, i]) + 1, DEEP)
            assert rows[norm] == torch.clamp(steps + 1, max=DEEP).sum()
    assert rows["pre"] == 2 * LENGTH * DEEP > rows["post"]


def test_a_cache_stays_valid():
    x, params = tensors((random_states(4, 2, LENGTH), model(4)))
    stepper = UniversalTransformer(params, **WORDS)
    _, cache = stepper.step(x[:, :5])
    before = cache.rows.clone(), cache.at.clone()
    first, _ = stepper.step(x[:, 5:], cache)
    stepper.step(x[:, 4:5], cache)
    again, _ = stepper.step(x[:, 5:], cache)
    assert torch.equal(cache.rows, before[0]) and torch.equal(cache.at, before[1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def attended(x, w, keys, *, heads, extra=0.0, sink=None, softcap=None, mask=None):
    """Attention of x[T,d] to keys[S,d] as written, in float64, plus extra[d]; query heads share w's key heads."""
    groups = w["wk"].shape[1] * heads // w["wq"].shape[1]
    q, k, v = (
        (rows @ w[f"w{n}"] + w[f"b{n}"]).reshape(len(rows), count, -1).transpose(1, 0, 2)
        for n, rows, count in (("q", x, heads), ("k", keys, groups), ("v", keys, groups))
    )
    k, v = (a.repeat(heads // groups, 0) for a in (k, v))
    logits = q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    seen = np.ones(logits.shape[1:], bool) if mask is None else mask
    e = np.where(seen, np.exp(logits - logits.max()), 0)
    total = e.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - logits.max()))
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    return (p @ v).transpose(1, 0, 2).reshape(len(x), -1) @ w["wo"] + w["bo"] + extra


def two_ways(seed, step, first, groups, normed=False, **kind):
    """With the signal of the step in the keys and values; and without it, the constant added to what comes out."""
    w = random_layer(seed, groups=groups)["attention"]
    rng = np.random.default_rng(seed)
    places = universal.signals(rng.normal(size=(1, 6, WIDTH)), first, step)
    signal = universal.sinusoidal_positions(1, WIDTH, offset=step, like=places)[0]
    z = rng.normal(size=(6, WIDTH)) + places - signal  # u + P[position]
    value = (signal @ w["wv"]).reshape(groups, -1).repeat(HEADS // groups, 0).reshape(-1)

    def entered(rows):
        return F.layer_norm(torch.from_numpy(rows), (WIDTH,)).numpy() if normed else rows

    queries = entered(z + signal)
    given = attended(queries, w, entered(z + signal), heads=HEADS, **kind)
    return given, attended(queries, w, entered(z), heads=HEADS, extra=value @ w["wo"], **kind)


DRAWN = given(st.integers(0, 500), st.integers(1, 12), st.integers(0, 60), st.sampled_from([1, 2, 4]))


@SEARCH
@DRAWN
def test_frozen_keys_and_values_need_no_signal_of_the_step(seed, step, first, groups):
    given, short = two_ways(seed, step, first, groups)
    np.testing.assert_allclose(given, short, rtol=0, atol=1e-12 * max(1, np.abs(given).max()))


BROKEN = {
    "norm": {"normed": True},
    "sink": {"sink": 0.0},
    "softcap": {"softcap": 1.0},
    "empty_rows": {"mask": np.tri(6, dtype=bool) & (np.arange(6) > 1)},
}


@pytest.mark.parametrize("why", BROKEN)
def test_where_the_shortcut_is_refused_it_would_be_wrong(why):
    assert shortcut() == ""
    assert shortcut(**{why: "pre" if why == "norm" else True}).startswith(
        {"norm": "pre-norm", "sink": "sink", "softcap": "softcap", "empty_rows": "empty rows"}[why]
    )
    for seed in range(5):
        given, short = two_ways(seed, 3, 2, 2, **BROKEN[why])
        assert np.abs(given - short).max() > 1e-3


def test_signals_that_are_no_common_number_are_refused():
    assert shortcut(by_position=True).startswith("signal by position")
    assert shortcut(rotary_by_step=True).startswith("rotary by step")
    assert shortcut("pre", sink=True).count(";") == 1


class Rows(torch.overrides.TorchFunctionMode):
    """How many rows were multiplied by matrices of a width, in each product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.found = width, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.matmul and args[1].shape[1] == self.width:
            self.found.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("seed", [7, 10])
def test_halted_positions_and_padding_are_not_computed(seed, norm):
    """Keys and values of who halts are once more in post-norm, and those of all real tokens in pre-norm."""
    x, params = tensors((random_states(seed, 3, LENGTH), model(seed, groups=1)))
    mask = torch.from_numpy(np.arange(LENGTH) < np.asarray([[LENGTH], [4], [0]]))
    inner, pair = 10, 4
    with Rows(inner) as rows, Rows(pair) as again, torch.no_grad():
        _, steps, _ = universal_transformer(x, params, norm=norm, mask=mask, **WORDS)
    running = [int((steps >= n).sum()) for n in range(1, int(steps.max()) + 1)]
    assert len(set(running)) > 1 and running[0] == LENGTH + 4
    assert rows.found == running
    assert again.found == (running[:-1] if norm == "post" else [LENGTH + 4] * len(running))


def test_inputs_weights_and_results_are_no_workspace():
    x, params = tensors((random_states(4, 2, LENGTH), model(4)))
    before = {name: leaf.detach().clone() for name, leaf in leaves(params).items()}
    runs = UniversalTransformer(params, **WORDS)
    with torch.no_grad():
        first = runs(x)
        kept = [one.clone() for one in first]
        runs(2 * x)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert all(torch.equal(leaf, before[name]) for name, leaf in leaves(params).items())


def test_what_does_not_fit_is_refused():
    x, params = tensors((random_states(4, 2, 3), model(4)))
    runs, memory = UniversalTransformer(params, **WORDS), torch.zeros(2, 4, WIDTH).double()
    _, cache = runs.step(x)
    for message, call in {
        r"mask: got shape \(2, 2\), wanted \(2, 3\)": lambda: runs(x, mask=torch.ones(2, 2) > 0),
        r"mask: got shape \(2, 3\), wanted \(2, 6\)": lambda: runs.step(x, cache, mask=torch.ones(2, 3) > 0),
        "memory: got one, wanted one if and only if": lambda: runs(x, memory=memory),
        "memory: got none and a mask, wanted": lambda: runs(x, memory_mask=torch.ones(2, 4) > 0),
        "memory: got one with a cache, wanted it with the first": lambda: runs.step(x, cache, memory=memory),
        "cache: got 5 steps, 2 batch rows, wanted 5, 1": lambda: runs.step(x[:1], cache),
        "cache: got 4 steps, 2 batch rows, wanted 5, 2": lambda: runs.step(x, replace(cache, at=cache.at[:4])),
        "heads: got 3, wanted a divisor of 8": lambda: UniversalTransformer(params, heads=3, max_steps=2),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    crossed = UniversalTransformer(tensors(model(4, cross=True)), **WORDS)
    with pytest.raises(ValueError, match="memory: got none, wanted one"):
        crossed(x)
    with pytest.raises(ValueError, match=r"memory_mask: got shape \(2, 3\), wanted \(2, 4\)"):
        crossed(x, memory=memory, memory_mask=torch.ones(2, 3) > 0)
