"""Gradients of norms' parameters inside layers, where a backward sums them over rows in 16 bits."""

from __future__ import annotations

import numpy as np
import torch

from veriformer.boundary import Request
from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.oracle import gradient_bounds
from veriformer.subject import Precision
from veriformer.targets import Options, load

WIDTH, LENGTH, INNER = 8, 192, 16
NORMS = {f"params.norm{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}
COTANGENT = np.random.default_rng(2).integers(-64, 65, (1, LENGTH, WIDTH)) / 64  # exact in bfloat16
COARSE = Capabilities(saved_statistics="storage", gradient_accumulate="storage")
FINE = Capabilities(saved_statistics="storage")


def layer(operation: str, prefix: str, **keywords: int) -> Case:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((1, LENGTH, WIDTH))}
    for name in "qkvo":
        arrays[f"{prefix}attention.w{name}"] = rng.standard_normal((WIDTH, WIDTH)) / 3
        arrays[f"{prefix}attention.b{name}"] = rng.standard_normal(WIDTH)
    for name, shape in {"1": (WIDTH, INNER), "2": (INNER, WIDTH)}.items():
        arrays[f"{prefix}feed_forward.w{name}"] = rng.standard_normal(shape) / 3
        arrays[f"{prefix}feed_forward.b{name}"] = rng.standard_normal(shape[1])
    for i in (1, 2):
        arrays[f"{prefix}norm{i}.weight"], arrays[f"{prefix}norm{i}.bias"] = np.ones(WIDTH), np.zeros(WIDTH)
    return Case(operation, arrays, {"heads": 2, **keywords}, "bfloat16")


def budgets(case: Case, capabilities: Capabilities, results: int = 1) -> dict:
    names = tuple(name for name in case.arrays if name != "x")
    cotangents = (COTANGENT[:, : case["x"].shape[1]], *[None] * (results - 1))
    return gradient_bounds(case, names, cotangents, capabilities, Precision.of(capabilities, case.dtype))


def test_only_norms_parameters_get_more_and_no_less_than_the_sum_may_lose():
    case = layer("encoder_layer", "params.")
    fine, coarse = budgets(case, FINE), budgets(case, COARSE)
    for name, bound in coarse.items():
        more = bound.allowed - fine[name].allowed
        assert np.array_equal(bound.value, fine[name].value)
        assert (more > 0).all() if name in NORMS else (more == 0).all(), name
    more = coarse["params.norm2.bias"].allowed - fine["params.norm2.bias"].allowed  # a plain sum of the cotangent
    assert np.allclose(more, 2.0**-8 * LENGTH * np.abs(COTANGENT).sum((0, 1)))


def test_the_weights_that_a_universal_transformer_uses_in_every_step_add_up():
    case = layer("universal_transformer", "params.layer.", max_steps=2)
    halting = {"params.halt.w": np.zeros((WIDTH, 1)), "params.halt.b": np.full(1, -5.0)}
    case = case.with_arrays(**{**case.arrays, "x": case["x"][:, :24]}, **halting)
    once = case.with_keywords(max_steps=1)
    name = "params.layer.norm2.bias"
    more = [budgets(c, COARSE, 3)[name].allowed - budgets(c, FINE, 3)[name].allowed for c in (once, case)]
    assert (more[1] > 1.01 * more[0]).all()


def test_torch_keeps_the_budget_that_it_declares_and_not_the_finer_one():
    case, name = layer("encoder_layer", "params."), "params.norm2.bias"
    loaded = next(one for one in load("torch", Options()) if one.description.name == "torch:layers")
    assert loaded.description.capabilities["encoder_layer"].gradient_accumulate == "storage"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        request = Request(case.arrays, case.keywords, case.dtype, gradient=(name,), cotangents=(COTANGENT,))
        outcome = loaded.boundaries["encoder_layer"].cross(request)
    finally:
        torch.set_num_threads(before)
    fine, coarse = (budgets(case, capabilities)[name] for capabilities in (FINE, COARSE))
    off = np.abs(outcome.gradients[name] - fine.value)
    assert (off <= coarse.allowed).all()
    assert (off > fine.allowed).any(), "torch sums in float32 now: drop gradient_accumulate from impls/torch_*.py"
