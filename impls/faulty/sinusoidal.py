"""Wrong sinusoids: one correct table in float64 angles with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
ROWS = 4
CAPABILITIES = {"sinusoidal_positions": Capabilities(accumulate="float64", blocks=(ROWS,))}


def _make(fault: str) -> Callable[..., NDArray]:
    def sinusoidal_positions(length: int, width: int, *, offset: int = 0) -> NDArray:
        with np.errstate(all="ignore"):
            angle = _angles(_positions(length, offset, fault), width, fault)
            table = _table(angle, width, fault)
            return _damaged(table, offset, fault).astype(np.float32)

    sinusoidal_positions.__qualname__ = f"sinusoidal_positions[{fault}]"
    return sinusoidal_positions


def _positions(length: int, offset: int, fault: str) -> NDArray:
    if fault == "offset_ignored":
        offset = 0
    if fault == "offset_one_short":
        offset = max(offset - 1, 0)
    if fault == "positions_from_one":
        offset = offset + 1
    position = np.arange(offset, offset + length, dtype=np.float64)
    if fault == "positions_by_linspace":
        position = np.linspace(offset, offset + length, length)
    if fault == "positions_in_one_byte":
        position = np.mod(position, 256)
    if fault == "positions_in_bfloat16":
        position = _bfloat16(position)
    return position.astype(np.float16).astype(np.float64) if fault == "positions_in_half" else position


def _angles(position: NDArray, width: int, fault: str) -> NDArray:
    """position / 10000^(2i / width), [length, ceil(width / 2)]."""
    pair = np.arange((width + 1) // 2)
    if fault == "floor_division_before_product":
        return position[:, None] * np.exp(2 * pair * (-np.log(10000.0) / width // 2))
    exponent = 2 * pair / width
    if fault == "wavelengths_squared":
        exponent = 4 * pair / width
    if fault in ("divided_by_pairs_less_one", "divided_by_pairs_less_one_unguarded"):
        less_one = width // 2 - 1
        exponent = pair / (less_one if fault.endswith("unguarded") else max(less_one, 1))
    if fault == "even_width_assumed":
        exponent = 2 * pair / (width + width % 2)
    frequency = (1000.0 if fault == "base_1000" else 10000.0) ** -exponent
    if fault == "angles_in_bfloat16":
        return _bfloat16(position[:, None] * _bfloat16(frequency))
    if fault == "angles_in_half":
        return (position.astype(np.float16)[:, None] * frequency.astype(np.float16)).astype(np.float64)
    return position[:, None] * frequency


def _table(angle: NDArray, width: int, fault: str) -> NDArray:
    sine, cosine = np.sin(angle), np.cos(angle)
    if fault == "frequency_per_channel":
        cosine = np.cos(angle * 10000.0 ** (-1 / width))
    if fault == "cosine_first":
        sine, cosine = cosine, sine
    if fault == "sine_for_cosine":
        cosine = sine
    if fault == "halves_concatenated":
        return np.concatenate([sine, cosine[:, : width // 2]], axis=1)
    table = np.stack([sine, cosine], axis=-1).reshape(len(angle), -1)
    if fault == "odd_width_one_too_many":
        return table
    if fault == "odd_width_ends_in_zero" and width % 2:
        table[:, width - 1] = 0
    if fault == "odd_width_ends_in_a_cosine" and width % 2:
        table[:, width - 1] = table[:, width]
    return table[:, :width]


def _damaged(table: NDArray, offset: int, fault: str) -> NDArray:
    if fault == "padding_row_blank" and 0 <= 1 - offset < len(table):
        table[1 - offset] = 0
    if fault == "last_rows_blank":
        table[max(len(table) // ROWS * ROWS, 1) :] = 0
    if fault == "table_in_half":
        return table.astype(np.float16)
    return table


def _bfloat16(values: NDArray) -> NDArray:
    """Rounded to 8 significant bits, ties away from zero."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.floor(np.abs(mantissa) * 256 + 0.5) * np.sign(mantissa), exponent - 8)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "angles-at-position-one": {
        "wavelengths_squared": ("PapersReimplementations#9", "exponent 4i / d: every column counted as a pair"),
        "floor_division_before_product": ("LoFTR#41", "log(1e4) / d // 2 is a whole number"),
        "base_1000": ("mutation: a slip in the base", "1000 for 10000"),
        "frequency_per_channel": ("mutation: 10000^(-c / d) by channel", "a cosine has a frequency of its own"),
        "divided_by_pairs_less_one": ("Universal-Transformer-Pytorch, timing signal", "i / (d/2 - 1) for 2i / d"),
    },
    "starts-with-zeros-and-ones": {
        "positions_from_one": ("mutation: positions counted from 1", "position p gets the row of p + 1"),
        "cosine_first": ("mutation: sine and cosine exchanged", "cosines stand in the even channels"),
    },
    "pairs-lie-on-the-unit-circle": {
        "halves_concatenated": ("allennlp#2993, tensorflow#37191", "all sines, then all cosines"),
        "sine_for_cosine": ("mutation: one function for both", "the sine stands in both channels"),
        "divided_by_pairs_less_one_unguarded": ("keras-transformer, timing signal", "0 / 0 at widths 2 and 3"),
    },
    "squared-norm-is-half-the-width": {
        "last_rows_blank": ("mutation: whole blocks only", "rows after the last block of 4 are 0"),
        "padding_row_blank": ("transformers#10200", "a padding index freezes position 1 at 0"),
    },
    "doubled-width-adds-wavelengths": {
        "even_width_assumed": ("mutation: odd width as the next even one, cut", "the exponent is 2i / (d + 1)"),
        "odd_width_one_too_many": ("pyaptamer#527", "an odd width gets one column too many"),
        "odd_width_ends_in_zero": ("tensor2tensor, timing signal", "the last channel of an odd width is 0"),
        "odd_width_ends_in_a_cosine": ("mutation: lone cosine", "the last channel of an odd width is a cosine"),
    },
    "offset-is-a-slice": {
        "offset_ignored": ("mutation: an accepted argument without effect", "offset has no effect"),
        "offset_one_short": ("mutation: last position for next position", "offset is one too small, unless 0"),
    },
    "more-rows-change-nothing": {
        "positions_by_linspace": ("mutation: linspace for arange", "positions stretch with the length"),
    },
    "positions-are-distinct": {
        "positions_in_bfloat16": ("torch 2.13, arange in bfloat16", "385 of 512 positions are distinct"),
        "positions_in_half": ("torch 2.13, arange in float16", "3073 of 4096 positions are distinct"),
        "positions_in_one_byte": ("mutation: a table of 256 rows", "position 256 gets the row of position 0"),
    },
    "products-depend-on-the-distance": {
        "angles_in_half": ("DiffSynth-Studio#1025", "the angle is a product of float16 numbers"),
        "angles_in_bfloat16": ("depthcharge#82", "the angle is formed in bfloat16"),
    },
    "equals-the-reference": {
        "table_in_half": ("mutation: a table kept short", "the table is rounded to float16"),
    },
}
FAULTS = {
    variant: Fault("sinusoidal_positions", f"sinusoidal_positions/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"sinusoidal_positions": _make(variant)} for variant in ("correct", *FAULTS)}
