"""Models as targets: objects that stay where they are made, asked by programs of moves.

A decoder_lm or encoder_decoder is an object with the methods of its row in the table of operations, a
factory that takes nothing, or a factory that takes the weights: make(params, *, heads, …).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from veriformer.boundary import Boundary, Request, WrongType, describe_error, quiet
from veriformer.calling import CallPlan, UsageError, arguments, mask_values, plan_call
from veriformer.case import flattened, nested
from veriformer.declarations import DTYPES, Capabilities
from veriformer.hugging_face import adapted, check_hugging_face, is_hugging_face, wrapper_of
from veriformer.moves import Move, Program, full
from veriformer.operation import PARAMS
from veriformer.operations import OPERATIONS
from veriformer.reference_models import sample_weights

OPTIONAL = ("crop", "reorder")
"""Methods that a model may lack."""
STEP_WORDS = {
    "mask": ("mask", "attention_mask", "source_mask", "src_mask"),
    "positions": ("positions", "position_ids"),
}
"""What step, full and encode may take beside tokens, and the names under which they may."""


@dataclass(frozen=True)
class ModelFacts:
    """What a model says of itself.

    weights: it is made of weights that the suite gives, else they are its own. words: its methods.
    takes: method -> our word -> its parameter's name. vocabulary, max_length, window: numbers or None;
    source_vocabulary: that of an encoder_decoder's source, if another. width: how many logits there are, at least
    the vocabulary. dtypes: those in which it can be had, empty where that is not known. trouble: why it could not
    be made. factory: the target makes it; takes_dtype: and is told the dtype. wrapper: our class around it, if any.
    """

    weights: bool = False
    factory: bool = True
    words: tuple[str, ...] = ()
    takes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    vocabulary: int | None = None
    max_length: int | None = None
    window: int | None = None
    source_vocabulary: int | None = None
    width: int | None = None
    takes_dtype: bool = False
    dtypes: tuple[str, ...] = ()
    trouble: str = ""
    wrapper: str = ""

    def says(self) -> str:
        """The line for a header, such as 'full, step(mask), crop; vocabulary 50; weights of its own'."""
        words = [f"{word}({', '.join(self.takes[word])})" if self.takes.get(word) else word for word in self.words]
        sizes = {"vocabulary": self.vocabulary, "max_length": self.max_length, "window": self.window}
        parts = [f"{name} {size}" for name, size in sizes.items() if size is not None]
        return "; ".join([", ".join(words), *parts, "weights given" if self.weights else "weights of its own"])


def weighted(target: Any, operation: str) -> bool:
    """Whether a target is a factory whose first parameter is called params."""
    if is_model(target, operation) or not callable(target):
        return False
    try:
        first = next(iter(inspect.signature(target).parameters.values()), None)
    except (ValueError, TypeError):
        return False
    return first is not None and first.name == "params"


def is_model(target: Any, operation: str) -> bool:
    """Whether a target is an object with the methods that it must have, or of transformers; not a class of such."""
    if is_hugging_face(target):
        return True
    wanted = [word for word in OPERATIONS[operation].words if word not in OPTIONAL]
    return not isinstance(target, type) and all(callable(getattr(target, word, None)) for word in wanted)


def check_target(target: Any, operation: str) -> None:
    """Raise UsageError for what is neither a model nor a factory, and for a model that lacks a method."""
    if is_hugging_face(target):
        check_hugging_face(target, operation)
        return
    wanted = [word for word in OPERATIONS[operation].words if word not in OPTIONAL]
    has = [word for word in wanted if callable(getattr(target, word, None))]
    lacks = [word for word in wanted if word not in has]
    if has and lacks:
        raise UsageError(f"{operation} has {', '.join(has)} but lacks {', '.join(lacks)}; wanted {_call(lacks[0])}")
    plain = isinstance(target, type) or hasattr(target, "__code__") or not hasattr(target, "forward")
    if not has and (not callable(target) or not plain):
        raise UsageError(
            f"{operation} is a {type(target).__name__}; wanted an object with {', '.join(wanted)}, a factory of one "
            "that takes nothing, or one that takes the weights: make(params, *, heads, …)"
        )


def _call(word: str) -> str:
    """How a method is called."""
    calls = {
        "full": "full(tokens) -> logits",
        "step": "step(tokens, cache) -> (logits, cache)",
        "encode": "encode(source) -> memory",
    }
    return calls[word]


def plan_model(target: Any, operation: str) -> CallPlan:
    """How a model is made. Raises UsageError for parameters of a factory that nobody knows."""
    if weighted(target, operation):
        return plan_call(target, operation)
    if not is_model(target, operation):
        needed = [p.name for p in _parameters(target) if p.default is p.empty and p.kind not in _SEVERAL]
        needed = [name for name in needed if name != "dtype"]
        if needed:
            raise UsageError(
                f"{operation}: the factory needs {needed[0]!r}; wanted one that takes nothing, as in "
                f"lambda: Model({needed[0]}), or one that takes the weights: make(params, *, heads, …)"
            )
    return CallPlan(operation)


_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return []


@dataclass
class ModelBoundary(Boundary):
    """A model in its own process or in ours; function is the object or its factory.

    Caches and memories live as long as a request. A model with weights of its own is made once for each dtype.
    """

    facts: ModelFacts = field(default_factory=ModelFacts)
    made: dict[str, Any] = field(default_factory=dict)

    def _arguments(self, request: Request) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        return model_arguments(self.plan, self.capabilities, self.framework, request, self.facts)

    def _returned(self, request: Request, positional: list[Any], named: dict[str, Any], natives: dict[str, Any]) -> Any:
        """The logits of every full and step of the program, in order."""
        own = not self.facts.weights  # a model of given weights takes their dtype from them
        with self.framework.in_dtype(request.dtype) if own else contextlib.nullcontext():
            model = self._model(request.dtype, positional, named)
            kept: dict[int | None, Any] = {None: None}
            return [
                logits
                for number, move in enumerate(program_of(request))
                for logits in self._moved(model, move, number, kept, natives)
            ]

    def _model(self, dtype: str, positional: list[Any], named: dict[str, Any]) -> Any:
        if self.facts.weights:
            with self.framework.seeded():
                return self.framework.in_eval(self.function(*positional, **named))
        if dtype not in self.made:
            self.made.clear()  # one at a time; such a model may be large
            self.made[dtype] = made_in(self.function, self.plan.operation, self.framework, dtype)
        return self.made[dtype]

    def _moved(self, model: Any, move: Move, number: int, kept: dict[Any, Any], natives: dict[str, Any]) -> list[Any]:
        """The logits that a move gives, none or one; what else it gives is kept."""
        method = getattr(model, move.word, None)
        if method is None:
            raise WrongType(f"the model has no {move.word}")
        arrays = {name: natives[f"move{number}.{name}"] for name in move.arrays}
        given, extras = ordered(move, self.facts, arrays, kept)
        found = method(*given, **extras)
        if move.word == "full":
            return [found]
        logits = []
        if move.word == "step":
            if not isinstance(found, (tuple, list)) or len(found) != 2:
                raise WrongType(f"step returned {type(found).__name__}, wanted a pair: logits and the cache")
            if not self.framework.is_array(found[0]):
                raise WrongType(f"step returned a {type(found[0]).__name__} first, wanted (logits, cache)")
            logits, found = [found[0]], found[1]
        if found is None:
            what = "memory" if move.word == "encode" else "cache"
            raise WrongType(f"{move.word} returned None for the {what}; None stands for an empty one")
        kept[move.into] = found
        return logits

    def _results(self, returned: Any, request: Request) -> list[Any]:
        for result in returned:
            self._check_array(result)
        return list(returned)


def ordered(
    move: Move, facts: ModelFacts, arrays: Mapping[str, Any], kept: Mapping[int | None, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """What a move's method is given, by position and by name: its arrays, and what earlier moves have left."""
    words = facts.takes.get(move.word, {})
    given = [array for name, array in arrays.items() if name not in words]
    if move.word == "step":
        given += [kept[move.memory]] if "encode" in facts.words else []
        given.append(kept[move.cache])
    elif move.word in OPTIONAL:
        given.insert(0, kept[move.cache])
    given += [] if move.length is None else [move.length]
    return given, {words[name]: array for name, array in arrays.items() if name in words}


