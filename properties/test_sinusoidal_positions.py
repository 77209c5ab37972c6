"""Laws of sinusoidal_positions."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_close
from veriformer.law import choice, law
from veriformer.properties.measured import Measured, expect_equal, measure
from veriformer.properties.position_cases import sinusoidal_positions_cases
from veriformer.properties.rotations import angles, product_with, products, squares
from veriformer.subject import Subject


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(widths=(2, 10**6)),
    source="Vaswani et al. 2017, section 3.5; P41",
    relative=False,
    kills=(
        "sinusoidal.py:halves_concatenated",
        "sinusoidal.py:sine_for_cosine",
        "sinusoidal.py:divided_by_pairs_less_one_unguarded",
    ),
)
def pairs_lie_on_the_unit_circle(sinusoidal_positions: Subject, case: Case) -> None:
    """Channels 2i and 2i + 1 of a row are a sine and a cosine of one angle: their squares sum to 1."""
    sine, cosine = sines_and_cosines(measure(sinusoidal_positions, case))
    total = squares(sine[..., : case["width"] // 2], cosine)
    expect_close(total.value, 1.0, total.allowed, what="the sum of squares of a pair is")


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(parity=0),
    source="P41",
    relative=False,
    kills=("sinusoidal.py:last_rows_blank", "sinusoidal.py:padding_row_blank"),
)
def squared_norm_is_half_the_width(sinusoidal_positions: Subject, case: Case) -> None:
    """With an even width every row has a squared norm of half the width, whichever way its channels are ordered."""
    rows = measure(sinusoidal_positions, case)
    norms = squares(rows, rows * 0).rearranged(lambda array: array.sum(-1))
    expect_close(norms.value, case["width"] / 2, norms.allowed, what="the squared norm of a row is")


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(length=3, parity=0),
    source="Vaswani et al. 2017, section 3.5; P41, R43",
    kills=(
        "sinusoidal.py:angles_in_half",
        "sinusoidal.py:angles_in_bfloat16",
        "sinusoidal.py:positions_in_bfloat16",
        "sinusoidal.py:sine_for_cosine",
    ),
)
def products_depend_on_the_distance(sinusoidal_positions: Subject, case: Case) -> None:
    """With an even width the product of two rows depends on the distance of their positions only."""
    gram = products(measure(sinusoidal_positions, case))
    expect_equal(gram[1:, 1:], gram[:-1, :-1])


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(),
    steps=choice(1, 2, 7, 300, 2048),
    needs={"offset"},
    source="P42, R43",
    kills=("sinusoidal.py:offset_ignored", "sinusoidal.py:offset_one_short", "sinusoidal.py:positions_by_linspace"),
)
def offset_is_a_slice(sinusoidal_positions: Subject, case: Case, steps: int) -> None:
    """A table from a later offset is the tail of a longer table."""
    longer = measure(sinusoidal_positions, case.with_keywords(length=case["length"] + steps))
    later = measure(sinusoidal_positions, case.with_keywords(offset=case["offset"] + steps))
    expect_equal(later, longer[steps:])


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(),
    more=choice(1, 3, 8, 64),
    source="P42",
    kills=("sinusoidal.py:positions_by_linspace", "sinusoidal.py:last_rows_blank"),
)
def more_rows_change_nothing(sinusoidal_positions: Subject, case: Case, more: int) -> None:
    """A longer table begins with the rows of a shorter one."""
    longer = measure(sinusoidal_positions, case.with_keywords(length=case["length"] + more))
    expect_equal(measure(sinusoidal_positions, case), longer[: case["length"]])


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(offsets=(0, 1, 254, 3, 1000)),
    source="Vaswani et al. 2017, section 3.5; R43",
    kills=(
        "sinusoidal.py:even_width_assumed",
        "sinusoidal.py:odd_width_one_too_many",
        "sinusoidal.py:odd_width_ends_in_zero",
        "sinusoidal.py:odd_width_ends_in_a_cosine",
        "sinusoidal.py:divided_by_pairs_less_one",
    ),
)
def doubled_width_adds_wavelengths(sinusoidal_positions: Subject, case: Case) -> None:
    """Every second pair of a table twice as wide is a pair of the narrower one, odd widths included."""
    width = case["width"]
    channel = np.arange(width)
    wide = measure(sinusoidal_positions, case.with_keywords(width=2 * width))
    expect_equal(measure(sinusoidal_positions, case), wide[:, channel // 2 * 4 + channel % 2])


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(widths=(2, 10**6), offsets=(0,)),
    source="Vaswani et al. 2017, section 3.5; R43",
    relative=False,
    kills=(
        "sinusoidal.py:wavelengths_squared",
        "sinusoidal.py:floor_division_before_product",
        "sinusoidal.py:base_1000",
        "sinusoidal.py:frequency_per_channel",
        "sinusoidal.py:divided_by_pairs_less_one",
        "sinusoidal.py:positions_from_one",
    ),
)
def angles_at_position_one(sinusoidal_positions: Subject, case: Case) -> None:
    """At position 1 the angle of pair i is 10000^(-2i / width)."""
    width = case["width"]
    rows = measure(sinusoidal_positions, case.with_keywords(length=case["length"] + 1, offset=0))
    sine, cosine = sines_and_cosines(rows[1])
    turned = angles(sine[: width // 2], cosine)
    wanted = 10000.0 ** (-2 * np.arange(width // 2) / width)
    expect_close(turned.value, wanted, turned.allowed, what="the angle of a pair at position 1 is")


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(widths=(1, 16), offsets=(0, 254, 2047, 4090, 1000)),
    more=choice(1, 2, 300, 7, 700),
    source="R43",
    kills=(
        "sinusoidal.py:positions_in_bfloat16",
        "sinusoidal.py:positions_in_half",
        "sinusoidal.py:positions_in_one_byte",
    ),
)
def positions_are_distinct(sinusoidal_positions: Subject, case: Case, more: int) -> None:
    """No two positions have the same row, as far as the precision can tell their angles apart."""
    longer = case.with_keywords(length=case["length"] + more)
    table, bound = sinusoidal_positions(longer), sinusoidal_positions.reference(longer)
    _, first, group = np.unique(table, axis=0, return_index=True, return_inverse=True)
    earlier = first[group.reshape(-1)]
    apart = np.abs(bound.value - bound.value[earlier]) > bound.allowed + bound.allowed[earlier]
    twins = np.flatnonzero(apart.any(-1))
    pair = [case["offset"] + int(i) for i in (earlier[twins[0]], twins[0])] if len(twins) else [0, 1]
    expect(not len(twins), "not distinct", f"positions {pair[0]} and {pair[1]} have one row, wanted different ones")


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(parity=0),
    needs={"offset"},
    source="Vaswani et al. 2017, section 3.5; P41, R43",
    kills=("sinusoidal.py:positions_from_one", "sinusoidal.py:positions_in_bfloat16", "sinusoidal.py:cosine_first"),
)
def positions_add(sinusoidal_positions: Subject, case: Case) -> None:
    """The row of a sum of positions is the row of one, each pair turned by the other's angles."""
    sine, cosine = sines_and_cosines(measure(sinusoidal_positions, case))
    near_sine, near_cosine = sines_and_cosines(measure(sinusoidal_positions, case.with_keywords(offset=0)))
    start_sine, start_cosine = (part[:1] for part in (sine, cosine))
    whole = product_with(near_sine, start_cosine), product_with(near_cosine, start_sine)
    expect_equal(sine, Measured(whole[0].value + whole[1].value, whole[0].allowed + whole[1].allowed))
    whole = product_with(near_cosine, start_cosine), product_with(near_sine, start_sine)
    expect_equal(cosine, Measured(whole[0].value - whole[1].value, whole[0].allowed + whole[1].allowed))


@law(
    "sinusoidal_positions",
    case=sinusoidal_positions_cases(offsets=(0,)),
    source="Vaswani et al. 2017, section 3.5; P41",
    relative=False,
    kills=("sinusoidal.py:positions_from_one", "sinusoidal.py:cosine_first"),
)
def starts_with_zeros_and_ones(sinusoidal_positions: Subject, case: Case) -> None:
    """The row of position 0 is 0 in even channels and 1 in odd ones."""
    first = measure(sinusoidal_positions, case.with_keywords(offset=0))[0]
    expect_equal(first, np.arange(case["width"]) % 2.0)


def sines_and_cosines(rows: Measured) -> tuple[Measured, Measured]:
    """The even and the odd channels."""
    return rows[..., 0::2], rows[..., 1::2]
