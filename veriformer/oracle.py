"""The reference and its error budget for a case, under the conventions an implementation declares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from veriformer import budgets
from veriformer.budgets import Bound, Precision
from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.dialect import TABLES, positional_of, reference_call, words_of
from veriformer.given_models import TableModel
from veriformer.memory import Memory, key_of
from veriformer.reference import visible_keys
from veriformer.reference.universal_dialects import dialect_and_halting

ATTENTIONS = ("attention", "attention_with_lse")
COMPOSITES = (
    "multi_head_attention",
    "encoder_layer",
    "decoder_layer",
    "encoder",
    "decoder",
    "transformer",
    "decoder_lm",
    "encoder_decoder",
    "universal_transformer",
)
"""Operations whose budgets come from perturbing the reference; the others have closed forms."""
NORMS = ("layer_norm", "rms_norm")
_NORM = re.compile(r"\.norm\d*\.(weight|bias)$")
"""Names of a norm's parameters among the weights of a composite."""
HALTING = ("adaptive_computation_time", "act_loop", "universal_transformer")
"""Operations that choose how many steps to take."""
_MEMORY = Memory()


def shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    """The shapes of an operation's results."""
    operation = case.operation
    if operation in TABLES:
        sizes = tuple(int(case[name]) for name in case.table.scalars)
        return (sizes,)
    if case.table.number:
        return ((),)
    if operation == "cross_entropy":
        return (case["targets"].shape if case["reduction"] == "none" else (),)
    if operation in HALTING:
        state = case["states"][..., 0, :] if operation == "adaptive_computation_time" else case[case.table.needed[0]]
        return state.shape, state.shape[:-1], state.shape[:-1]
    if operation == "logsumexp":
        shape = list(case["x"].shape)
        del shape[case["axis"]]
        return (tuple(shape),)
    if operation == "embedding":
        return ((*case["ids"].shape, case["table"].shape[1]),)
    if operation == "next_token_probabilities":
        return (case["logits"].shape,)
    if operation == "varlen_attention":
        return ((*case["q"].shape[:2], case["v"].shape[2]),)
    if operation == "cached_attention":
        out = (*case["q"].shape[:3], case["v_new"].shape[3])
        return out, case["k_cache"].shape, case["v_cache"].shape
    if operation in ("transformer", "encoder_decoder"):
        return ((*case["target"].shape, vocabulary_of(case)),)
    if operation == "decoder_lm":
        return ((*case["tokens"].shape, vocabulary_of(case)),)
    if operation == "generate":
        return ((case["prompt"].shape[0], int(case["max_length"])),)
    if operation in ATTENTIONS:
        out = (*case["q"].shape[:3], case["v"].shape[3])
        return (out, out[:3]) if operation == "attention_with_lse" else (out,)
    if operation == "adamw_step" or case.table.listed:
        return tuple(case[name].shape for name in case.table.results_for(case.arrays))
    return (case["x"].shape,)


def vocabulary_of(case: Case) -> int:
    """How many tokens a model with weights scores: what its head gives, or else the rows of its embedding."""
    if "params.head.w" in case.arrays:
        return int(case["params.head.w"].shape[1])
    name = next(name for name in ("params.target_embedding", "params.embedding") if name in case.arrays)
    return int(case[name].shape[0])


def query_offset(case: Case, capabilities: Capabilities) -> int:
    """Absolute position of query 0 under the declared causal alignment."""
    if capabilities.causal_alignment == "top_left":
        return 0
    return int(case.size("Tk") - case.size("Tq"))


def allowed_keys(case: Case, capabilities: Capabilities | None = None) -> np.ndarray:
    """Which keys each query may see: causal, window, mask and infinite bias together, as bool[B,H,Tq,Tk]."""
    sizes = case.sizes()
    batch, heads, queries, keys = sizes["B"], sizes["H"], sizes["Tq"], sizes["Tk"]
    offset = query_offset(case, capabilities or Capabilities())
    allowed = np.broadcast_to(
        np.asarray(
            visible_keys(queries, keys, causal=case["causal"], window=case["window"], offset=offset, like=case["q"])
        ),
        (batch, heads, queries, keys),
    )
    if case["mask"] is not None:
        allowed = allowed & case["mask"]
    if case["bias"] is not None:
        allowed = allowed & (case["bias"] != -np.inf)
    return allowed


