"""A graph in an ONNX file as a function: its inputs by our names, run by ONNX Runtime or the reference evaluator.

The function is written as source, so that the script of a failure holds the very text that was called.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from veriformer.calling import UsageError, meaning_of, names_of, nearest
from veriformer.declarations import DTYPES, Capabilities
from veriformer.operation import Operation
from veriformer.operations import OPERATIONS

INSTALL = "pip install veriformer[onnx]"
ROWS = ("softmax", "log_softmax", "logsumexp")
"""Operations whose last axis is one of its own, though the table gives no name to it."""
FOLDING = '''def folded(x, leading, trailing):
    """x with as many axes before the last ones as the file wants."""
    if x.ndim == leading + trailing:
        return x
    return x.reshape((1,) * (leading - 1) + (-1,) * (leading > 0) + x.shape[x.ndim - trailing :])


def unfolded(y, x, leading, trailing):
    """A result with the axes that x has before its last ones."""
    return y if x.ndim == leading + trailing else y.reshape(x.shape[: x.ndim - trailing] + y.shape[leading:])


'''
_EMPTY = {"mask": "np.ones({shape}, bool)", "bias": "np.zeros({shape})", "sink": "np.full({shape}, -np.inf)"}
"""What an array stands for that a case does not give, but the file wants: it changes nothing."""


@dataclass(frozen=True)
class Input:
    """An input of a graph. shape: None where a size may be any; itself None where the file does not say."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class GraphFunction:
    """A graph as a function of an operation's arrays and keywords.

    text: lines for a script that define the same function there. module: says what runs it, as its DISTRIBUTIONS.
    """

    function: Callable[..., Any]
    capabilities: Capabilities
    text: str
    module: ModuleType


def load_graph(operation: str, place: str, everything: bool = False) -> GraphFunction:
    """The function behind an ONNX file; everything: it returns all outputs, in the file's order.

    Raises UsageError where the file cannot be read, or its inputs or outputs do not fit the operation.
    """
    table, path = OPERATIONS[operation], Path(place)
    if table.words or table.given or table.listed or "params" in table.positional:
        raise UsageError(f"{operation}: a graph takes arrays, and this operation is called with more; name a function")
    model = _read(path)
    held = {one.name for one in model.graph.initializer}
    inputs = [_input(one) for one in model.graph.input if one.name not in held]
    bound = _bind(table, inputs, path)
    dtype = _dtype(table, bound, path)
    _check_sizes(bound, path)
    outputs = [one.name for one in model.graph.output]
    places = list(range(len(outputs))) if everything else _places(table, outputs, path)
    source = _source(table, bound, dtype, places)
    reference = dtype == "bfloat16" or importlib.util.find_spec("onnxruntime") is None  # NumPy's bfloat16 is not taken
    header = _header(path, reference)
    module = ModuleType(path.stem)
    vars(module).update(np=np, run=Runner(path, header, inputs))
    vars(module)["DISTRIBUTIONS"] = ("onnx",) if reference else ("onnxruntime", "onnx")
    exec(source, vars(module))
    additive = "mask" in bound and bound["mask"].dtype in DTYPES
    capabilities = Capabilities(
        dtypes=(dtype,) if dtype else (),
        mask_means="additive" if additive else "attend",
        widths=_widths(table, bound),
        value_width="equal" if _widths(table, bound) and "v" in bound else "any",
    )
    text = "\n".join([*header, "", "", *source.splitlines(), "", ""])
    return GraphFunction(vars(module)[operation], capabilities, text, module)


def _read(path: Path) -> Any:
    """The model, without the data that lies in other files, which must be there."""
    if not path.is_file():
        names = [str(one) for one in path.parent.glob("*.onnx")] if path.parent.is_dir() else []
        raise UsageError(f"no file {path}{nearest(str(path), names)}")
    if importlib.util.find_spec("onnx") is None:
        raise UsageError(f"{path} needs onnx, which is not installed: {INSTALL}")
    import onnx  # noqa: PLC0415

    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise UsageError(f"{path} is not an ONNX file ({type(error).__name__})") from error
    if not model.graph.output:
        raise UsageError(f"{path} is not an ONNX file: no graph with an output was found in it")
    for tensor in model.graph.initializer:
        where = {one.key: one.value for one in tensor.external_data}.get("location", "")
        if where and not (path.parent / where).is_file():
            raise UsageError(f"{path} keeps {tensor.name!r} in {where}, which is not beside it")
    return model


def _input(value: Any) -> Input:
    import onnx  # noqa: PLC0415

    kind = value.type.tensor_type
    try:
        dtype = str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    except KeyError:
        raise UsageError(f"input {value.name!r} of the graph is no array of numbers") from None
    if not kind.HasField("shape"):
        return Input(value.name, dtype, None)
    sizes = tuple(one.dim_value if one.HasField("dim_value") else None for one in kind.shape.dim)
    return Input(value.name, dtype, sizes)


