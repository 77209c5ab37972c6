"""What tells a model where a token stands: sinusoids to add, rotations of queries and keys, biases on logits.

Conventions:
- Positions count from 0. Frequencies are Python numbers and angles float64, whatever the dtype of the
  arrays they act on: a float32 angle is off by 2e-4 at position 10000.
- Tables that depend on no array are float64, in the framework and on the device of `like`.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device


def sinusoidal_positions(length: int, width: int, *, offset: int = 0, like: Any) -> Any:
    """A row of sines and cosines for each position, to be added to the token that stands there.

    -> float64[length, width], in the framework and on the device of `like`.

        P[p, 2i] = sin(angle),   P[p, 2i + 1] = cos(angle),   angle = (offset + p) 10000^(-2i / width)

    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.5; P41, P42.
    Edges: at an odd width the last channel is a sine without its cosine.
    Raises ValueError for a negative length or a width below 1.
    """
    if length < 0:
        raise ValueError(f"sinusoidal_positions: length: got {length}, wanted at least 0")
    if width < 1:
        raise ValueError(f"sinusoidal_positions: width: got {width}, wanted at least 1")
    xp = array_namespace(like)
    angle = _angles(xp.arange(length, device=device(like)) + offset, width, 10000.0)
    pairs = xp.stack([xp.sin(angle), xp.cos(angle)], axis=-1)
    return xp.reshape(pairs, (length, 2 * angle.shape[1]))[:, :width]


def rotary_embedding(x: Any, positions: Any, *, base: float = 10000.0, pairs: str = "halves") -> Any:
    """Each pair of channels turned by an angle that grows with the position of its row.

    x[…, T, D], positions[T] -> y, like x.

        (y_a, y_b) = (x_a cos - x_b sin, x_a sin + x_b cos),   angle = position · base^(-2j / D)

    pairs: pair j is channels (j, j + D/2) in "halves", (2j, 2j + 1) in "interleaved".
    Source: Su et al. 2021 (RoFormer), section 3.2.2, which interleaves; P43, P44.
    Edges: position 0 changes nothing; positions may be negative.
    Raises ValueError for an odd D, positions that are not [T], a base that is not > 0, unknown pairs.
    """
    _check_rotary(x, positions, base, pairs)
    xp = array_namespace(x)
    half, angle = x.shape[-1] // 2, _angles(positions, x.shape[-1], base)
    cos, sin = xp.astype(xp.cos(angle), x.dtype), xp.astype(xp.sin(angle), x.dtype)
    if pairs == "halves":
        a, b = x[..., :half], x[..., half:]
        return xp.concat([a * cos - b * sin, a * sin + b * cos], axis=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return xp.reshape(xp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1), x.shape)


def alibi_bias(heads: int, query_length: int, key_length: int, *, form: str = "signed", like: Any) -> Any:
    """A penalty on logits that grows with distance, at a rate of its own in each head.

    -> float64[heads, query_length, key_length], in the framework and on the device of `like`.

        bias[h, i, j] = -m_h (i + key_length - query_length - j),   m_h = 2^(-8 h / heads), h from 1

    form: "signed" is the bias above, positive at later keys; "distance" takes |…| of the bracket.
    If heads is no power of two, the slopes m are those of the next lower power, c, followed by every
    second one of 2c, beginning with its first.
    Source: Press, Smith, Lewis 2021 (Train Short, Test Long), section 3, and its code for other heads; P46.
    Raises ValueError for an unknown form, heads below 1 or a negative length.
    """
    if form not in ("signed", "distance"):
        raise ValueError(f"alibi_bias: form: got {form!r}, wanted 'signed' or 'distance'")
    if heads < 1:
        raise ValueError(f"alibi_bias: heads: got {heads}, wanted at least 1")
    for name, length in (("query_length", query_length), ("key_length", key_length)):
        if length < 0:
            raise ValueError(f"alibi_bias: {name}: got {length}, wanted at least 0")
    xp, where = array_namespace(like), device(like)
    position = xp.arange(query_length, device=where) + (key_length - query_length)
    ahead = xp.astype(xp.arange(key_length, device=where)[None, :] - position[:, None], xp.float64)
    slopes = xp.asarray(_slopes(heads), dtype=xp.float64, device=where)
    return slopes[:, None, None] * (ahead if form == "signed" else -xp.abs(ahead))


def _angles(positions: Any, width: int, base: float) -> Any:
    """position · base^(-2j / width) for pairs j = 0, 1, … of `width` channels: float64[T, ceil(width / 2)]."""
    xp = array_namespace(positions)
    frequencies = [base ** (-2 * j / width) for j in range((width + 1) // 2)]
    frequencies = xp.asarray(frequencies, dtype=xp.float64, device=device(positions))
    return xp.astype(positions, xp.float64)[:, None] * frequencies


def _slopes(heads: int) -> list[float]:
    """m_1 … m_heads."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power, 2)]
    return slopes + between[: heads - power]


def _check_rotary(x: Any, positions: Any, base: float, pairs: str) -> None:
    """ValueError for what would broadcast or pair up into a wrong answer without a word."""
    if pairs not in ("halves", "interleaved"):
        raise ValueError(f"rotary_embedding: pairs: got {pairs!r}, wanted 'halves' or 'interleaved'")
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ValueError(f"rotary_embedding: x: got shape {tuple(x.shape)}, wanted […, T, D] with an even D")
    if tuple(positions.shape) != (x.shape[-2],):
        raise ValueError(
            f"rotary_embedding: positions: got shape {tuple(positions.shape)}, wanted ({x.shape[-2]},), one a row of x"
        )
    if not 0 < base < math.inf:
        raise ValueError(f"rotary_embedding: base: got {base}, wanted a finite number > 0")
