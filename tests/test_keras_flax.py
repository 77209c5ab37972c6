"""Keras and Flax are alive: a look at a variant of each, and a backend that cannot change after the import."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from toys import ROOT, run_python


def skip_without(*names: str) -> None:
    """Skip where a library is absent; Keras cannot be imported here, for it wants to know its backend."""
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize(
    ("target", "law", "needs"),
    [
        ("keras_torch:heads", "multi_head_attention/equals-the-reference", ("keras", "torch")),
        ("keras_torch:attention", "attention/zero-scale-averages", ("keras", "torch")),
        ("keras_jax:functions", "gelu/equals-the-reference", ("keras", "jax")),
        ("flax:linen_stable", "layer_norm/equals-the-reference", ("flax", "jax")),
        ("flax:nnx", "rms_norm/equals-the-reference", ("flax", "jax")),
    ],
)
def test_an_adapter_calls_its_library(target: str, law: str, needs: tuple[str, ...]) -> None:
    skip_without(*needs)
    words = ("check", target, "--law", law, "--effort", "look", "--dtype", "float32")
    done = run_python("-m", "veriformer", *words, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_keras_has_one_backend_in_a_process() -> None:
    skip_without("keras", "torch")
    code = "import veriformer.impls.keras_torch; import veriformer.impls.keras_jax"
    done = run_python("-c", code, folder=ROOT)
    assert done.returncode == 1 and "another backend" in done.stderr
