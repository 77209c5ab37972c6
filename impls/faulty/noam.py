"""Wrong schedules: that of Noam with one switch for each mistake."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from veriformer.declarations import Fault

FRAMEWORK = "numpy"


def _make(fault: str) -> Callable[..., float]:
    def noam_schedule(step: int, *, width: int, warmup: int) -> float:
        s = _counted(step, warmup, fault)
        if fault == "warm_up_one_longer":
            warmup += 1
        if s <= 0:
            return 0 * step**-0.5 if fault == "zero_divides" else 0.0
        rate = _scale(width, fault) * _shape(s, warmup, fault)
        return float(np.float16(rate)) if fault == "rate_in_half" else float(rate)

    noam_schedule.__qualname__ = f"noam_schedule[{fault}]"
    return noam_schedule


def _counted(step: int, warmup: int, fault: str) -> float:
    """The number that a step has."""
    if fault == "peak_repeated" and step > warmup:
        return step - 1
    if fault == "step_in_two_bytes":
        return step % 65_536
    return {
        "step_at_least_one": max(step, 1),
        "steps_counted_from_one_less": step - 1,
        "steps_counted_from_one_more": step + 1,
        "eps_added_to_the_step": step + 1e-6,
        "step_halved": step // 2,
    }.get(fault, step)


def _scale(width: int, fault: str) -> float:
    return {
        "width_forgotten": 1.0,
        "root_of_the_width_multiplies": width**0.5,
        "width_without_root": 1 / width,
        "base_rate_doubled": 2 * width**-0.5,
    }.get(fault, width**-0.5)


def _shape(s: float, warmup: int, fault: str) -> float:
    """The rate as a function of the step."""
    rising, falling = s * warmup**-1.5, s**-0.5
    if fault == "larger_of_the_two":
        return max(rising, falling)
    if fault == "no_warm_up":
        return falling
    if fault == "constant_after_the_warm_up":
        return min(rising, warmup**-0.5)
    if fault == "falls_with_the_step":
        return min(rising, warmup**0.5 / s)
    if fault == "falls_in_a_line":
        return min(rising, warmup**-0.5 * max(1 - (s - warmup) / (9 * warmup), 0))
    if fault == "steps_counted_after_the_warm_up":
        return rising if s <= warmup else (s - warmup + 1) ** -0.5 * warmup**-0.5
    if fault == "peak_after_half_the_warm_up":
        return min(2 * rising, falling)
    if fault == "warm_up_with_the_square":
        rising = s**2 * warmup**-2.5
    if fault == "warm_up_without_power":
        rising = s / warmup
    if fault == "whole_division":
        rising = s // max(warmup // 4, 1) / 4 * warmup**-0.5
    if fault == "warm_up_along_a_cosine":
        rising = warmup**-0.5 * (1 - math.cos(math.pi * min(s / warmup, 1.0))) / 2
    return min(rising, falling)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "starts-at-zero": {
        "step_at_least_one": ("pytorch-saltnet#7", "steps 0 and 1 share a rate"),
        "zero_divides": ("mutation: no guard at all", "0^(-1/2) is an error"),
        "eps_added_to_the_step": ("mutation: a guard against division by 0", "the step and 1e-6"),
    },
    "first-step-has-the-first-rate": {
        "steps_counted_from_one_less": ("gpt-neox#1373, verl#3674, bert#1293", "the first update has the rate 0"),
        "steps_counted_from_one_more": (
            "mutation: counted twice before the first step",
            "step s has the rate of s + 1",
        ),
        "base_rate_doubled": ("mutation: a factor of its own", "twice the rate"),
        "warm_up_without_power": ("mutation: s / warmup", "the line rises to 1"),
        "width_forgotten": ("mutation: no width", "the width has no influence"),
    },
    "warm-up-is-linear": {
        "warm_up_with_the_square": ("mutation: a power", "the rate rises with the square of the step"),
        "warm_up_along_a_cosine": ("mutation: another schedule", "the rate rises along a cosine"),
        "whole_division": ("mutation: epochs for steps", "the rate rises in four steps"),
        "no_warm_up": ("mutation: step^(-1/2) alone", "the rate falls from the first step on"),
    },
    "falls-with-the-root-of-the-step": {
        "constant_after_the_warm_up": ("mutation: another schedule", "the rate stays at its peak"),
        "falls_with_the_step": ("mutation: a root forgotten", "the rate falls as 1 / s"),
        "falls_in_a_line": ("mutation: another schedule", "the rate falls in a line, to 0"),
        "step_in_two_bytes": ("mutation: int16", "step 65 536 counts as step 0"),
    },
    "peak-is-at-the-end-of-the-warm-up": {
        "warm_up_one_longer": ("mutation: < for <=", "the warm-up takes one step more"),
        "peak_after_half_the_warm_up": ("mutation: a factor 2 on one branch", "the peak comes too early"),
    },
    "rises-and-falls": {
        "peak_repeated": ("gradual-warmup-lr PR#11", "the first step after the warm-up repeats the peak"),
        "step_halved": ("mutation: two batches a step", "two steps share a rate"),
    },
    "wider-models-have-lower-rates": {
        "root_of_the_width_multiplies": ("mutation: a sign of an exponent", "width^(1/2)"),
        "width_without_root": ("mutation: a root forgotten", "1 / width"),
    },
    "warm-up-leaves-no-trace": {
        "steps_counted_after_the_warm_up": ("mutation: a schedule after a schedule", "steps count from the peak on"),
        "larger_of_the_two": ("mutation: max for min", "falls, then rises"),
    },
    "equals-the-reference": {
        "rate_in_half": ("mutation: a rate in the dtype of weights", "the rate is rounded to float16"),
    },
}
FAULTS = {
    variant: Fault("noam_schedule", f"noam_schedule/{law}", source, summary, "float64")
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"noam_schedule": _make(variant)} for variant in ("correct", *FAULTS)}
