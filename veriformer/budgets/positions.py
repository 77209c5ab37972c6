"""Error budgets of the sinusoids, the rotary embedding and ALiBi.

Admitted algorithms: an angle is a position times a frequency, the frequency a power or the exponential
of a product with log(base); sine and cosine belong to one angle. A slope of ALiBi is a power of 2, or a
power of a rounded ratio; the distance is formed in whole numbers. Not admitted: angles, frequencies
or positions in a dtype shorter than the accumulator; angles by repeated rotation.
"""

from __future__ import annotations

import math

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.precision import C, Precision


def sinusoidal_positions(length: int, width: int, *, offset: int = 0, precision: Precision) -> Bound:
    """Error budget of the table of sinusoids; storage is the dtype of the table.

    -> value, allowed, both [length, width].

        theta = position 10000^(-2i/width),   E_theta = |theta| u_acc (2 (2i/width) ln 10000 + C)
        E = |derivative| sin E_theta + |value| (1 - cos E_theta) + C u_acc      at most 1 + |value|

    The exponent is wrong by two of its roundings, C is left for exponential and product.
    Source: derived; Vaswani et al. 2017 (Attention Is All You Need), section 3.5, for the table.
    Edges: position 0 is held to C roundings, whatever its frequency.
    """
    value = np.asarray(reference.sinusoidal_positions(length, width, offset=offset, like=np.zeros(())))
    exponent = (np.arange(width) // 2 * 2 / width)[None, :]
    positions = (offset + np.arange(length))[:, None]
    error = _angle_error(positions, exponent, 10000.0, precision)
    other = np.sqrt(np.maximum(1 - value * value, 0.0))
    turned, moved = _turned(other, value, error)
    limit = 1 + np.abs(value)
    terms = {
        "angle": np.minimum(turned + moved, limit),
        "arithmetic": np.full(value.shape, precision.g(C) * precision.u_acc),
        "output": precision.u_out * np.abs(value) + precision.eta,
    }
    return Bound(value, np.minimum(added(terms), limit), terms)


def rotary_embedding(
    x: Array, positions: Array, *, base: float = 10000.0, pairs: str = "halves", precision: Precision
) -> Bound:
    """Error budget of the rotary embedding.

    x[…, T, D], positions[T] -> value, allowed, both like x.

        y_a = x_a cos - x_b sin,   y_b = x_a sin + x_b cos,   E_theta = |theta| u_acc (2 (2i/D) |ln base| + C)
        E_a = |y_b| sin E_theta + |y_a| (1 - cos E_theta)                a turn too far
            + C u_acc (|x_a| + |x_b|)                                    sine, cosine, products
            + [unfused] (2 u_mid (|x_a cos| + |x_b sin|) + eta (|x_a| + |x_b| + 2))

    E_b likewise. Both members of a pair are turned by the same wrong angle, hence y. Stored by the
    unfused computation: sine and cosine, and the products with them.
    Source: derived; Su et al. 2021 (RoFormer), section 3.4.2, for the rotation.
    Edges: pairs of zeros stay exact.
    """
    value = reference.rotary_embedding(x, positions, base=base, pairs=pairs)
    p, width = precision, x.shape[-1]
    pair, partner = _pairs(width, pairs)
    exponent = pair * 2 / width
    error = _angle_error(positions[:, None], exponent, base, p)
    x_size, both = np.abs(x), np.abs(x) + np.abs(x[..., partner])
    turned, moved = _turned(np.abs(value[..., partner]), value, error)
    terms = {"angle": turned + moved, "arithmetic": p.g(C) * p.u_acc * both, "output": p.u_out * np.abs(value)}
    if p.unfused:
        theta = positions[:, None] * base**-exponent
        products = x_size * np.abs(np.cos(theta)) + x_size[..., partner] * np.abs(np.sin(theta))
        terms["storage"] = 2 * p.u_mid * products + p.eta_mid * (both + 2)
    terms["output"] = terms["output"] + p.eta
    terms = {name: np.where(both == 0, 0.0, term) for name, term in terms.items()}
    return Bound(value, added(terms), terms)


def alibi_bias(heads: int, query_length: int, key_length: int, *, form: str = "signed", precision: Precision) -> Bound:
    """Error budget of ALiBi's bias; storage is the dtype of the bias.

    -> value, allowed, both [heads, query_length, key_length].

        E = |value| (k + C) u_acc for a slope that is power k of its ratio

    Source: derived; Press, Smith, Lewis 2021 (ALiBi), section 3, for the slopes.
    Edges: exactly 0 is demanded where query and key stand at one position.
    """
    like = np.zeros(())
    value = np.asarray(reference.alibi_bias(heads, query_length, key_length, form=form, like=like))
    lower = 1 << (max(heads, 1).bit_length() - 1)
    # Past the lower power of two come the odd powers of the next ratio.
    powers = [h + 1 if h < lower else 2 * (h - lower) + 1 for h in range(heads)]
    growth = (precision.g(np.asarray(powers, float) + C))[:, None, None]
    size = np.abs(value)
    terms = {
        "slope": growth * precision.u_acc * size,
        "output": precision.u_out * size + np.where(value == 0, 0.0, precision.eta),
    }
    return Bound(value, added(terms), terms)


def _angle_error(positions: Array, exponent: Array, base: float, p: Precision) -> Array:
    """E_theta of angles position base^-exponent; more than half a turn is as wrong as can be."""
    theta = np.abs(positions) * base**-exponent
    error = theta * p.u_acc * (2 * exponent * abs(math.log(base)) + C)
    return np.minimum(error, math.pi)


def _turned(partner: Array, value: Array, error: Array) -> tuple[Array, Array]:
    """How far a pair moves when it is turned too far: across itself, and back along itself."""
    return np.abs(partner) * np.sin(np.minimum(error, math.pi / 2)), np.abs(value) * (1 - np.cos(error))


def _pairs(width: int, pairs: str) -> tuple[Array, Array]:
    """For each channel, the number of its pair and the channel that is its partner."""
    channel = np.arange(width)
    half = width // 2
    if pairs == "halves":
        return channel % half, (channel + half) % width
    return channel // 2, channel ^ 1
