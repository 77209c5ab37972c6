"""Positions in torch, as models write them: float32 angles, whatever the dtype of what is turned.

torch has none of the three as a function of its own. "positions" multiplies by tables of cosines and sines;
"positions_complex" multiplies complex numbers made of neighbouring channels (declared: rotary_pairs =
interleaved) and takes the distance for ALiBi (declared: alibi = distance). "positions_stored" keeps its tables,
and multiplies, in the dtype of x.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
_WIDENED = {"float64": "float64", "default": "float32"}


def sinusoidal_positions(length: int, width: int, *, offset: int = 0) -> Tensor:
    """A row of sines and cosines for each position.

    -> float32[length, width]
    P[p, 2i] = sin(angle), P[p, 2i + 1] = cos(angle), angle = (offset + p) exp(-2i log(10000) / width)
    Source: Vaswani et al. 2017, section 3.5. At an odd width the last channel is a lone sine.
    """
    position = torch.arange(offset, offset + length, dtype=torch.float32).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10000.0) / width))
    table = torch.empty(length, width, dtype=torch.float32)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency[: width // 2])
    return table


def rotary_embedding(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """Each pair (j, j + D/2) of channels turned by the angle of its token's position.

    x[..., T, D], positions[T] -> [..., T, D]
    x cos + rotated(x) sin with rotated(a, b) = (-b, a), angle = position / base^(2j / D)
    Source: Su et al. 2021, section 3.4.2, equation 34, with the pairs of Black et al. 2022 (GPT-NeoX-20B).
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    angle = _angles(positions, x.shape[-1], base, kind).repeat(1, 2)
    z = x.to(kind)
    a, b = z.chunk(2, dim=-1)
    return (z * angle.cos() + torch.cat([-b, a], dim=-1) * angle.sin()).to(x.dtype)


def _angles(positions: Tensor, width: int, base: float, kind: torch.dtype) -> Tensor:
    frequency = float(base) ** -(torch.arange(0, width, 2, dtype=kind, device=positions.device) / width)
    return torch.outer(positions.to(kind), frequency)


def alibi_bias(heads: int, query_length: int, key_length: int) -> Tensor:
    """A penalty that grows with the distance from query back to key, at each head's own rate.

    -> float32[heads, query_length, key_length]
    m_h (key position - query position), query i at i + key_length - query_length
    Source: Press, Smith, Lewis 2021, section 3; its code for heads that are no power of two.
    """
    ahead = torch.arange(key_length) - torch.arange(key_length - query_length, key_length).unsqueeze(1)
    return torch.tensor(_slopes(heads)).view(-1, 1, 1) * ahead


def _slopes(heads: int) -> list[float]:
    """2^(-8 h / H) for a power of two, else those of the next lower one and every second of the next higher."""
    power = 2 ** math.floor(math.log2(heads))
    steps = [2 * h for h in range(1, power + 1)] + list(range(1, 2 * (heads - power), 2))
    return [math.pow(2.0, -4.0 * step / power) for step in steps]


def _sinusoids_stacked(length: int, width: int, *, offset: int = 0) -> Tensor:
    """The same table from float64 angles, sines and cosines laid side by side and the pairs then flattened."""
    exponent = torch.arange((width + 1) // 2, dtype=torch.float64) * (-2 / width)
    position = torch.arange(length, dtype=torch.float64) + offset
    angle = torch.outer(position, torch.pow(10000.0, exponent))
    pairs = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    return pairs[:, :width].to(torch.float32, memory_format=torch.contiguous_format)


def _rotary_as_product(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """Neighbouring channels as a complex number, times exp(i angle)."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    angle = _angles(positions, x.shape[-1], base, kind)
    z = torch.view_as_complex(x.to(kind).contiguous().view(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle))
    return turned.flatten(-2).to(x.dtype)


def _rotary_stored(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """Angles in float32 at least; sine, cosine and products in the dtype of x."""
    kind = torch.promote_types(x.dtype, torch.float32)
    angle = _angles(positions, x.shape[-1], base, kind)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-2).flatten(-2)


def _alibi_by_distance(heads: int, query_length: int, key_length: int) -> Tensor:
    """-m |distance|, the slopes as powers of float32 ratios."""
    distance = (torch.arange(query_length)[:, None] + (key_length - query_length) - torch.arange(key_length)).abs()
    power = 1 << heads.bit_length() - 1
    ratio = torch.tensor(2.0) ** (-8.0 / power)
    slopes = [ratio ** (h + 1) if h < power else ratio ** (h - power + 0.5) for h in range(heads)]
    return -torch.stack(slopes).reshape(-1, 1, 1) * distance


VARIANTS = {
    "positions": {
        "sinusoidal_positions": sinusoidal_positions,
        "rotary_embedding": rotary_embedding,
        "alibi_bias": alibi_bias,
    },
    "positions_complex": {
        "sinusoidal_positions": _sinusoids_stacked,
        "rotary_embedding": _rotary_as_product,
        "alibi_bias": _alibi_by_distance,
    },
    "positions_stored": {"rotary_embedding": _rotary_stored},
}
CAPABILITIES = {
    "positions": {"rotary_embedding": Capabilities(intermediate=_WIDENED)},
    "positions_complex": {
        "sinusoidal_positions": Capabilities(accumulate="float64"),
        "rotary_embedding": Capabilities(intermediate=_WIDENED, rotary_pairs="interleaved"),
        "alibi_bias": Capabilities(alibi="distance"),
    },
}
