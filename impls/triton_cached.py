"""A decoding step as Triton kernels: new rows go into the caches in place, then attention over them in parts.

The queries that share a key head are rows of one block, so that each key is read once for all of them; and the keys
of a sequence are divided among programs, as one step has too few queries to fill a GPU. A last kernel joins the
parts. On CUDA tensors the kernels are compiled; on CPU tensors they run in Triton's interpreter, where
TRITON_INTERPRET=1 was set before this file was imported.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
WIDEST = 256
"""Width of a head that a program holds at most."""
MOST_PARTS = 32
"""Among how many programs the keys of a sequence are divided at most."""
MOST_HEADS = 65535
"""Key heads of all sequences: a grid on a GPU is no longer along its second axis."""


@triton.jit
def _tile(base, offsets, inside, width, step, WIDTH: tl.constexpr):
    """Rows at the given offsets, where they are inside, their entries `step` apart; 0 elsewhere."""
    columns = tl.arange(0, WIDTH)
    held = inside[:, None] & (columns < width)[None, :]
    return tl.load(base + offsets[:, None] + columns[None, :] * step, mask=held, other=0.0)


@triton.jit
def append_kernel(
    new_ptr, cache_ptr, lengths_ptr, new_b, new_g, new_t, new_d, cache_b, cache_g, cache_t,
    groups, new, capacity, width, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Block program_id(0) of the new rows of sequence and key head program_id(1), written from row lengths on.

    Nothing is written beyond the cache.
    """
    place = tl.program_id(1).to(tl.int64)
    b, g = place // groups, place % groups
    rows = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    targets, columns = tl.load(lengths_ptr + b) + rows, tl.arange(0, D)
    inside = (rows < new) & (targets < capacity)
    values = _tile(new_ptr + b * new_b + g * new_g, rows * new_t, inside, width, new_d, D)
    places = cache_ptr + b * cache_b + g * cache_g + targets[:, None] * cache_t + columns[None, :]
    tl.store(places, values, mask=inside[:, None] & (columns < width)[None, :])


@triton.jit
def part_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_t, k_b, k_g, k_t, v_b, v_g, v_t,
    groups, shared, new, capacity, width, value_width, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Part program_id(2) of the keys, seen by block program_id(0) of the queries that share key head program_id(1).

    out and the logsumexp (to base 2) of these keys alone; an empty part has 0 and -inf. No row behind a cache is read.
    Source: Dao et al. 2023 (Flash-Decoding).
    """
    tl.static_assert(M >= 16 and N >= 16 and D >= 16 and DV >= 16, "tl.dot takes sizes from 16")
    place, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    b, g = place // groups, place % groups
    # row r is query r mod new of head r div new of the group
    rows = tl.program_id(0) * M + tl.arange(0, M)
    inside = rows < shared * new
    length = tl.load(lengths_ptr + b).to(tl.int32)
    keys = tl.minimum(length + new, capacity)
    each = tl.cdiv(tl.cdiv(keys, parts), N) * N
    places = (rows // new).to(tl.int64) * q_h + (rows % new).to(tl.int64) * q_t
    q = _tile(q_ptr + b * q_b + g * shared * q_h, places, inside, width, 1, D)
    last = tl.zeros([M], tl.int32) + (keys - 1)
    if CAUSAL:
        last = length + rows % new
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, DV], tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, keys), N):
        columns = (start + tl.arange(0, N)).to(tl.int64)
        k = _tile(k_ptr + b * k_b + g * k_g, columns * k_t, columns < keys, width, 1, D)
        v = _tile(v_ptr + b * v_b + g * v_g, columns * v_t, columns < keys, value_width, 1, DV)
        seen = (columns < keys)[None, :] & (columns[None, :] <= last[:, None])
        s = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        top = higher
    some = tl.where(total == 0.0, 1.0, total)
    number = (part * tl.num_programs(1) + place) * (shared * new) + rows
    columns = tl.arange(0, DV)
    held = inside[:, None] & (columns < value_width)[None, :]
    tl.store(out_ptr + number[:, None] * value_width + columns[None, :], out / some[:, None], mask=held)
    tl.store(lse_ptr + number, top + tl.log2(some), mask=inside)


@triton.jit
def join_kernel(
    parts_ptr, lse_ptr, out_ptr, rows, parts, value_width, PARTS: tl.constexpr, M: tl.constexpr, DV: tl.constexpr
):
    """Block program_id of all queries: their parts, weighted by their sums of exponentials. Every query sees a key."""
    numbers = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    each, columns = tl.arange(0, PARTS), tl.arange(0, DV)
    inside = numbers < rows
    held = (each < parts)[:, None] & inside[None, :]
    top = tl.max(tl.load(lse_ptr + each[:, None] * rows + numbers[None, :], mask=held, other=float("-inf")), 0)
    top = tl.where(inside, top, 0.0)
    held = inside[:, None] & (columns < value_width)[None, :]
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, DV], tl.float32)
    for part in range(0, parts):
        row = part * rows + numbers
        weight = tl.exp2(tl.load(lse_ptr + row, mask=inside, other=float("-inf")) - top)
        places = parts_ptr + row[:, None] * value_width + columns[None, :]
        out += weight[:, None] * tl.load(places, mask=held, other=0.0)
        total += weight
    out = out / tl.where(inside, total, 1.0)[:, None]
    places = out_ptr + numbers[:, None] * value_width + columns[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=held)


INTERPRETED = not isinstance(part_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, which is settled when they are decorated."""


