"""What becomes of the scores: scale, bias, shifts, very large and very low ones."""

from __future__ import annotations

import math

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_different, expect_finite, expect_same
from veriformer.law import choice, law
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import (
    edge_key,
    evenly,
    loud,
    visible_mean,
    weighing,
    whole,
)
from veriformer.properties.measured import expect_equal, measure
from veriformer.subject import Subject


@law(
    "attention",
    case=attention_cases(scale=True),
    factor=choice(4.0, 2.0, 0.25, 0.5, 16.0),
    needs={"scale"},
    source="P08",
    changes=("scale_power_of_two",),
    kills=("attention.py:scale_twice", "attention.py:softcap_before_scale", "attention.py:sink_scaled"),
)
def scale_is_inverse_temperature(attention: Subject, case: Case, factor: float) -> None:
    """A scale c times as large equals a query c times as large; bit for bit where c is a power of four.

    (Of two, if scale_power_of_two is declared. The root of the scale may be given to query and key each.)
    """
    if case.dtype == "float16":
        # Nothing cancels among non-negative whole numbers, hence nothing underflows.
        case = case.with_arrays(q=np.abs(whole(case["q"])), k=np.abs(whole(case["k"])))
    colder = case.with_keywords(scale=case["scale"] * factor)
    longer = case.with_arrays(q=case["q"] * factor)
    if attention.capabilities.scale_power_of_two or math.log(factor, 4).is_integer():
        expect_same(attention(colder), attention(longer))
    else:
        expect_equal(measure(attention, colder), measure(attention, longer))


@law(
    "attention",
    case=attention_cases(scale=False),
    needs={"scale"},
    source="P48",
    kills=(
        "attention.py:default_scale_one",
        "attention.py:default_scale_inverse_width",
        "attention.py:scale_over_all_heads",
        "attention.py:scale_from_padded_width",
        "attention.py:scale_from_value_width",
    ),
)
def default_scale_is_inverse_root_width(attention: Subject, case: Case) -> None:
    """Without a scale, it is D^-1/2."""
    given = case.with_keywords(scale=case.size("D") ** -0.5)
    expect_equal(measure(attention, case), measure(attention, given))


@law(
    "attention",
    case=attention_cases(scale=True, bias=False, sink=False, least={"Tk": 2}),
    pick=PICKS,
    needs={"scale"},
    source="P09",
    relative=False,
    kills=("attention.py:scale_ignored",),
)
def scale_matters(attention: Subject, case: Case, pick: int) -> None:
    """Twice the scale gives more weight to the key that matches best."""
    allowed, width = allowed_keys(case, attention.capabilities), case.size("D")
    key = edge_key(allowed & (allowed.sum(-1, keepdims=True) > 1), case.random(pick))
    match = np.zeros_like(case["k"])
    match[:, :, key] = 1.0
    lit = weighing(case.with_arrays(q=np.ones_like(case["q"]), k=match), key)
    rows = allowed[..., key] & (allowed.sum(-1) > 1)
    once, twice = (attention(lit.with_keywords(scale=logit / width))[rows] for logit in (1.0, 2.0))
    expect_different(
        twice, once, what=f"the logit of key {key} is 1 at the one scale, 2 at the other, all others are 0"
    )


@law(
    "attention",
    case=attention_cases(scale=True, bias=False, sink=False),
    needs={"scale", "nonpositive_scale"},
    source="P60",
    kills=("attention.py:mask_before_scale", "attention.py:scale_zero_is_default"),
)
def zero_scale_averages(attention: Subject, case: Case) -> None:
    """scale = 0 gives the plain mean of the values that a row may see."""
    expect_equal(measure(attention, case.with_keywords(scale=0.0)), visible_mean(case, attention.capabilities))


@law(
    "attention",
    case=attention_cases(scale=True),
    needs={"scale", "nonpositive_scale"},
    source="P60",
    kills=("attention.py:scale_sign_lost",),
)
def negative_scale_negates_the_query(attention: Subject, case: Case) -> None:
    """A scale of -s is a scale of s with the query negated."""
    negative = case.with_keywords(scale=-case["scale"])
    expect_equal(measure(attention, negative), measure(attention, case.with_arrays(q=-case["q"])))