def _bind(table: Operation, inputs: list[Input], path: Path) -> dict[str, Input]:
    """Our names for the inputs: by name or alias, what is left by position. Raises UsageError where one has none."""
    bound: dict[str, Input] = {}
    left: list[Input] = []
    for one in inputs:
        ours = _meaning(table, one)
        if ours and ours not in bound:
            bound[ours] = one
        else:
            left.append(one)
    free = [name for name in table.positional if name not in bound]
    if len(left) > len(free):
        extra = left[len(free)]
        words = [alias for ours in (*table.keywords, *table.options) for alias in names_of(ours, table)]
        raise UsageError(
            f"{path}: input {extra.name!r} has no known meaning in {table.name}"
            f"{nearest(extra.name, [*table.positional, *words])}"
        )
    if len(left) < len(free):
        raise UsageError(
            f"{path}: no input for {free[len(left)]!r}; the graph takes {', '.join(one.name for one in inputs)}, "
            f"wanted {', '.join(table.positional)}: a weight kept inside the file must become an input"
        )
    bound |= dict(zip(free, left, strict=True))
    for ours, one in bound.items():
        _check_rank(table, ours, one, path)
    return bound


def _meaning(table: Operation, one: Input) -> str:
    """Our word for an input, by its name; of several, as of attn_mask, the one that its dtype fits. Or nothing."""
    if one.name in table.positional:
        return one.name
    meanings = [word for word in meaning_of(one.name, table) if not isinstance(table.keywords.get(word), str)]
    if len(meanings) > 1 and "mask" in meanings:
        return "bias" if one.dtype in DTYPES else "mask"
    return meanings[0] if meanings else ""


def _check_rank(table: Operation, ours: str, one: Input, path: Path) -> None:
    if not (table.knows(ours) and one.shape is not None):
        return
    axes = table.axes(ours)
    if "..." not in axes and len(axes) != len(one.shape):
        raise UsageError(
            f"{path}: input {one.name!r} has {len(one.shape)} axes, {ours} of {table.name} has {len(axes)}: "
            f"[{', '.join(axes)}]"
        )


def _check_sizes(bound: Mapping[str, Input], path: Path) -> None:
    shapes = [one.shape for one in bound.values()]
    if all(shape is not None and None not in shape for shape in shapes) and any(shapes):
        sizes = ", ".join(f"{one.name}{list(one.shape or ())}" for one in bound.values())
        raise UsageError(f"{path} fixes every size ({sizes}), so no other could be judged: export it with dynamic axes")


def _widths(table: Operation, bound: Mapping[str, Input]) -> tuple[int, ...]:
    """The only width of heads that the file takes, where it fixes it."""
    found = [
        size
        for ours, one in bound.items()
        if table.knows(ours) and one.shape is not None and "..." not in table.axes(ours)
        for axis, size in zip(table.axes(ours), one.shape, strict=True)
        if axis == "D" and size
    ]
    return tuple(found[:1])


def _dtype(table: Operation, bound: Mapping[str, Input], path: Path) -> str:
    """The dtype in which the graph computes: that of its first array of real numbers."""
    found = [one.dtype for ours, one in bound.items() if ours in table.arrays and table.kind(ours) != "int"]
    for dtype in found:
        if dtype not in DTYPES:
            raise UsageError(f"{path}: an input holds {dtype}, wanted one of {', '.join(DTYPES)}")
    return found[0] if found else ""


def _places(table: Operation, outputs: list[str], path: Path) -> list[int]:
    """Where the operation's results are among the outputs: by name where all are named, else in order."""
    if len(outputs) < len(table.results):
        raise UsageError(f"{path} has {len(outputs)} outputs, wanted {len(table.results)}: {', '.join(table.results)}")
    if all(name in outputs for name in table.results):
        return [outputs.index(name) for name in table.results]
    return list(range(len(table.results)))


