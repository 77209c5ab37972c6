"""Our Universal Transformers against the reference, preset by preset, and what the early end of a loop saves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference_models import close, converted
from universal_models import HEADS, random_states, random_universal, with_halting

from veriformer.impls import numpy_universal, torch_universal, torch_universal_compacted
from veriformer.reference.universal_dialects import PRESETS, universal_dialect

TORCH = {
    name: found["universal_transformer"]
    for name, found in (torch_universal.VARIANTS | torch_universal_compacted.VARIANTS).items()
}
SEEDS = (1, 4, 10, 13, 20)


def problem(seed: int, cross: bool):
    """(x, params), keywords."""
    rng = np.random.default_rng(seed)
    keywords = {
        "heads": HEADS, "max_steps": 1 + seed % 5, "norm": ("post", "pre")[seed % 2], "causal": seed % 3 > 0,
        "epsilon": (0.01, 0.3)[seed % 2], "mask": rng.random((2, 5)) < 0.7 if seed % 3 else None,
    }  # fmt: skip
    if cross:
        keywords |= {"memory": random_states(seed + 1, 2, 3), "memory_mask": rng.random((2, 3)) < 0.7}
    return (random_states(seed, 2, 5), random_universal(seed, cross=cross)), keywords


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_numpy_gives_what_the_reference_gives_in_every_preset(preset, cross):
    for seed in SEEDS:
        arrays, keywords = problem(seed, cross)
        found = numpy_universal.universal_transformer(*arrays, preset=preset, **keywords)
        for got, wanted in zip(found, universal_dialect(*arrays, preset=preset, **keywords), strict=True):
            close(got, wanted, 1e-12)
            assert got.dtype == wanted.dtype


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", TORCH)
def test_torch_gives_what_the_reference_gives(name, cross):
    for seed in SEEDS:
        arrays, keywords = problem(seed, cross)
        found = TORCH[name](*converted(torch.from_numpy, arrays), **converted(torch.from_numpy, keywords))
        for got, wanted in zip(found, universal_dialect(*arrays, **keywords), strict=True):
            close(got, wanted, 1e-12)
            assert str(got.dtype) == f"torch.{wanted.dtype}"


@pytest.mark.parametrize("function", [numpy_universal.universal_transformer, TORCH["universal_compacted"]])
def test_a_loop_that_may_stop_early_does(function):
    """A million steps would take minutes."""
    x, params = random_states(0, 1, 3), with_halting(random_universal(0), 3.0)
    if "torch" in function.__module__:
        x, params = converted(torch.from_numpy, (x, params))
    _, steps, _ = function(x, params, heads=HEADS, max_steps=10**6)
    assert steps.max() == 2


@pytest.mark.parametrize("function", [numpy_universal.universal_transformer, *TORCH.values()])
@pytest.mark.parametrize("words", [{"norm": "deep"}, {"max_steps": 0}, {"epsilon": 1.0}])
def test_what_makes_no_sense_is_refused(function, words):
    x, params = random_states(0, 1, 2), random_universal(0)
    if "torch" in function.__module__:
        x, params = converted(torch.from_numpy, (x, params))
    with pytest.raises(ValueError, match=next(iter(words))):
        function(x, params, **{"heads": HEADS, "max_steps": 2, **words})
