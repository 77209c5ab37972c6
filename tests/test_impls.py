"""The right implementations against scalar loops written here, and every planted fault against its twin."""

from __future__ import annotations

import importlib
import importlib.util
import math
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

PLAIN = ("numpy_plain", "numpy_blocked")
FAULTY = ("attention", "attention_tiled", "attention_with_lse", "softmax", "layer_norm", "hygiene")
INF = float("inf")


def load(name: str) -> types.ModuleType:
    if name.startswith("torch") or name.endswith(("gradient", "hygiene_torch")):
        pytest.importorskip("torch")
    return importlib.import_module(f"veriformer.impls.{name}")


def variants(module: types.ModuleType) -> dict[str, dict[str, Any]]:
    return getattr(module, "VARIANTS", None) or {"": vars(module)}


def attention_loop(q, k, v, mask=None, bias=None, causal=False, scale=None, window=None, softcap=None, sink=None):
    """Attention and lse, one number at a time."""
    (batch, heads, queries, width), groups, keys = q.shape, k.shape[1], k.shape[2]
    out, lse = np.zeros((batch, heads, queries, v.shape[-1])), np.full((batch, heads, queries), -INF)
    left, right = window or (None, None)
    for b, h, i in np.ndindex(batch, heads, queries):
        g, here, logits = h * groups // heads, i + keys - queries, {}
        for j in range(keys):
            hidden = (
                causal and j > here or left is not None and j < here - left or right is not None and j > here + right
            )
            if hidden or mask is not None and not np.broadcast_to(mask, (batch, heads, queries, keys))[b, h, i, j]:
                continue
            s = sum(float(x) * float(y) for x, y in zip(q[b, h, i], k[b, g, j], strict=True))
            s *= width**-0.5 if scale is None else scale
            s = s if softcap is None else softcap * math.tanh(s / softcap)
            s = s if bias is None else s + float(np.broadcast_to(bias, (batch, heads, queries, keys))[b, h, i, j])
            logits[j] = s
        if not logits:
            continue
        top = max(logits.values())
        total = sum(math.exp(s - top) for s in logits.values())
        lse[b, h, i] = top + math.log(total)
        total += 0 if sink is None else math.exp(float(sink[h]) - top)
        for j, s in logits.items():
            out[b, h, i] += math.exp(s - top) / total * v[b, g, j].astype(float)
    return out, lse


def row_loop(operation: str, row: list[float], temperature: float = 1.0) -> Any:
    row = [x / temperature for x in row]
    top = max(row)
    lse = top + math.log(sum(math.exp(x - top) for x in row))
    if operation == "logsumexp":
        return lse
    return [x - lse if operation == "log_softmax" else math.exp(x - lse) for x in row]


def layer_norm_loop(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    out = np.zeros(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        mean = math.fsum(x[index]) / x.shape[-1]
        variance = math.fsum((c - mean) ** 2 for c in x[index]) / x.shape[-1]
        for c, value in enumerate(x[index]):
            out[(*index, c)] = weight[c] * (value - mean) / math.sqrt(variance + eps) + bias[c]
    return out


def attention_cases(dtype: Any = np.float64) -> list[dict[str, Any]]:
    """Small cases, each with something that at least one planted fault needs."""
    rng = np.random.default_rng(0)

    def case(
        queries: int, keys: int, heads: int = 4, groups: int = 2, width: int = 3, values: int = 5, **more: Any
    ) -> dict:
        sizes = {"q": (heads, queries, width), "k": (groups, keys, width), "v": (groups, keys, values)}
        arrays = {name: rng.standard_normal((2, *size)) * more.get("times", 1) for name, size in sizes.items()}
        arrays |= {name: a for name, a in more.items() if name != "times"}
        return {name: a.astype(dtype) if getattr(a, "dtype", None) == np.float64 else a for name, a in arrays.items()}

    def mask(*shape: int) -> np.ndarray:
        return rng.random(shape) < 0.6

    no_first = np.ones((1, 1, 1, 7), bool)
    no_first[..., :4] = False
    bias, sink = rng.standard_normal((2, 4, 5, 5)), rng.standard_normal(4)
    low = {"q": np.full((2, 4, 2, 3), 8.0), "k": np.full((2, 2, 5, 3), -8.0) + rng.standard_normal((2, 2, 5, 3))}
    sparse = mask(2, 4, 5, 5)
    sparse[:, :, 1], sparse[:, :, 0, 0] = False, True
    return [
        case(5, 5),
        case(5, 5, heads=6, causal=True),
        case(3, 7, causal=True),
        case(7, 3, causal=True),
        case(5, 5, mask=mask(2, 4, 5, 5), width=4),
        case(5, 5, mask=mask(2, 1, 1, 5), bias=bias, causal=True),
        case(5, 5, mask=sparse),
        case(2, 7, mask=no_first),
        case(5, 5, bias=bias, softcap=1.5),
        case(5, 5, bias=bias[:, :, :1], scale=0.25),
        case(3, 6, window=(1, 2)),
        case(3, 6, window=(2, None), causal=True, mask=mask(1, 1, 3, 6)),
        case(4, 4, window=(None, 1)),
        case(4, 4, causal=True, softcap=0.5, mask=mask(1, 4, 1, 4)),
        case(4, 4, sink=sink, scale=2.0),
        case(1, 4, sink=sink),
        case(3, 3, causal=True, scale=0.0),
        case(3, 3, causal=True, scale=-1.0),
        case(2, 5, **low),
        case(2, 6, times=30.0),
        case(2, 6, times=30.0, softcap=2.0),
    ]


def rows(dtype: Any = np.float64) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    plain = [rng.standard_normal(shape) * 3 for shape in ((2, 5), (3, 4, 3), (2, 1, 8), (6,))]
    far = [np.array(x) for x in ([[0.0, -200.0], [500.0, 499.0]], [[-60.0, -61.0, -62.0]], [-INF] * 4 + [0.0, -1.0])]
    return [x.astype(dtype) for x in [*plain, *far]]


def norm_cases(dtype: Any = np.float64) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, float]]:
    rng = np.random.default_rng(2)
    shapes = ((6, 5), (2, 3, 4), (2, 8), (3, 1), (4,))
    xs = [rng.standard_normal(shape) for shape in shapes]
    xs += [xs[0] * 1e-3, xs[2] + 4096.0, np.full((2, 6), 2.0), xs[1] * 500]
    parts = [(x, rng.standard_normal(x.shape[-1]), rng.standard_normal(x.shape[-1])) for x in xs]
    return [(*(a.astype(dtype) for a in part), 1e-5) for part in parts]


