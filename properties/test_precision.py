"""Whether an implementation works in the precision that it declares: statistics of its errors on dense data."""

from __future__ import annotations

import numpy as np

from veriformer import oracle
from veriformer.budgets import Precision
from veriformer.budgets.claims import LEAST, judge_claim
from veriformer.case import Case
from veriformer.dialect import reference_call
from veriformer.expect import current, expect
from veriformer.law import law
from veriformer.properties.dense_cases import DENSE, dense_cases
from veriformer.subject import Subject


@law(
    tuple(DENSE),
    case=dense_cases(),
    kind="precision",
    source="Higham, Mary 2019 (A new approach to probabilistic rounding error analysis)",
    kills=(
        "precision.py:softmax_short_exponentials",
        "precision.py:log_softmax_short_sum",
        "precision.py:logsumexp_short_sum",
        "precision.py:layer_norm_short_input",
        "precision.py:layer_norm_sample_variance",
        "precision.py:rms_norm_short_squares",
        "precision.py:gelu_tanh_for_erf",
        "precision.py:feed_forward_tf32_inputs",
        "precision.py:feed_forward_short_accumulator",
        "precision.py:attention_tf32_inputs",
        "precision.py:attention_short_accumulator",
        "precision.py:attention_half_accumulator",
        "precision.py:attention_short_probabilities",
        "precision.py:attention_scale_off",
    ),
    changes=("accumulate", "intermediate", "rounds_probabilities"),
)
def works_in_the_declared_precision(subject: Subject, case: Case) -> None:
    """On dense random data errors are no larger than the declared precision typically makes them, and point no way."""
    got = subject(case)
    if got.size < LEAST or not dense(case):
        return
    precision = Precision.of(subject.capabilities, case.dtype, growth="typical")
    (typical,) = oracle.bounds(case, subject.capabilities, precision)

    def exact(arrays: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(reference_call(case.operation, subject.capabilities, arrays, case.keywords))

    claim = judge_claim(got, typical, exact, case.arrays, subject.precision)
    trial = current()
    if np.isfinite(claim.bits):  # not where there is no error at all
        trial.bits = claim.bits if trial.bits is None else max(trial.bits, claim.bits)
    expect(claim.holds, "precision", claim.message)


def dense(case: Case) -> bool:
    """Whether no array is of a few values: equal values repeat one error, which says nothing of the others."""
    return all(np.unique(a).size >= min(a.size, 16) for a in case.arrays.values() if a.dtype.kind == "f")
