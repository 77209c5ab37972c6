"""Positions in NumPy: sinusoids, rotary embedding, ALiBi; each in two ways of writing.

"plain" is the formula with angles in float64. "complex" takes neighbouring channels for the two parts of a
complex number (declared: rotary_pairs = interleaved), the sinusoids for powers of a complex number and
ALiBi for a distance (declared: alibi = distance); its angles are of the dtype it computes in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
_WIDENED = {"float64": "float64", "default": "float32"}
_TABLE = Capabilities(accumulate="float64")


def sinusoidal_positions(length: int, width: int, *, offset: int = 0) -> NDArray:
    """A row of sines and cosines for each position.

    -> float32[length, width]
    P[p, 2i] = sin(angle), P[p, 2i + 1] = cos(angle), angle = (offset + p) 10000^(-2i / width)
    Source: Vaswani et al. 2017, section 3.5. At an odd width the last channel is a lone sine.
    """
    position = np.arange(offset, offset + length, dtype=np.float64)
    angle = position[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
    table = np.empty((length, width), dtype=np.float32)
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle[:, : width // 2])
    return table


def rotary_embedding(x: NDArray, positions: NDArray, *, base: float = 10000.0) -> NDArray:
    """Each pair (j, j + D/2) of channels turned by the angle of its token's position.

    x[..., T, D], positions[T] -> [..., T, D]
    (y_a, y_b) = (x_a cos - x_b sin, x_a sin + x_b cos), angle = position base^(-2j / D)
    Source: Su et al. 2021, section 3.2.2, with the pairs of Black et al. 2022 (GPT-NeoX-20B).
    """
    return _turned(x, positions, base, 1.0)


def rotary_embedding_vjp(
    cotangent: NDArray, x: NDArray, positions: NDArray, *, base: float = 10000.0
) -> tuple[NDArray, None]:
    """The vector-Jacobian product of rotary_embedding: the cotangent turned back.

    cotangent[..., T, D] -> [..., T, D] for x, None for positions
    Source: Su et al. 2021, section 3.2.2: a rotation's transpose is its inverse.
    """
    return _turned(cotangent, positions, base, -1.0), None


def _turned(x: NDArray, positions: NDArray, base: float, sign: float) -> NDArray:
    width = x.shape[-1]
    angle = np.multiply.outer(positions.astype(np.float64), float(base) ** (-np.arange(0, width, 2) / width))
    z = x if x.dtype == np.float64 else x.astype(np.float32)
    cos, sin = np.cos(angle).astype(z.dtype), (sign * np.sin(angle)).astype(z.dtype)
    a, b = np.split(z, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def alibi_bias(heads: int, query_length: int, key_length: int) -> NDArray:
    """A penalty that grows with the distance from query back to key, at each head's own rate.

    -> float32[heads, query_length, key_length]
    -m_h (query position - key position), query i at i + key_length - query_length
    Source: Press, Smith, Lewis 2021, section 3; its code for heads that are no power of two.
    """
    query = np.arange(query_length)[:, None] + (key_length - query_length)
    behind = query - np.arange(key_length)
    return (-_slopes(heads)[:, None, None] * behind).astype(np.float32)


def _slopes(heads: int) -> NDArray:
    """m_h: a geometric sequence that starts at its ratio, from the next lower power of two and between."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * power + 1, 2) / power)
    return np.concatenate([slopes, between[: heads - power]])


def _sinusoids_as_powers(length: int, width: int, *, offset: int = 0) -> NDArray:
    """The same table, each pair the imaginary and real part of exp(i angle), in float32 throughout."""
    frequency = np.exp(np.arange(0, width, 2, dtype=np.float32) * np.float32(-np.log(10000.0) / width))
    angle = np.arange(offset, offset + length).astype(np.float32)[:, None] * frequency
    turn = np.exp(1j * angle)
    pairs = np.stack([turn.imag, turn.real], axis=-1)
    return np.ascontiguousarray(pairs.reshape(length, -1)[:, :width])


def _rotary_as_product(x: NDArray, positions: NDArray, *, base: float = 10000.0) -> NDArray:
    """Neighbouring channels as a complex number, times exp(i angle)."""
    return _multiplied(x, positions, base, conjugate=False)


def _rotary_as_product_vjp(
    cotangent: NDArray, x: NDArray, positions: NDArray, *, base: float = 10000.0
) -> tuple[NDArray, None]:
    """The cotangent times exp(-i angle)."""
    return _multiplied(cotangent, positions, base, conjugate=True), None


def _multiplied(x: NDArray, positions: NDArray, base: float, conjugate: bool) -> NDArray:
    kind = np.float64 if x.dtype == np.float64 else np.float32
    exponent = np.arange(x.shape[-1] // 2, dtype=kind) * kind(-2 / x.shape[-1])
    turn = np.exp(1j * (positions.astype(kind)[:, None] * np.exp(exponent * np.log(kind(base)))))
    parts = np.ascontiguousarray(x, dtype=kind).reshape(*x.shape[:-1], -1, 2)
    z = (parts[..., 0] + 1j * parts[..., 1]) * (turn.conj() if conjugate else turn)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape).astype(x.dtype)


def _alibi_by_distance(heads: int, query_length: int, key_length: int) -> NDArray:
    """-m |distance|, in float32 throughout; each slope is the one before it times the ratio."""
    power = 1 << heads.bit_length() - 1
    slopes = np.concatenate([_powers(power), _powers(2 * power)[0::2]])[:heads]
    last = np.arange(key_length - query_length, key_length)
    return slopes[:, None, None] * -np.abs(np.subtract.outer(last, np.arange(key_length))).astype(np.float32)


def _powers(count: int) -> NDArray:
    """r, r^2, ... r^count with r^count = 2^-8."""
    return np.cumprod(np.full(count, 2.0 ** (-8 / count), dtype=np.float32))


VARIANTS = {
    "positions": {
        "sinusoidal_positions": sinusoidal_positions,
        "rotary_embedding": rotary_embedding,
        "rotary_embedding_vjp": rotary_embedding_vjp,
        "alibi_bias": alibi_bias,
    },
    "positions_complex": {
        "sinusoidal_positions": _sinusoids_as_powers,
        "rotary_embedding": _rotary_as_product,
        "rotary_embedding_vjp": _rotary_as_product_vjp,
        "alibi_bias": _alibi_by_distance,
    },
}
CAPABILITIES = {
    "positions": {
        "sinusoidal_positions": _TABLE,
        "rotary_embedding": Capabilities(dtypes=DTYPES, intermediate=_WIDENED),
        "alibi_bias": _TABLE,
    },
    "positions_complex": {
        "rotary_embedding": Capabilities(dtypes=DTYPES, intermediate=_WIDENED, rotary_pairs="interleaved"),
        "alibi_bias": Capabilities(alibi="distance"),
    },
}
