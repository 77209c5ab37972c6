"""Gradients of the encoder-decoder: they reach both stacks and both tables, and no row that does not count."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_close, expect_same
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.cotangents import differentiable, graded
from veriformer.properties.measured import expect_equal
from veriformer.properties.transformer_cases import transformer_cases
from veriformer.properties.transformer_changes import (
    even,
    handed,
    head_of,
    layers,
    real_tokens,
    scale_of,
    sounding,
    untied,
)
from veriformer.subject import Subject

NEEDS = {"gradients"}
TABLES = ("params.source_embedding", "params.target_embedding")


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/transformer_gradient.py."""
    return tuple(f"transformer_gradient.py:{name}" for name in names)


def upstream(case: Case, pick: int) -> np.ndarray:
    """A cotangent of the logits, small whole numbers [B,T,V]."""
    shape = (*case["target"].shape, case.size("V"))
    return case.random(pick).integers(-3, 4, shape).astype(float)


def gathered(tokens: np.ndarray, rows: int, gradient: np.ndarray) -> np.ndarray:
    """What each row of a table gets: the sum over the tokens that name it, [rows,d]."""
    return np.einsum("btr,btd->rd", (tokens[..., None] == np.arange(rows)).astype(float), gradient)


@law(
    "transformer",
    case=transformer_cases(),
    kind="gradient",
    needs=NEEDS,
    source="R17, P63",
    relative=False,
    kills=faults("memory_detached"),
)
def gradient_exists(transformer: Subject, case: Case) -> None:
    """Every table and weight of both stacks but the biases of keys gets a gradient of its own shape."""
    names = tuple(name for name in differentiable(case) if not name.endswith(".bk"))
    for name, gradient in transformer.gradients(case, names).items():
        expect(gradient is not None, "no gradient", f"{name} got no gradient, wanted one of shape {case[name].shape}")
        same = gradient.shape == case[name].shape
        expect(same, "shape", f"the gradient of {name} has shape {gradient.shape}, wanted {case[name].shape}")


@law(
    "transformer",
    case=transformer_cases(tied=True, examples=6),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P95",
    kills=faults("tied_head_detached", "tied_embedding_detached"),
)
def gradient_of_a_tied_table_is_that_of_both_its_uses(transformer: Subject, case: Case, pick: int) -> None:
    """A tied table gets what it would get as a table alone and what its transpose would get as a head alone."""
    table, head, cotangent = "params.target_embedding", "params.head.w", upstream(case, pick)
    tied = graded(transformer, case, (table,), cotangent)[table]
    apart = graded(transformer, untied(case), (table, head), cotangent)
    total, allowed = apart[table].value + apart[head].value.T, apart[table].allowed + apart[head].allowed.T
    expect_close(tied.value, total, tied.allowed + allowed, what="the gradient of the tied table is")


@law(
    "transformer",
    case=transformer_cases(examples=6),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"norm", "pre_norm"},
    source="R41, R42",
    kills=faults(
        "zero_row_frozen",
        "last_repeat_wins",
        "scale_missing",
        "averaged_over_the_batch",
        "memory_detached_in_later_layers",
    ),
)
def gradient_of_tables_gathers_by_token(transformer: Subject, case: Case, pick: int) -> None:
    """With even cross-attention and nothing else sounding, each token hands its row its share, and repeats add up."""
    lit = untied(even(sounding(case, "cross_attention"), "cross_attention"))
    d, real, cotangent = case.size("d"), real_tokens(case)[..., None], upstream(case, pick)
    of_target = cotangent @ head_of(lit)[0].T
    names, ends = [f"{layer}cross_attention." for layer in layers(lit, "decoder")], (np.eye(d), np.zeros((d, d)))
    linear = sum(handed(lit, name, ends[0]) - handed(lit, name, ends[1]) for name in names)
    of_source = real / real.sum(1, keepdims=True) * (of_target.sum(1, keepdims=True) @ linear.T)
    found = graded(transformer, lit, TABLES, cotangent)
    for name, tokens, gradient in zip(TABLES, ("source", "target"), (of_source, of_target), strict=True):
        wanted = gathered(case[tokens], len(case[name]), gradient) * scale_of(case)
        expect_equal(found[name], wanted, what=f"the gradient of {name} is")


@law(
    "transformer",
    case=transformer_cases(tied=False),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P50, P54, P87, R16",
    relative=False,
    kills=faults("padding_trained", "head_trains_the_table", "later_tokens_trained"),
)
def gradient_reaches_rows_that_count_alone(transformer: Subject, case: Case, pick: int) -> None:
    """For logits up to i a table gets exactly 0 where no real source token, no target token up to i names its row."""
    cotangent, now = upstream(case, pick), pick % case["target"].shape[1]
    cotangent[:, now + 1 :] = 0.0
    named = {"source": case["source"][real_tokens(case)], "target": case["target"][:, : now + 1]}
    found = transformer.gradients(case, TABLES, cotangent)
    for name, tokens in zip(TABLES, named.values(), strict=True):
        if found[name] is not None:
            rest = found[name][~np.isin(np.arange(len(case[name])), tokens)]
            expect_same(rest, np.zeros_like(rest), what=f"the gradient of rows of {name} that do not count is")
