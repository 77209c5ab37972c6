"""What stays after the filters of next_token_probabilities, and what may: shared by several laws."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.budgets import Bound
from veriformer.budgets.generation import Choices, choices, mass_error
from veriformer.case import Case
from veriformer.dialect import words_of
from veriformer.subject import Subject

GRID = 2.0**10
"""Logits are put on multiples of 1 / GRID before a shift."""
FREE = {"top_k": None, "top_p": None}
"""Keywords of a call without filters."""


def without(case: Case, *words: str) -> Case:
    """The case without some of its filters, or without both."""
    return case.with_keywords(**{word: None for word in words or FREE})


def restricted(case: Case, kept: np.ndarray) -> Case:
    """The case with -inf for all tokens but the kept ones."""
    return case.with_arrays(logits=np.where(kept, case["logits"], -np.inf))


def choices_of(subject: Subject, case: Case) -> Choices:
    """What the filters may leave under the declared conventions and precision."""
    words = {word: case[word] for word in case.table.keywords} | words_of(case.operation, subject.capabilities)
    return choices(case["logits"], **words, precision=subject.precision)


def shares_of(subject: Subject, case: Case) -> Bound:
    """The probabilities without filters, by the reference."""
    bound: Bound = subject.reference(without(case))
    return bound


def visible(subject: Subject, case: Case) -> np.ndarray:
    """Tokens that are too probable, even without filters, to underflow if they stay."""
    bound = shares_of(subject, case)
    least: np.ndarray = np.maximum(1e3 * subject.precision.eta, 4 * bound.allowed)
    return bound.value > least


def as_counted(subject: Subject, case: Case) -> Case:
    """The case at the temperature at which top_p counts the mass."""
    last = subject.capabilities.sampling_order == "temperature_last"
    return case.with_keywords(temperature=1.0) if last else case


def masses_of(subject: Subject, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """What top_p counts: probabilities of what the implementation's own top_k leaves, and the error of their sums."""
    left = without(restricted(case, subject(without(case, "top_p")) > 0))
    bound: Bound = subject.reference(left)
    unseen = case.size("V") * max(subject.precision.eta, subject.precision.eta_mid)
    return bound.value, mass_error(left["logits"], case["temperature"], subject.precision) + unseen


def shifted(case: Case, shift: float) -> tuple[Case, Case, np.ndarray]:
    """Two cases whose logits differ by exactly a shift, and the rows in which they do."""
    high = case.with_arrays(logits=np.round(case["logits"] * GRID) / GRID + shift)
    low = case.with_arrays(logits=high["logits"] - shift)
    exact = low["logits"] + shift == high["logits"]
    return low, high, exact.all(-1)


def with_other_rows_changed(case: Case) -> tuple[Case, np.ndarray]:
    """About half of the rows replaced by quite different ones, and which rows were left alone."""
    logits = case["logits"]
    kept = case.random(1).permutation(logits[..., 0].size).reshape(logits.shape[:-1]) % 2 == 0
    finite = np.where(logits == -np.inf, 0.0, logits)
    return case.with_arrays(logits=np.where(kept[..., None], logits, 3 - 2 * finite[..., ::-1])), kept


def taken(case: Case, order: np.ndarray) -> Case:
    """The case with some tokens of the vocabulary, in that order."""
    return case.with_arrays(logits=case["logits"].take(order, -1))


def likeliest(case: Case) -> np.ndarray:
    """Tokens of the largest logit."""
    found: np.ndarray = case["logits"] == case["logits"].max(-1, keepdims=True)
    return found


def counted(got: Any, among: np.ndarray) -> np.ndarray:
    """How many of some tokens have a probability."""
    number: np.ndarray = ((np.asarray(got) > 0) & among).sum(-1)
    return number