def generated(case: Case) -> np.ndarray:
    """What greedy generation gives, with pad up to max_length: an exact choice of whole numbers."""
    found = reference_call(case.operation, Capabilities(), case.arrays, case.keywords)
    rest = int(case["max_length"]) - found.shape[1]
    return np.pad(found, ((0, 0), (0, rest)), constant_values=case["pad"])


def open_choices(case: Case) -> np.ndarray:
    """Where in generated ids any token may stand: from a row's first choice among equal logits on."""
    ids, start = generated(case.with_keywords(end=None)), case["prompt"].shape[1]
    logits = TableModel(case["model.table"]).full(ids)[:, start - 1 : -1]
    tied = (logits == logits.max(-1, keepdims=True)).sum(-1) > 1
    if case["end"] is not None:  # a row that has ended has no more choices
        ended = np.logical_or.accumulate(ids[:, start:] == case["end"], axis=1)
        tied[:, 1:] &= ~ended[:, :-1]
    return np.pad(np.logical_or.accumulate(tied, axis=1), ((0, 0), (start, 0)))


def bounds(case: Case, capabilities: Capabilities, precision: Precision) -> tuple[Bound, ...]:
    """Value and budget of every result. Composites need torch."""
    precision = replace(precision, saved_statistics="float32", recomputes_probabilities=True)  # of the backward alone
    return _MEMORY.get(  # type: ignore[no-any-return]
        key_of(case, words_of(case.operation, capabilities), capabilities.empty_row, precision),
        lambda: _bounds(case, capabilities, precision),
    )


def _bounds(case: Case, capabilities: Capabilities, precision: Precision) -> tuple[Bound, ...]:
    with np.errstate(over="ignore"):
        if case.operation in ATTENTIONS:
            return _attention(case, capabilities, precision)
        if case.operation == "generate":
            ids = generated(case).astype(float)
            return (Bound(ids, np.where(open_choices(case), np.inf, 0.0), {}),)
        if case.operation in COMPOSITES:
            return _perturbed(case, (), None, capabilities, precision)[0]
        words = {name: case[name] for name in (*case.table.keywords, *case.table.options)}
        words |= words_of(case.operation, capabilities)
        positional = positional_of(case.operation, case.arrays, case.keywords)
        found = getattr(budgets, case.operation)(*positional, **words, precision=precision)
    return found if isinstance(found, tuple) else (found,)


def gradient_bounds(
    case: Case,
    names: tuple[str, ...],
    cotangents: tuple[np.ndarray | None, ...],
    capabilities: Capabilities,
    precision: Precision,
) -> dict[str, Bound]:
    """Value and budget of the vector-Jacobian product for each named array. Needs torch."""
    return _MEMORY.get(  # type: ignore[no-any-return]
        key_of(
            case,
            words_of(case.operation, capabilities),
            capabilities.at("gradient_accumulate", case.dtype),
            precision,
            names,
            cotangents,
        ),
        lambda: _gradient_bounds(case, names, cotangents, capabilities, precision),
    )


def _gradient_bounds(
    case: Case,
    names: tuple[str, ...],
    cotangents: tuple[np.ndarray | None, ...],
    capabilities: Capabilities,
    precision: Precision,
) -> dict[str, Bound]:
    found = _perturbed(case, names, cotangents, capabilities, precision)[1]
    if case.operation in ("adaptive_computation_time", "act_loop"):
        return _decided(case, capabilities, precision, found)
    return found


def _decided(case: Case, capabilities: Capabilities, precision: Precision, found: dict[str, Bound]) -> dict[str, Bound]:
    """The bounds with everything allowed in rows where roundings may choose another halting step."""
    loop = case.operation == "act_loop"
    halting = case["step.halting"][..., : case["max_steps"]] if loop else case["halting"]
    rows = budgets.undecided(halting, case["epsilon"], precision, capabilities.halting_comparison)

    def opened(bound: Bound) -> Bound:
        there = rows.reshape(*rows.shape, *[1] * (bound.value.ndim - rows.ndim))
        return replace(bound, allowed=np.where(there, np.inf, bound.allowed))

    return {name: opened(bound) for name, bound in found.items()}


