"""Attention as Triton kernels: one pass over blocks of keys with an online softmax, and its backward.

Heads are grouped by addressing, never by copying; masks are read with their own strides, so that axes of length 1
cost nothing. Scores are kept times log2 e, for exp2, and so is the logsumexp that the backward starts from. On CUDA
tensors the kernels are compiled; on CPU tensors they run in Triton's interpreter, where TRITON_INTERPRET=1 was set
before this file was imported.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
WIDEST = 256
"""Width of a head that a program holds at most."""
MOST_HEADS = 65535
"""Heads of all sequences: a grid on a GPU is no longer along its second axis."""
LENGTHS = ["queries", "keys"]
"""Arguments that change from call to call, for which nothing is compiled anew."""


@triton.jit
def _tile(base, rows, stride, height, width, WIDTH: tl.constexpr):
    """The given rows of a matrix whose rows are contiguous; 0 outside of it."""
    columns = tl.arange(0, WIDTH)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _put(base, rows, values, height, width, WIDTH: tl.constexpr):
    """The given rows of a contiguous matrix are written; nothing outside of it."""
    columns = tl.arange(0, WIDTH)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    places = base + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(places, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _seen(mask, rows, columns, queries, keys, mask_q, mask_k, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """Which of the given queries may attend to which of the given keys; query i sits at i + keys - queries."""
    seen = (rows < queries)[:, None] & (columns < keys)[None, :]
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + (keys - queries))
    if MASKED:
        places = mask + rows.to(tl.int64)[:, None] * mask_q + columns.to(tl.int64)[None, :] * mask_k
        seen = seen & (tl.load(places, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _scores(q, k, seen, scale):
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _last_key(block, queries, keys, M: tl.constexpr, CAUSAL: tl.constexpr):
    """Where the keys end that a block of queries may see."""
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(block * M + M + keys - queries, 0))
    return end


@triton.jit(do_not_specialize=LENGTHS)
def attention_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_q, mask_k,
    heads, shared, queries, keys, width, value_width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Block program_id(0) of the queries of head program_id(1) of all B H: out and the logsumexp of its scores.

    Source: Dao 2023 (FlashAttention-2), algorithm 1.
    """
    tl.static_assert(M >= 16 and N >= 16 and D >= 16 and DV >= 16, "tl.dot takes sizes from 16")
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = place // heads, place % heads
    k_ptr += b * k_b + (h // shared) * k_h
    v_ptr += b * v_b + (h // shared) * v_h
    mask_ptr += b * mask_b + h * mask_h
    rows = block * M + tl.arange(0, M)
    q = _tile(q_ptr + b * q_b + h * q_h, rows, q_t, queries, width, D)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, DV], tl.float32)
    for start in range(0, _last_key(block, queries, keys, M, CAUSAL), N):
        columns = start + tl.arange(0, N)
        k = _tile(k_ptr, columns, k_t, keys, width, D)
        s = _scores(q, k, _seen(mask_ptr, rows, columns, queries, keys, mask_q, mask_k, CAUSAL, MASKED), scale)
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: every exp2 below gives 0
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = _tile(v_ptr, columns, v_t, keys, value_width, DV)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        top = higher
    empty = total == 0.0
    out = out / tl.where(empty, 1.0, total)[:, None]
    _put(out_ptr + place * queries * value_width, rows, out, queries, value_width, DV)
    lse = tl.where(empty, 0.0, top + tl.log2(tl.where(empty, 1.0, total)))  # of an empty row: exp2(-inf - 0) is 0
    tl.store(lse_ptr + place * queries + rows, lse, mask=rows < queries)


