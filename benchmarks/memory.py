"""Bytes that a call allocates for arrays, counted exactly: every allocation, also of what is freed at once.

torch's allocator reports to its profiler. NumPy's goes through a handler that can be replaced (NEP 49); ours counts
and calls the C library. Both numbers depend on shapes and code alone, not on the machine's mood.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

for _name, _level in (("KINETO_LOG_LEVEL", "99"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
    os.environ.setdefault(_name, _level)  # before torch is imported: its profiler talks on stderr

SET_HANDLER = 304
"""Where PyDataMem_SetHandler stands in NumPy's table of C functions (NumPy 1.22 and later)."""


def allocated(call: Callable[[], Any], framework: str) -> int:
    """Bytes that one call allocates for arrays of a framework, "torch" or "numpy"."""
    return _torch_bytes(call) if framework == "torch" else _numpy_bytes(call)


def _torch_bytes(call: Callable[[], Any]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = record.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


def _numpy_bytes(call: Callable[[], Any]) -> int:
    with counting() as count:
        call()
        return count[0]


_SIZE, _PLACE = ctypes.c_size_t, ctypes.c_void_p
_MALLOC = ctypes.CFUNCTYPE(_PLACE, _PLACE, _SIZE)
_CALLOC = ctypes.CFUNCTYPE(_PLACE, _PLACE, _SIZE, _SIZE)
_REALLOC = ctypes.CFUNCTYPE(_PLACE, _PLACE, _PLACE, _SIZE)
_FREE = ctypes.CFUNCTYPE(None, _PLACE, _PLACE, _SIZE)


class _Allocator(ctypes.Structure):
    _fields_ = [("context", _PLACE), ("malloc", _MALLOC), ("calloc", _CALLOC), ("realloc", _REALLOC), ("free", _FREE)]


class _Handler(ctypes.Structure):
    """PyDataMem_Handler of NumPy's C API."""

    _fields_ = [("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", _Allocator)]


def _library() -> Any:
    library = ctypes.CDLL(None)
    signatures = {"malloc": [_SIZE], "calloc": [_SIZE, _SIZE], "realloc": [_PLACE, _SIZE], "free": [_PLACE]}
    for name, given in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = given, None if name == "free" else _PLACE
    return library


_COUNTS: list[list[int]] = []
"""Of the blocks that count now, an inner one after the one around it."""
_KEPT: list[Any] = []
"""Handlers live as long as the process: arrays made under one are freed by it."""


def _handler() -> Any:
    """The capsule of the handler that counts, made once."""
    if not _KEPT:
        library = _library()

        def counted(function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
            def allocate(_: Any, *given: Any) -> Any:
                for count in _COUNTS:
                    count[0] += size(*given)
                return function(*given)

            return allocate

        allocator = _Allocator(
            None,
            _MALLOC(counted(library.malloc, lambda size: size)),
            _CALLOC(counted(library.calloc, lambda count, size: count * size)),
            _REALLOC(counted(library.realloc, lambda _, size: size)),
            _FREE(lambda _, place, size: library.free(place)),
        )
        handler = _Handler(b"veriformer_counting", 1, allocator)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [_PLACE, ctypes.c_char_p, _PLACE]
        _KEPT.extend([handler, new(ctypes.addressof(handler), b"mem_handler", None)])
    return _KEPT[1]


def _set_handler(capsule: Any) -> Any:
    _multiarray_umath = importlib.import_module("numpy._core._multiarray_umath")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = _PLACE, [ctypes.py_object, ctypes.c_char_p]
    place: Any = pointer(_multiarray_umath._ARRAY_API, None)
    table = ctypes.cast(place, ctypes.POINTER(_PLACE))
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[SET_HANDLER])(capsule)


@contextmanager
def counting() -> Iterator[list[int]]:
    """The one entry of the list is how many bytes NumPy allocates for arrays until the block ends."""
    before, count = _set_handler(_handler()), [0]
    _COUNTS.append(count)
    try:
        yield count
    finally:
        _COUNTS.pop()
        _set_handler(before)
