"""Implementations under test, one self-contained file each; none is exempt from the laws."""

NUMPY = ("veriformer.impls.numpy_plain", "veriformer.impls.numpy_blocked")
"""Modules behind the registered name `numpy`."""
TORCH = ("veriformer.impls.torch_functional", "veriformer.impls.torch_sdpa")
"""Modules behind the registered name `torch`."""