def calls(operation: str, dtype: Any = np.float64) -> list[tuple[tuple, dict]]:
    """Positional arrays and keywords for one operation."""
    if operation == "layer_norm":
        return [((x, w, b), {"eps": eps}) for x, w, b, eps in norm_cases(dtype)]
    if operation.startswith("attention"):
        arrays = ("q", "k", "v")
        cases = attention_cases(dtype)
        return [(tuple(c[a] for a in arrays), {k: x for k, x in c.items() if k not in arrays}) for c in cases]
    found = [((x,), {"axis": axis}) for x in rows(dtype) for axis in range(x.ndim)]
    return found + (
        [((x,), {"temperature": t}) for x in rows(dtype)[:2] for t in (0.01, 0.5, 3.0)] * (operation == "softmax")
    )


def wanted(operation: str, arrays: tuple, keywords: dict) -> tuple[np.ndarray, ...]:
    if operation == "layer_norm":
        return (layer_norm_loop(*(a.astype(float) for a in arrays), keywords["eps"]),)
    if operation.startswith("attention"):
        return attention_loop(*arrays, **keywords)[: 2 if operation.endswith("lse") else 1]
    x, axis = arrays[0].astype(float), keywords.get("axis", -1)
    with np.errstate(all="ignore"):
        return (np.apply_along_axis(lambda r: row_loop(operation, list(r), keywords.get("temperature", 1.0)), axis, x),)


def run(function: Any, arrays: tuple, keywords: dict) -> tuple[np.ndarray, ...] | None:
    """The results as a tuple; None where the implementation lacks a keyword or the case is not its own."""
    accepted = set(function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount])
    if not set(keywords) <= accepted:
        return None
    result = function(
        *(a.copy() for a in arrays), **{n: a.copy() if hasattr(a, "copy") else a for n, a in keywords.items()}
    )
    return result if isinstance(result, tuple) else (result,)


def numpy_correct() -> list[tuple[str, str, str]]:
    found = [(name, "", op) for name in PLAIN for op in load(name).CAPABILITIES]
    for name in FAULTY:
        found += [(f"faulty.{name}", "correct", op) for op in load(f"faulty.{name}").VARIANTS["correct"]]
    controls = load("faulty.controls")
    kept = [v for v in controls.VARIANTS if not v.endswith("declared")]
    return found + [("faulty.controls", v, op) for v in kept for op in controls.VARIANTS[v]]


