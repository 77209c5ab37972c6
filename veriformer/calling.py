"""How a third party's function is called: its parameters, our words for them, conversions.

One published table, ALIASES, says which foreign names mean which of our keywords.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from veriformer.case import nested
from veriformer.declarations import Capabilities
from veriformer.operation import LISTED, PARAMS, Operation
from veriformer.operations import OPERATIONS

ALIASES: dict[str, tuple[str, ...]] = {
    "causal": ("causal", "is_causal"),
    "mask": ("mask", "attention_mask", "allow"),
    "bias": ("bias", "attn_bias", "attention_bias"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "window": ("window", "window_size", "local_window_size"),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap", "logit_softcap"),
    "sink": ("sink", "sinks"),
    "axis": ("axis", "dim"),
    "temperature": ("temperature", "temp", "tau"),
    "top_k": ("top_k", "k"),
    "top_p": ("top_p", "p"),
    "eps": ("eps", "epsilon"),
    "epsilon": ("epsilon", "eps"),
    "max_steps": ("max_steps", "act_max_steps"),
    "label_smoothing": ("label_smoothing", "smoothing"),
    "ignore_index": ("ignore_index", "ignored_index", "ignore_id", "padding_idx", "pad_id"),
    "lr": ("lr", "learning_rate"),
    "beta1": ("beta1", "b1"),
    "beta2": ("beta2", "b2"),
    "weight_decay": ("weight_decay", "wd"),
    "max_norm": ("max_norm", "max_grad_norm", "clip_norm"),
    "width": ("width", "d_model", "model_size"),
    "warmup": ("warmup", "warmup_steps"),
    "heads": ("heads", "num_heads", "n_heads", "nhead"),
    "base": ("base", "theta", "rope_theta"),
    "max_length": ("max_length", "max_len", "max_seq_len", "capacity"),
    "end": ("end", "eos", "eos_token_id", "end_token"),
    "pad": ("pad", "pad_token_id", "pad_token"),
    "rate": ("rate", "p"),
    "padding_index": ("padding_index", "padding_idx"),
    "block_table": ("block_table", "block_tables"),
}
UNCLEAR = {"universal_transformer": ("eps",)}
"""Names that may mean something else in an operation, where they are left alone: the eps of the norms inside."""
MASK_OR_BIAS = "attn_mask"
"""torch's name for either: a boolean mask or a float bias, by dtype; never both in one call."""
GROUPED = "enable_gqa"
"""A flag that must be set when there are fewer key than query heads."""


class UsageError(Exception):
    """The user asked for something that cannot be done; one line says what to do instead. Exit code 2."""


def nearest(word: str, words: Sequence[str]) -> str:
    """' (nearest: …)' for a message, or an empty string where there is nothing to offer."""
    found = difflib.get_close_matches(word, list(words), 1, 0.0)
    return f"; nearest is {found[0]!r}" if found else ""


@dataclass(frozen=True)
class CallPlan:
    """How one function is called for one operation.

    keywords: our word -> the parameter's name. grouped: the name of the flag for grouped heads.
    pick: where the results sit in a returned tuple, or None for a bare array. left: parameters that
    keep their own defaults. always: our words that are given in every call, since the function has
    no default for them, or another one than ours. factory: the function makes a composite
    from its weights, make(params, **keywords), and what it returns takes the arrays.
    """

    operation: str
    keywords: Mapping[str, str] = field(default_factory=dict)
    grouped: str = ""
    pick: tuple[int, ...] | None = None
    left: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    factory: bool = False

    @property
    def accepts(self) -> frozenset[str]:
        """Our words for what may be given."""
        return frozenset(self.keywords)

    def mapping(self) -> str:
        """The mapping for the header, such as 'causal -> is_causal, scale'."""
        words = [ours if ours == theirs else f"{ours} -> {theirs}" for ours, theirs in self.keywords.items()]
        if self.grouped:
            words.append(f"G < H -> {self.grouped}")
        if self.left:
            words.append("left at their defaults: " + ", ".join(self.left))
        return ", ".join(words)

    def exclusive(self) -> bool:
        """Whether mask and bias share one parameter."""
        return "mask" in self.keywords and self.keywords.get("mask") == self.keywords.get("bias")


