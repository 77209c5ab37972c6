"""Two options of attention that bend the weights: the softcap on scores, the sink beside them."""

from __future__ import annotations

import math

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between
from veriformer.law import choice, law
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import edge_key, keep, loud, weighing, whole
from veriformer.properties.measured import expect_equal, measure
from veriformer.subject import Subject


@law(
    "attention",
    case=attention_cases(softcap=True),
    needs={"softcap"},
    source="P65",
    kills=("attention.py:softcap_factor_missing",),
)
def large_softcap_changes_nothing(attention: Subject, case: Case) -> None:
    """A softcap far above every score gives what no softcap gives."""
    case = case.with_arrays(q=whole(case["q"], 1), k=whole(case["k"], 1))
    scale = case.size("D") ** -0.5 if case["scale"] is None else case["scale"]
    # c tanh(s / c) = s (1 - (s / c)^2 / 3 + ...): the second term is below one roundoff of the accumulator.
    cap = case.size("D") * scale * (3 * attention.precision.u_acc) ** -0.5
    if cap > attention.largest / 4:
        return
    capped, plain = case.with_keywords(softcap=cap), case.with_keywords(softcap=None)
    expect_equal(measure(attention, capped), measure(attention, plain))


@law(
    "attention",
    case=attention_cases(softcap=True, bias=False, sink=False),
    pick=PICKS,
    cap=choice(1.0, 2.0),
    needs={"softcap"},
    source="P65",
    kills=("attention.py:softcap_ignored", "attention.py:softcap_before_scale"),
)
def softcap_bounds_the_odds(attention: Subject, case: Case, pick: int, cap: float) -> None:
    """Scores within [-c, c]: among n keys none weighs less than e^-2c / (n - 1 + e^-2c), or more than with e^2c."""
    allowed = allowed_keys(case, attention.capabilities)
    key = edge_key(allowed, case.random(pick))
    rows = allowed[..., key]
    n = allowed.sum(-1)[rows][:, None]
    weight = measure(attention, weighing(loud(case, 1e3), key).with_keywords(softcap=cap))[rows]
    low, high = (math.exp(odds) / (n - 1 + math.exp(odds)) for odds in (-2 * cap, 2 * cap))
    expect_between(weight.value, low, high, weight.allowed, what=f"the weight of key {key}")


@law(
    "attention",
    case=attention_cases(sink=True, bias=True, causal=False, window=False),
    needs={"sink", "bias"},
    source="P65",
    kills=(
        "attention.py:sink_skipped_for_one_query",
        "attention.py:sink_scaled",
        "attention.py:sink_first_head",
        "attention.py:sink_ignored",
    ),
)
def sink_equals_an_extra_key_of_value_zero(attention: Subject, case: Case) -> None:
    """A sink is one more key, visible to all, with the sink as its logit and 0 as its value."""
    longer = keep(case, Tk=[0, *range(case.size("Tk"))])
    bias = np.broadcast_to(longer["bias"], (*case["q"].shape[:3], longer.size("Tk"))).copy()
    bias[..., 0] = case["sink"][:, None]
    k, v, mask = longer["k"].copy(), longer["v"].copy(), longer["mask"]
    k[:, :, 0], v[:, :, 0] = 0.0, 0.0
    if mask is not None:
        mask = mask.copy()
        mask[..., 0] = True
    extra = longer.with_arrays(k=k, v=v, mask=mask, bias=bias, sink=None)
    expect_equal(measure(attention, case), measure(attention, extra))


@law("attention", case=attention_cases(sink=True), needs={"sink"}, source="P65", kills=("attention.py:sink_plus_one",))
def low_sink_changes_nothing(attention: Subject, case: Case) -> None:
    """A sink far below every logit gives what no sink gives."""
    scale = case.size("D") ** -0.5 if case["scale"] is None else case["scale"]
    reach = float(np.abs(case["q"]).max() * np.abs(case["k"]).max()) * case.size("D") * scale
    low = case.with_arrays(sink=np.full_like(case["sink"], -2 * reach - 1000.0))
    expect_equal(measure(attention, low), measure(attention, case.with_arrays(sink=None)))
