"""Laws of adamw_step: how far a parameter moves, which way, and what has a say in it."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_different
from veriformer.law import SINGLE, Domain, Recipe, choice, law
from veriformer.properties.cases import few
from veriformer.properties.measured import expect_equal, expect_unmoved, measure, measure_all
from veriformer.properties.optimizer_cases import PLAIN, STEPS, adamw_cases
from veriformer.properties.optimizer_states import (
    STATE,
    against,
    changed,
    fresh,
    grown,
    longest,
    rearranged,
    remembered,
    seen_eps,
    sound,
    without_penalty,
)
from veriformer.subject import Subject

WIDE = "float32 or float64 or bfloat16"
"""What laws need whose numbers leave the range of float16."""
LATER = STEPS[1:]


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/adamw.py."""
    return tuple(f"adamw.py:{name}" for name in names)


@law(
    "adamw_step",
    case=adamw_cases(families=("near_epsilon", "normal", "decades", "integers", "ladder", "huge")),
    source="Kingma, Ba 2015, algorithm 1; P109, R51",
    relative=False,
    changes=("adam_epsilon",),
    kills=faults(
        "eps_before_the_correction",
        "eps_inside_the_root",
        "eps_missing",
        "correction_multiplies",
        "corrections_missing",
        "corrections_exchanged",
        "root_missing",
        "ascends",
    ),
)
def first_step_is_the_rate_against_the_gradient(adamw_step: Subject, case: Case) -> None:
    """From a fresh state a parameter moves by lr g / (|g| + eps) against its gradient g, of whatever size."""
    if not sound(case):
        return
    first = fresh(case)
    got = measure(adamw_step, first)
    expect_equal(got, against(case["grad"], case["lr"], seen_eps(first, adamw_step.capabilities)))


@law(
    "adamw_step",
    case=adamw_cases(families=(*PLAIN, "near_epsilon", "decades")),
    needs={SINGLE},
    source="Kingma, Ba 2015, section 3; P113, R52",
    relative=False,
    changes=("adam_epsilon",),
    kills=faults(
        "corrections_missing",
        "correction_of_m_missing",
        "correction_of_v_missing",
        "correction_multiplies",
        "steps_counted_from_zero",
        "steps_counted_from_two",
        "corrections_of_one_step_only",
        "step_in_half",
        "averages_used_before_the_step",
    ),
)
def constant_gradient_moves_by_the_rate_at_every_step(adamw_step: Subject, case: Case) -> None:
    """While a gradient g stays as it was, its parameter moves by lr g / (|g| + eps) against it at every step."""
    if not sound(case):
        return
    g, before = case["grad"], case["step"] - 1
    m, v = (1 - case["beta1"] ** before) * g, (1 - case["beta2"] ** before) * g * g
    now = case.with_arrays(param=np.zeros(g.shape), m=m, v=v)
    got, wanted = measure(adamw_step, now), against(g, case["lr"], seen_eps(now, adamw_step.capabilities))
    # m and v come rounded: a unit of the move, and half of one
    expect_close(got.value, wanted, got.allowed + 2 * adamw_step.precision.u_out * np.abs(wanted))


@law(
    "adamw_step",
    case=adamw_cases(families=("normal", "integers", "decades", "constant"), steps=LATER),
    needs={SINGLE},
    source="Kingma, Ba 2015, section 2.1; P111",
    relative=False,
    kills=faults("correction_of_v_missing", "beta_of_m_forgotten"),
)
def no_step_is_longer_than_the_averages_admit(adamw_step: Subject, case: Case) -> None:
    """A move is at most lr sqrt(sum a²/b), a and b the weights of all gradients so far in the two averages."""
    if not sound(case):
        return
    m, v = remembered(case, case["step"] - 1)
    got = measure(adamw_step, case.with_arrays(param=0 * m, m=m, v=v))
    most = case["lr"] * longest(case)
    # as above; the average before the step is no longer than it may be after one more step
    slack = 2 * adamw_step.precision.u_out * most
    expect_between(got.value, -most, most, got.allowed + slack, what="the move")


