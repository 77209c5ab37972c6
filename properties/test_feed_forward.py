"""Laws of feed_forward."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.budgets import Bound
from veriformer.case import Case
from veriformer.expect import expect_close, expect_same
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.cotangents import cotangent_of
from veriformer.properties.measured import expect_equal, measure
from veriformer.properties.pairings import pairing
from veriformer.properties.rows import expect_unmoved, with_other_rows_changed
from veriformer.properties.rows_cases import FORWARD, feed_forward_cases
from veriformer.subject import Subject


def with_units(case: Case, units: np.ndarray) -> Case:
    """The case with some of its hidden units, in that order."""
    return case.with_arrays(w1=case["w1"][:, units], b1=case["b1"][units], w2=case["w2"][units])


def into_rows(case: Case) -> np.ndarray:
    """The rows of x, [rows, d]."""
    return case["x"].reshape(-1, case.size("d"))


@law(
    "feed_forward",
    case=feed_forward_cases(rows=2),
    source="P82, R02",
    changes=("leak",),
    kills=("feed_forward.py:width_three_convolution", "feed_forward.py:last_row_of_block_reused"),
)
def rows_are_independent(feed_forward: Subject, case: Case) -> None:
    """A token's result does not depend on the other tokens."""
    changed, kept = with_other_rows_changed(case)
    expect_unmoved(feed_forward, case, changed, kept)


@law(
    "feed_forward",
    case=feed_forward_cases(rows=2),
    source="P82, R05",
    kills=(
        "feed_forward.py:width_three_convolution",
        "feed_forward.py:row_tail_dropped",
        "feed_forward.py:rank_three_takes_the_first",
    ),
)
def positions_are_alike(feed_forward: Subject, case: Case) -> None:
    """Tokens in another order, and cut into other leading axes, have the same results: every position is alike."""
    rows = into_rows(case)
    order = case.random().permutation(len(rows))
    got = measure(feed_forward, case).rearranged(lambda array: array.reshape(rows.shape)[order])
    for shape in (rows.shape, (1, len(rows), 1, rows.shape[1])):
        moved = measure(feed_forward, case.with_arrays(x=rows[order].reshape(shape)))
        expect_equal(moved.rearranged(lambda array: array.reshape(rows.shape)), got)


@law(
    "feed_forward",
    case=feed_forward_cases(inner=2),
    source="P82",
    kills=(
        "feed_forward.py:unit_tail_dropped",
        "feed_forward.py:first_weight_transposed",
        "feed_forward.py:second_weight_transposed",
        "feed_forward.py:first_bias_rolled",
    ),
)
def hidden_units_permute(feed_forward: Subject, case: Case) -> None:
    """Hidden units in another order, each with its weights and its bias, change nothing."""
    order = case.random().permutation(case.size("f"))
    expect_equal(measure(feed_forward, with_units(case, order)), measure(feed_forward, case))


@law(
    "feed_forward",
    case=feed_forward_cases(biases=False, families=("normal", "integers", "one_hot", "sparse", "halves")),
    factors=choice((2.0, 0.5), (4.0, 1.0), (0.5, 8.0), (1.0, -2.0), (2.0, -1.0)),
    source="P82",
    kills=(
        "feed_forward.py:gelu_for_relu",
        "feed_forward.py:softplus_for_relu",
        "feed_forward.py:hidden_capped_at_six",
        "feed_forward.py:residual_added",
        "feed_forward.py:first_bias_always_one",
    ),
)
def goes_with_both_weights(feed_forward: Subject, case: Case, factors: tuple[float, float]) -> None:
    """Without biases, w1 times a > 0 and w2 times b give the result times a b: of degree 2 in (w1, w2), either sign."""
    a, b = factors
    scaled = case.with_arrays(w1=case["w1"] * a, w2=case["w2"] * b)
    exact = (scaled["w1"] == case["w1"] * a).all() and (scaled["w2"] == case["w2"] * b).all()
    if exact:
        expect_equal(measure(feed_forward, scaled), measure(feed_forward, case) * (a * b))


@law(
    "feed_forward",
    case=feed_forward_cases(),
    source="P82",
    kills=(
        "feed_forward.py:relu_after_the_second_layer",
        "feed_forward.py:second_bias_in_the_activation",
        "feed_forward.py:residual_added",
    ),
)
def both_signs_come_out(feed_forward: Subject, case: Case) -> None:
    """w2 and b2 with the other sign give the result with the other sign: nothing follows the second layer."""
    turned = case.with_arrays(w2=-case["w2"], b2=-case["b2"])
    expect_equal(measure(feed_forward, turned), measure(feed_forward, case) * -1.0)


@law(
    "feed_forward",
    case=feed_forward_cases(),
    source="P75, P82, R45",
    relative=False,
    kills=(
        "feed_forward.py:second_bias_ignored",
        "feed_forward.py:residual_added",
        "feed_forward.py:relu_after_the_second_layer",
    ),
)
def silent_second_layer_gives_its_bias(feed_forward: Subject, case: Case) -> None:
    """With w2 = 0 every token gets b2, bit for bit."""
    got = feed_forward(case.with_arrays(w2=np.zeros_like(case["w2"])))
    expect_same(got, np.broadcast_to(case["b2"], got.shape))