def meaning_of(name: str, operation: Operation) -> tuple[str, ...]:
    """Our words that a parameter's name stands for in this operation."""
    known = {*operation.keywords, *operation.options}
    if name == MASK_OR_BIAS and {"mask", "bias"} <= known:
        return ("mask", "bias")
    return tuple(ours for ours in known if name in names_of(ours, operation))


def names_of(ours: str, operation: Operation) -> tuple[str, ...]:
    """The names of parameters that stand for our word in this operation."""
    return tuple(name for name in ALIASES.get(ours, (ours,)) if name not in UNCLEAR.get(operation.name, ()))


def plan_call(
    function: Callable[..., Any], operation: str, accepts: Sequence[str] | None = None, returns: Sequence[str] = ()
) -> CallPlan:
    """The plan for a function, from its signature, or from `accepts` where it has none.

    Raises UsageError for a parameter without a default that matches nothing, for too few positional
    parameters, and where there is no signature and no `accepts`.
    """
    table = OPERATIONS[operation]
    pick = pick_results(table, returns)
    if accepts is not None:
        return _plan(table, list(accepts), [], pick, defaults=dict.fromkeys(accepts), strict=True)
    try:
        # a module of torch is called through a signature that says nothing
        parameters = list(inspect.signature(getattr(function, "forward", function)).parameters.values())
    except (ValueError, TypeError):
        raise UsageError(
            f"{operation}: {getattr(function, '__name__', function)!r} has no signature to read; "
            f"say what it accepts, e.g. --accepts {','.join((*table.keywords, *table.options))}"
            " (or --accepts none)"
        ) from None
    return _plan_signature(table, parameters, pick)