@triton.jit(do_not_specialize=LENGTHS)
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_q, mask_k,
    heads, shared, queries, keys, width, value_width, scale, plain_scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq of block program_id(0) of the queries of head program_id(1), and delta = sum out dout, row by row.

    Source: Dao 2023 (FlashAttention-2), algorithm 2, by rows.
    """
    tl.static_assert(M >= 16 and N >= 16 and D >= 16 and DV >= 16, "tl.dot takes sizes from 16")
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = place // heads, place % heads
    k_ptr += b * k_b + (h // shared) * k_h
    v_ptr += b * v_b + (h // shared) * v_h
    mask_ptr += b * mask_b + h * mask_h
    rows = block * M + tl.arange(0, M)
    q = _tile(q_ptr + b * q_b + h * q_h, rows, q_t, queries, width, D)
    do = _tile(do_ptr + place * queries * value_width, rows, value_width, queries, value_width, DV)
    out = _tile(out_ptr + place * queries * value_width, rows, value_width, queries, value_width, DV)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + place * queries + rows, delta, mask=rows < queries)
    lse = tl.load(lse_ptr + place * queries + rows, mask=rows < queries, other=0.0)
    dq = tl.zeros([M, D], tl.float32)
    for start in range(0, _last_key(block, queries, keys, M, CAUSAL), N):
        columns = start + tl.arange(0, N)
        k = _tile(k_ptr, columns, k_t, keys, width, D)
        v = _tile(v_ptr, columns, v_t, keys, value_width, DV)
        seen = _seen(mask_ptr, rows, columns, queries, keys, mask_q, mask_k, CAUSAL, MASKED)
        p = tl.exp2(_scores(q, k, seen, scale) - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = tl.where(seen, p * (dp - delta[:, None]), 0.0)  # dp may overflow where nothing is seen
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    _put(dq_ptr + place * queries * width, rows, dq * plain_scale, queries, width, D)


@triton.jit(do_not_specialize=LENGTHS)
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, mask_b, mask_h, mask_q, mask_k,
    heads, shared, queries, keys, width, value_width, scale, plain_scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dk and dv of block program_id(0) of the keys of key head program_id(1) of all B G, over all its query heads.

    Source: Dao 2023 (FlashAttention-2), algorithm 2, by columns.
    """
    tl.static_assert(M >= 16 and N >= 16 and D >= 16 and DV >= 16, "tl.dot takes sizes from 16")
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = heads // shared
    b, g = place // groups, place % groups
    columns = block * N + tl.arange(0, N)
    k = _tile(k_ptr + b * k_b + g * k_h, columns, k_t, keys, width, D)
    v = _tile(v_ptr + b * v_b + g * v_h, columns, v_t, keys, value_width, DV)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, DV], tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(block * N - (keys - queries), 0) // M * M
    for h in range(g * shared, g * shared + shared):
        head = b * heads + h
        for start in range(first, queries, M):
            rows = start + tl.arange(0, M)
            q = _tile(q_ptr + b * q_b + h * q_h, rows, q_t, queries, width, D)
            do = _tile(do_ptr + head * queries * value_width, rows, value_width, queries, value_width, DV)
            lse = tl.load(lse_ptr + head * queries + rows, mask=rows < queries, other=0.0)
            delta = tl.load(delta_ptr + head * queries + rows, mask=rows < queries, other=0.0)
            mask = mask_ptr + b * mask_b + h * mask_h
            seen = _seen(mask, rows, columns, queries, keys, mask_q, mask_k, CAUSAL, MASKED)
            p = tl.exp2(_scores(q, k, seen, scale) - lse[:, None])
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = tl.where(seen, p * (dp - delta[:, None]), 0.0)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
    _put(dk_ptr + place * keys * width, columns, dk * plain_scale, keys, width, D)
    _put(dv_ptr + place * keys * value_width, columns, dv, keys, value_width, DV)


INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, which is settled when they are decorated."""
LONG = 512
"""From so many queries on several block sizes are tried on the GPU, once for each kind of call, in 16-bit dtypes."""
_TRIED = [
    triton.Config({"M": m, "N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in ((64, 32, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 4, 3))
]
# autotune asks for the GPU's driver at once, and fails where there is none
tuned_kernel = (
    None
    if INTERPRETED or not torch.cuda.is_available()
    else triton.autotune(_TRIED, key=["D", "DV", "CAUSAL", "MASKED"])(attention_kernel)
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float) -> Tensor:
        batch, heads, queries, _ = q.shape
        out = q.new_empty(batch, heads, queries, v.shape[3])
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
        places, sizes = _places(q, k, v, mask), _sizes(q, k, v)
        flags = _flags(q, k, v, mask, causal)
        tune = tuned_kernel is not None and queries >= LONG and q.element_size() == 2
        blocks = {} if tune else _blocks(q, v)
        with torch.cuda.device_of(q):
            (tuned_kernel if tune else attention_kernel)[lambda meta: (triton.cdiv(queries, meta["M"]), batch * heads)](
                q, k, v, mask, out, lse, *places, *sizes, scale * math.log2(math.e), **flags, **blocks
            )
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        (batch, heads, queries, _), (_, groups, keys, _) = q.shape, k.shape
        do, delta = do.contiguous(), torch.empty_like(lse)
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        flags, blocks = _flags(q, k, v, mask, ctx.causal), _blocks(q, v)
        rest = (*_places(q, k, v, mask), *_sizes(q, k, v), ctx.scale * math.log2(math.e), ctx.scale)
        with torch.cuda.device_of(q):
            query_gradient_kernel[(triton.cdiv(queries, blocks["M"]), batch * heads)](
                q, k, v, mask, out, do, lse, delta, dq, *rest, **flags, **blocks
            )
            key_gradient_kernel[(triton.cdiv(keys, blocks["N"]), batch * groups)](
                q, k, v, mask, do, lse, delta, dk, dv, *rest, **flags, **blocks
            )
        return dq, dk, dv, None, None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention without a matrix of scores in memory, forward and backward.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv], mask boolean, 4-D, each axis full or 1 -> [B,H,Tq,Dv]
    softmax(q k^T scale) v over the keys a row may see; query i sits at i + Tk - Tq
    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2. A row that may see nothing gives zeros.
    Raises ValueError for a dtype, a width, a shape or a device that the kernels do not take.
    """
    _check(q, k, v)
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask: got {mask.dtype}, wanted torch.bool")
    seen = q if mask is None else mask.expand(*q.shape[:3], k.shape[2]).view(torch.uint8)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    return _Attention.apply(*(x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v)), seen, causal, scale)


def _places(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[int, ...]:
    return (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask.stride())


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def _flags(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool) -> dict[str, Any]:
    """What is compiled in. A mask of numbers is q itself, which stands for none."""
    d, dv = (max(triton.next_power_of_2(x.shape[3]), 16) for x in (q, v))
    return {"CAUSAL": causal, "MASKED": mask.dtype == torch.uint8, "D": d, "DV": dv}


def _blocks(q: Tensor, v: Tensor) -> dict[str, int]:
    """Block sizes whose tiles fit into the 163 KiB of an A100 at any width; the least ones for the interpreter."""
    row = max(q.shape[3], v.shape[3]) * q.element_size()
    size = 16 if INTERPRETED or row > 512 else 32 if row > 256 else 64
    return {"M": size, "N": size}


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    name = str(q.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype: got {name}, wanted {' or '.join(DTYPES)}{NOT_HERE}")
    if not (INTERPRETED or q.is_cuda):
        raise ValueError(f"device: got {q.device.type}, wanted cuda, or TRITON_INTERPRET=1 set before Python starts")
    if not q.dtype == k.dtype == v.dtype or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"q, k, v: got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}, wanted equal widths, lengths, dtypes")
    if q.shape[1] % k.shape[1] or not 0 < max(q.shape[3], v.shape[3]) <= WIDEST:
        raise ValueError(f"heads, widths: got {[*q.shape]}, {[*k.shape]}, wanted H a multiple of G, D up to {WIDEST}")
    if q.shape[0] * q.shape[1] > MOST_HEADS:
        raise ValueError(f"q: got {[*q.shape]}, wanted at most {MOST_HEADS} heads in all")


# the interpreter computes with the bits of bfloat16 numbers as if they were integers
DTYPES = ("float32", "float16") if INTERPRETED else ("float32", "bfloat16", "float16")
NOT_HERE = ", as Triton's interpreter is wrong in bfloat16" if INTERPRETED else ""
CAPABILITIES = {
    "attention": Capabilities(
        dtypes=DTYPES,
        devices=("cpu",) if INTERPRETED else ("cuda",),
        blocks=(16,) if INTERPRETED else (64,),
        compiles_per_shape=not INTERPRETED,
        nonpositive_scale=True,
    )
}