def _recomputes(operation: str, precision: Precision) -> bool:
    """Whether the backward may form exp(x - lse) anew: logsumexp always (it is the gradient), softmax never (it has its
    result), log_softmax and cross entropy where what they keep is coarse, and with the others as declared."""
    if operation in ("softmax", "logsumexp"):
        return operation == "logsumexp"
    coarse = operation in ("log_softmax", "cross_entropy") and precision.u_statistics > precision.u_acc
    return precision.recomputes_probabilities or coarse


def _row_sums(case: Case, names: Sequence[str], capabilities: Capabilities) -> dict[str, float]:
    """The unit roundoff in which gradients of norms' parameters are summed over rows, where that is declared coarse."""
    unit = Precision(case.dtype, accumulate=capabilities.at("gradient_accumulate", case.dtype)).u_acc
    if unit <= Precision(case.dtype).u_acc:
        return {}
    return {name: unit for name in names if case.operation in NORMS and name != "x" or _NORM.search(name)}


def _perturbed(
    case: Case,
    names: tuple[str, ...],
    cotangents: tuple[np.ndarray | None, ...] | None,
    capabilities: Capabilities,
    precision: Precision,
) -> tuple[tuple[Bound, ...], dict[str, Bound]]:
    from veriformer.budgets.perturbation import perturbed

    if not _recomputes(case.operation, precision):
        precision = replace(precision, recomputes_probabilities=False)

    def function(tensors: Mapping[str, Any]) -> Any:
        return reference_call(case.operation, capabilities, tensors, case.keywords)

    if case.operation == "universal_transformer":
        return _pondered(case, names, cotangents, capabilities, precision)
    row_sums = _row_sums(case, names, capabilities)
    return perturbed(function, case.arrays, precision, cotangents=cotangents, wrt=names, row_sums=row_sums)


def _pondered(
    case: Case,
    names: tuple[str, ...],
    cotangents: tuple[np.ndarray | None, ...] | None,
    capabilities: Capabilities,
    precision: Precision,
) -> tuple[tuple[Bound, ...], dict[str, Bound]]:
    """The same for a Universal Transformer, of which sequences are open where roundings may choose a halting step."""
    from veriformer.budgets.universal import universal_transformer

    def function(tensors: Mapping[str, Any]) -> Any:
        named = {**case.keywords, **{name: tensors[name] for name in case.table.options if name in tensors}}
        result, halting = dialect_and_halting(*positional_of(case.operation, tensors, case.keywords), **named)
        return (*result, halting)

    return universal_transformer(
        function, case.arrays, precision, epsilon=case["epsilon"], cotangents=cotangents, wrt=names,
        row_sums=_row_sums(case, names, capabilities),
    )  # fmt: skip


def _attention(case: Case, capabilities: Capabilities, precision: Precision) -> tuple[Bound, ...]:
    names = ("mask", "bias", "causal", "scale", "window", "softcap", "sink")
    keywords = {name: case[name] for name in names}
    given = {**keywords, "offset": query_offset(case, capabilities), "precision": precision}
    if case.operation == "attention":
        found: tuple[Bound, ...] = (budgets.attention(case["q"], case["k"], case["v"], **given),)
    else:
        found = budgets.attention_with_lse(case["q"], case["k"], case["v"], **given)
    return (_empty_rows(found[0], case, capabilities, precision), *found[1:])


def empty_row_rule(case: Case, capabilities: Capabilities) -> str:
    """The declared value of empty rows for the kind of mask that this case has."""
    kind = "mask" if case["mask"] is not None else "bias" if case["bias"] is not None else "causal"
    rule = capabilities.empty_row
    return rule if isinstance(rule, str) else rule.get(kind, rule.get("default", "zeros"))


def _empty_rows(out: Bound, case: Case, capabilities: Capabilities, precision: Precision) -> Bound:
    rule = empty_row_rule(case, capabilities)
    if rule == "zeros" or case["sink"] is not None:
        return out
    empty = ~allowed_keys(case, capabilities).any(-1)
    if not empty.any():
        return out
    value, allowed = out.value.copy(), out.allowed.copy()
    if rule == "nan":
        value[empty] = np.nan
    elif rule == "undefined":
        allowed[empty] = np.inf
    else:
        plain = case.with_arrays(mask=None, bias=None).with_keywords(causal=False, window=None, scale=0.0)
        mean = _attention(plain.as_operation("attention"), Capabilities(), precision)[0]
        value[empty], allowed[empty] = mean.value[empty], mean.allowed[empty]
    return replace(out, value=value, allowed=allowed)