@law(
    "adamw_step",
    case=adamw_cases(families=("normal", "integers", "constant", "near_epsilon"), steps=(2, 3, 10)),
    needs={SINGLE},
    source="Kingma, Ba 2015, section 2.1; P111",
    relative=False,
    kills=faults("move_limited", "correction_of_v_missing", "correction_of_m_missing"),
)
def gradients_that_grow_move_furthest(adamw_step: Subject, case: Case) -> None:
    """Where gradients grew by beta2/beta1 at each step, a move is as long as the averages admit, longer than lr."""
    if not sound(case) or not case["beta1"] or not case["beta2"]:
        return
    m, v, now = grown(case, case["step"] - 1)
    got = measure(adamw_step, case.with_arrays(param=0 * m, m=m, v=v))
    root = np.sqrt(now / (1 - case["beta2"] ** case["step"]))
    eps = seen_eps(case, adamw_step.capabilities)
    wanted = -case["lr"] * longest(case) * np.sign(case["grad"]) * root / (root + eps)
    expect_close(got.value, wanted, got.allowed + 2 * adamw_step.precision.u_out * np.abs(wanted))


@law(
    "adamw_step",
    case=adamw_cases(families=(*PLAIN, "ladder", "near_epsilon", "huge")),
    factor=choice(4.0, 0.25, 1024.0, 2.0**-10),
    needs={"eps", WIDE},
    source="Kingma, Ba 2015, section 2.1; P110, R53",
    kills=faults("eps_inside_the_root", "root_missing", "gradient_limited"),
)
def scaled_gradients_move_alike(adamw_step: Subject, case: Case, factor: float) -> None:
    """Gradients and eps times c, with m times c and v times c², move parameters as before."""
    if not sound(case):
        return
    one = without_penalty(case, adamw_step.capabilities)
    other = one.with_arrays(grad=factor * one["grad"], m=factor * one["m"], v=factor**2 * one["v"])
    param, m, v = measure_all(adamw_step, one)
    moved = measure_all(adamw_step, other.with_keywords(eps=factor * one["eps"]))
    for got, wanted, what in zip(moved, (param, m * factor, v * factor**2), ("param", "m", "v"), strict=True):
        expect_equal(got, wanted, what=what)


@law(
    "adamw_step",
    case=adamw_cases(),
    source="P110",
    kills=faults("sign_of_the_gradient_lost", "only_positive_gradients_average"),
)
def opposite_gradients_move_the_other_way(adamw_step: Subject, case: Case) -> None:
    """With parameter, gradient and m of the other sign, so are the results; v is the same."""
    if not sound(case):
        return
    opposite = case.with_arrays(param=-case["param"], grad=-case["grad"], m=-case["m"])
    param, m, v = measure_all(adamw_step, case)
    for got, wanted in zip(measure_all(adamw_step, opposite), (param * -1, m * -1, v), strict=True):
        expect_equal(got, wanted)


@law(
    "adamw_step",
    case=adamw_cases(),
    factor=choice(2.0, 0.5, 4.0),
    source="Kingma, Ba 2015, algorithm 1",
    kills=faults("eps_scaled_by_the_rate", "rate_in_the_average", "rate_at_least_a_thousandth", "rate_under_the_root"),
)
def move_is_proportional_to_the_rate(adamw_step: Subject, case: Case, factor: float) -> None:
    """A parameter of 0 moves twice as far at twice the rate."""
    if not sound(case):
        return
    one = case.with_arrays(param=np.zeros(case["param"].shape))
    other = one.with_keywords(lr=case["lr"] * factor)
    expect_equal(measure(adamw_step, other), measure(adamw_step, one) * factor)


@law(
    "adamw_step",
    case=adamw_cases(decays=(0.1, 1.0, 0.5)),
    source="R56, B131",
    relative=False,
    kills=faults("decay_without_rate", "rate_at_least_a_thousandth"),
)
def rate_zero_moves_nothing(adamw_step: Subject, case: Case) -> None:
    """At lr = 0 no bit of a parameter changes, whatever the decay."""
    if sound(case):
        got = measure(adamw_step, case.with_keywords(lr=0.0))
        expect_equal(got, case["param"])


