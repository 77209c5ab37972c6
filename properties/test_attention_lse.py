"""attention_with_lse: the normaliser beside the output, and what it is for."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_same
from veriformer.law import law
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import answerable, keep, per_head
from veriformer.properties.measured import Measured, expect_equal, measure, measure_all
from veriformer.subject import Subject


@law(
    "attention_with_lse",
    case=attention_cases(),
    source="P61",
    kills=(
        "attention_with_lse.py:lse_base_two",
        "attention_with_lse.py:lse_before_scale",
        "attention_with_lse.py:lse_without_bias",
        "attention_with_lse.py:lse_over_hidden_keys",
        "attention_with_lse.py:lse_maximum_alone",
        "attention_with_lse.py:lse_of_first_head",
        "attention_with_lse.py:lse_mean",
    ),
)
def lse_is_the_logsumexp_of_the_logits(attention_with_lse: Subject, case: Case) -> None:
    """lse = log sum_j exp(logit_j) over the keys a row may see; natural logarithm, after scale, softcap and bias."""
    scale = case.size("D") ** -0.5 if case["scale"] is None else case["scale"]
    logits = case["q"] @ per_head(case, "k").swapaxes(-1, -2) * scale
    if case["softcap"] is not None:
        logits = case["softcap"] * np.tanh(logits / case["softcap"])
    logits = logits if case["bias"] is None else logits + case["bias"]
    logits = np.where(allowed_keys(case, attention_with_lse.capabilities), logits, -np.inf)
    _, lse = measure_all(attention_with_lse, case)
    expect_equal(lse, np.logaddexp.reduce(logits, -1))


@law(
    "attention_with_lse",
    case=attention_cases(sink=False, causal=False, window=False, least={"Tk": 2}),
    pick=PICKS,
    source="P61",
    kills=(
        "attention_with_lse.py:lse_of_shifted",
        "attention_with_lse.py:out_not_normalised",
        "attention_with_lse.py:lse_base_two",
    ),
)
def parts_merge(attention_with_lse: Subject, case: Case, pick: int) -> None:
    """Attention over two parts of the keys, weighted by exp(lse), is attention over all of them."""
    first = case.random(pick).permutation(case.size("Tk")) < case.random(pick).integers(1, case.size("Tk"))
    case = answerable(attention_with_lse, case, min(first.sum(), (~first).sum()))
    parts = [measure_all(attention_with_lse, keep(case, Tk=np.flatnonzero(keys))) for keys in (first, ~first)]
    out, lse = measure_all(attention_with_lse, case)
    merged, total = merge(*parts)
    expect_equal(merged, out)
    expect_equal(total, lse)


@law(
    "attention_with_lse",
    case=attention_cases(),
    also=("attention",),
    source="P61",
    kills=("attention_with_lse.py:out_not_causal", "attention_with_lse.py:out_not_normalised"),
)
def out_equals_attention(attention_with_lse: Subject, attention: Subject, case: Case) -> None:
    """The output beside lse is what attention gives."""
    expect_equal(measure(attention_with_lse, case), measure(attention, case.as_operation("attention")))


@law(
    "attention_with_lse",
    case=attention_cases(some_empty=True),
    needs={"empty rows"},
    source="P55",
    relative=False,
    kills=("attention_with_lse.py:lse_zero_on_empty_rows", "attention_with_lse.py:lse_nan_on_empty_rows"),
)
def lse_is_minus_infinity_on_an_empty_row(attention_with_lse: Subject, case: Case) -> None:
    """A row that may see nothing has lse = -inf, with a sink too."""
    empty = ~allowed_keys(case, attention_with_lse.capabilities).any(-1)
    lse = attention_with_lse(case)[1][empty]
    expect_same(lse, np.full_like(lse, -np.inf), what="lse of an empty row is")


@law(
    "attention_with_lse",
    case=attention_cases(sink=True, empty=True),
    needs={"sink"},
    source="P65",
    kills=("attention_with_lse.py:lse_with_sink",),
)
def lse_ignores_the_sink(attention_with_lse: Subject, case: Case) -> None:
    """The sink has no part in lse."""
    with_sink, without = (measure_all(attention_with_lse, one)[1] for one in (case, case.with_arrays(sink=None)))
    expect_equal(with_sink, without)


@law(
    "attention_with_lse",
    case=attention_cases(sink=True),
    needs={"sink"},
    source="P65",
    kills=("attention_with_lse.py:sink_ignored", "attention_with_lse.py:sink_doubled"),
)
def sink_scales_by_sigmoid(attention_with_lse: Subject, case: Case) -> None:
    """With a sink the output is the plain one times sigmoid(lse - sink)."""
    out, lse = measure_all(attention_with_lse, case.with_arrays(sink=None))
    share = sigmoid(lse + -case["sink"][:, None])
    expect_equal(measure(attention_with_lse, case), product(share, out))


def sigmoid(x: Measured) -> Measured:
    """1 / (1 + exp(-x)), whose slope is at most 1/4; [B,H,Tq] -> [B,H,Tq,1]."""
    return Measured(np.exp(-np.logaddexp(0, -x.value)), x.allowed / 4)[..., None]


def product(one: Measured, other: Measured) -> Measured:
    """A product of two inexact factors, of which a zero takes everything with it."""
    value = np.where(one.value == 0, 0.0, one.value * other.value)
    allowed = one.allowed * (np.abs(other.value) + other.allowed) + np.abs(one.value) * other.allowed
    return Measured(value, allowed)


def merge(one: tuple[Measured, ...], other: tuple[Measured, ...]) -> tuple[Measured, Measured]:
    """out and lse over the union of two disjoint sets of keys."""
    (a, lse_a), (b, lse_b) = one, other
    gap = np.where(np.isneginf(lse_a.value), -np.inf, lse_a.value - lse_b.value)
    share = sigmoid(Measured(gap, lse_a.allowed + lse_b.allowed))
    # share a + (1 - share) b = b + share (a - b)
    moved = product(share, Measured(a.value - b.value, np.zeros_like(a.allowed)))
    allowed = share.value * a.allowed + (1 - share.value) * b.allowed + moved.allowed
    total = Measured(np.logaddexp(lse_a.value, lse_b.value), np.maximum(lse_a.allowed, lse_b.allowed))
    return Measured(b.value + moved.value, allowed), total