def cached_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *,
    causal: bool = True, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """New keys and values written into the given caches, then attention over the rows in use.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], caches [B,G,C,D] and [B,G,C,Dv], lengths[B]
    -> (out[B,H,m,Dv], k_cache, v_cache); row lengths[b] + i = new row i, where query i stands
    Source: Dao et al. 2023 (Flash-Decoding); Kwon et al. 2023 (PagedAttention), section 4.1, for caches in place.
    Rows beyond the capacity are dropped without a word, and none is read: to compare lengths would stop the GPU at
    every step.
    Raises ValueError for a dtype, a width, a layout of the caches or a device that the kernels do not take.
    """
    _check(q, k_new, v_new, k_cache, v_cache)
    (batch, heads, new, width), (_, groups, capacity, value_width) = q.shape, v_cache.shape
    shared, scale = heads // groups, (width**-0.5 if scale is None else float(scale)) * math.log2(math.e)
    q = q if q.stride(3) == 1 else q.contiguous()
    m, n = 16, _keys(max(width, value_width) * q.element_size())
    d, dv = (max(triton.next_power_of_2(w), 16) for w in (width, value_width))
    blocks, rows_in_all = triton.cdiv(shared * new, m), batch * heads * new
    parts = _parts(q, blocks * batch * groups, triton.cdiv(capacity, n))
    out = q.new_empty(batch, heads, new, value_width)
    partial = torch.empty(parts, *out.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts, *out.shape[:3], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        for rows, cache, block in ((k_new, k_cache, d), (v_new, v_cache, dv)):
            append_kernel[(triton.cdiv(new, m), batch * groups)](
                rows, cache, lengths, *rows.stride(), *cache.stride()[:3], groups, new, capacity, rows.shape[3],
                M=m, D=block,
            )  # fmt: skip
        part_kernel[(blocks, batch * groups, parts)](
            q, k_cache, v_cache, lengths, partial, lse, *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
            groups, shared, new, capacity, width, value_width, scale, CAUSAL=causal, D=d, DV=dv, M=m, N=n,
        )  # fmt: skip
        join_kernel[(triton.cdiv(rows_in_all, m),)](
            partial, lse, out, rows_in_all, parts, value_width, PARTS=triton.next_power_of_2(parts), M=m, DV=dv
        )
    return out, k_cache, v_cache


def _keys(row: int) -> int:
    """Keys of a block, whose tiles fit into the 163 KiB of an A100 whatever the bytes of a row."""
    return 16 if INTERPRETED or row > 512 else 32 if row > 256 else 64


def _parts(q: Tensor, programs: int, blocks: int) -> int:
    """Parts of the keys: two programs for each of the GPU's multiprocessors, but no part without a block of keys."""
    wanted = 4 if INTERPRETED else 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
    return max(1, min(triton.cdiv(wanted, max(programs, 1)), blocks, MOST_PARTS))


def _check(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    name = str(q.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype: got {name}, wanted {' or '.join(DTYPES)}{NOT_HERE}")
    if not (INTERPRETED or q.is_cuda):
        raise ValueError(f"device: got {q.device.type}, wanted cuda, or TRITON_INTERPRET=1 set before Python starts")
    if any(x.dtype != q.dtype for x in (k_new, v_new, k_cache, v_cache)):
        raise ValueError(f"dtype: got {q.dtype} beside others, wanted one for q, the new rows and the caches")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("caches: got rows that are not contiguous, wanted stride 1 along the last axis")
    if q.shape[1] % k_cache.shape[1] or not 0 < max(q.shape[3], v_cache.shape[3]) <= WIDEST:
        raise ValueError(f"heads, widths: got {[*q.shape]}, {[*v_cache.shape]}, wanted G dividing H, D up to {WIDEST}")
    if k_cache.shape[0] * k_cache.shape[1] > MOST_HEADS:
        raise ValueError(f"caches: got {[*k_cache.shape]}, wanted at most {MOST_HEADS} key heads in all")


# the interpreter computes with the bits of bfloat16 numbers as if they were integers
DTYPES = ("float32", "float16") if INTERPRETED else ("float32", "bfloat16", "float16")
NOT_HERE = ", as Triton's interpreter is wrong in bfloat16" if INTERPRETED else ""
CAPABILITIES = {
    "cached_attention": Capabilities(
        dtypes=DTYPES,
        devices=("cpu",) if INTERPRETED else ("cuda",),
        blocks=(16,),
        compiles_per_shape=not INTERPRETED,
        strides="last_axis_contiguous",
        cache_in_place=True,
        checks_capacity=False,  # lengths lie on the device, and to read them would stop it
        gradients=False,
        nonpositive_scale=True,
        nan_contained=True,
    )
}
