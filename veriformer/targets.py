"""From the words a user types to functions with call plans: `OPERATION=module:attribute` and its kin."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from veriformer.boundary import Boundary, describe_error
from veriformer.calling import CallPlan, UsageError, nearest, plan_call
from veriformer.declarations import Capabilities, Expected, Fault
from veriformer.external import PREFIX, offered
from veriformer.frameworks import framework_named
from veriformer.libraries import library_named, versions_of
from veriformer.models import ModelBoundary, ModelFacts, check_target, facts_of, is_model, plan_model
from veriformer.onnx_file import load_graph
from veriformer.operations import OPERATIONS
from veriformer.written_in import framework_of

GROUP = "veriformer.implementations"
VJP = "_vjp"
"""A function OPERATION_vjp(cotangent, *arrays, **keywords) gives the gradients of OPERATION."""


@dataclass(frozen=True)
class Options:
    """What the command line or `conformance` says about a target."""

    accepts: tuple[str, ...] | None = None
    returns: tuple[str, ...] = ()
    framework: str = ""
    declare: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"


@dataclass(frozen=True)
class Description:
    """An implementation as the judging side needs it: everything but the functions themselves."""

    name: str
    framework: str
    default_dtypes: tuple[str, ...]
    plans: Mapping[str, CallPlan]
    capabilities: Mapping[str, Capabilities]
    versions: Mapping[str, str]
    expected: tuple[Expected, ...] = ()
    fault: Fault | None = None
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """operation (or OPERATION_vjp) -> (module or path, expression in it), for a script that imports it by itself."""
    vjps: frozenset[str] = frozenset()
    """Operations whose gradients come from an OPERATION_vjp."""
    models: Mapping[str, ModelFacts] = field(default_factory=dict)
    """What is known of operations that are models."""
    device: str = "cpu"
    """Where its arrays are."""


@dataclass
class Loaded:
    """A description with the functions behind it."""

    description: Description
    boundaries: dict[str, Boundary]
    devices: frozenset[str] = frozenset()
    """Devices of operations that were left out, for they do not work on the one in use."""


def load(target: str, options: Options, folder: str = "") -> list[Loaded]:
    """Every implementation that a target names.

    Raises UsageError, in one line with the nearest name, for an unknown operation, module, file,
    attribute, variant or capability, and where nothing of it works on the device.
    """
    folder = folder or str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = _named(target, options)
    working = [one for one in found if one.boundaries]
    if not working:
        devices = sorted({device for one in found for device in one.devices})
        raise UsageError(f"{target} works on {', '.join(devices)}, not on {options.device}: add --device {devices[0]}")
    return working


def _named(target: str, options: Options) -> list[Loaded]:
    """Every implementation of that name, also those without an operation that works on the device."""
    if target.startswith(PREFIX):
        return [_load_program(target, "", options)]
    if "=" in target:
        operation, place = target.split("=", 1)
        return [_load_function(target, operation.strip(), place.strip(), options)]
    registered = _registered()
    name, _, variant = target.partition(":") if not Path(target).exists() else (target, "", "")
    if name in registered and not Path(name).exists():
        return _load_registered(name, variant, registered[name], options)
    return _load_module(target, options)


def load_functions(functions: Mapping[str, Callable[..., Any]], options: Options, name: str = "") -> Loaded:
    """An implementation made of functions in memory, keyed by operation."""
    for operation, function in functions.items():
        _check_name(operation, functions)
        _check_callable(operation, function, operation)
    first = next(iter(functions.values()))
    module = sys.modules.get(getattr(first, "__module__", "") or "", None) or sys.modules["__main__"]
    places = {operation: place for operation, function in functions.items() if (place := _place_of(function))}
    return _assemble(name or _name_of(first), dict(functions), module, options, {}, (), None, places)


def _place_of(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Where a function in memory can be had again: a module in a package, or the file of a lone one, and its name.

    None for what has no name at the top of a module, or is in the script that runs: that would run it again.
    """
    name, where = getattr(function, "__qualname__", ""), getattr(function, "__module__", "") or ""
    module = sys.modules.get(where)
    file = getattr(module, "__file__", None)
    if where == "__main__" or file is None or not name.isidentifier() or getattr(module, name, None) is not function:
        return None
    return (where if "." in where else str(file)), name


def _name_of(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "") or ""
    return f"{module}:{getattr(function, '__qualname__', type(function).__name__)}"


def _check_operation(operation: str) -> None:
    if operation not in OPERATIONS:
        raise UsageError(
            f"unknown operation {operation!r}{nearest(operation, list(OPERATIONS))}; `veriformer list` shows all"
        )


