"""What every operation owes before its numbers are looked at: types, memory, state, repetition, layouts."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import strategies as st

from veriformer.case import LAYOUTS, Case
from veriformer.expect import Refused, expect, expect_close, expect_finite, expect_same, listed
from veriformer.law import Recipe, law
from veriformer.properties.every_case import EVERY, REAL_VALUED, WITH_ARRAYS, any_cases, plain_cases, turned
from veriformer.properties.model_runs import allowance
from veriformer.subject import Subject


def results_of(subject: Subject, case: Case) -> tuple[np.ndarray, ...]:
    """The results as a tuple, one or several."""
    results = subject(case)
    return results if isinstance(results, tuple) else (results,)


@law(
    EVERY,
    case=plain_cases(),
    kind="contract",
    source="the operation's calling convention",
    root=True,
    relative=False,
    kills=(
        "hygiene.py:softmax_returns_none",
        "hygiene.py:softmax_returns_a_list",
        "hygiene.py:softmax_returns_a_tuple",
        "hygiene.py:logsumexp_keeps_the_axis",
        "hygiene.py:logsumexp_returns_a_number",
        "hygiene.py:layer_norm_flattens",
        "hygiene.py:layer_norm_refuses_batches",
        "hygiene.py:attention_returns_weights_too",
        "hygiene.py:attention_drops_the_head_axis",
        "hygiene_torch.py:torch_returns_numpy",
        "attention_with_lse.py:lse_queries_before_heads",
    ),
)
def returns_an_array(subject: Subject, case: Case) -> None:
    """An ordinary call returns arrays of the right type and shape."""
    try:
        outcome = subject.outcome(case)
    except Refused as refused:
        expect(False, "raised", str(refused))
        return
    for name, result, wanted in zip(subject.results_for(case), outcome.results, subject.shapes(case), strict=True):
        expect(result.shape == wanted, "shape", f"{name} has shape {result.shape}, wanted {wanted}")


@law(
    EVERY,
    case=plain_cases(),
    kind="contract",
    source="the operation's calling convention",
    relative=False,
    kills=("hygiene.py:softmax_returns_float64", "attention_with_lse.py:lse_always_float32"),
)
def keeps_the_dtype(subject: Subject, case: Case) -> None:
    """Results have the first input's dtype, tables float32, ids and steps int64, lse float32 beside 16-bit inputs."""
    outcome = subject.outcome(case)
    for name, got in zip(subject.results_for(case), outcome.dtypes, strict=True):
        dtype = case.table.result_dtype(name, case.dtype)
        expect(got == dtype, "dtype", f"{name} is {got}, wanted {dtype}")


@law(
    REAL_VALUED,
    case=any_cases(families=("normal", "integers", "constant", "one_hot", "halves")),
    kind="contract",
    source="R18",
    relative=False,
    kills=("softmax.py:softmax_narrow_rows_unguarded", "layer_norm.py:eps_zero"),
)
def finite_on_plain_data(subject: Subject, case: Case) -> None:
    """Moderate numbers give finite numbers."""
    for name, result in zip(subject.results_for(case), results_of(subject, case), strict=True):
        expect_finite(result, what=name)


@law(
    EVERY,
    case=any_cases(),
    kind="contract",
    source="R04",
    relative=False,
    kills=("hygiene.py:softmax_adds_noise",),
)
def repeats_itself(subject: Subject, case: Case) -> None:
    """The same call made twice gives the same bits."""
    for first, second in zip(results_of(subject, case), results_of(subject, case), strict=True):
        expect_same(second, first)


@law(
    WITH_ARRAYS,
    case=any_cases(layouts=("contiguous", "transposed", "strided", "offset")),
    kind="hygiene",
    source="R04",
    relative=False,
    kills=(
        "hygiene.py:softmax_subtracts_in_place",
        "hygiene.py:layer_norm_weight_updated",
        "hygiene.py:attention_uses_mask_as_scratch",
        "hygiene.py:attention_scales_query_in_place",
        "hygiene_torch.py:torch_writes_its_input",
    ),
)
def leaves_inputs_untouched(subject: Subject, case: Case) -> None:
    """A call changes no bit of its inputs, but for a cache where that is declared."""
    changed = [name for name in subject.outcome(case).changed if name not in subject.writes]
    expect(not changed, "input changed", f"{listed(changed or '-')} changed during the call, wanted it untouched")


