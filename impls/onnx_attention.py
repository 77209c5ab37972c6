"""ONNX's reference evaluator: attention in its forms, and rotary embedding.

Every function is a graph of one operator, made once for each dtype, rank and set of attributes. Attributes are float32,
whatever the tensors are: in float64 a scale or softcap that float32 cannot hold is refused. Sums are made in the dtype
of the tensors. A mask is True where a query may attend, or floats that are added; not both; one whose last axis is
shorter than the keys hides the others. The causal triangle starts at the top left unless there are keys of the past or
counts of valid keys, which put it at the bottom right. There is no sink; windows came with opset 25.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from veriformer.declarations import DTYPES, Capabilities, Expected

FRAMEWORK = "numpy"
DISTRIBUTIONS = ("onnx",)
Window = tuple[int | None, int | None]


@lru_cache(maxsize=512)
def _graph(
    operator: str, opset: int, kinds: tuple[tuple[str, int] | None, ...], outputs: int, attributes: tuple[Any, ...]
) -> ReferenceEvaluator:
    """An evaluator of one operator; kinds are the dtype and rank of each input, None for one that is left out."""
    names = [f"input{i}" if kind else "" for i, kind in enumerate(kinds)]
    results = [f"output{i}" for i in range(outputs)]
    node = helper.make_node(operator, names, results, **dict(attributes))
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind[0])), [None] * kind[1])
        for name, kind in zip(names, kinds, strict=True)
        if kind
    ]
    graph = helper.make_graph([node], operator, inputs, [onnx.ValueInfoProto(name=name) for name in results])
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))


def _run(operator: str, opset: int, inputs: list[Any], outputs: int = 1, **attributes: Any) -> list[Any]:
    """The outputs of one operator; inputs and attributes that are None are left out."""
    given = tuple(sorted((name, value) for name, value in attributes.items() if value is not None))
    kinds = tuple(None if array is None else (array.dtype.name, array.ndim) for array in inputs)
    feeds = {f"input{i}": array for i, array in enumerate(inputs) if array is not None}
    return list(_graph(operator, opset, kinds, outputs, given).run(None, feeds))


def _mask(mask: NDArray | None, bias: NDArray | None, keys: int) -> NDArray | None:
    """attn_mask with its last axis written out: one that is shorter than the keys would hide the others."""
    if mask is not None and bias is not None:
        raise ValueError("mask and bias: ONNX takes one attn_mask; pass one of them")
    given = bias if mask is None else mask
    return None if given is None else np.broadcast_to(given, (*given.shape[:-1], keys))


def _attention(outputs: int, packed: bool) -> Any:
    def attention(
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        mask: NDArray | None = None,
        bias: NDArray | None = None,
        causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> NDArray:
        """Attention-23; outputs: 4 also asks for the logits; packed: heads in the last axis.

        q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
        softmax(softcap tanh(q k^T scale / softcap) + bias) v over the keys a row may see; query i sits at i (top left)
        Source: the ONNX operators, Attention. Raises ValueError if mask and bias are both given.
        """
        attributes: dict[str, Any] = {"is_causal": int(causal), "scale": scale, "softcap": softcap}
        heads, groups = q.shape[1], k.shape[1]
        arrays = [_joined(a) for a in (q, k, v)] if packed else [q, k, v]
        attributes |= {"q_num_heads": heads, "kv_num_heads": groups} if packed else {}
        out = _run("Attention", 23, [*arrays, _mask(mask, bias, k.shape[2])], outputs, **attributes)[0]
        return _split(out, heads) if packed else out

    return attention


def _joined(x: NDArray) -> NDArray:
    """[B,H,T,D] -> [B,T,H*D]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def _split(x: NDArray, heads: int) -> NDArray:
    """[B,T,H*D] -> [B,H,T,D]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attention_past(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> NDArray:
    """Attention-23 whose first Tk - Tq keys and values are those of the past, so that query i sits at i + Tk - Tq.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv], mask or bias[B or 1,H or 1,Tq or 1,Tk] -> [B,H,Tq,Dv]
    Source: the ONNX operators, Attention.
    Raises ValueError where causal is to leave more queries than keys, since no past is shorter than nothing.
    """
    past = k.shape[2] - q.shape[2]
    if past < 0 and causal:
        raise ValueError(f"{q.shape[2]} queries, {k.shape[2]} keys: a past cannot have {past} keys")
    past = max(past, 0)
    inputs = [q, k[:, :, past:], v[:, :, past:], _mask(mask, bias, k.shape[2]), k[:, :, :past], v[:, :, :past]]
    return _run("Attention", 23, inputs, 3, is_causal=int(causal), scale=scale, softcap=softcap)[0]


def attention_lengths(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
) -> NDArray:
    """Attention-25 told that all Tk keys are valid (nonpad_kv_seqlen), so that query i sits at i + Tk - Tq.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv], mask or bias[B or 1,H or 1,Tq or 1,Tk] -> [B,H,Tq,Dv]
    Source: the ONNX operators, Attention.
    """
    left, right = window or (None, None)
    attributes = {"left_window_size": left, "right_window_size": right}
    inputs = [q, k, v, _mask(mask, bias, k.shape[2]), None, None, np.full(q.shape[0], k.shape[2])]
    return _run("Attention", 25, inputs, is_causal=int(causal), scale=scale, softcap=softcap, **attributes)[0]


def cached_attention(
    q: NDArray,
    k_new: NDArray,
    v_new: NDArray,
    k_cache: NDArray,
    v_cache: NDArray,
    lengths: NDArray,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
) -> tuple[NDArray, NDArray, NDArray]:
    """TensorScatter-24, then Attention-25 over the caches with counts of valid keys.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], k_cache[B,G,C,D], v_cache[B,G,C,Dv], lengths[B] -> out, both caches
    Source: the ONNX operators, Attention (the second use of a cache) and TensorScatter.
    """
    k_cache, v_cache = (
        _run("TensorScatter", 24, [cache, new, lengths])[0] for cache, new in ((k_cache, k_new), (v_cache, v_new))
    )
    left, right = window or (None, None)
    attributes = {"left_window_size": left, "right_window_size": right, "is_causal": int(causal), "scale": scale}
    inputs = [q, k_cache, v_cache, None, None, None, lengths + q.shape[2]]
    return _run("Attention", 25, inputs, **attributes)[0], k_cache, v_cache


def _rotary(interleaved: bool, packed: bool) -> Any:
    def rotary_embedding(x: NDArray, positions: NDArray, *, base: float = 10000.0) -> NDArray:
        """RotaryEmbedding-23; packed: [N,T,D] and position_ids, else [N,1,T,D] and a row of angles for each position.

        x[...,T,D], positions[T] -> [...,T,D]; pairs turned by position base^(-2j/D)
        Source: the ONNX operators, RotaryEmbedding.
        """
        T, D = x.shape[-2:]
        angles = positions[:, None] * float(base) ** (-2.0 * np.arange(D // 2) / D)
        cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
        rows = x.reshape(-1, T, D) if packed else x.reshape(-1, 1, T, D)
        if packed:
            inputs = [rows, cos, sin, np.tile(np.arange(T), (len(rows), 1))]
            return _run("RotaryEmbedding", 23, inputs, interleaved=int(interleaved), num_heads=1)[0].reshape(x.shape)
        inputs = [rows, *(np.tile(part, (len(rows), 1, 1)) for part in (cos, sin))]
        return _run("RotaryEmbedding", 23, inputs, interleaved=int(interleaved))[0].reshape(x.shape)

    return rotary_embedding


def _dense(*shape: int) -> list[Any]:
    """Standard normal numbers, for a law on dense data."""
    return list(np.random.default_rng(0).standard_normal(shape).tolist())


VARIANTS: dict[str, dict[str, Any]] = {
    "attention": {
        "attention": _attention(1, packed=False),
        "rotary_embedding": _rotary(interleaved=False, packed=False),
    },
    "packed": {"attention": _attention(1, packed=True), "rotary_embedding": _rotary(interleaved=False, packed=True)},
    "scores": {"attention": _attention(4, packed=False)},
    "past": {"attention": attention_past},
    "lengths": {"attention": attention_lengths, "cached_attention": cached_attention},
    "interleaved": {"rotary_embedding": _rotary(interleaved=True, packed=False)},
    "interleaved_packed": {"rotary_embedding": _rotary(interleaved=True, packed=True)},
}
_ALL = Capabilities(dtypes=DTYPES, accumulate={"bfloat16": "storage", "float16": "storage"})
# an attribute is a float32, and so is its root, which Attention takes of the scale
_SCALED = replace(_ALL, accumulate={**_ALL.accumulate, "float64": "float32"}, intermediate={"float64": "float32"})
_ATTENTION = replace(_SCALED, causal_alignment="top_left", mask_with_bias=False, infinite_bias=True)
_BOTTOM = replace(_ATTENTION, causal_alignment="bottom_right")
_TURNED = replace(_ALL, rotary_pairs="interleaved")
CAPABILITIES: dict[str, dict[str, Capabilities]] = {
    "attention": {"attention": _ATTENTION, "rotary_embedding": _ALL},
    "packed": {"attention": _ATTENTION, "rotary_embedding": _ALL},
    "scores": {"attention": _ATTENTION},
    "past": {"attention": replace(_BOTTOM, more_queries_than_keys="unless_causal")},
    "lengths": {"attention": _BOTTOM, "cached_attention": _SCALED},
    "interleaved": {"rotary_embedding": _TURNED},
    "interleaved_packed": {"rotary_embedding": _TURNED},
}
_EVERY = ("attention", "packed", "scores", "past", "lengths")
_ROW = {"q": [[[[0.0], [0.0]]]], "k": [[[[0.0], [0.0]]]], "v": [[[[0.0], [1.0]]]], "mask": [[[[True, True]]]]}
_LONG = {"q": _dense(1, 2, 64, 64), "k": _dense(1, 2, 256, 64), "v": _dense(1, 2, 256, 64)}
EXPECTED = [
    Expected(
        "attention/equals-the-reference",
        "with is_causal, a mask with one row for all queries gets the triangle of the first query alone",
        "reports/findings/onnx_reference_causal_mask_row.py",
        {**_ROW, "causal": True},
        where="causal and (mask or bias)",
        variants=_EVERY,
        spreads=True,
    ),
    Expected(
        "attention/works-in-the-declared-precision",
        "bfloat16 is summed up in bfloat16, where 256 + 1 is 256",
        "reports/findings/onnx_reference_bfloat16_sums.py",
        _LONG,
        {"dtype": "bfloat16"},
        variants=_EVERY,
    ),
]