def model_arguments(
    plan: CallPlan, capabilities: Capabilities, framework: Any, request: Request, facts: ModelFacts
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """What a model is made of, by position and by name, and every array of weights and moves by its name."""
    weights = replace(request, arrays={n: a for n, a in request.arrays.items() if n.startswith(PARAMS)})
    made = arguments(plan, capabilities, framework, weights) if facts.weights else ([], {}, {})
    positional, named, natives = made
    for number, move in enumerate(program_of(request)):
        for name, array in move.arrays.items():
            values = mask_values(array, capabilities.mask_means) if array.dtype == bool else array
            natives[f"move{number}.{name}"] = framework.native(values, request.dtype, request.layout)
    return positional, named, natives


def program_of(request: Request) -> Program:
    """The program of a request, by default a single full."""
    if request.program:
        return request.program
    arrays = {name: array for name, array in request.arrays.items() if not name.startswith(PARAMS)}
    return (full(arrays["tokens"]),) if "tokens" in arrays else (Move("full", arrays),)


def made_in(target: Any, operation: str, framework: Any, dtype: str) -> Any:
    """A model with weights of its own in a dtype, as far as the framework can: a copy of a given object.

    An object that cannot be copied stays as it is; a factory lets one be made in every dtype. A model of transformers
    gets our methods.
    """
    target = adapted(target, operation)
    if is_model(target, operation):
        if not framework.castable(target):
            return target
        try:
            return framework.cast(copy.deepcopy(target), dtype)
        except Exception:
            return framework.in_eval(target)
    with framework.seeded():  # weights at random are the same ones in every process
        model = target(dtype=framework.dtypes[dtype]) if takes_dtype(target) else target()
    return framework.cast(adapted(model, operation), dtype)


def takes_dtype(factory: Any) -> bool:
    """Whether a factory is told the dtype."""
    return any(parameter.name == "dtype" for parameter in _parameters(factory))


def facts_of(
    target: Any, operation: str, plan: CallPlan, framework: Any, dtypes: tuple[str, ...]
) -> tuple[ModelFacts, dict[str, Any]]:
    """What a model says of itself, and the model that was made to see it, by its dtype.

    It is made in the first of the dtypes in which it works; what goes wrong in all of them is left to the laws.
    """
    given, trouble = weighted(target, operation), ""
    for number, dtype in enumerate(dtypes):
        try:
            with quiet(), framework.in_dtype(dtype):
                model = _sample(target, operation, plan, framework, dtype) if given else None
                model = made_in(target, operation, framework, dtype) if model is None else model
                facts = _facts(target, model, operation, framework, dtypes[number:])
            return facts, {} if given else {dtype: model}
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            trouble = trouble or describe_error(error)
    needed = tuple(word for word in OPERATIONS[operation].words if word not in OPTIONAL)
    return ModelFacts(given, not is_model(target, operation), needed, trouble=trouble), {}


def _sample(target: Any, operation: str, plan: CallPlan, framework: Any, dtype: str) -> Any:
    """The model that a factory makes of small weights."""
    flat = flattened(sample_weights(operation), "params")
    natives = {name: framework.native(np.asarray(array), dtype) for name, array in flat.items()}
    return target(nested(natives)["params"], **{plan.keywords["heads"]: 2})


def _facts(target: Any, model: Any, operation: str, framework: Any, dtypes: tuple[str, ...]) -> ModelFacts:
    check_target(model, operation)
    words = tuple(word for word in OPERATIONS[operation].words if callable(getattr(model, word, None)))
    takes = {word: _extras(getattr(model, word)) for word in words if word not in OPTIONAL}
    if weighted(target, operation):
        return ModelFacts(True, True, words, takes, dtypes=dtypes)
    names = ("vocabulary", "source_vocabulary", "max_length", "window")
    numbers: dict[str, Any] = {name: _number(model, name) for name in names}
    token = framework.native(np.zeros((1, 1), np.int64), dtypes[0])
    logits = model.full(token, token) if operation == "encoder_decoder" else model.full(token)
    numbers["width"] = int(logits.shape[-1])
    numbers["vocabulary"] = min(numbers["vocabulary"] or numbers["width"], numbers["width"])
    found, told = framework.read(logits)[1], takes_dtype(target) and not is_model(target, operation)
    if found in DTYPES and (found != dtypes[0] or not (told or framework.castable(model))):
        dtypes = (found,)
    factory, wrapper = not is_model(target, operation), wrapper_of(model)
    return ModelFacts(False, factory, words, takes, **numbers, takes_dtype=told, dtypes=dtypes, wrapper=wrapper)


def _extras(method: Callable[..., Any]) -> dict[str, str]:
    """Our words for what a method may take beside tokens, with its own names."""
    names = [p.name for p in _parameters(method)]
    return {ours: name for ours, theirs in STEP_WORDS.items() for name in names if name in theirs}


LIMITS = ("max_length", "block_size", "max_position_embeddings")
"""Attributes that say how many tokens a model takes."""


def _number(model: Any, name: str) -> int | None:
    names = LIMITS if name == "max_length" else (name,)
    value = next((found for one in names if (found := getattr(model, one, None)) is not None), None)
    return int(value) if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else None
