"""States of an optimiser and changes of them, shared by the laws of adamw_step."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.properties.measured import Measured, measure_all
from veriformer.subject import Subject

STATE = ("param", "grad", "m", "v")


def sound(case: Case) -> bool:
    """Whether this is a state that steps lead to, as it is unless a case was made smaller."""
    finite = all(np.isfinite(case[name]).all() for name in STATE)
    betas = all(0 <= case[word] < 1 for word in ("beta1", "beta2"))
    return bool(finite and betas and (case["v"] >= 0).all() and case["step"] >= 1 and case["eps"] > 0)


def fresh(case: Case) -> Case:
    """The first step from parameters, m and v of 0."""
    none = np.zeros(case["param"].shape)
    return case.with_arrays(param=none, m=none, v=none).with_keywords(step=1)


def without_penalty(case: Case, capabilities: Capabilities) -> Case:
    """The case without decay where that is a part of the gradient."""
    coupled = capabilities.weight_decay == "coupled"
    return case.with_keywords(weight_decay=0.0) if coupled else case


def gradient_of(case: Case, capabilities: Capabilities) -> np.ndarray:
    """The gradient that is averaged, with the penalty where decay is coupled."""
    g: np.ndarray = case["grad"]
    return g + case["weight_decay"] * case["param"] if capabilities.weight_decay == "coupled" else g


def seen_eps(case: Case, capabilities: Capabilities) -> float:
    """What is added to the root of the corrected v."""
    correction = 1 - case["beta2"] ** case["step"]
    return float(case["eps"] / (1 if capabilities.adam_epsilon == "corrected" else correction**0.5))


def against(g: np.ndarray, lr: float, eps: float) -> np.ndarray:
    """The move -lr g / (|g| + eps)."""
    return -lr * g / (np.abs(g) + eps)


def changed(case: Case, name: str, change: Any) -> Case:
    """The case with another array or keyword, made from the one that it has."""
    value = change(case[name])
    return case.with_arrays(**{name: value}) if name in STATE else case.with_keywords(**{name: value})


def rearranged(found: tuple[Measured, ...], change: Any) -> tuple[Measured, ...]:
    """All results with their entries moved alike."""
    return tuple(one.rearranged(change) for one in found)


def averages(adamw_step: Subject, case: Case, factors: tuple[float, ...]) -> tuple[Measured, Measured]:
    """m and v after several steps from nothing, with these multiples of the case's gradient.

    The error of an average shrinks by beta at each step, and that of the step itself is added.
    """
    beta1, beta2 = case["beta1"], case["beta2"]
    now, errors = fresh(case).with_arrays(param=case["param"]), (np.zeros(case["m"].shape),) * 2
    for step, factor in enumerate(factors, 1):
        found = measure_all(adamw_step, now.with_arrays(grad=factor * case["grad"]).with_keywords(step=step))
        errors = beta1 * errors[0] + found[1].allowed, beta2 * errors[1] + found[2].allowed
        now = now.with_arrays(param=found[0].value, m=found[1].value, v=found[2].value)
    return Measured(now["m"], errors[0]), Measured(now["v"], errors[1])


def averaged(factors: tuple[float, ...], beta: float) -> float:
    """The average of numbers with weights (1 - beta) beta^(steps since)."""
    return (1 - beta) * sum(factor * beta**since for since, factor in enumerate(reversed(factors)))


def remembered(case: Case, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """m and v after this many steps of gradients that grow by beta2/beta1, keep their sign at random, or come and go.

    The first are the ones that lead to the longest step.
    """
    rng, shape, beta1, beta2 = case.random(5), case["grad"].shape, case["beta1"], case["beta2"]
    growth = rng.choice([beta2 / max(beta1, 0.5), 1.0, 0.9], shape)
    m, v = np.zeros(shape), np.zeros(shape)
    for since in reversed(range(min(steps, 60))):
        g = case["grad"] * growth ** -(since + 1.0) * np.where(growth == 1, rng.integers(-1, 2, shape), 1)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    return m, v


def grown(case: Case, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """m and v after this many steps of gradients that grew by beta2/beta1 up to the case's own, and v after that."""
    g, growth = case["grad"], case["beta2"] / case["beta1"]
    m, v = 0 * g, 0 * g
    for since in reversed(range(steps)):
        past = g * growth ** -(since + 1.0)
        m, v = case["beta1"] * m + (1 - case["beta1"]) * past, case["beta2"] * v + (1 - case["beta2"]) * past * past
    return m, v, case["beta2"] * v + (1 - case["beta2"]) * g * g


def longest(case: Case) -> float:
    """sqrt(sum a²/b), a and b the weights of all gradients so far in the corrected averages."""
    (beta1, beta2), since = (case["beta1"], case["beta2"]), np.arange(min(case["step"], 100_000))
    with np.errstate(all="ignore"):
        log_a, log_b = since * np.log(beta1), since * np.log(beta2)
        terms = np.where(since == 0, 1.0, np.exp(2 * log_a - log_b)).sum()
    unit = (1 - beta1) ** 2 / (1 - beta2) * (1 - beta2 ** case["step"]) / (1 - beta1 ** case["step"]) ** 2
    return float((unit * terms) ** 0.5)
