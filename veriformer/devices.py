"""What torch says of a device that is not the CPU: whether it is there, its name, its random state, its health."""

from __future__ import annotations

from typing import Any


def usable(torch: Any, name: str) -> str:
    """The device as torch calls it. Raises ValueError, in one line, for one that is not there."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise ValueError(f"device {name!r}: torch {torch.__version__} cannot use it here: {first}") from None
    return name


def named(torch: Any, device: str) -> dict[str, str]:
    """The entry "device" for the header, none for the CPU."""
    if device.startswith("cuda"):
        return {"device": f"{device}, {torch.cuda.get_device_name(device)}"}
    return {} if device == "cpu" else {"device": device}


def random_state(torch: Any, device: str) -> dict[str, Any]:
    """A GPU's own random state, which a call must not change."""
    if not device.startswith("cuda"):
        return {}
    return {"CUDA's random state": torch.cuda.get_rng_state(device).numpy().tobytes()}


def trouble(torch: Any, device: str) -> str:
    """Why a GPU can be asked for nothing more, as after a kernel that reads where it must not; "" where all is well."""
    if not device.startswith("cuda"):
        return ""
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).cpu()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""