def _check_name(name: str, functions: Mapping[str, Any]) -> None:
    """Raise UsageError for what is neither an operation nor OPERATION_vjp beside its operation."""
    operation = name.removesuffix(VJP)
    _check_operation(operation)
    if operation != name and operation not in functions:
        raise UsageError(f"{name} without {operation}: give the function whose gradient it is")


def _check_callable(place: str, function: Any, operation: str = "") -> None:
    if operation in OPERATIONS and OPERATIONS[operation].words:
        check_target(function, operation)
        return
    if isinstance(function, type):
        raise UsageError(f"{place} is a class; name a function, or an instance that can be called")
    if not callable(function):
        raise UsageError(f"{place} is a {type(function).__name__}, wanted something that can be called")


def _registered() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def registered_names() -> list[str]:
    """Names registered under the entry-point group, sorted."""
    return sorted(_registered())


def _load_function(target: str, operation: str, place: str, options: Options) -> Loaded:
    _check_operation(operation)
    if place.startswith(PREFIX):
        return _load_program(place, operation, options)
    if place.endswith(".onnx"):
        return _load_graph(operation, place, options)
    where, _, attribute = place.rpartition(":")
    if not where or not attribute:
        raise UsageError(f"target {target!r}: wanted OPERATION=module:attribute or OPERATION=path/file.py:attribute")
    module = import_module(where)
    function: Any = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            raise UsageError(f"{where} has no attribute {part!r}{nearest(part, _public(function))}")
        function = getattr(function, part)
    _check_callable(place, function, operation)
    declared = getattr(module, "CAPABILITIES", {})
    own = declared if operation in declared else {}
    functions, places = {operation: function}, {operation: (where, attribute)}
    vjp = getattr(module, attribute + VJP, None) if "." not in attribute else None
    if callable(vjp):
        functions[operation + VJP], places[operation + VJP] = vjp, (where, attribute + VJP)
    return _assemble(place, functions, module, options, own, _expected(module, ""), None, places)


def _load_program(place: str, operation: str, options: Options) -> Loaded:
    functions, module, capabilities = offered(place, operation)
    places = {name: (place, name) for name in functions}
    declared = dict.fromkeys(functions, capabilities)
    return _assemble(place, functions, module, replace(options, framework="numpy"), declared, (), None, places)


def _load_graph(operation: str, place: str, options: Options) -> Loaded:
    graph, options = load_graph(operation, place, bool(options.returns)), replace(options, framework="numpy")
    functions, own = {operation: graph.function}, {operation: graph.capabilities}
    return _assemble(place, functions, graph.module, options, own, (), None, {operation: (place, graph.text)})


def _load_registered(name: str, variant: str, point: importlib.metadata.EntryPoint, options: Options) -> list[Loaded]:
    library = library_named(name)
    if library is not None and library.missing:
        raise UsageError(f"{name} needs {' and '.join(library.missing)}, which is not installed: {library.install}")
    modules = point.load()
    found: list[Loaded] = []
    for place in [modules] if isinstance(modules, str) else modules:
        tail = place.rpartition(".")[2].removeprefix(f"{name}_")
        module = import_module(place)
        for one in _from_module(module, name, options):
            short = one.description.name
            label = short if ":" in short else f"{name}:{tail}"
            found.append(replace(one, description=replace(one.description, name=label)))
    return _pick_variant(found, name, variant)


def _load_module(target: str, options: Options) -> list[Loaded]:
    path, _, variant = target.partition(":")
    module = import_module(path)
    return _pick_variant(_from_module(module, path, options), path, variant)


def _pick_variant(found: list[Loaded], name: str, variant: str) -> list[Loaded]:
    if not variant:
        return found
    chosen = [one for one in found if one.description.name == f"{name}:{variant}"]
    if not chosen:
        names = [one.description.name.partition(":")[2] for one in found if ":" in one.description.name]
        tail = nearest(variant, names) if names else f"; for a function of it write OPERATION={name}:{variant}"
        raise UsageError(f"{name} has no variant {variant!r}{tail}")
    return chosen


