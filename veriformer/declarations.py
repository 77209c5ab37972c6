"""What an implementation says of itself: capabilities, expected failures, planted faults.

This is the only module of ours that a file in `impls/` imports. It needs nothing but the standard
library, so that declaring costs an implementation no dependency.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Every dtype the suite knows, in the order they are judged and printed."""
PRESETS = (
    "default",
    "graves",
    "ut_paper_text",
    "t2t_basic",
    "t2t_accumulated",
    "t2t_global",
    "pondernet",
    "fixed",
)
"""Dialects of the Universal Transformer, by name."""


def _choice(default: Any, allowed: tuple[Any, ...] | None, text: str) -> Any:
    return field(default=default, metadata={"allowed": allowed, "text": text})


@dataclass(frozen=True)
class Capabilities:
    """What one operation of one implementation accepts and promises.

    Silence claims the ordinary domain: every keyword of the signature, lengths of at least 1, T > 0,
    scale > 0, moderate values. Fields below the line "extras" are claims beyond it and are off
    unless declared. A false claim is a failure; a legitimate choice is never one.

    Raises ValueError for a value outside the choices of a field, naming the choices.
    """

    dtypes: tuple[str, ...] = _choice((), None, "dtypes accepted; empty: all that the framework has")
    devices: tuple[str, ...] = _choice((), None, "kinds of devices it works on, such as cuda; empty: any")
    layout: str = _choice("BHTD", ("BHTD", "BTHD"), "order of the axes of query, key, value and output")
    mask_means: str = _choice(
        "attend", ("attend", "drop", "additive"), "True in mask: may attend, must not; or a float mask that is added"
    )
    causal_alignment: str = _choice(
        "bottom_right", ("bottom_right", "top_left", "square"), "position of query 0; square: only Tq = Tk is accepted"
    )
    more_queries_than_keys: str = _choice(
        "always", ("always", "unless_causal", "never"), "when attention may have more queries than keys"
    )
    causal_with_mask: bool = _choice(True, (True, False), "causal and mask (or bias) may be given together")
    mask_with_bias: bool = _choice(True, (True, False), "mask and bias may be given together")
    empty_row: Any = _choice(
        "zeros", ("zeros", "nan", "mean", "undefined"), "output of a row that may attend to nothing"
    )
    checks_capacity: bool = _choice(True, (True, False), "more new rows than a cache has room for raise an exception")
    grouped_heads: bool = _choice(True, (True, False), "fewer key than query heads (G < H) are accepted")
    biases: bool = _choice(True, (True, False), "biases beside the weight matrices of a composite are accepted")
    rms_norms: bool = _choice(True, (True, False), "composites accept norms without a bias, that is rms_norm")
    post_norm: bool = _choice(True, (True, False), "layers accept norm=post")
    pre_norm: bool = _choice(True, (True, False), "layers accept norm=pre, where they take norm at all")
    value_width: str = _choice("any", ("any", "equal"), "value width: any, or only that of the keys")
    widths: tuple[int, ...] = _choice((), None, "head widths accepted; empty: any")
    blocks: tuple[int, ...] = _choice((), None, "block sizes; lengths and widths one below, at and one above are tried")
    strides: str = _choice(
        "any", ("any", "last_axis_contiguous"), "memory layouts accepted: any, or only a contiguous last axis"
    )
    compiles_per_shape: bool = _choice(False, (True, False), "each new shape is slow: `matrix` makes no search")
    accumulate: Any = _choice(
        "float32", None, "dtype sums are held in, or a mapping from dtype to it; for float64 only a mapping counts"
    )
    intermediate: Any = _choice("storage", None, "dtype values between steps may be stored in, or such a mapping")
    rounds_probabilities: bool = _choice(True, (True, False), "attention weights may be rounded to the storage dtype")
    gradients: bool = _choice(True, (True, False), "gradients can be asked for, where the framework has them")
    bias_gradient: bool = _choice(True, (True, False), "attention's bias is among what gradients can be asked for")
    leak: str = _choice("exact", ("exact", "rounding"), "hidden content changes no bit, or only the rounding")
    norm_epsilon: str = _choice("inside", ("inside", "outside"), "eps under the root, or added to the deviation")
    norm_variance: str = _choice("biased", ("biased", "unbiased"), "variance divided by d, or by d - 1")
    rms_weight: str = _choice("plain", ("plain", "one_plus"), "rms_norm multiplies by weight, or by 1 + weight")
    gelu: str = _choice("erf", ("erf", "tanh"), "gelu by the error function, or by its approximation with tanh")
    rotary_pairs: str = _choice("halves", ("halves", "interleaved"), "pairs (j, j + D/2), or (2j, 2j + 1)")
    alibi: str = _choice("signed", ("signed", "distance"), "-m (query - key position), or -m |distance|")
    sampling_order: str = _choice(
        "temperature_first",
        ("temperature_first", "temperature_last"),
        "top_p counts the mass after temperature, or before it",
    )
    smoothing: str = _choice(
        "all",
        ("all", "others", "others_but_padding"),
        "label smoothing spreads over all classes, the others, or the others but ignore_index, then a class",
    )
    all_ignored: str = _choice("nan", ("nan", "zero"), "mean loss where every target is ignored")
    weight_decay: str = _choice(
        "decoupled", ("decoupled", "coupled"), "decay of the parameter itself (AdamW), or added to its gradient (L2)"
    )
    adam_epsilon: str = _choice(
        "corrected", ("corrected", "uncorrected"), "eps beside the root of the corrected v, or of v itself"
    )
    clip_epsilon: float = _choice(0.0, None, "a number that clipping adds to the norm by which it divides")
    halting_comparison: str = _choice(
        "at_least", ("at_least", "above"), "ACT halts where the halting sum reaches 1 - epsilon, or exceeds it"
    )
    presets: tuple[str, ...] = _choice(
        ("default",), None, "dialects of the Universal Transformer accepted: " + ", ".join(PRESETS)
    )
    saved_statistics: Any = _choice(
        "float32", None, "dtype in which a norm or logsumexp keeps its statistics for the backward"
    )
    gradient_accumulate: Any = _choice(
        "float32", None, "dtype in which the backward of a norm, also in a layer, sums gradients of weight and bias"
    )
    recomputes_probabilities: bool = _choice(
        True, (True, False), "the backward of attention, log_softmax and cross entropy may form exp(logit - lse) anew"
    )
    cache: str = _choice(
        "consumed", ("consumed", "persistent"), "a model's cache is used once, or stays valid after it was passed on"
    )
    chunked_steps: bool = _choice(
        True, (True, False), "a model's step takes several tokens at any time, not only at the beginning"
    )
    several_sessions: bool = _choice(True, (True, False), "several caches of a model may be in use at the same time")
    # extras
    nonpositive_scale: bool = _choice(False, (True, False), "extra: scale = 0 and scale < 0")
    nan_contained: bool = _choice(False, (True, False), "extra: NaN and inf under the mask stay there")
    batch_invariant: bool = _choice(False, (True, False), "extra: a row alone equals the row in a batch, bit by bit")
    zero_temperature: bool = _choice(False, (True, False), "extra: T = 0, shared among the largest")
    extreme_values: bool = _choice(False, (True, False), "extra: values near the largest of the dtype")
    infinite_bias: bool = _choice(False, (True, False), "extra: -inf in bias means False in mask")
    empty_softmax_row: bool = _choice(False, (True, False), "extra: a softmax row of -inf alone gives zeros")
    cache_in_place: bool = _choice(False, (True, False), "extra: the given caches are written and returned")
    zero_lengths: bool = _choice(False, (True, False), "extra: packed sequences without rows")
    exact_top_k: bool = _choice(False, (True, False), "extra: top_k leaves k tokens also where several equal the last")
    scale_power_of_two: bool = _choice(False, (True, False), "extra: scaling by any power of two is exact")

    def __post_init__(self) -> None:
        for name, choice in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            allowed = choice.metadata["allowed"]
            values = value.values() if isinstance(value, Mapping) else (value,)
            for one in values:
                if allowed is not None and one not in allowed:
                    raise ValueError(f"{name}={one!r} is not a choice; {name} is one of {', '.join(map(str, allowed))}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"dtypes: {dtype!r} is not known; known are {', '.join(DTYPES)}")
        for name in ("accumulate", "intermediate", "saved_statistics", "gradient_accumulate"):
            value = getattr(self, name)
            for one in value.values() if isinstance(value, Mapping) else (value,):
                if one not in ("storage", *DTYPES):
                    raise ValueError(f"{name}={one!r} is no dtype; wanted storage or one of {', '.join(DTYPES)}")
        for preset in self.presets:
            if preset not in PRESETS:
                raise ValueError(f"presets: {preset!r} is not known; known are {', '.join(PRESETS)}")
        if not isinstance(self.clip_epsilon, (int, float)) or not self.clip_epsilon >= 0:
            raise ValueError(f"clip_epsilon={self.clip_epsilon!r}: wanted a number >= 0, as in clip_epsilon=1e-6")
        for name in ("widths", "blocks"):
            if not all(isinstance(size, int) and size > 0 for size in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: wanted whole numbers above 0, as in {name}=32,64")

    def at(self, name: str, dtype: str) -> Any:
        """The value of a field that may be a mapping from dtype (or from "default") to a value."""
        value = getattr(self, name)
        if isinstance(value, Mapping):
            return value.get(dtype, value.get("default", self.__dataclass_fields__[name].default))
        return value

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for the header and the report."""
        return {
            name: getattr(self, name)
            for name, choice in self.__dataclass_fields__.items()
            if getattr(self, name) != choice.default
        }

    @classmethod
    def parse(cls, words: Mapping[str, Any], base: Capabilities | None = None) -> Capabilities:
        """Capabilities from plain words, as `--declare key=value` and pyproject.toml give them.

        Raises ValueError for an unknown key, naming the nearest, and for a value that is no choice.
        """
        fields: dict[str, Any] = {}
        for key, value in words.items():
            if key not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(key, cls.__dataclass_fields__, 1, 0.0)
                raise ValueError(f"unknown capability {key!r}; did you mean {near[0]!r}?")
            fields[key] = _parse_value(value, cls.__dataclass_fields__[key].default)
        return dataclasses.replace(base or cls(), **fields)


def _parse_value(value: Any, default: Any) -> Any:
    if not isinstance(value, str):
        return value
    if isinstance(default, bool):
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        return words.get(value.lower(), value)
    if isinstance(default, float):
        return _number(value)
    if isinstance(default, tuple):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(int(part) if part.isdigit() else part for part in parts)
    return value


def _number(word: str) -> Any:
    """The number that a word is, or the word, which then is no choice."""
    try:
        return float(word)
    except ValueError:
        return word


@dataclass(frozen=True)
class Expected:
    """One failure that is known and explained. Strict: when it is gone, the run is red.

    law: the law's id. case: keyword and array literals of a case that must fail (required for laws
    that draw cases). when: conditions on "dtype", "device" and on package versions, such as
    {"dtype": "bfloat16", "device": "cpu", "torch": "<2.14"}; an entry whose conditions do not hold sleeps.
    where: an expression over keywords and sizes such as "causal and scale <= 0", or over axis_length, the length of
    the axis that the keyword axis names, of any case that a law is given; the search goes on outside it. Without it the
    search of that item is off, and the report says so. kind: the kind of failure, such as "not finite", "raised" or
    "crash", or "refused" where the case is one that the law needs taken; empty: any wrong result, but no exception. A
    contract root (`OPERATION/returns-an-array`) that is expected to fail without `where` leaves the other laws of that
    operation and dtype out, as not provided. spreads: other laws of numbers of the operation break by the same cause:
    `where` counts for them too, and without it failures of this kind, or wrong numbers if it is empty, as long as this
    entry still fails. Such laws are then known to fail as well. Of `OPERATION/equals-the-reference` alone.

    Raises ValueError if reason is empty, or spreads is said of another law.
    """

    law: str
    reason: str
    link: str = ""
    case: Mapping[str, Any] | None = None
    when: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    variants: tuple[str, ...] = ()
    kind: str = ""
    spreads: bool = False

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"Expected({self.law!r}) needs a reason: say why this failure is known")
        if self.spreads and not self.law.endswith("/equals-the-reference"):
            raise ValueError(f"Expected({self.law!r}): only a failure of OPERATION/equals-the-reference spreads")


@dataclass(frozen=True)
class Fault:
    """One deliberate mistake in `impls/faulty/`: what it does, who must notice, where it was seen.

    law: id of the law that must accuse it. source: the public bug, or "mutation" with the reason.
    dtype: the dtype in which it shows.
    """

    operation: str
    law: str
    source: str
    summary: str
    dtype: str = "float32"