@law(
    "adamw_step",
    case=adamw_cases(least=2),
    source="R02, R57",
    kills=faults("tail_untouched", "variance_of_the_row", "first_rate_for_all"),
)
def entries_are_on_their_own(adamw_step: Subject, case: Case) -> None:
    """Entries in another order and shape, each with its state, have the same results."""
    if not sound(case):
        return
    order = case.random().permutation(case["param"].size)
    flat = case.with_arrays(**{name: case[name].reshape(-1)[order] for name in STATE})
    here = rearranged(measure_all(adamw_step, case), lambda array: array.reshape(-1)[order])
    for got, wanted in zip(measure_all(adamw_step, flat), here, strict=True):
        expect_equal(got, wanted)


@law(
    "adamw_step",
    case=adamw_cases(least=2),
    source="R02, R57",
    changes=("leak",),
    kills=faults("one_variance_for_all", "trust_ratio", "variance_of_the_row", "gradients_centred"),
)
def other_entries_have_no_influence(adamw_step: Subject, case: Case) -> None:
    """What happens to other entries changes no bit of a parameter."""
    if not sound(case):
        return
    kept = case.random(1).permutation(case["param"].size).reshape(case["param"].shape) % 2 == 0
    other = {"param": case["param"] + 1, "grad": 3 - 2 * case["grad"], "m": -case["m"], "v": 2 * case["v"]}
    moved = case.with_arrays(**{name: np.where(kept, case[name], array) for name, array in other.items()})
    expect_unmoved(adamw_step, case, moved, kept)


@law(
    "adamw_step",
    case=adamw_cases(steps=(100_000,), families=PLAIN),
    later=choice(65_536, 1_000_000, 131_072),
    source="Kingma, Ba 2015, section 3",
    kills=faults("step_in_two_bytes", "rate_falls_with_the_step"),
)
def late_steps_are_alike(adamw_step: Subject, case: Case, later: int) -> None:
    """Once beta^step is nothing, the number of the step no longer matters."""
    if sound(case) and max(case["beta1"], case["beta2"]) ** 65_536 < 1e-16 and case["step"] >= 65_536:
        one, other = measure_all(adamw_step, case), measure_all(adamw_step, case.with_keywords(step=later))
        for got, wanted in zip(other, one, strict=True):
            expect_equal(got, wanted)


CHANGES = {
    "param": lambda x: x + 1, "grad": lambda g: 0.5 - 2 * g, "m": lambda m: m + 1, "v": lambda v: 4 * v + 0.25,
    "step": lambda t: t + 1, "lr": lambda lr: lr / 2, "beta1": lambda b: b / 2, "beta2": lambda b: b / 2,
    "eps": lambda e: 64 * e, "weight_decay": lambda w: w + 0.5,
}  # fmt: skip
"""What is changed -> how."""


def words(domain: Domain) -> list[str]:
    """What has a say in a step and can be given."""
    return [name for name in CHANGES if name in (*STATE, "step", "lr") or name in domain.accepts]


@law(
    "adamw_step",
    case=adamw_cases(families=("near_epsilon", "normal", "integers"), steps=(1, 2, 3, 10)),
    word=Recipe(words, few(words)),
    source="R09, B133",
    kills=faults("decay_ignored", "betas_ignored", "eps_ignored", "step_ignored", "state_ignored", "variance_ignored"),
)
def everything_given_has_influence(adamw_step: Subject, case: Case, word: str) -> None:
    """Another parameter, gradient, state, step, rate, beta, eps or decay gives another result."""
    if not sound(case):
        return
    other = changed(case, word, CHANGES[word])
    pairs = list(zip(adamw_step.bounds(case), adamw_step.bounds(other), strict=True))
    sure = [np.abs(a.value - b.value) > a.allowed + b.allowed for a, b in pairs]
    results = zip(adamw_step(case), adamw_step(other), sure, strict=True)
    for one, moved, where in results:
        expect_different(one[where], moved[where], what=f"another {word}")
