"""Error budgets are calibrated: correct kernels stay within them, planted mistakes do not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from veriformer import budgets, reference
from veriformer.budgets import Precision, error_ratio
from veriformer.declarations import DTYPES

NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FAMILIES = ("normal", "constant", "few", "blocks", "ties", "heavy", "sparse", "offset", "ramp")
FUSED = {"intermediate": "float32", "rounds_probabilities": False}


def stored(x, dtype):
    """x rounded to a dtype, as float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(NUMPY[dtype]).astype(np.float64)


def tensor(x, dtype):
    return torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype))


def plain(result):
    return result.to(torch.float64).numpy()


def worst(computed, bound, precision):
    ratio = error_ratio(np.asarray(computed, dtype=np.float64), bound.value, bound.allowed, precision.largest)
    return float(ratio.max(initial=0.0))


def data(rng, shape, dtype, top=4.0):
    """Adversarial data: every family that shrunk counterexamples come from, magnitudes 1e-6 to 10^top."""
    family, size, n = FAMILIES[rng.integers(len(FAMILIES))], 10 ** rng.uniform(-6, top), shape[-1]
    noise = rng.normal(size=shape)
    x = {
        "normal": lambda: noise * size,
        "constant": lambda: np.full(shape, rng.normal() * size),
        "few": lambda: rng.choice(rng.normal(size=3), size=shape) * size,
        "blocks": lambda: np.where(np.arange(n) < n // 2, rng.normal(), rng.normal()) * np.full(shape, size),
        "ties": lambda: (1 + rng.integers(-2, 3, size=shape) * 10.0 ** rng.uniform(-7, -1)) * size,
        "heavy": lambda: np.clip(rng.standard_cauchy(size=shape), -1e3, 1e3) * size * 1e-2,
        "sparse": lambda: noise * (rng.random(shape) < 0.1) * size,
        "offset": lambda: noise * 10.0 ** rng.uniform(-3, 1) + 10.0 ** rng.uniform(0, top),
        "ramp": lambda: np.linspace(-1, 1, n) * np.full(shape, size),
    }[family]()
    return stored(np.clip(x, -6e4, 6e4), dtype)


def length(rng, most):
    return int(np.exp(rng.uniform(0, np.log(most + 0.99))))


def cases(count, name):
    """Generators of independent cases, the same in every run."""
    return (np.random.default_rng([index, *name.encode()]) for index in range(count))


# --- correct kernels ------------------------------------------------------------------------------


def rounder(dtype):
    """Rounds to a 16-bit dtype and computes on in float32: one stored value of an unfused kernel."""
    return lambda x: np.asarray(x, dtype=np.float32).astype(NUMPY[dtype]).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_softmax_family_stays_within_its_budget(dtype):
    precision = Precision(dtype)
    for rng in cases(150, "softmax"):
        x = data(rng, (2, length(rng, 512)), dtype)
        t, temperature = tensor(x, dtype), float(10 ** rng.uniform(-0.5, 2))
        pairs = (
            (F.softmax(t, -1), budgets.softmax(x, precision=precision)),
            (F.log_softmax(t, -1), budgets.log_softmax(x, precision=precision)),
            (torch.logsumexp(t, 0), budgets.logsumexp(x, axis=0, precision=precision)),
        )
        for computed, bound in pairs:
            assert worst(plain(computed), bound, precision) <= 1
        if abs(x).max() / temperature < precision.largest:
            bound = budgets.softmax(x, temperature=temperature, precision=precision)
            assert worst(plain(F.softmax(t / temperature, -1)), bound, precision) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_softmax_that_stores_every_step_stays_within_the_unfused_budget(dtype):
    precision, rd = Precision(dtype), rounder(dtype)
    for rng in cases(150, "unfused softmax"):
        x = data(rng, (2, length(rng, 512)), dtype)
        t = rd(x - x.max(axis=-1, keepdims=True))
        e = rd(np.exp(t))
        total = rd(e.sum(axis=-1, keepdims=True))
        p, log_p = e / total, t - rd(np.log(total))
        assert worst(stored(p, dtype), budgets.softmax(x, precision=precision), precision) <= 1
        assert worst(stored(log_p, dtype), budgets.log_softmax(x, precision=precision), precision) <= 1


@pytest.mark.parametrize("intermediate", ["storage", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_layer_norm_stays_within_its_budget(dtype, intermediate):
    precision = Precision(dtype, intermediate=intermediate)
    for rng in cases(150, "layer_norm"):
        n, eps = length(rng, 512), float(rng.choice([1e-12, 1e-5, 1e-3]))
        x, weight, bias = data(rng, (2, n), dtype), data(rng, (n,), dtype, 1), data(rng, (n,), dtype, 1)
        bound = budgets.layer_norm(x, weight, bias, eps=eps, precision=precision)
        computed = F.layer_norm(tensor(x, dtype), (n,), tensor(weight, dtype), tensor(bias, dtype), eps)
        assert worst(plain(computed), bound, precision) <= 1


@pytest.mark.parametrize("epsilon", ["inside", "outside"])
@pytest.mark.parametrize("variance", ["biased", "unbiased"])
def test_float32_layer_norm_in_every_dialect_stays_within_its_budget(epsilon, variance):
    precision = Precision("float32")
    for rng in cases(150, "dialects"):
        n, eps = length(rng, 511) + 1, np.float32(rng.choice([1e-12, 1e-5, 1e-3]))
        x = data(rng, (2, n), "float32").astype(np.float32)
        weight, bias = np.float32(rng.normal(size=(2, n)))
        c = x - x.mean(axis=-1, keepdims=True)
        v = (c * c).sum(axis=-1, keepdims=True) / np.float32(n - (variance == "unbiased"))
        y = weight * (c / (np.sqrt(v + eps) if epsilon == "inside" else np.sqrt(v) + eps)) + bias
        wide = [a.astype(np.float64) for a in (x, weight, bias)]
        bound = budgets.layer_norm(*wide, eps=float(eps), epsilon=epsilon, variance=variance, precision=precision)
        assert worst(y, bound, precision) <= 1


def attention_case(rng, dtype, most=128):
    """q, k, v with one or two query heads a key head, scores of a few units or of any size."""
    heads, groups = [(1, 1), (2, 2), (4, 2)][rng.integers(3)]
    queries, keys, width, value_width = (length(rng, m) for m in (most, most, 64, 64))
    q, k = data(rng, (1, heads, queries, width), dtype), data(rng, (1, groups, keys, width), dtype, 2)
    v = data(rng, (1, groups, keys, value_width), dtype)
    size = np.abs(q).sum(axis=-1).max() * np.abs(k).max() * width**-0.5
    if rng.random() < 0.6 and size > 0:
        q = stored(np.clip(q * (10 ** rng.uniform(-1, 1.5) / size), -6e4, 6e4), dtype)
    return q, k, v


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_attention_stays_within_its_budget(dtype, backend):
    precision = Precision(dtype)
    judged = 0
    for rng in cases(80, "sdpa"):
        q, k, v = attention_case(rng, dtype)
        if backend is SDPBackend.FLASH_ATTENTION:
            v = stored(np.resize(v, (*v.shape[:3], q.shape[3])), dtype)  # flash wants one width
        shape = (1, q.shape[1], q.shape[2], k.shape[2])
        kind = ("plain", "causal", "mask", "bias")[rng.integers(4)]
        given, theirs = {}, {}
        if kind == "causal":
            given, theirs = {"causal": True, "offset": 0}, {"is_causal": True}
        elif kind == "mask":
            mask = rng.random(shape) < 0.5
            given, theirs = {"mask": mask}, {"attn_mask": torch.from_numpy(mask)}
        elif kind == "bias":
            bias = data(rng, shape, dtype, 1)
            given, theirs = {"bias": bias}, {"attn_mask": tensor(bias, dtype)}
        arrays = [tensor(a, dtype) for a in (q, k, v)]
        with sdpa_kernel(backend):
            computed = F.scaled_dot_product_attention(*arrays, **theirs, enable_gqa=q.shape[1] > k.shape[1])
        assert worst(plain(computed), budgets.attention(q, k, v, **given, precision=precision), precision) <= 1
        judged += 1
    assert judged == 80


def any_keywords(rng, q, k, dtype):
    """One draw of every keyword of attention."""
    queries, keys, heads = q.shape[2], k.shape[2], q.shape[1]
    maybe = rng.random(6)
    return {
        "causal": bool(maybe[0] < 0.4),
        "mask": rng.random((1, heads, queries, keys)) < 0.6 if maybe[1] < 0.3 else None,
        "bias": data(rng, (1, 1, queries, keys), dtype, 1) if maybe[2] < 0.4 else None,
        "window": (int(rng.integers(keys + 1)), None) if maybe[3] < 0.3 else None,
        "softcap": float(rng.choice([0.5, 30.0])) if maybe[4] < 0.4 else None,
        "sink": stored(rng.normal(size=heads) * 4, dtype) if maybe[5] < 0.4 else None,
    }


def visible_keys(q, k, given):
    visible = reference.visible_keys(q.shape[2], k.shape[2], causal=given["causal"], window=given["window"], like=q)
    return visible if given["mask"] is None else visible & given["mask"]


def naive_attention(q, k, v, given, work, rd=lambda x: x, base2=False, block=None):
    """A kernel in dtype `work` that passes every step through `rd`; with `block`, tiles and a running maximum."""
    q, k, v = (a.astype(work) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    s = rd(rd(q * work(q.shape[3] ** -0.5)) @ k.swapaxes(-1, -2))
    if given["softcap"] is not None:
        s = rd(rd(np.tanh(rd(s / work(given["softcap"])))) * work(given["softcap"]))
    if given["bias"] is not None:
        s = rd(s + given["bias"].astype(work))
    s = np.where(visible_keys(q, k, given), s, work(-np.inf))
    factor, exp, log = (work(np.log2(np.e)), np.exp2, np.log2) if base2 else (work(1), np.exp, np.log)
    s, block = s * factor, block or s.shape[3]
    m = np.full((*s.shape[:3], 1), -np.inf, dtype=work)
    total, o = np.zeros_like(m), np.zeros((*s.shape[:3], v.shape[3]), dtype=work)
    with np.errstate(all="ignore"):
        for start in range(0, s.shape[3], block):
            tile = s[..., start : start + block]
            grown = np.maximum(m, tile.max(axis=-1, keepdims=True))
            peak = np.where(grown == -np.inf, work(0), grown)
            e, old = rd(exp(rd(tile - peak))), exp(m - peak)
            total, o, m = (
                total * old + e.sum(axis=-1, keepdims=True),
                o * old + e @ v[:, :, start : start + block],
                grown,
            )
        lse = (np.where(m == -np.inf, work(0), m) + log(total)) / factor
        o = np.where(total == 0, work(0), o / total)
        if given["sink"] is not None:
            o = o / (1 + np.exp(given["sink"].astype(work)[:, None, None] - lse))
    return o, lse[..., 0]


@pytest.mark.parametrize("form", ["naive", "tiled", "base2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_attention_with_every_keyword_stays_within_its_budget(dtype, form):
    precision, work = Precision(dtype, **FUSED), np.float64 if dtype == "float64" else np.float32
    for rng in cases(80, "fused"):
        q, k, v = attention_case(rng, dtype, 64)
        given = any_keywords(rng, q, k, dtype)
        options = {"naive": {}, "tiled": {"block": 7}, "base2": {"block": 16, "base2": True}}[form]
        out, lse = naive_attention(q, k, v, given, work, **options)
        out_bound, lse_bound = budgets.attention_with_lse(q, k, v, **given, precision=precision)
        assert worst(stored(out, dtype), out_bound, precision) <= 1
        assert worst(lse, lse_bound, Precision(precision.beside)) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_that_stores_every_step_stays_within_the_unfused_budget(dtype):
    precision = Precision(dtype)
    for rng in cases(150, "unfused"):
        q, k, v = attention_case(rng, dtype, 64)
        given = any_keywords(rng, q, k, dtype)
        out, lse = naive_attention(q, k, v, given, np.float32, rd=rounder(dtype))
        out_bound, lse_bound = budgets.attention_with_lse(q, k, v, **given, precision=precision)
        assert worst(stored(out, dtype), out_bound, precision) <= 1
        assert worst(lse, lse_bound, Precision("float32")) <= 1


# --- planted mistakes -----------------------------------------------------------------------------


def seeded(*shape):
    return np.random.default_rng(7).normal(size=shape)


def layer_norm_faults(dtype=np.float32):
    x = seeded(4, 512)
    mean, v = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    far = (x + 1000).astype(dtype)
    one_pass = (far * far).mean(-1, keepdims=True) - far.mean(-1, keepdims=True) ** 2
    small = stored(x * 0.01, "float32")
    centred = small - small.mean(-1, keepdims=True)
    return {
        "variance over n - 1": (x, (x - mean) / np.sqrt(v * 512 / 511 + 1e-5)),
        "one-pass variance at mean/deviation 1000": (
            far.astype(np.float64),
            (far - far.mean(-1, keepdims=True)) / np.sqrt(one_pass + dtype(1e-5)),
        ),
        "eps outside at deviation 0.01": (small, centred / (small.std(-1, keepdims=True) + 1e-5)),
        "eps forgotten at deviation 0.01": (small, centred / small.std(-1, keepdims=True)),
    }


@pytest.mark.parametrize("fault", layer_norm_faults())
def test_layer_norm_faults_exceed_the_float32_budget(fault):
    x, wrong = layer_norm_faults()[fault]
    x = stored(x, "float32")
    precision = Precision("float32")
    bound = budgets.layer_norm(x, np.ones(512), np.zeros(512), precision=precision)
    assert worst(stored(wrong, "float32"), bound, precision) > 1


def test_softmax_without_the_maximum_subtracted_exceeds_the_budget():
    x, precision = stored(100 + seeded(3, 8), "float32"), Precision("float32")
    with np.errstate(all="ignore"):
        e = np.exp(x.astype(np.float32))
        wrong = e / e.sum(-1, keepdims=True)
    assert worst(wrong, budgets.softmax(x, precision=precision), precision) == np.inf


def attention_faults():
    """q, k, v and the wrong answers, in float32."""
    rng = np.random.default_rng(3)
    q, k, v = (stored(rng.normal(size=(1, heads, 64, 32)), "float32") for heads in (4, 2, 2))
    right = reference.attention(q, k, v)
    s = np.einsum("bhqd,bhkd->bhqk", q, np.repeat(k, 2, 1)) * 32**-0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    p, values = p / p.sum(-1, keepdims=True), np.repeat(v, 2, 1)
    slow = np.zeros_like(right)
    for start in range(0, 64, 16):
        slow = stored(slow + p[..., start : start + 16] @ values[:, :, start : start + 16], "bfloat16")
    faults = {
        "scale times 1.001": reference.attention(q, k, v, scale=1.001 * 32**-0.5),
        "bfloat16 accumulator": slow,
        "bfloat16 probabilities": stored(p, "bfloat16") @ values,
        "heads tiled, not repeated": reference.attention(q, np.tile(k, (1, 2, 1, 1)), np.tile(v, (1, 2, 1, 1))),
        "one key too few": reference.attention(q, k[:, :, 1:], v[:, :, 1:]),
    }
    return q, k, v, faults


@pytest.mark.parametrize("fault", attention_faults()[3])
def test_attention_faults_exceed_the_float32_budget(fault):
    q, k, v, faults = attention_faults()
    precision = Precision("float32")
    assert worst(stored(faults[fault], "float32"), budgets.attention(q, k, v, precision=precision), precision) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_gross_attention_faults_exceed_the_budget_in_every_dtype(dtype):
    q, k, v = (stored(a, dtype) for a in attention_faults()[:3])
    tiled = reference.attention(q, np.tile(k, (1, 2, 1, 1)), np.tile(v, (1, 2, 1, 1)))
    precision, given = Precision(dtype), {"sink": np.zeros(4), "softcap": 2.0, "causal": True}
    assert worst(stored(tiled, dtype), budgets.attention(q, k, v, precision=precision), precision) > 1
    bound, lse_bound = budgets.attention_with_lse(q, k, v, **given, precision=precision)
    for name in given:
        less = {other: value for other, value in given.items() if other != name}
        assert worst(stored(reference.attention(q, k, v, **less), dtype), bound, precision) > 1, name
    lse_with_sink = np.logaddexp(lse_bound.value, 0.0)
    assert worst(lse_with_sink, lse_bound, precision) > 1
