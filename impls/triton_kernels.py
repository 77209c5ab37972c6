"""Softmax and layer norm as Triton kernels, a tile of whole rows a program, forward and backward.

On CUDA tensors they are compiled; on CPU tensors they run in Triton's interpreter, where TRITON_INTERPRET=1 was set
before this file was imported. A row is held in one tile, so widths end at WIDEST.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
WIDEST = 65536
"""Entries of a row that one program holds at most."""


@triton.jit
def _load(base, rows, columns, inside, width, outside):
    """A tile of contiguous rows in float32; `outside` elsewhere."""
    places = base + rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(places, mask=inside, other=outside).to(tl.float32)


@triton.jit
def _store(base, rows, columns, inside, width, values):
    places = base + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(places, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, height, width, temperature, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Tile program_id of the rows of y = exp((x - max) / T) / sum."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    x = _load(x_ptr, rows, columns, inside, width, float("-inf"))
    x = tl.where((rows < height)[:, None], x, 0.0)  # -inf alone would make NaN, of which nothing is stored
    e = tl.exp(tl.div_rn(x - tl.max(x, 1)[:, None], temperature))
    _store(y_ptr, rows, columns, inside, width, tl.div_rn(e, tl.sum(e, 1)[:, None]))


@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, height, width, temperature, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Tile program_id of the rows of dx = y (dy - sum y dy) / T."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    y = _load(y_ptr, rows, columns, inside, width, 0.0)
    dy = _load(dy_ptr, rows, columns, inside, width, 0.0)
    dx = y * (dy - tl.sum(y * dy, 1)[:, None])
    _store(dx_ptr, rows, columns, inside, width, tl.div_rn(dx, temperature))


@triton.jit
def layer_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, scale_ptr, height, width, count, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tile program_id of the rows of y, their means, and scale = 1 / sqrt(variance + eps).

    count is the width as a number with a point, in which a width of 1 is no constant to the compiler.
    """
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    x = _load(x_ptr, rows, columns, inside, width, 0.0)
    mean = tl.div_rn(tl.sum(x, 1), count)
    centred = tl.where(inside, x - mean[:, None], 0.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(centred * centred, 1), count) + eps))
    weight = tl.load(w_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    bias = tl.load(b_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    y = weight[None, :] * (centred * scale[:, None]) + bias[None, :]
    _store(y_ptr, rows, columns, inside, width, y)
    tl.store(mean_ptr + rows, mean, mask=rows < height)
    tl.store(scale_ptr + rows, scale, mask=rows < height)


@triton.jit
def layer_norm_backward_kernel(
    x_ptr, w_ptr, dy_ptr, mean_ptr, scale_ptr, dx_ptr, dw_ptr, db_ptr, height, width, count, tiles,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of `tiles` tiles of rows from program_id times tiles on, and their part of dweight and dbias.

    dx = scale (g - mean g - z mean(g z)), g = weight dy, z = (x - mean) scale
    """
    part, columns = tl.program_id(0), tl.arange(0, BLOCK)
    weight = tl.load(w_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for tile in range(part * tiles, part * tiles + tiles):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < height)[:, None] & (columns < width)[None, :]
        x = _load(x_ptr, rows, columns, inside, width, 0.0)
        dy = _load(dy_ptr, rows, columns, inside, width, 0.0)
        mean = tl.load(mean_ptr + rows, mask=rows < height, other=0.0)
        scale = tl.load(scale_ptr + rows, mask=rows < height, other=0.0)[:, None]
        z = tl.where(inside, (x - mean[:, None]) * scale, 0.0)
        g = weight[None, :] * dy
        level, along = tl.div_rn(tl.sum(g, 1), count), tl.div_rn(tl.sum(g * z, 1), count)
        _store(dx_ptr, rows, columns, inside, width, scale * (g - level[:, None] - z * along[:, None]))
        dw += tl.sum(dy * z, 0)
        db += tl.sum(dy, 0)
    place = part.to(tl.int64) * width + columns
    tl.store(dw_ptr + place, dw, mask=columns < width)
    tl.store(db_ptr + place, db, mask=columns < width)


NUMBERS = 2048
"""How many a tile of several rows holds at most."""
INTERPRETED = not isinstance(softmax_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, which is settled when they are decorated."""
PARTS = 2 if INTERPRETED else 256
"""Programs among which the backward of layer norm divides the rows: enough to fill a GPU."""


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, temperature: float) -> Tensor:
        y = torch.empty_like(rows)
        with torch.cuda.device_of(rows):
            softmax_kernel[_grid(rows)](rows, y, *rows.shape, float(temperature), **_tile(rows))
        ctx.save_for_backward(y)
        ctx.temperature = float(temperature)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(y)
        with torch.cuda.device_of(y):
            softmax_backward_kernel[_grid(y)](y, dy, dx, *y.shape, ctx.temperature, **_tile(y))
        return dx, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, width = torch.empty_like(rows), rows.shape[1]
        mean, scale = (torch.empty(len(rows), dtype=torch.float32, device=rows.device) for _ in range(2))
        with torch.cuda.device_of(rows):
            layer_norm_kernel[_grid(rows)](
                rows, weight, bias, y, mean, scale, *rows.shape, float(width), float(eps), **_tile(rows)
            )
        ctx.save_for_backward(rows, weight, mean, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows, weight, mean, scale = ctx.saved_tensors
        dy, dx, (all_tiles,), width = dy.contiguous(), torch.empty_like(rows), _grid(rows), rows.shape[1]
        tiles = triton.cdiv(all_tiles, PARTS)
        parts = triton.cdiv(all_tiles, tiles)
        dw, db = (torch.empty(parts, width, dtype=torch.float32, device=rows.device) for _ in range(2))
        with torch.cuda.device_of(rows):
            layer_norm_backward_kernel[(parts,)](
                rows, weight, dy, mean, scale, dx, dw, db, *rows.shape, float(width), tiles, **_tile(rows)
            )
        return dx, dw.sum(0).to(weight.dtype), db.sum(0).to(weight.dtype), None


def softmax(x: Tensor, *, axis: int = -1, temperature: float = 1.0) -> Tensor:
    """Softmax of x / T, a tile of rows a program, in float32.

    x[...] -> [...]
    p_i = exp((x_i - max x) / T) / sum_j exp((x_j - max x) / T)
    Source: Tillet, Kung, Cox 2019 (Triton), for the language. A row of -inf alone gives NaN.
    Raises ValueError for T <= 0, and for a dtype, a width or a device that the kernels do not take.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: got {temperature}, wanted a number above 0")
    moved = x.movedim(axis, -1)
    _check(x, moved.shape[-1])
    rows = moved.reshape(-1, moved.shape[-1]).contiguous()
    return _Softmax.apply(rows, temperature).view(moved.shape).movedim(-1, axis)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last axis, a tile of rows a program, in float32; its mean and deviation are kept.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(variance + eps) + bias
    Source: Ba, Kiros, Hinton 2016, equations 3 and 4. A constant row gives the bias.
    Raises ValueError for a dtype, a width or a device that the kernels do not take.
    """
    _check(x, x.shape[-1])
    if weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        raise ValueError(f"weight, bias: got {[*weight.shape]} and {[*bias.shape]}, wanted [{x.shape[-1]}]")
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _LayerNorm.apply(rows, weight.contiguous(), bias.contiguous(), eps).view(x.shape)


def _tile(rows: Tensor) -> dict[str, int]:
    """A tile that holds whole rows, several where they are narrow, and warps for it."""
    block = triton.next_power_of_2(rows.shape[1])
    height = max(min(NUMBERS // block, 16), 1)
    return {"ROWS": height, "BLOCK": block, "num_warps": min(max(height * block // 512, 1), 16)}


def _grid(rows: Tensor) -> tuple[int]:
    return (triton.cdiv(len(rows), _tile(rows)["ROWS"]),)


def _check(x: Tensor, width: int) -> None:
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype: got {name}, wanted {' or '.join(DTYPES)}{NOT_HERE}")
    if not 0 < width <= WIDEST or not x.numel():
        raise ValueError(f"x: got {[*x.shape]} with rows of {width}, wanted rows of 1 to {WIDEST} entries")
    if not (INTERPRETED or x.is_cuda):
        raise ValueError(f"device: got {x.device.type}, wanted cuda, or TRITON_INTERPRET=1 set before Python starts")


# the interpreter computes with the bits of bfloat16 numbers as if they were integers
DTYPES = ("float32", "float16") if INTERPRETED else ("float32", "bfloat16", "float16")
NOT_HERE = ", as Triton's interpreter is wrong in bfloat16" if INTERPRETED else ""
_ROWS = Capabilities(
    dtypes=DTYPES, devices=("cpu",) if INTERPRETED else ("cuda",), blocks=(16,), compiles_per_shape=not INTERPRETED
)
CAPABILITIES = {"softmax": _ROWS, "layer_norm": _ROWS}