@law(
    WITH_ARRAYS,
    case=any_cases(),
    kind="hygiene",
    source="R04",
    relative=False,
    kills=(
        "hygiene.py:softmax_returns_its_input",
        "hygiene.py:softmax_reuses_its_result",
        "hygiene.py:logsumexp_returns_a_view",
    ),
)
def returns_its_own_memory(subject: Subject, case: Case) -> None:
    """A result shares memory neither with an input nor with an earlier result, which a later call leaves alone."""
    for _ in range(2):
        outcome = subject.outcome(case)
        aliased = [name for name in outcome.aliased if name not in subject.writes]
        shared = listed(aliased or "-")
        expect(not aliased, "aliased", f"the result shares memory with {shared}, wanted memory of its own")
        expect(not outcome.stale, "stale", f"the call {outcome.stale}, wanted memory of its own")
        for name in list(case.arrays)[:1]:
            case = case.with_arrays(**{name: case[name][..., ::-1]})


@law(
    EVERY,
    case=any_cases(),
    kind="hygiene",
    source="R12",
    relative=False,
    kills=(
        "hygiene.py:softmax_draws_random_numbers",
        "hygiene_torch.py:torch_draws_random_numbers",
        "hygiene_torch.py:torch_sets_default_dtype",
        "hygiene_torch.py:torch_sets_threads",
    ),
)
def keeps_global_state(subject: Subject, case: Case) -> None:
    """A call leaves random generators, default dtype, threads and error handling as they were."""
    state = subject.outcome(case).state
    expect(not state, "state changed", f"{listed(state or '-')} changed during the call, wanted it as before")


def spread(case: Case) -> Case:
    """Every array constant along one axis longer than 1, so that a stride of 0 can hold it."""
    numbers = {name: array for name, array in case.arrays.items() if array.ndim and array.dtype.kind != "i"}
    return case.with_arrays(**{name: constant_along_one(array) for name, array in numbers.items()})


def constant_along_one(array: np.ndarray) -> np.ndarray:
    """The array with the first entry of its first long axis all along that axis."""
    axis = next((axis for axis, length in enumerate(array.shape) if length > 1), 0)
    return np.broadcast_to(array.take([0], axis), array.shape)


def differences(subject: Subject, case: Case, results: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """By how much each result may differ from another one that is equal by law; a model's weights may be unknown."""
    if case.table.words:
        return [allowance(subject, case, result) for result in results]
    return [2 * bound.allowed for bound in subject.bounds(case)]


@law(
    WITH_ARRAYS,
    case=any_cases(),
    layout=Recipe(
        lambda domain: domain.admitted(LAYOUTS[1:]), lambda domain: st.sampled_from(domain.admitted(LAYOUTS[1:]))
    ),
    kind="hygiene",
    source="R03",
    kills=(
        "softmax.py:softmax_reads_as_contiguous",
        "softmax.py:log_softmax_reads_as_contiguous",
        "softmax.py:logsumexp_reads_as_contiguous",
        "layer_norm.py:reads_as_contiguous",
        "attention_tiled.py:reads_as_contiguous",
        "attention_tiled.py:inner_stride_assumed",
    ),
)
def layout_changes_nothing(subject: Subject, case: Case, layout: str) -> None:
    """Transposed, strided, expanded and offset inputs give what a contiguous copy gives."""
    case = spread(case) if layout == "expanded" else case
    packed, viewed = results_of(subject, case), results_of(subject, case.with_layout(layout))
    for one, other, allowed in zip(packed, viewed, differences(subject, case, packed), strict=True):
        expect_close(other, one, allowed, largest=subject.largest)


@law(
    EVERY,
    case=any_cases(),
    other=turned(any_cases()),
    kind="contract",
    source="R69",
    relative=False,
    kills=("hygiene.py:softmax_keeps_a_longer_buffer", "attention_tiled.py:causal_buffer_kept"),
)
def history_changes_nothing(subject: Subject, case: Case, other: Case) -> None:
    """A call gives the same bits again after a call of another size."""
    before = results_of(subject, case)
    with contextlib.suppress(Refused):
        subject.outcome(other)
    for one, again in zip(before, results_of(subject, case), strict=True):
        expect_same(again, one)
