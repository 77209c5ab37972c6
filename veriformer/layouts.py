"""Memory layouts in which arrays are given: the same values, strides or offsets of their own."""

from __future__ import annotations

from typing import Any

import numpy as np


def lay_out(array: Any, layout: str, empty: Any) -> Any:
    """The same values in another memory layout; `empty(shape)` makes a buffer of the framework."""
    if layout == "contiguous" or array.ndim == 0:
        return array
    shape = list(array.shape)
    if layout == "expanded":
        return array
    if layout == "transposed" and len(shape) > 1:
        buffer = empty([*shape[:-2], shape[-1], shape[-2]])
        view = buffer.swapaxes(-1, -2)
    elif layout == "offset":
        buffer = empty([shape[0] + 1, *shape[1:]])
        view = buffer[1:]
    else:
        buffer = empty([*shape[:-1], 2 * shape[-1] + 1])
        view = buffer[..., 1::2]
    view[...] = array
    return view


def constant_axis(values: np.ndarray) -> int | None:
    """The first axis along which nothing changes, so that stride 0 can stand for it."""
    for axis, length in enumerate(values.shape):
        if length > 1 and (values == values.take([0], axis)).all():
            return axis
    return None
