"""Budgets of the Universal Transformer: what they hold, and which sequences are open."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from judging import tensor
from perturbing import ratio
from reference_models import converted
from universal_models import HEADS, random_states, random_universal

from veriformer import oracle
from veriformer.budgets import Precision
from veriformer.case import Case, flattened
from veriformer.declarations import Capabilities
from veriformer.impls import numpy_universal, torch_universal, torch_universal_compacted
from veriformer.reference.universal import universal_transformer
from veriformer.reference.universal_dialects import dialect_and_halting

OPERATION = "universal_transformer"
NUMPY = numpy_universal.CAPABILITIES["universal"][OPERATION]
TORCH = torch_universal.CAPABILITIES["universal"][OPERATION]


def case_of(seed=4, dtype="float32", batch=2, length=4, bias=None, **keywords):
    params = random_universal(seed)
    arrays = {"x": random_states(seed, batch, length), **flattened(params, "params")}
    if bias is not None:
        arrays["params.halt.b"] = np.asarray(bias)
    return Case(OPERATION, arrays, {"heads": HEADS, "max_steps": 4, "causal": True, **keywords}, dtype)


def bounds_of(case, capabilities=NUMPY):
    return oracle.bounds(case, capabilities, Precision.of(capabilities, case.dtype))


def sums_of(case):
    """H[B,T,M] of the float64 reference, and N[B,T]."""
    (_, steps, _), h = dialect_and_halting(case["x"], case.params, **case.keywords)
    return h.cumsum(-1), steps


def on_the_edge(case, position, n):
    """The case whose epsilon puts H_n of a position of the first sequence exactly on the threshold."""
    sums, steps = sums_of(case)
    assert n <= steps[0, position]
    return case.with_keywords(epsilon=float(1 - sums[0, position, n - 1]))


def test_values_are_the_reference_and_gradients_its_gradients():
    case = case_of(dtype="float64")
    tensors = converted(lambda array: torch.from_numpy(array.copy()), case.params)
    x, w = torch.from_numpy(case["x"].copy()).requires_grad_(), tensors["halt"]["w"].clone().requires_grad_()
    tensors["halt"]["w"] = w
    out, steps, remainder = universal_transformer(x, tensors, **case.keywords)
    cotangents = (np.ones(out.shape), None, 2 * np.ones(remainder.shape))
    found = bounds_of(case, Capabilities())
    for bound, wanted in zip(found, (out, steps, remainder), strict=True):
        np.testing.assert_allclose(bound.value, wanted.detach().numpy(), rtol=1e-12, atol=1e-14)
    names = ("x", "params.halt.w")
    gradients = oracle.gradient_bounds(case, names, cotangents, Capabilities(), Precision("float64"))
    for name, wanted in zip(names, torch.autograd.grad(out.sum() + 2 * remainder.sum(), (x, w)), strict=True):
        np.testing.assert_allclose(gradients[name].value, wanted.numpy(), rtol=1e-9, atol=1e-12)
        assert (gradients[name].allowed < 1e-9).all()


def test_steps_are_exact_and_so_is_the_remainder_of_a_single_one():
    case = case_of(epsilon=0.5)
    out, steps, remainder = bounds_of(case)
    assert (steps.allowed == 0).all() and 1 in steps.value and steps.value.max() > 1
    assert ((remainder.allowed == 0) == (steps.value == 1)).all()
    assert ((out.allowed > 0) & (out.allowed < 1e-4)).all()


def test_padding_must_be_exactly_zero():
    mask = np.arange(4) < np.asarray([[4], [2]])
    found = bounds_of(case_of().with_arrays(mask=mask))
    for bound in found:
        assert (bound.value[1, 2:] == 0).all() and (bound.allowed[1, 2:] == 0).all()


@pytest.mark.parametrize("n", [1, 2])
def test_a_sum_on_the_threshold_opens_its_sequence_and_no_other(n):
    sums, steps = sums_of(case_of())
    position = int(np.argmax(steps[0] > n))
    case = on_the_edge(case_of(), position, n)
    for bound in bounds_of(case):
        assert np.isposinf(bound.allowed[0]).all() and np.isfinite(bound.allowed[1]).all()
    gradients = oracle.gradient_bounds(
        case, ("x", "params.halt.b"), (np.ones((2, 4, 8)), None, None), NUMPY, Precision.of(NUMPY, "float32")
    )
    assert np.isposinf(gradients["x"].allowed[0]).all() and np.isfinite(gradients["x"].allowed[1]).all()
    assert np.isposinf(gradients["params.halt.b"].allowed).all()


def test_how_near_is_open_follows_the_precision():
    case = on_the_edge(case_of(), 0, 1)
    case = case.with_keywords(epsilon=case["epsilon"] + 1e-4)
    for dtype, capabilities, is_open in (("float32", NUMPY, False), ("float16", TORCH, True)):
        other = Case(OPERATION, case.arrays, case.keywords, dtype)
        assert np.isposinf(bounds_of(other, capabilities)[0].allowed[0]).all() == is_open


def test_sums_that_decide_nothing_open_nothing():
    """Those after a position has halted, and that of the last step there is, where it halts anyway."""
    case = case_of(batch=1, length=1, bias=[-3.0], max_steps=2)
    sums, steps = sums_of(case)
    assert steps.tolist() == [[2]]
    last = case.with_keywords(epsilon=float(1 - sums[0, 0, 1]))
    assert np.isfinite(bounds_of(last)[0].allowed).all()
    assert np.isposinf(bounds_of(last.with_keywords(max_steps=3))[0].allowed).all()


def test_padding_does_not_open_a_sequence():
    case = on_the_edge(case_of(causal=True), 3, 1)
    assert np.isposinf(bounds_of(case)[0].allowed[0]).all()
    mask = np.ones((2, 4), bool)
    mask[0, 3] = False
    assert np.isfinite(bounds_of(case.with_arrays(mask=mask))[0].allowed).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_correct_implementations_stay_within(dtype, norm):
    closed = 0
    for seed in (4, 13, 20):
        case = case_of(seed, dtype, norm=norm, max_steps=3)
        for function, capabilities in (
            (torch_universal.universal_transformer, TORCH),
            (torch_universal_compacted.universal_transformer, TORCH),
        ):
            tree = converted(lambda array: tensor(array.copy(), dtype), {"x": case["x"], **case.params})
            got = function(tree.pop("x"), tree, **case.keywords)
            for result, bound in zip(got, bounds_of(case, capabilities), strict=True):
                assert ratio(result, bound, dtype) <= 1
                closed += int(np.isfinite(bound.allowed).sum())
    assert closed > 200