@law(
    "attention",
    case=attention_cases(bias=False, sink=False),
    source="P60",
    kills=("attention.py:recency_kept", "attention_tiled.py:tail_counts_phantom_keys"),
)
def zero_query_averages_visible_values(attention: Subject, case: Case) -> None:
    """A query of zeros gives the plain mean of the values that a row may see."""
    expect_equal(measure(attention, evenly(case)), visible_mean(case, attention.capabilities))


@law(
    "attention",
    case=attention_cases(softcap=False, sink=False),
    pick=PICKS,
    source="P59",
    kills=("attention.py:no_maximum", "attention_tiled.py:tail_counts_phantom_keys"),
)
def key_shift_changes_nothing(attention: Subject, case: Case, pick: int) -> None:
    """The same vector added to every key adds the same to all logits of a row, and changes nothing."""
    case = case.with_arrays(k=whole(case["k"]))
    shift = case.random(pick).integers(-4, 5, (*case["k"].shape[:2], 1, case.size("D")))
    expect_equal(measure(attention, case.with_arrays(k=case["k"] + shift)), measure(attention, case))


@law(
    "attention",
    case=attention_cases(bias=True, sink=False),
    pick=PICKS,
    needs={"bias"},
    source="P59",
    kills=("attention.py:bias_before_softcap", "attention.py:bias_as_boolean"),
)
def constant_bias_changes_nothing(attention: Subject, case: Case, pick: int) -> None:
    """One number added to the bias of a whole row changes nothing."""
    bias = np.broadcast_to(whole(case["bias"]), (*case["q"].shape[:3], case.size("Tk")))
    shift = case.random(pick).choice([-64.0, -3.0, 2.0, 16.0], (*bias.shape[:3], 1))
    even = case.with_arrays(bias=bias)
    expect_equal(measure(attention, case.with_arrays(bias=bias + shift)), measure(attention, even))


@law(
    "attention",
    case=attention_cases(bias=True, sink=False),
    pick=PICKS,
    needs={"bias"},
    source="P62",
    kills=(
        "attention.py:bias_scaled",
        "attention.py:bias_negated",
        "attention.py:bias_as_boolean",
        "attention.py:bias_dropped_with_mask",
    ),
)
def bias_multiplies_odds(attention: Subject, case: Case, pick: int) -> None:
    """A bias b on one of n equal keys gives it the weight e^b / (e^b + n - 1)."""
    rng, allowed = case.random(pick), allowed_keys(case, attention.capabilities)
    key = edge_key(allowed, rng)
    b, bias = rng.choice([-3.0, -1.0, 1.0, 2.0, 4.0], allowed.shape[:3]), np.zeros(allowed.shape)
    bias[..., key] = b
    wanted = np.where(allowed[..., key], np.exp(b) / (np.exp(b) + (allowed.sum(-1) - 1)), 0.0)
    biased = weighing(evenly(case), key).with_arrays(bias=bias)
    expect_equal(measure(attention, biased), wanted[..., None])


@law(
    "attention",
    case=attention_cases(),
    top=choice(1e3, 1e5),
    source="P07",
    relative=False,
    kills=("attention.py:softcap_overflows", "attention.py:no_maximum"),
)
def large_logits_stay_finite(attention: Subject, case: Case, top: float) -> None:
    """Logits far beyond where exp overflows give finite results."""
    expect_finite(attention(loud(case, top)))


@law(
    "attention",
    case=attention_cases(softcap=False, sink=False),
    depth=choice(60.0, 900.0, 20000.0),
    source="P07, P57",
    kills=("attention_tiled.py:tail_counts_phantom_keys",),
)
def low_logits_keep_their_mass(attention: Subject, case: Case, depth: float) -> None:
    """The weights of a row sum to 1 where all of its logits are far below 0."""
    depth = min(depth, 900.0) if case.dtype == "float16" else depth
    low = np.full(case["k"].shape, -depth / case.size("D") ** 0.5)
    deep = case.with_arrays(q=np.ones_like(case["q"]), k=low - np.abs(whole(case["k"])), v=np.ones_like(case["v"]))
    expect_equal(measure(attention, deep), 1.0)