def _source(table: Operation, bound: Mapping[str, Input], dtype: str, places: list[int]) -> str:
    """The text of the function."""
    words = [name for name in bound if name not in table.positional]
    axes = {
        axis: f"{name}.shape[{i - len(table.axes(name))}]"
        for name in reversed(list(table.arrays))
        for i, axis in enumerate(table.axes(name))
    }
    head = ", ".join([*table.positional, *(("*", *words) if words else ())])
    values = {ours: _value(table, ours, one, dtype, axes) for ours, one in bound.items()}
    for ours in values:
        if (leading := _leading(table, ours, bound)) is not None:
            values[ours] = f"folded({values[ours]}, {leading}, {_trailing(table, ours)})"
    feeds = [f"        {one.name!r}: {values[ours]}," for ours, one in bound.items()]
    picked = [f"results[{place}]" for place in places]
    first = next((name for name in table.arrays if _leading(table, name, bound) is not None), None)
    if first is not None:
        sides = f"{_leading(table, first, bound)}, {_trailing(table, first)}"
        picked = [f"unfolded({one}, {first}, {sides})" for one in picked]
    answer = picked[0] if len(picked) == 1 else f"({', '.join(picked)})"
    text = [f"def {table.name}({head}):", "    feeds = {", *feeds, "    }", "    results = run(feeds)"]
    return ("" if first is None else FOLDING) + "\n".join([*text, f"    return {answer}"])


def _leading(table: Operation, ours: str, bound: Mapping[str, Input]) -> int | None:
    """How many axes the file has where the operation has any number; None where nothing need be folded."""
    shape = bound[ours].shape
    free = table.knows(ours) and "..." in table.axes(ours)
    return None if not free or shape is None or "axis" in bound else len(shape) - _trailing(table, ours)


def _trailing(table: Operation, ours: str) -> int:
    return 1 if table.name in ROWS else len(table.axes(ours)) - 1


def _value(table: Operation, ours: str, one: Input, dtype: str, axes: Mapping[str, str]) -> str:
    """An expression for what an input is given."""
    if not table.knows(ours):
        return _number(ours, one)
    text = ours
    if ours in table.options:
        wanted = [axes.get(axis, "1") for axis in table.axes(ours)]
        empty = "np.zeros({shape})" if one.dtype in DTYPES else _EMPTY.get(ours, "")
        empty = (_EMPTY[ours] if ours == "sink" else empty).format(shape=f"({', '.join(wanted)},)")
        text = f"({empty} if {ours} is None else {ours})" if empty else ours
    kind = {"int": "int64", "bool": "bool"}.get(table.kind(ours), dtype)
    same = one.dtype == kind and ours not in table.options
    return text if same else f"{text}.astype({_kind(one.dtype)})"


def _number(ours: str, one: Input) -> str:
    """An expression for a keyword, as an array without axes or with one."""
    empty = {"scale": "q.shape[-1] ** -0.5", "window": "(None, None)"}.get(ours)
    text = f"({empty} if {ours} is None else {ours})" if empty else ours
    if ours == "window":
        text = f"[-1 if side is None else side for side in {text}]"
    made = f"np.asarray({text}, {_kind(one.dtype)})"
    return f"{made}.reshape({(-1,) * len(one.shape)})" if one.shape is not None and ours != "window" else made


def _kind(dtype: str) -> str:
    return "ml_dtypes.bfloat16" if dtype == "bfloat16" else repr(dtype)


def _header(path: Path, reference: bool) -> tuple[str, ...]:
    """Lines that make `run`."""
    where = repr(str(path.resolve()))
    if reference:
        return (
            "import ml_dtypes",
            "import onnx.reference",
            f"evaluator = onnx.reference.ReferenceEvaluator({where})",
            "run = lambda feeds: evaluator.run(None, feeds)",
        )
    return (
        "import onnxruntime",
        "options = onnxruntime.SessionOptions()",
        "options.log_severity_level, options.intra_op_num_threads = 4, 1",
        f"session = onnxruntime.InferenceSession({where}, options, providers=['CPUExecutionProvider'])",
        "run = lambda feeds: session.run(None, feeds)",
    )


class Runner:
    """Runs a graph; it is read by what runs it only with the first call, in the process that makes it."""

    def __init__(self, path: Path, header: tuple[str, ...], inputs: list[Input]) -> None:
        self.path, self.header, self.inputs = path, header, inputs
        self.made: dict[str, Any] = {}

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> Any:
        """All outputs. Raises ValueError for sizes that the file does not take, RuntimeError where the run fails."""
        for one in self.inputs:
            self._check(one, feeds[one.name])
        if not self.made:
            exec("\n".join(self.header), self.made)
        try:
            return self.made["run"](feeds)
        except Exception as error:  # exceptions of ONNX Runtime are of classes that say nothing of a refusal
            raise RuntimeError(str(error).strip()) from error

    def _check(self, one: Input, array: np.ndarray) -> None:
        if one.shape is None:
            return
        if len(one.shape) != array.ndim:
            raise ValueError(f"{one.name!r} has {len(one.shape)} axes in {self.path.name}, this case {array.ndim}")
        for axis, (size, given) in enumerate(zip(one.shape, array.shape, strict=True)):
            if size is not None and size != given:
                raise ValueError(
                    f"{self.path.name} fixes axis {axis} of {one.name!r} at {size}, this case has {given}: "
                    "export it with dynamic axes"
                )
