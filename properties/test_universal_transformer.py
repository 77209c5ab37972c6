"""The Universal Transformer: what is added before a step, what a step is, how many there are, what counts."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_close, expect_different
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.layer_changes import TRIES, counting, nudged
from veriformer.properties.measured import expect_equal, measure, measure_all
from veriformer.properties.universal_build import ID, chain, real_tokens
from veriformer.properties.universal_cases import DEFAULT, LEAST, universal_cases
from veriformer.properties.universal_changes import (
    EVEN,
    PLAIN,
    at_once,
    even_mean,
    even_weights,
    expect_all_equal,
    expect_steps,
    silenced,
    silent_states,
    telling,
)
from veriformer.subject import Subject


@law(
    ID,
    case=universal_cases(pace="even", presets=DEFAULT),
    needs=EVEN,
    source="P47, P75, P98, P99, P103, B151, B153, B157",
    kills=(
        "universal.py:steps_missing",
        "universal.py:steps_from_zero",
        "universal.py:step_added_once",
        "universal.py:step_added_to_the_first_position",
        "universal.py:positions_at_the_input_alone",
        "universal.py:positions_from_one",
        "universal.py:signals_in_the_first_step_alone",
        "universal.py:signals_beside_the_residual",
        "universal.py:signals_multiplied",
        "universal.py:sines_before_cosines",
        "universal.py:frequencies_of_half_the_width",
        "universal_halting.py:interpolates",
        "universal_halting.py:precedence_slip",
        "universal_halting.py:last_state",
        "universal_halting.py:halting_as_last_weight",
        "universal_halting.py:divided_by_the_steps",
        "universal_halting.py:steps_count_alike",
    ),
)
def silent_layers_leave_input_and_signals(universal: Subject, case: Case) -> None:
    """Where every sublayer gives 0, s^n is x + n P[position] + P[1] + … + P[n], normed on the way in post-norm, and
    the output their weighted mean.
    """
    silent = silenced(case)
    expect_equal(measure(universal, silent), even_mean(silent, silent_states(silent)))


@law(
    ID,
    case=universal_cases(pace="even", presets=DEFAULT, examples=16),
    needs=EVEN,
    source="P100, P103, R63, B157",
    relative=False,
    kills=(
        "universal_halting.py:summed_in_bfloat16",
        "universal_halting.py:halts_at_one",
        "universal_halting.py:halts_at_half",
        "universal_halting.py:epsilon_for_the_threshold",
        "universal_halting.py:nothing_summed",
        "universal_halting.py:hard_sigmoid",
        "universal_halting.py:bias_of_one_added",
        "universal_halting.py:bias_dropped",
        "universal_halting.py:left_after_the_last_step",
        "universal_halting.py:steps_from_zero",
        "universal_halting.py:small_halting_never_stops",
    ),
)
def an_even_unit_halts_everybody_at_the_same_step(universal: Subject, case: Case) -> None:
    """Where halting is h for everybody, N is the first n with n h >= 1 - epsilon, at most M, and R = 1 - (N - 1) h."""
    _, n, remainder = even_weights(case)
    expect_steps(measure_all(universal, case), real_tokens(case), n, remainder)


@law(
    ID,
    case=universal_cases(presets=DEFAULT),
    needs=PLAIN,
    source="P93, P104, R70",
    kills=(
        "universal.py:normed_at_the_end",
        "universal.py:norm_always_post",
        "universal.py:activation_after_w2",
        "universal.py:feed_forward_over_time",
        "universal.py:causal_strict",
        "universal.py:positions_from_one",
        "universal.py:steps_from_zero",
        "universal_halting.py:halting_as_last_weight",
        "universal_halting.py:remainder_of_a_single_step_is_zero",
    ),
)
def a_single_step_is_one_layer(universal: Subject, case: Case) -> None:
    """max_steps = 1 gives the layer's result on x + P[position] + P[1], N = 1 and R = 1, whatever halting says."""
    case, real = case.with_keywords(max_steps=1), real_tokens(case)
    results = measure_all(universal, case)
    expect_equal(results[0][real], chain(case)[:, :, 0][real], what="output is")
    expect_steps(results, real, 1.0, 1.0)


