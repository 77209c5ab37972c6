"""Statistics of errors on dense data, as laws of precision ask for them."""

from __future__ import annotations

import numpy as np

from veriformer import oracle
from veriformer.budgets import Precision
from veriformer.budgets.claims import LEAST, judge_claim
from veriformer.case import Case
from veriformer.dialect import reference_call
from veriformer.expect import current, expect
from veriformer.subject import Subject


def expect_declared_precision(subject: Subject, case: Case) -> None:
    """The errors are no larger than the declared precision typically makes them, and point no way."""
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
