"""Wrong rotary embeddings: one correct implementation with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities, Fault

FRAMEWORK = "numpy"
TABLE_LENGTH = 512
BLOCK = 4
CAPABILITIES = {
    "rotary_embedding": Capabilities(dtypes=DTYPES, intermediate={"float64": "float64", "default": "float32"})
}


def _make(fault: str) -> Callable[..., NDArray]:
    def rotary_embedding(x: NDArray, positions: NDArray, *, base: float = 10000.0) -> NDArray:
        z = _wide(_read(x, fault))
        z = z.astype(np.float16).astype(z.dtype) if fault == "input_in_half" else z
        angle = _angles(_positions(positions, x, fault), x.shape[-1], base, fault)
        cos, sin = np.cos(angle), np.sin(angle)
        if fault == "tables_in_half":
            cos, sin = cos.astype(np.float16), sin.astype(np.float16)
        y = _turned(z, cos.astype(z.dtype), sin.astype(z.dtype), fault).astype(x.dtype)
        if fault == "writes_its_input":
            x[...] = y
        return y

    rotary_embedding.__qualname__ = f"rotary_embedding[{fault}]"
    return rotary_embedding


def _read(x: NDArray, fault: str) -> NDArray:
    if fault != "reads_as_contiguous" or x.flags.c_contiguous:
        return x
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    # np.resize repeats a buffer that is too short, where the real mistake reads foreign memory.
    return np.resize(base.ravel(order="K")[max(start, 0) :], x.shape)


def _positions(positions: NDArray, x: NDArray, fault: str) -> NDArray:
    """What each token is turned by, [T] or broadcast to it."""
    p, count = positions.astype(np.float64), np.arange(len(positions), dtype=np.float64)
    found = {
        "positions_ignored": count,
        "positions_from_the_first": p[:1] + count,
        "positions_sorted": np.sort(p),
        "positions_from_one": p + 1,
        "positions_doubled": 2 * p,
        "table_wraps": p % TABLE_LENGTH,
        "position_saturates": np.minimum(p, TABLE_LENGTH - 1),
        "positions_in_input_dtype": p.astype(x.dtype).astype(np.float64),
    }.get(fault, p)
    if fault == "first_token_left_out":
        found = np.where(count == 0, 0, found)
    if fault == "heads_taken_for_tokens" and x.ndim == 4:
        return np.resize(found, x.shape[1])[:, None]
    return found


def _angles(position: NDArray, width: int, base: float, fault: str) -> NDArray:
    """position base^(-2j / D), [T, D/2]; [T, D] where the members of a pair differ."""
    pair = np.arange(width // 2)
    base = 10000.0 if fault == "base_ignored" else base
    if fault == "exponent_per_channel":
        return position[..., None] * base ** (-np.arange(width) / width)
    exponent = {
        "exponent_halved": pair / width,
        "wavelengths_squared": 4 * pair / width,
        "exponent_over_pairs_less_one": pair / max(width // 2 - 1, 1),
        "exponent_from_one": 2 * (pair + 1) / width,
    }.get(fault, 2 * pair / width)
    frequency = base**-exponent
    if fault == "angles_in_half":
        return (position.astype(np.float16)[..., None] * frequency.astype(np.float16)).astype(np.float64)
    if fault == "second_half_left_alone":
        frequency[(len(pair) + 1) // 2 :] = 0
    if fault == "pairs_repeated_for_halves":
        frequency = np.repeat(frequency, 2)
    return position[..., None] * frequency


def _turned(z: NDArray, cos: NDArray, sin: NDArray, fault: str) -> NDArray:
    half = z.shape[-1] // 2
    if fault == "interleaved_undeclared":
        a, b = z[..., 0::2], z[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(z.shape)
    a, b = z[..., :half], z[..., half:]
    if cos.shape[-1] != half:
        own, partner = (cos[..., :half], sin[..., :half]), (cos[..., half:], sin[..., half:])
        return np.concatenate([a * own[0] - b * own[1], a * partner[1] + b * partner[0]], axis=-1)
    if fault == "sine_and_cosine_swapped":
        cos, sin = sin, cos
    if fault == "turned_backwards":
        sin = -sin
    first, second = a * cos - b * sin, a * sin + b * cos
    if fault == "minus_missing":
        first = a * cos + b * sin
    if fault == "reflected":
        second = a * sin - b * cos
        first = a * cos + b * sin
    if fault == "first_member_overwritten":
        second = first * sin + b * cos
    if fault == "tail_blank":
        whole = max(half // BLOCK * BLOCK, 1)
        first[..., whole:], second[..., whole:] = 0, 0
    y = np.concatenate([first, second], axis=-1)
    if fault == "added_to_the_input":
        return z + np.concatenate([sin, cos], axis=-1)
    if fault == "first_batch_row_for_all" and y.ndim > 2:
        y = np.broadcast_to(y[:1], y.shape)
    return np.clip(y, -64, 64) if fault == "clipped" else y


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "pair-j-turns-by-its-own-angle": {
        "turned_backwards": ("mutation: sign of the sine", "turned by the negative angle"),
        "exponent_halved": ("mutation: j / D for 2j / D", "the exponent is half of what it should be"),
        "wavelengths_squared": ("PapersReimplementations#9", "exponent 4j / D: every channel counted as a pair"),
        "exponent_over_pairs_less_one": ("Universal-Transformer-Pytorch, timing signal", "j / (D/2 - 1) for 2j / D"),
        "exponent_from_one": ("mutation: pairs counted from 1", "each pair has its neighbour's frequency"),
        "positions_doubled": ("mlx-lm#1545", "twice the position"),
        "second_half_left_alone": ("mutation: partial rotation", "half of the pairs are not turned"),
    },
    "position-zero-changes-nothing": {
        "positions_from_one": ("mutation: positions counted from 1", "position p turns as p + 1"),
        "sine_and_cosine_swapped": ("mutation: tables exchanged", "a turn by a right angle less the angle"),
        "reflected": ("mutation: a minus in the wrong row", "a reflection and not a rotation"),
        "input_in_half": ("mutation: float16 input in a float32 kernel", "x is rounded to float16"),
    },
    "pairs-keep-their-length": {
        "interleaved_undeclared": ("TransformerLens#365", "pairs are neighbours, and that is not declared"),
        "minus_missing": ("mutation: rotate-half without its minus", "a cos + b sin in the first half"),
        "exponent_per_channel": ("mutation: base^(-c / D) by channel", "the members of a pair turn differently"),
        "tail_blank": ("mutation: whole blocks only", "pairs after the last block of 4 are 0"),
        "tables_in_half": ("mutation: tables kept short", "sine and cosine are rounded to float16"),
    },
    "scores-depend-on-the-distance": {
        "pairs_repeated_for_halves": ("how-to-train-your-gpt#7", "frequencies of neighbours, rotation of halves"),
        "angles_in_half": ("gpt-neox#1003", "angles are products of float16 numbers"),
        "table_wraps": ("mutation: a table of 512 rows", "position 512 turns as position 0"),
        "position_saturates": ("transformers#38156", "positions stop at the length of a buffer"),
        "positions_in_input_dtype": ("transformers#29285", "positions are rounded to bfloat16"),
    },
    "tokens-turn-by-their-own-position": {
        "positions_ignored": ("transformers#22161", "arange for the given positions"),
        "positions_from_the_first": ("unsloth#3699", "the first position and those that follow it"),
        "positions_sorted": ("mutation: positions sorted", "tokens get each other's positions"),
        "first_token_left_out": ("mutation: a class token assumed", "the first token is never turned"),
    },
    "turns-add": {
        "first_member_overwritten": ("mutation: work in place", "the second half sees the new first half"),
    },
    "linear-in-x": {
        "added_to_the_input": ("mutation: sinusoids added", "sine and cosine are added and nothing is turned"),
    },
    "rows-are-independent": {
        "first_batch_row_for_all": ("reasoning-from-scratch#33", "every batch row gets the result of the first"),
    },
    "rank-changes-nothing": {
        "heads_taken_for_tokens": ("mlx-lm#1545", "with four axes the position is that of the head"),
    },
    "base-matters": {
        "base_ignored": ("mutation: an accepted argument without effect", "base is always 10000"),
    },
    "mirror-image-turns-back": {
        "clipped": ("mutation: a fixed-point table", "results are clipped at 64"),
    },
    "layout-changes-nothing": {
        "reads_as_contiguous": ("kernl#193", "a strided array is read as packed"),
    },
    "leaves-inputs-untouched": {
        "writes_its_input": ("mutation: an in-place kernel", "x is overwritten by the result"),
    },
}
_DTYPES = {"positions_in_input_dtype": "bfloat16"}
FAULTS = {
    variant: Fault("rotary_embedding", f"rotary_embedding/{law}", source, summary, _DTYPES.get(variant, "float32"))
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"rotary_embedding": _make(variant)} for variant in ("correct", *FAULTS)}