@law(
    ID,
    case=universal_cases(presets=DEFAULT, bare=False, least={"L": 2}),
    needs=EVEN,
    source="P104, R70",
    kills=(
        "universal_halting.py:last_state_of_all",
        "universal_halting.py:steps_are_the_limit",
        "universal_halting.py:bias_dropped",
    ),
)
def who_halts_at_once_makes_one_step(universal: Subject, case: Case) -> None:
    """A halting bias that is large gives what max_steps = 1 gives, whatever max_steps is."""
    case = at_once(case, universal.domain)
    expect_all_equal(measure_all(universal, case), measure_all(universal, case.with_keywords(max_steps=1)))


@law(
    ID,
    case=universal_cases(pace="none", presets=DEFAULT),
    needs=EVEN,
    source="P91, P104, R70, B157",
    kills=(
        "universal.py:first_norm_in_later_steps",
        "universal.py:one_step_too_few",
        "universal.py:one_step_too_many",
        "universal_halting.py:no_remainder_at_the_limit",
        "universal_halting.py:steps_from_zero",
        "universal.py:step_added_once",
    ),
)
def who_never_halts_makes_all_steps(universal: Subject, case: Case) -> None:
    """A halting bias that is very negative gives the state after max_steps layers, N = M and R = 1."""
    results, real = measure_all(universal, case), real_tokens(case)
    expect_equal(results[0], even_mean(case, chain(case)), what="output is")
    expect_steps(results, real, case["max_steps"], even_weights(case)[2])


@law(
    ID,
    case=universal_cases(presets=DEFAULT, least={"L": 2}),
    pick=PICKS,
    needs=PLAIN,
    source="P105, P107",
    kills=(
        "universal.py:one_step_too_few",
        "universal.py:one_step_too_many",
        "universal_halting.py:steps_from_zero",
        "universal_halting.py:last_state_of_all",
    ),
)
def a_limit_changes_only_who_needs_more_steps(universal: Subject, case: Case, pick: int) -> None:
    """With fewer steps allowed N is at most so many; who needs no more keeps all results, whatever the others do."""
    limit = 1 + pick % (case["max_steps"] + 2)
    low, high = sorted((limit, case["max_steps"]))
    few, many = (measure_all(universal, case.with_keywords(max_steps=n)) for n in (low, high))
    real, n, decided = real_tokens(case), many[1].value, np.isfinite(few[1].allowed + many[1].allowed)
    expect_close(
        few[1].value[real], np.minimum(n, low)[real], (few[1].allowed + many[1].allowed)[real], what="steps is"
    )
    enough = (n <= low) & decided
    expect_all_equal(few, many, enough)


@law(
    ID,
    case=universal_cases(presets=DEFAULT, bare=False, mask=False, memory_mask=False, least=LEAST, examples=4),
    pick=PICKS,
    needs=PLAIN,
    source="R47, corpus B109",
    relative=False,
    kills=(
        "universal_halting.py:last_state",
        "universal_halting.py:steps_count_alike",
        "universal_halting.py:bias_dropped",
    ),
)
def every_weight_counts(universal: Subject, case: Case, pick: int) -> None:
    """Other numbers in any weight but the bias of the keys change the output, those of the halting unit among them."""
    moved = dict.fromkeys(counting(case), 0.0)
    for attempt in range(TRIES):
        drawn, rng = telling(case, pick + 16 * attempt), case.random(pick + attempt)
        before = universal(drawn)[0]
        for name in [name for name, by in moved.items() if not by]:
            other = drawn.with_arrays(**{name: nudged(drawn[name], rng, 2.0 ** (attempt - 1))})
            moved[name] = np.abs(universal(other)[0] - before).max()
        if all(moved.values()):
            break
    for name, by in moved.items():
        expect_different(by, 0.0, what=f"{name} has influence")