@pytest.mark.parametrize(("name", "variant", "operation"), numpy_correct())
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_numpy_implementations_equal_the_loops(name: str, variant: str, operation: str, dtype: str) -> None:
    if (variant, dtype) == ("layer_norm_one_pass_in_float64", "float64"):
        pytest.skip("declared for float32 alone")
    function = variants(load(name))[variant][operation]
    judged = 0
    for arrays, keywords in calls(operation, np.dtype(dtype)):
        if name == "faulty.controls" and keywords.get("scale", 1) is not None and keywords.get("scale", 1) <= 0:
            continue
        got = run(function, arrays, keywords)
        if got is None:
            continue
        judged += 1
        limit = 1e-11 if dtype == "float64" else 2e-3 if max(np.abs(a).max() for a in arrays) > 50 else 3e-5
        for one, right in zip(got, wanted(operation, arrays, keywords), strict=True):
            assert one.dtype == dtype and one.shape == right.shape
            np.testing.assert_allclose(one, right, rtol=limit, atol=limit)
    assert judged >= 3


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_low_precision_is_computed_wide_and_rounded_once(name: str, dtype: Any) -> None:
    module, unit = load(name), float(ml_dtypes.finfo(dtype).eps)
    for operation in ("softmax", "layer_norm", "attention"):
        arrays, keywords = calls(operation, dtype)[0]
        (got,), (right,) = run(vars(module)[operation], arrays, keywords), wanted(operation, arrays, keywords)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(float), right, rtol=unit, atol=unit / 100)


@pytest.mark.parametrize("variant", ["default", "math", "flash"])
def test_torch_attention_equals_the_loop_outside_the_known_fault(variant: str) -> None:
    torch, function = pytest.importorskip("torch"), load("torch_sdpa").VARIANTS[variant]["attention"]
    judged = 0
    for arrays, keywords in calls("attention"):
        square = arrays[0].shape[2] == arrays[1].shape[2]
        if not set(keywords) <= {"mask", "bias", "causal", "scale"} or {"mask", "bias"} <= set(keywords):
            continue
        if keywords.get("causal") and (not square or "mask" in keywords or keywords.get("scale", 1) <= 0):
            continue
        arrays = (*arrays[:2], arrays[2][..., : arrays[0].shape[-1]])
        tensors = {n: torch.tensor(a) if isinstance(a, np.ndarray) else a for n, a in keywords.items()}
        got = function(*map(torch.tensor, arrays), **tensors)
        np.testing.assert_allclose(got, wanted("attention", arrays, keywords)[0], rtol=1e-11, atol=1e-11)
        judged += 1
    assert judged >= 5


@pytest.mark.parametrize("operation", ["softmax", "log_softmax", "logsumexp", "layer_norm"])
def test_torch_functional_equals_the_loops(operation: str) -> None:
    torch, function = pytest.importorskip("torch"), vars(load("torch_functional"))[operation]
    for arrays, keywords in calls(operation):
        got = function(*map(torch.tensor, arrays), **keywords)
        np.testing.assert_allclose(got, wanted(operation, arrays, keywords)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", ["default", "math", "flash"])
@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_torch_causal_attention_with_nonpositive_scale_is_the_known_fault(variant: str, scale: float) -> None:
    torch, function = pytest.importorskip("torch"), load("torch_sdpa").VARIANTS[variant]["attention"]
    q, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[1.0], [3.0]]]])
    first, last = function(q, q, v, causal=True, scale=scale).flatten().tolist()
    assert last == 2.0
    assert math.isnan(first) == (variant != "math")


def faults(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, variant) for name in names for variant in load(f"faulty.{name}").FAULTS]


def observe(function: Any, operation: str, dtype: Any) -> list[Any]:
    """All that a caller can see: results, inputs afterwards, shared memory, global state, history."""
    seen: list[Any] = []
    for arrays, keywords in calls(operation, dtype):
        result = run(function, arrays, keywords)
        seen += [] if result is None else [*result, len(result)]
    arrays, keywords = calls(operation, dtype)[4 if operation.startswith("attention") else 0]
    keywords = {} if run(function, arrays, keywords) is None else keywords
    arrays, keywords = [a.copy() for a in arrays], {n: np.array(a) if n == "mask" else a for n, a in keywords.items()}
    state = np.random.get_state()[2]
    first = function(*arrays, **keywords)
    seen += [type(first).__name__, np.random.get_state()[2] - state, *arrays, keywords.get("mask", 0)]
    again = function(*arrays, **keywords)
    shares = isinstance(first, np.ndarray) and (np.shares_memory(first, again) or np.shares_memory(first, arrays[0]))
    one = function(np.ones((2, 1), dtype)) if operation == "logsumexp" else first
    seen += [shares, again, getattr(one, "base", None) is not None and operation == "logsumexp"]
    return seen + observe_layout(function, operation, dtype)


def observe_layout(function: Any, operation: str, dtype: Any) -> list[Any]:
    arrays, _ = calls(operation, dtype)[0]
    spread = [np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim > 1 else a for a in arrays]
    for a in spread:
        if a.ndim > 1:
            a.base[..., 1::2] = 7.0
    seen = [function(*spread)]
    if operation == "attention":
        q, k, v = (a.copy() for a in arrays)
        mask = np.arange(5)[None, None, None] < 4
        v[:, :, 4] = np.nan
        seen += [function(q, k, v, mask=mask) if "bias" in function.__code__.co_varnames else 0]
        blocking = np.where(mask, 0.0, -np.inf).astype(dtype)
        seen += [function(*arrays, bias=blocking) if "bias" in function.__code__.co_varnames else 0]
        long = [np.concatenate([a, a], axis=2) for a in arrays]
        seen += [function(*case, causal=True) for case in (arrays, long, arrays)]
    return seen