def import_module(place: str) -> ModuleType:
    """The module at a dotted name or a path; the path's folder joins the import path.

    Raises UsageError where there is none, or where importing it fails.
    """
    if place.endswith(".py"):
        return _import_file(Path(place))
    if Path(place).is_dir() and not (Path(place) / "__init__.py").is_file():
        raise UsageError(f"{place} is a folder; name a file in it, a module or a registered name")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            names = [*registered_names(), *_neighbours()]
            raise UsageError(f"no module, file or registered name {place!r}{nearest(place, names)}") from None
        raise UsageError(f"importing {place} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"importing {place} failed: {describe_error(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        names = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"no file {path}{nearest(str(path), names)}")
    root = path.resolve().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if root != path.resolve().parent:
        return import_module(".".join(path.resolve().with_suffix("").relative_to(root).parts))
    name = f"veriformer_target_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"importing {path} failed: {describe_error(error)}") from error
    return module


def _neighbours() -> list[str]:
    return [p.stem for p in Path.cwd().glob("*.py")] + [
        p.name for p in Path.cwd().iterdir() if (p / "__init__.py").exists()
    ]


def _public(owner: Any) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


def _from_module(module: ModuleType, name: str, options: Options) -> list[Loaded]:
    variants = getattr(module, "VARIANTS", None)
    if variants is None:
        names = [name for op in OPERATIONS for name in (op, op + VJP)]
        functions = {name: vars(module)[name] for name in names if _names_target(module, name)}
        if not functions:
            raise UsageError(
                f"{name} defines no function named like an operation ({', '.join(OPERATIONS)}); "
                f"name one with OPERATION={name}:attribute"
            )
        variants = {"": functions}
    declared, faults = getattr(module, "CAPABILITIES", {}), getattr(module, "FAULTS", {})
    found = []
    for variant, functions in variants.items():
        for operation in functions:
            _check_name(operation, functions)
        own = declared.get(variant, {k: v for k, v in declared.items() if k in OPERATIONS})
        label = f"{name}:{variant}" if variant else name
        where = name if name.endswith(".py") else module.__name__
        places = {op: (where, f'VARIANTS["{variant}"]["{op}"]' if variant else op) for op in functions}
        expected, fault = _expected(module, variant), faults.get(variant)
        found.append(_assemble(label, functions, module, options, own, expected, fault, places))
    return found


def _names_target(module: ModuleType, name: str) -> bool:
    """Whether a module has something of an operation's name that can be a target: callable, or a model."""
    value = vars(module).get(name)
    return callable(value) or name in OPERATIONS and bool(OPERATIONS[name].words) and is_model(value, name)


def _expected(module: ModuleType, variant: str) -> tuple[Expected, ...]:
    return tuple(e for e in getattr(module, "EXPECTED", ()) if not e.variants or variant in e.variants)


def _assemble(
    name: str,
    functions: Mapping[str, Callable[..., Any]],
    module: ModuleType,
    options: Options,
    declared: Mapping[str, Capabilities],
    expected: tuple[Expected, ...],
    fault: Fault | None,
    places: Mapping[str, tuple[str, str]],
) -> Loaded:
    kind = options.framework or framework_of(next(iter(functions.values())), module)
    try:
        framework = framework_named(kind, options.device)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{name}: {error}") from error
    boundaries: dict[str, Boundary] = {}
    plans, capabilities, models = {}, {}, {}
    vjps = {op.removesuffix(VJP): function for op, function in functions.items() if op.endswith(VJP)}
    elsewhere: set[str] = set()
    for operation, function in functions.items():
        if operation.endswith(VJP):
            continue
        model = bool(OPERATIONS[operation].words)
        if model and (options.accepts is not None or options.returns or operation in vjps):
            raise UsageError(f"{operation} is a model: --accepts, --returns and {operation}_vjp say nothing about it")
        plan = (
            plan_model(function, operation)
            if model
            else plan_call(function, operation, options.accepts, options.returns)
        )
        capability = _capability(operation, declared.get(operation, Capabilities()), options, plan)
        if capability.devices and options.device.partition(":")[0] not in capability.devices:
            elsewhere.update(capability.devices)
            continue
        boundaries[operation] = Boundary(function, plan, capability, framework, vjps.get(operation))
        if model:
            dtypes = capability.dtypes or framework.default_dtypes
            models[operation], made = facts_of(function, operation, plan, framework, dtypes)
            facts = models[operation]
            boundaries[operation] = ModelBoundary(function, plan, capability, framework, facts=facts, made=made)
        plans[operation], capabilities[operation] = plan, capability
    description = Description(
        name,
        framework.name,
        framework.default_dtypes,
        plans,
        capabilities,
        {**framework.versions(), **versions_of(getattr(module, "DISTRIBUTIONS", ()))},
        expected,
        fault,
        places,
        frozenset(vjps),
        models,
        options.device,
    )
    return Loaded(description, boundaries, frozenset(elsewhere))


def _capability(operation: str, declared: Capabilities, options: Options, plan: CallPlan) -> Capabilities:
    try:
        capability = Capabilities.parse(options.declare, declared)
    except ValueError as error:
        raise UsageError(f"{operation}: {error}") from error
    return replace(capability, mask_with_bias=False) if plan.exclusive() else capability


def words(values: Sequence[str]) -> tuple[str, ...]:
    """The parts of comma-separated words, without blanks."""
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())
