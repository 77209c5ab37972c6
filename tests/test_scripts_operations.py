"""Scripts of failures where calls hold whole numbers, scalars, weights, caches or an OPERATION_vjp."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_scripts import codes, failing, repair, write_script

from veriformer.checking import in_process
from veriformer.targets import Options, load

LIBRARY = """
import numpy as np
BROKEN = True

def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def softmax_vjp(cotangent, x):
    p = softmax(x)
    inner = (p * cotangent).sum(-1, keepdims=True)
    return (p * (cotangent if BROKEN else cotangent - inner),)

def sinusoidal_positions(length, width, *, offset=0):
    positions = np.arange(length)[:, None] + (0 if BROKEN else offset)
    pairs = np.arange(width) // 2
    angles = positions * 10000.0 ** (-2 * pairs / width)
    return np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles)).astype(np.float32)

def embedding(ids, table):
    return table[ids - (ids > 0) * BROKEN]

def dropout(x, *, rate, uniform):
    return np.where(uniform >= rate, x / (1 if BROKEN else 1 - rate), 0).astype(x.dtype)

def attend(q, k, v, visible):
    s = np.where(visible, q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5, -np.inf)
    return softmax(s) @ np.where(np.isfinite(v), v, 0)

def multi_head_attention(x, memory, params, *, heads):
    def split(a):
        return np.swapaxes(a.reshape(*a.shape[:2], -1, params["wq"].shape[1] // heads), 1, 2)
    q, k, v = (a @ params["w" + n] + params.get("b" + n, 0) for a, n in ((x, "q"), (memory, "k"), (memory, "v")))
    q, k = split(q), split(k)
    v = np.swapaxes(v.reshape(*v.shape[:2], k.shape[1], -1), 1, 2)
    k, v = (np.repeat(a, heads // a.shape[1], 1) for a in (k, v))
    out = np.swapaxes(attend(q, k, v, True), 1, 2).reshape(*x.shape[:2], -1)
    return ((out @ params["wo"] + params.get("bo", 0)) * (2 if BROKEN else 1)).astype(x.dtype)

def cached_attention(q, k_new, v_new, k_cache, v_cache, lengths):
    k, v, m = k_cache.copy(), v_cache.copy(), q.shape[2]
    for b, n in enumerate(lengths):
        k[b, :, n : n + m], v[b, :, n : n + m] = k_new[b], v_new[b] * (2 if BROKEN else 1)
    last = lengths[:, None] + np.arange(m)
    visible = np.arange(k.shape[2]) <= last[:, None, :, None]
    each = q.shape[1] // k.shape[1]
    return attend(q, np.repeat(k, each, 1), np.repeat(v, each, 1), visible).astype(q.dtype), k, v

VARIANTS = {name: {name: globals()[name]} for name in
            ("sinusoidal_positions", "embedding", "dropout", "multi_head_attention", "cached_attention")}
VARIANTS["vjp"] = {"softmax": softmax, "softmax_vjp": softmax_vjp}
"""
ORACLES = ("sinusoidal_positions", "embedding", "dropout", "multi_head_attention", "cached_attention")


def test_scripts_tell_broken_from_fixed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "ops.py"
    path.write_text(LIBRARY)
    loaded = {one.description.name.partition(":")[2]: in_process(one) for one in load(str(path), Options())}
    laws = {name: f"{name}/equals-the-reference" for name in ORACLES} | {"vjp": "softmax/gradient-equals-the-reference"}
    scripts = []
    for name, law in laws.items():
        row = failing(loaded[name], law)
        assert row.failure is not None and row.failure.kind == "value", f"{name}: {row.verdict} {row.reason}"
        scripts.append(write_script(row, loaded[name], tmp_path / f"{name}.py"))
    assert codes(scripts, tmp_path) == dict.fromkeys(laws, 1)
    repair(path)
    assert codes(scripts, tmp_path) == dict.fromkeys(laws, 0)
