"""Training steps in NumPy and torch against numbers of Python."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

from veriformer.declarations import Capabilities

ARRAYS = ([1.0, -2.0, 0.5], [0.25, -3.0, 1e-3], [0.1, 0.2, -0.3], [0.5, 0.01, 0.125])
WORDS = {"lr": 0.01, "beta1": 0.8, "beta2": 0.96, "eps": 1e-3, "weight_decay": 0.5}
GRADS = ([[3.0, -1.0], [0.0, 2.0]], [1.0])


def variants() -> list[tuple[str, str, str]]:
    """(module, variant, operation) of all that come with the package."""
    found = []
    for module in ("numpy_optimizer", "torch_optimizer", "torch_flat"):
        if module.startswith("torch") and not importlib.util.find_spec("torch"):
            continue
        table = importlib.import_module(f"veriformer.impls.{module}").VARIANTS
        found += [(module, variant, operation) for variant, functions in table.items() for operation in functions]
    return found


ALL = variants()


def of(module: str, variant: str, operation: str) -> tuple[Any, Capabilities]:
    """A function and what it declares."""
    loaded = importlib.import_module(f"veriformer.impls.{module}")
    declared = loaded.CAPABILITIES.get(variant, {}).get(operation, Capabilities())
    return loaded.VARIANTS[variant][operation], declared


def array(module: str, values: Any) -> Any:
    """float64 of the module's framework."""
    if module == "numpy_optimizer":
        return np.asarray(values, dtype=np.float64)
    import torch

    return torch.tensor(values, dtype=torch.float64)


def chosen(operation: str) -> Any:
    """All implementations of one operation, as parameters."""
    return pytest.mark.parametrize(("module", "variant"), [(m, v) for m, v, found in ALL if found == operation])


def moved(param: float, grad: float, m: float, v: float, step: int, declared: Capabilities) -> tuple[float, ...]:
    """One number's step."""
    lr, beta1, beta2, eps, decay = WORDS.values()
    if declared.weight_decay == "coupled":
        grad, decay = grad + decay * param, 0.0
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
    c1, c2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
    root = (math.sqrt(v) + eps) / c2 if declared.adam_epsilon == "uncorrected" else math.sqrt(v) / c2 + eps
    return param - lr * decay * param - lr * m / c1 / root, m, v


@chosen("adamw_step")
@pytest.mark.parametrize("step", [1, 2, 50])
def test_steps_are_those_of_single_numbers(module: str, variant: str, step: int) -> None:
    function, declared = of(module, variant, "adamw_step")
    given = [array(module, values) for values in ARRAYS]
    found = np.stack([np.asarray(one) for one in function(*given, step, **WORDS)])
    wanted = np.array([moved(*numbers, step, declared) for numbers in zip(*ARRAYS, strict=True)]).T
    np.testing.assert_allclose(found, wanted, rtol=1e-13)
    assert [np.asarray(one).tolist() for one in given] == list(ARRAYS)


@chosen("clip_by_global_norm")
@pytest.mark.parametrize("max_norm", [0.5, 3.0, 100.0])
def test_clipping_is_that_of_single_numbers(module: str, variant: str, max_norm: float) -> None:
    function, declared = of(module, variant, "clip_by_global_norm")
    given = [array(module, values) for values in GRADS]
    factor = min(1.0, max_norm / (math.sqrt(15) + declared.clip_epsilon))
    for got, values in zip(function(given, max_norm=max_norm), GRADS, strict=True):
        np.testing.assert_allclose(np.asarray(got), factor * np.array(values), rtol=1e-13)
    assert [np.asarray(g).tolist() for g in given] == list(GRADS)


@chosen("noam_schedule")
@pytest.mark.parametrize(("step", "rate"), [(0, 0.0), (1, 0.0625), (4, 0.25), (16, 0.125), (64, 0.0625)])
def test_rates_are_those_of_the_formula(module: str, variant: str, step: int, rate: float) -> None:
    function, _ = of(module, variant, "noam_schedule")
    got = np.asarray(function(step, width=4, warmup=4))
    assert got.shape == () and got == pytest.approx(rate, rel=1e-6)


def test_a_norm_is_not_lost_with_its_squares() -> None:
    clip, _ = of("numpy_optimizer", "optimizer", "clip_by_global_norm")
    np.testing.assert_allclose(clip([np.float32([3e25, 4e25])], max_norm=1.0)[0], [0.6, 0.8], rtol=1e-6)
    assert clip([np.zeros(2)], max_norm=1.0)[0].tolist() == [0, 0] and clip([], max_norm=1.0) == []