def _plan_signature(table: Operation, parameters: list[inspect.Parameter], pick: tuple[int, ...] | None) -> CallPlan:
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    factory = bool("params" in table.positional and positional and positional[0].name == "params")
    count = 1 if factory else len(table.positional)
    if not factory:
        _check_order(table, parameters, positional)
    if len(positional) < count and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UsageError(
            f"{table.name}: the function takes {len(positional)} positional arguments "
            f"({', '.join(p.name for p in positional)}), wanted {count}: {', '.join(table.positional)}"
        )
    rest = [p for p in parameters if p not in positional[:count] and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named, left = [], []
    for parameter in rest:
        if meaning_of(parameter.name, table) or parameter.name == GROUPED:
            named.append(parameter.name)
        elif parameter.default is not parameter.empty:
            left.append(parameter.name)
        else:
            words = [alias for ours in (*table.keywords, *table.options) for alias in names_of(ours, table)]
            raise UsageError(
                f"{table.name}: parameter {parameter.name!r} has no default and no known meaning"
                f"{nearest(parameter.name, words)}"
            )
    bare = [p.name for p in rest if p.default is p.empty]
    defaults = {p.name: p.default for p in rest if p.default is not p.empty}
    return replace(_plan(table, named, left, pick, bare, defaults), factory=factory)


def _check_order(table: Operation, parameters: list[inspect.Parameter], positional: list[inspect.Parameter]) -> None:
    """Raise UsageError where an array's own name stands at another place than the array is passed to."""
    names = [p.name for p in parameters]
    for place, array in enumerate(table.positional):
        if array in names and (place >= len(positional) or positional[place].name != array):
            raise UsageError(
                f"{table.name}: {array!r} is not parameter {place + 1} of ({', '.join(names)}), and arrays are passed "
                f"by position; wrap it as def {table.name}({', '.join(table.positional)}, *, …)"
            )


def _plan(
    table: Operation,
    names: list[str],
    left: list[str],
    pick: tuple[int, ...] | None,
    bare: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> CallPlan:
    keywords: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name not in table.keywords):  # our own names first
        meanings = meaning_of(name, table)
        if strict and not meanings and name not in (GROUPED, "none"):
            words = [alias for ours in (*table.keywords, *table.options) for alias in names_of(ours, table)]
            raise UsageError(f"{table.name}: --accepts {name!r} has no known meaning{nearest(name, words)}")
        for ours in meanings:
            keywords.setdefault(ours, name)
    order = [*table.options, *table.keywords]
    lacking = [word for word in order if word in table.required and word not in keywords]
    if lacking:
        raise UsageError(
            f"{table.name}: no parameter for {lacking[0]!r}, which every call gives; wanted {signature_of(table)}"
        )
    keywords = {ours: keywords[ours] for ours in order if ours in keywords}
    # without a default of its own the function needs ours, and where its default is another, if ours says anything
    own = defaults or {}
    definite = [ours for ours, value in table.keywords.items() if value is not None]
    other = [ours for ours in definite if keywords.get(ours) in own and own[keywords[ours]] != table.keywords[ours]]
    always = [ours for ours, theirs in keywords.items() if theirs in bare or ours in other]
    return CallPlan(table.name, keywords, GROUPED if GROUPED in names else "", pick, tuple(left), tuple(always))


def pick_results(table: Operation, returns: Sequence[str]) -> tuple[int, ...] | None:
    """Positions of our results in what the function returns; None where it returns them as they are.

    Raises UsageError where `returns` does not name one of the operation's results.
    """
    if not returns:
        return None
    missing = [name for name in table.results if name not in returns]
    if missing:
        raise UsageError(f"{table.name}: --returns {','.join(returns)} does not name {missing[0]!r}")
    return tuple(list(returns).index(name) for name in table.results)


def arguments(
    plan: CallPlan, capabilities: Capabilities, framework: Any, request: Any
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Positional and keyword arguments in the function's own terms, and the native arrays by our names.

    request has arrays, keywords, dtype and layout as `boundary.Request` has.
    """
    table = OPERATIONS[plan.operation]
    natives = {}
    for name, values in request.arrays.items():
        if table.kind(name) == "bool":
            values = mask_values(values, capabilities.mask_means)
        if capabilities.layout == "BTHD" and name in table.headed:
            values = np.ascontiguousarray(values.transpose(0, 2, 1, 3))
        natives[name] = framework.native(values, request.dtype, request.layout)
    named: dict[str, Any] = {plan.keywords[name]: table.keywords.get(name) for name in plan.always}
    named |= {plan.keywords[name]: natives[name] for name in table.options if name in natives}
    for name, value in request.keywords.items():
        one_dialect = name == "preset" and name not in plan.keywords  # declared, and not asked for in words
        if name not in table.scalars and not one_dialect:
            theirs = plan.keywords[name]
            named[theirs] = _window(value, theirs) if name == "window" else value
    q, k = request.arrays.get("q"), request.arrays.get("k", request.arrays.get("k_new"))
    if plan.grouped and q is not None and k is not None and q.shape[1] != k.shape[1]:
        named[plan.grouped] = True
    positional = [natives[name] for name in table.arrays if name in natives] + [
        request.keywords[name] for name in table.scalars
    ]
    if "params" in table.positional:
        positional.append(
            nested({name: native for name, native in natives.items() if name.startswith(PARAMS)})["params"]
        )
    if table.given:
        positional.insert(0, framework.given(table.given, [natives[name] for name in table.params]))
    if table.listed:
        positional.insert(0, [native for name, native in natives.items() if name.startswith(LISTED)])
    return positional, named, natives


def signature_of(table: Operation, shapes: bool = False) -> str:
    """The operation's calling convention in one line, such as (x, *, axis=-1, temperature=1.0).

    For a model it is that of the factory that makes it of weights.
    """
    axes = {name: f"{name}[{', '.join(found.split())}]" for name, found in table.arrays.items()} if shapes else {}
    first = ["params"] if table.words else [axes.get(name, name) for name in table.positional]
    options = () if table.words else table.options
    words = [word if word in table.required else f"{word}=None" for word in options]
    words += [word if word in table.required else f"{word}={value}" for word, value in table.keywords.items()]
    return f"({', '.join((*first, *(('*', *words) if words else ())))})"


def mask_values(values: np.ndarray, means: str) -> np.ndarray:
    """A mask, True = may attend, in the terms of a declared `mask_means`."""
    if means == "drop":
        return ~values
    if means == "additive":
        return np.where(values, 0.0, -np.inf)
    return values


def _window(value: tuple[Any, Any], theirs: str) -> tuple[Any, Any]:
    """Our None is -1 where the parameter bears the name that kernels with a (left, right) pair use."""
    return tuple(-1 if side is None else side for side in value) if theirs == "window_size" else value  # type: ignore[return-value]