@law(
    ID,
    case=universal_cases(presets=DEFAULT, mask=False, memory=False, causal=False, least={**LEAST, "T": 3}),
    pick=PICKS,
    needs=PLAIN,
    source="corpus kind DEAD",
    relative=False,
    kills=(
        "universal_halting.py:epsilon_ignored",
        "universal.py:norm_always_post",
        "universal.py:causal_ignored",
        "universal.py:always_causal",
    ),
)
def every_keyword_counts(universal: Subject, case: Case, pick: int) -> None:
    """norm, causal, max_steps and epsilon change the output, as far as they may be given."""
    able, post = universal.capabilities, case["norm"] == "post"
    values = {"causal": True, "max_steps": 1, "epsilon": 0.9, "norm": "pre" if post else "post"}
    values = {word: value for word, value in values.items() if word in universal.domain.accepts}
    if not (able.pre_norm if post else able.post_norm):
        values.pop("norm", None)
    moved = dict.fromkeys(values, 0.0)
    for attempt in range(TRIES):
        drawn = telling(case, pick + 16 * attempt).with_keywords(epsilon=0.01)
        before = universal(drawn)[0]
        for word in [word for word, by in moved.items() if not by]:
            moved[word] = np.abs(universal(drawn.with_keywords(**{word: values[word]}))[0] - before).max()
        if all(moved.values()):
            break
    for word, by in moved.items():
        expect_different(by, 0.0, what=f"{word} has influence")


@law(
    ID,
    case=universal_cases(presets=DEFAULT, mask=False, memory=False, causal=False, least={"T": 2}),
    pick=PICKS,
    needs=PLAIN,
    source="P41, P47",
    relative=False,
    kills=("universal.py:positions_missing",),
)
def positions_tell_equal_tokens_apart(universal: Subject, case: Case, pick: int) -> None:
    """Equal tokens at different positions, which all see the same, have different outputs."""
    moved = 0.0
    for attempt in range(TRIES):
        case = telling(case, pick + 16 * attempt)
        out = universal(case.with_arrays(x=np.broadcast_to(case["x"][:, :1], case["x"].shape)))[0]
        moved = np.abs(out[:, 1:] - out[:, :-1]).max(-1)
        if moved.all():
            break
    expect_different(moved, 0.0, what="neighbours of equal content have different outputs")


@law(
    ID,
    case=universal_cases(pace="even", presets=("fixed",)),
    needs={"preset fixed"},
    source="P91, P104",
    relative=False,
    kills=("universal_halting.py:fixed_listens",),
)
def a_fixed_number_of_steps_is_made_whatever_halting_says(universal: Subject, case: Case) -> None:
    """In the preset "fixed" the output is the state after max_steps layers, N = M and R = 1."""
    results, real = measure_all(universal, case), real_tokens(case)
    expect_equal(results[0][real], chain(case)[:, :, -1][real], what="output is")
    expect_steps(results, real, case["max_steps"], 1.0)


@law(
    ID,
    case=universal_cases(pace="even", presets=("pondernet",)),
    needs={"preset pondernet", "biases"},
    source="P108b, Banino et al. 2021, section 2",
    relative=False,
    kills=("universal_halting.py:pondernet_may_never_halt",),
)
def pondernet_expects_over_all_steps(universal: Subject, case: Case) -> None:
    """In the preset "pondernet" step n counts h (1 - h)^(n-1), the last one, and R, what is left; N = M."""
    h, last = 1 / (1 + np.exp(-case["params.halt.b"][0])), case["max_steps"]
    weights = np.asarray([*(h * (1 - h) ** n for n in range(last - 1)), (1 - h) ** (last - 1)])
    results, real = measure_all(universal, case), real_tokens(case)
    expect_equal(results[0][real], (weights[:, None] * chain(case)).sum(2)[real], what="output is")
    expect_steps(results, real, last, weights[-1])
