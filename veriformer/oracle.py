"""The reference and its error budget for a case, under the conventions an implementation declares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from veriformer import budgets
from veriformer.budgets import Bound, Precision
from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.reference import visible_keys


def shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    """The shapes of an operation's results."""
    if case.operation == "logsumexp":
        shape = list(case["x"].shape)
        del shape[case["axis"]]
        return (tuple(shape),)
    if "x" in case.arrays:
        return (case["x"].shape,)
    batch, heads, queries, _ = case["q"].shape
    out = (batch, heads, queries, case["v"].shape[-1])
    return (out, (batch, heads, queries)) if case.operation == "attention_with_lse" else (out,)


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


def bounds(case: Case, capabilities: Capabilities, precision: Precision) -> tuple[Bound, ...]:
    """Value and budget of every result."""
    with np.errstate(over="ignore"):
        if case.operation == "layer_norm":
            return (_layer_norm(case, capabilities, precision),)
        if "q" in case.arrays:
            return _attention(case, capabilities, precision)
        keywords = {name: case[name] for name in case.table.keywords}
        return (getattr(budgets, case.operation)(case["x"], precision=precision, **keywords),)


def _layer_norm(case: Case, capabilities: Capabilities, precision: Precision) -> Bound:
    return budgets.layer_norm(
        case["x"],
        case["weight"],
        case["bias"],
        eps=case["eps"],
        epsilon=capabilities.norm_epsilon,
        variance=capabilities.norm_variance,
        precision=precision,
    )


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