@law(
    "feed_forward",
    case=feed_forward_cases(inner=2),
    source="P82",
    kills=(
        "feed_forward.py:activation_is_missing",
        "feed_forward.py:first_bias_after_the_activation",
        "feed_forward.py:first_bias_ignored",
        "feed_forward.py:hidden_units_leak",
    ),
)
def silent_units_can_be_removed(feed_forward: Subject, case: Case) -> None:
    """A hidden unit whose bias holds it below 0 for every token has no influence."""
    units = np.arange(case.size("f"))
    low = -8.0 * (1 + np.ceil((np.abs(into_rows(case)) @ np.abs(case["w1"])).max()))
    held = case.with_arrays(b1=np.where(units % 2, low, case["b1"]))
    expect_equal(measure(feed_forward, held), measure(feed_forward, with_units(case, units[units % 2 == 0])))


@law(
    "feed_forward",
    case=feed_forward_cases(families=FORWARD),
    source="P82, R24",
    kills=("feed_forward.py:first_bias_ignored", "feed_forward.py:first_bias_after_the_activation"),
)
def open_units_are_linear(feed_forward: Subject, case: Case) -> None:
    """Where every hidden unit is held above 0, x and -x give 2 (b1 w2 + b2) between them."""
    high = 2.0 ** np.ceil(np.log2(1 + (np.abs(into_rows(case)) @ np.abs(case["w1"])).max()))
    held = case.with_arrays(b1=np.full(case.size("f"), high))
    there, back = (measure(feed_forward, held.with_arrays(x=x)) for x in (case["x"], -case["x"]))
    middle = 2 * (held["b1"] @ case["w2"] + case["b2"])
    expect_close(there.value + back.value, middle, there.allowed + back.allowed, what="the sum over x and -x")


def euler(names: tuple[str, ...], case: Case, found: dict[str, Any], bounds: dict[str, Bound]) -> tuple[Any, Any]:
    """The sum of <a, da> over some arrays, and its error."""
    parts = [pairing(case[name], found[name], bounds[name].allowed) for name in names]
    return sum(total for total, _ in parts), sum(error for _, error in parts)


@law(
    "feed_forward",
    case=feed_forward_cases(),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="P82, R16",
    kills=(
        "rows_vjp.py:ffn_second_weight_from_before_relu",
        "rows_vjp.py:ffn_second_weight_of_the_last_batch",
        "rows_vjp.py:ffn_second_bias_is_a_mean",
        "rows_gradient.py:ffn_second_weight_of_the_last_batch",
    ),
)
def second_layer_obeys_euler(feed_forward: Subject, case: Case, pick: int) -> None:
    """The result is linear in (w2, b2): <w2, dw2> + <b2, db2> = <g, y>."""
    cotangent, names = cotangent_of(case, pick), ("w2", "b2")
    found, bounds = feed_forward.gradients_with_bounds(case, names, cotangent)
    if all(found[name] is not None for name in names):
        y = measure(feed_forward, case)
        total, allowed = euler(names, case, found, bounds)
        wanted, error = pairing(cotangent, y.value, y.allowed)
        expect_close(total, wanted, allowed + error, what="<w2, dw2> + <b2, db2>")


@law(
    "feed_forward",
    case=feed_forward_cases(),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="P82, R16",
    kills=(
        "rows_vjp.py:ffn_relu_skipped_in_backward",
        "rows_vjp.py:ffn_first_weight_of_the_last_batch",
        "rows_vjp.py:ffn_first_bias_over_the_wrong_axis",
        "rows_vjp.py:ffn_input_through_untransposed_weight",
    ),
)
def first_layer_obeys_euler(feed_forward: Subject, case: Case, pick: int) -> None:
    """y - b2 goes with (w1, b1) and with (x, b1): <w1, dw1> + <b1, db1> = <x, dx> + <b1, db1> = <g, y - b2>."""
    cotangent, names = cotangent_of(case, pick), ("x", "w1", "b1")
    found, bounds = feed_forward.gradients_with_bounds(case, names, cotangent)
    if all(found[name] is not None for name in names):
        y = measure(feed_forward, case)
        wanted, error = pairing(cotangent, y.value - case["b2"], y.allowed)
        for pair in (("w1", "b1"), ("x", "b1")):
            total, allowed = euler(pair, case, found, bounds)
            expect_close(total, wanted, allowed + error, what=f"<{pair[0]}, d{pair[0]}> + <b1, db1>")


@law(
    "feed_forward",
    case=feed_forward_cases(inner=2),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P82, R16",
    relative=False,
    kills=(
        "rows_vjp.py:ffn_relu_skipped_in_backward",
        "rows_vjp.py:ffn_second_weight_from_before_relu",
        "rows_gradient.py:ffn_relu_skipped_in_backward",
    ),
)
def silent_units_get_no_gradient(feed_forward: Subject, case: Case, pick: int) -> None:
    """The weights and the bias of a hidden unit that is below 0 for every token get a gradient of exactly 0."""
    silent = np.arange(case.size("f")) % 2 == 1
    low = -8.0 * (1 + np.ceil((np.abs(into_rows(case)) @ np.abs(case["w1"])).max()))
    held = case.with_arrays(b1=np.where(silent, low, case["b1"]))
    found = feed_forward.gradients(held, ("w1", "b1", "w2"), cotangent_of(case, pick))
    for name, gradient in found.items():
        if gradient is not None:
            part = gradient[silent] if name == "w2" else gradient[..., silent]
            expect_same(part, np.zeros_like(part), what=f"the gradient of {name} of a silent unit is")
