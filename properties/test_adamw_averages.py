"""Laws of adamw_step: the two averages, and what decay does beside them."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case, round_to
from veriformer.expect import expect_same
from veriformer.law import choice, law
from veriformer.properties.measured import Measured, expect_equal, measure, measure_all
from veriformer.properties.optimizer_cases import PLAIN, adamw_cases
from veriformer.properties.optimizer_states import (
    averaged,
    averages,
    gradient_of,
    sound,
    without_penalty,
)
from veriformer.subject import Subject

FACTORS = ((1.0, -0.5), (1.0, 1.0, 0.25), (0.5, 0.0, -1.0, 0.25, 1.0), (-1.0, 1.0, -1.0))
"""Gradients of several steps, in units of the first."""


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/adamw.py."""
    return tuple(f"adamw.py:{name}" for name in names)


@law(
    "adamw_step",
    case=adamw_cases(),
    source="Kingma, Ba 2015, algorithm 1; R57",
    relative=False,
    changes=("weight_decay",),
    kills=faults(
        "corrected_average_kept",
        "beta_of_m_forgotten",
        "betas_exchanged",
        "variance_centred",
        "largest_for_mean",
        "variance_never_falls",
        "variance_in_half",
        "betas_in_bfloat16",
        "betas_ignored",
        "nesterov_kept",
    ),
)
def averages_are_what_they_are_called(adamw_step: Subject, case: Case) -> None:
    """m is beta1 m + (1 - beta1) g and v is beta2 v + (1 - beta2) g²."""
    if not sound(case):
        return
    g, beta1, beta2 = gradient_of(case, adamw_step.capabilities), case["beta1"], case["beta2"]
    _, m, v = measure_all(adamw_step, case)
    expect_equal(m, beta1 * case["m"] + (1 - beta1) * g, what="m")
    expect_equal(v, beta2 * case["v"] + (1 - beta2) * g * g, what="v")


@law(
    "adamw_step",
    case=adamw_cases(families=(*PLAIN, "ladder", "decades")),
    factors=choice(*FACTORS),
    source="Kingma, Ba 2015, equation 1; P112, R57",
    relative=False,
    kills=faults("corrected_average_kept", "beta_of_m_forgotten", "state_kept_between_calls", "variance_centred"),
)
def averages_of_several_steps(adamw_step: Subject, case: Case, factors: tuple[float, ...]) -> None:
    """After several steps from nothing m and v are the averages of all gradients and of their squares."""
    if not sound(case):
        return
    m, v = averages(adamw_step, without_penalty(case, adamw_step.capabilities), factors)
    g, squares = case["grad"], tuple(factor**2 for factor in factors)
    expect_equal(m, averaged(factors, case["beta1"]) * g, what="m")
    expect_equal(v, averaged(squares, case["beta2"]) * g * g, what="v")


@law(
    "adamw_step",
    case=adamw_cases(),
    source="R57, R09",
    relative=False,
    kills=faults("rate_in_the_average", "decay_coupled", "corrected_average_kept"),
)
def averages_depend_on_gradients_alone(adamw_step: Subject, case: Case) -> None:
    """Another parameter, rate and step change no bit of m and v, but for decay that is coupled."""
    if not sound(case):
        return
    one = without_penalty(case, adamw_step.capabilities)
    other = one.with_arrays(param=case["param"] + 1).with_keywords(lr=case["lr"] / 4, step=case["step"] + 3)
    for got, wanted in zip(adamw_step(other)[1:], adamw_step(one)[1:], strict=True):
        expect_same(got, wanted)


@law(
    "adamw_step",
    case=adamw_cases(decays=(0.1, 1.0, 0.01, 0.5, 0.0)),
    source="Loshchilov, Hutter 2019, section 2; P112, R54",
    relative=False,
    changes=("weight_decay",),
    kills=faults(
        "decay_ignored", "decay_in_the_ratio", "decay_without_rate", "decay_coupled", "decay_twice", "decay_grows",
        "state_kept_between_calls",
    ),
)  # fmt: skip
def without_gradients_there_is_only_decay(adamw_step: Subject, case: Case) -> None:
    """A parameter that never had a gradient becomes param (1 - lr weight_decay), and stays where nothing decays."""
    if not sound(case):
        return
    none = np.zeros(case["m"].shape)
    still = without_penalty(case.with_arrays(grad=none, m=none), adamw_step.capabilities)
    param, m, v = measure_all(adamw_step, still)
    expect_equal(param, still["param"] * (1 - still["lr"] * still["weight_decay"]), what="param")
    expect_equal(m, none, what="m")
    expect_equal(v, case["beta2"] * case["v"], what="v")


@law(
    "adamw_step",
    case=adamw_cases(families=(*PLAIN, "huge", "large_mean"), decays=(0.5, 1.0, 0.25, 0.125)),
    needs={"weight_decay"},
    source="Loshchilov, Hutter 2019, algorithm 2; R55, B129, B130, B132",
    changes=("weight_decay",),
    kills=faults(
        "decay_of_the_updated", "decay_in_the_ratio", "decay_coupled", "decay_ignored", "decay_twice", "decay_grows",
        "decay_corrected",
    ),
)  # fmt: skip
def decay_is_apart_from_the_step(adamw_step: Subject, case: Case) -> None:
    """Decay adds -lr weight_decay param to a move, whatever g is; where it is coupled, weight_decay param to g."""
    if not sound(case):
        return
    decay, param, without = case["weight_decay"], case["param"], case.with_keywords(weight_decay=0.0)
    got = measure(adamw_step, case)
    if adamw_step.capabilities.weight_decay == "decoupled":
        expect_equal(got, measure(adamw_step, without) + -case["lr"] * decay * param)
        return
    penal = case["grad"] + decay * param
    exact = round_to(penal, case.dtype) == penal
    expect_equal(got[exact], measure(adamw_step, without.with_arrays(grad=penal))[exact])


@law(
    "adamw_step",
    case=adamw_cases(decays=(0.5, 0.25), families=PLAIN),
    needs={"weight_decay"},
    source="Loshchilov, Hutter 2019, section 2; R55",
    changes=("weight_decay",),
    kills=faults("decay_of_the_updated", "decay_coupled", "decay_as_a_step"),
)
def decay_is_proportional_to_the_parameter(adamw_step: Subject, case: Case) -> None:
    """What decay takes from a parameter doubles with the parameter; coupled, that is what it adds to the gradient."""
    if not sound(case):
        return
    single, double = (taken(adamw_step, case, times * case["param"]) for times in (1, 2))
    expect_equal(double, single * 2)


def taken(adamw_step: Subject, case: Case, param: np.ndarray) -> Measured:
    """By how much decay changes a parameter, or what it adds to m."""
    place = 0 if adamw_step.capabilities.weight_decay == "decoupled" else 1
    given = case.with_arrays(param=param)
    one = measure_all(adamw_step, given)[place]
    other = measure_all(adamw_step, given.with_keywords(weight_decay=0.0))[place]
    return Measured(one.value - other.value, one.allowed + other.allowed)
