"""Laws of noam_schedule: a rate that rises in a line, and falls with the root of the step."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_different, expect_same
from veriformer.law import choice, law
from veriformer.properties.measured import Measured, expect_equal, measure
from veriformer.properties.optimizer_cases import noam_cases
from veriformer.subject import Subject

MOST = 10**6
"""Steps beyond this are not asked for."""


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/noam.py."""
    return tuple(f"noam.py:{name}" for name in names)


def at(noam_schedule: Subject, case: Case, step: int) -> Measured:
    """The rate of another step."""
    return measure(noam_schedule, case.with_keywords(step=step))


@law(
    "noam_schedule",
    case=noam_cases(steps=("zero", "first", "late")),
    source="P114, R61, B142",
    relative=False,
    kills=faults("step_at_least_one", "zero_divides", "steps_counted_from_one_more", "eps_added_to_the_step"),
)
def starts_at_zero(noam_schedule: Subject, case: Case) -> None:
    """The rate of step 0 is 0."""
    expect_same(noam_schedule(case.with_keywords(step=0)), np.zeros(()))


@law(
    "noam_schedule",
    case=noam_cases(),
    source="Vaswani et al. 2017, equation 3; R61, B143",
    relative=False,
    kills=faults(
        "steps_counted_from_one_less",
        "steps_counted_from_one_more",
        "width_forgotten",
        "root_of_the_width_multiplies",
        "warm_up_one_longer",
        "warm_up_without_power",
        "whole_division",
        "base_rate_doubled",
        "step_halved",
    ),
)
def first_step_has_the_first_rate(noam_schedule: Subject, case: Case) -> None:
    """The rate of step 1 is width^(-1/2) warmup^(-3/2), above 0."""
    expect_equal(at(noam_schedule, case, 1), case["width"] ** -0.5 * case["warmup"] ** -1.5)


@law(
    "noam_schedule",
    case=noam_cases(steps=("early", "end")),
    source="Vaswani et al. 2017, section 5.3; P114, R61",
    kills=faults(
        "steps_counted_from_one_less",
        "steps_counted_from_one_more",
        "no_warm_up",
        "warm_up_with_the_square",
        "whole_division",
        "step_halved",
        "warm_up_along_a_cosine",
    ),
)
def warm_up_is_linear(noam_schedule: Subject, case: Case) -> None:
    """Up to step `warmup` the rate of step s is s times that of step 1."""
    step = min(case["step"], case["warmup"])
    expect_equal(at(noam_schedule, case, step), at(noam_schedule, case, 1) * step)


@law(
    "noam_schedule",
    case=noam_cases(steps=("end", "late")),
    source="Vaswani et al. 2017, section 5.3; P114, R61",
    kills=faults(
        "constant_after_the_warm_up",
        "falls_with_the_step",
        "falls_in_a_line",
        "peak_repeated",
        "steps_counted_from_one_less",
        "larger_of_the_two",
        "steps_counted_after_the_warm_up",
    ),
)
def falls_with_the_root_of_the_step(noam_schedule: Subject, case: Case) -> None:
    """From step `warmup` on the rate of step 4 s is half that of step s."""
    step = max(case["step"], case["warmup"])
    if 4 * step <= MOST:
        expect_equal(at(noam_schedule, case, 4 * step), at(noam_schedule, case, step) * 0.5)


@law(
    "noam_schedule",
    case=noam_cases(),
    source="Vaswani et al. 2017, section 5.3; P114, R61, B145",
    relative=False,
    kills=faults(
        "larger_of_the_two",
        "warm_up_one_longer",
        "no_warm_up",
        "width_forgotten",
        "base_rate_doubled",
        "peak_after_half_the_warm_up",
    ),
)
def peak_is_at_the_end_of_the_warm_up(noam_schedule: Subject, case: Case) -> None:
    """The rate of step `warmup` is (width warmup)^(-1/2), and no step has a larger one."""
    warmup = case["warmup"]
    peak = (case["width"] * warmup) ** -0.5
    expect_equal(at(noam_schedule, case, warmup), peak, what="the peak")
    for step in (warmup - 1, warmup + 1, warmup // 2, 2 * warmup, case["step"]):
        if step <= MOST:
            rate = at(noam_schedule, case, step)
            expect_between(rate.value, 0.0, peak, rate.allowed, what=f"the rate of step {step}")


@law(
    "noam_schedule",
    case=noam_cases(),
    source="P114, R61, B142",
    kills=faults(
        "step_at_least_one",
        "whole_division",
        "step_halved",
        "constant_after_the_warm_up",
        "larger_of_the_two",
        "peak_repeated",
    ),
)
def rises_and_falls(noam_schedule: Subject, case: Case) -> None:
    """Each rate of the warm-up is larger than the one before it, and each one after it smaller."""
    step, warmup = min(case["step"], MOST - 1), case["warmup"]
    for here in (0, step, warmup - 1, warmup):
        one, other = at(noam_schedule, case, here), at(noam_schedule, case, here + 1)
        gain, error = other.value - one.value, one.allowed + other.allowed
        expect_between(gain if here < warmup else -gain, 0.0, np.inf, error, what=f"the gain at step {here}")
        wanted = rate_of(noam_schedule, case, here + 1) - rate_of(noam_schedule, case, here)
        if abs(wanted) > error:
            expect_different(other.value, one.value, what=f"step {here + 1} for step {here}")


def rate_of(noam_schedule: Subject, case: Case, step: int) -> float:
    """The reference's rate."""
    return float(noam_schedule.reference(case.with_keywords(step=step)).value)


@law(
    "noam_schedule",
    case=noam_cases(steps=("first", "early", "late", "end")),
    times=choice(4, 16, 64),
    source="Vaswani et al. 2017, equation 3; R61",
    kills=faults("width_forgotten", "root_of_the_width_multiplies", "width_without_root"),
)
def wider_models_have_lower_rates(noam_schedule: Subject, case: Case, times: int) -> None:
    """Four times the width halves every rate."""
    wide = case.with_keywords(width=times * case["width"])
    expect_equal(measure(noam_schedule, wide), measure(noam_schedule, case) * times**-0.5)


@law(
    "noam_schedule",
    case=noam_cases(steps=("late", "end")),
    shorter=choice(0.5, 0.25, 0.75),
    source="Vaswani et al. 2017, equation 3; R61",
    kills=faults("steps_counted_after_the_warm_up", "larger_of_the_two"),
)
def warm_up_leaves_no_trace(noam_schedule: Subject, case: Case, shorter: float) -> None:
    """Once it is over, a shorter warm-up would have led to the same rate."""
    late = case.with_keywords(step=max(case["step"], case["warmup"]))
    other = late.with_keywords(warmup=max(int(shorter * case["warmup"]), 1))
    expect_equal(measure(noam_schedule, other), measure(noam_schedule, late))


@law(
    "noam_schedule",
    case=noam_cases(steps=("first", "early", "end")),
    times=choice(4, 16),
    source="Vaswani et al. 2017, equation 3; R61",
    kills=faults("warm_up_without_power", "warm_up_one_longer", "no_warm_up"),
)
def longer_warm_up_is_less_steep(noam_schedule: Subject, case: Case, times: int) -> None:
    """Within the warm-up, four times its length gives an eighth of the rate."""
    early = case.with_keywords(step=min(case["step"], case["warmup"]))
    longer = early.with_keywords(warmup=times * case["warmup"])
    expect_equal(measure(noam_schedule, longer), measure(noam_schedule, early) * times**-1.5)