def differ(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or getattr(one, "dtype", 0) != getattr(other, "dtype", 0):
        return True
    if np.shape(one) != np.shape(other):
        return True
    return one != other if isinstance(one, str) else not np.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("name", "variant"), faults(FAULTY))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_fault_differs_from_its_twin(name: str, variant: str) -> None:
    module = load(f"faulty.{name}")
    fault = module.FAULTS[variant]
    twin = observe(module.VARIANTS["correct"][fault.operation], fault.operation, np.dtype(fault.dtype))
    try:
        wrong = observe(module.VARIANTS[variant][fault.operation], fault.operation, np.dtype(fault.dtype))
    except (AttributeError, ValueError):
        return  # a result that is no array, or a refusal: seen
    assert len(wrong) != len(twin) or any(map(differ, wrong, twin)), fault.summary


def gradients(function: Any, operation: str) -> tuple[list[Any], list[Any]]:
    """Results and gradients of a few calls that hide keys, hold -inf, are constant, or have width 1."""
    import torch

    found = calls(operation, np.float32)
    if operation == "layer_norm":
        found += [((np.float32([[0.1], [0.7]]), np.float32([1.0]), np.float32([0.5])), {})]
    results, grads = [], []
    for arrays, keywords in found:
        tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
        more = {n: torch.tensor(a) if isinstance(a, np.ndarray) else a for n, a in keywords.items()}
        more = {n: a.requires_grad_() if n == "bias" else a for n, a in more.items()}
        if not set(more) <= set(function.__code__.co_varnames):
            continue
        out = function(*tensors, **more)
        results.append(out.detach().numpy())
        if out.requires_grad:
            out.backward(torch.linspace(-1, 2, out.numel()).reshape(out.shape))
        leaves = [*tensors, *(a for n, a in more.items() if n == "bias")]
        grads += [None if t.grad is None else t.grad.numpy() for t in leaves]
    return results, grads


@pytest.mark.parametrize("variant", load("faulty.gradient").FAULTS if importlib.util.find_spec("torch") else ())
def test_every_gradient_fault_shows_in_the_gradient_alone(variant: str) -> None:
    module = load("faulty.gradient")
    operation = module.FAULTS[variant].operation
    right, right_grads = gradients(module.VARIANTS["correct"][operation], operation)
    results, grads = gradients(module.VARIANTS[variant][operation], operation)
    for one, other in zip(results, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert all(g is not None for g in right_grads)
    assert any(map(differ, grads, right_grads))
    if module.FAULTS[variant].law.endswith("gradient-is-finite"):
        assert all(np.isfinite(g).all() for g in right_grads)
        assert not all(np.isfinite(g).all() for g in grads)


def test_every_torch_hygiene_fault_shows() -> None:
    torch, module = pytest.importorskip("torch"), load("faulty.hygiene_torch")
    default, threads = torch.get_default_dtype(), torch.get_num_threads()

    def seen(variant: str) -> list[Any]:
        torch.manual_seed(0)
        x = torch.tensor([[1.0, 2.0, 4.0]])
        out = module.VARIANTS[variant]["softmax"](x)
        state = [x.tolist(), type(out), torch.rand(1).item(), torch.get_default_dtype(), torch.get_num_threads()]
        torch.set_default_dtype(default)
        torch.set_num_threads(threads)
        return state

    assert all(seen(variant) != seen("correct") for variant in module.FAULTS)


def test_names_and_laws_are_well_formed() -> None:
    everything: list[str] = []
    for name in FAULTY:
        module = load(f"faulty.{name}")
        assert set(module.VARIANTS) == {"correct", *module.FAULTS}
        for variant, fault in module.FAULTS.items():
            assert fault.operation in module.VARIANTS[variant]
            assert fault.law.startswith(f"{fault.operation}/")
            assert fault.source and fault.summary
        everything += module.FAULTS
    assert len(everything) >= 60


def test_crashing_variants_load_without_crashing() -> None:
    module = load("faulty.crash")
    got = module.VARIANTS["correct"]["attention"](*(np.ones((1, 1, 2, 2), np.float32) for _ in "qkv"))
    assert got.shape == (1, 1, 2, 2)
    with pytest.raises(RuntimeError, match="always raises"):
        module.VARIANTS["raises"]["attention"](*(np.ones((1, 1, 2, 2), np.float32) for _ in "qkv"))
