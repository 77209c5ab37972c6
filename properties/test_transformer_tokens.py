"""The encoder-decoder at its ends: tables, their scale, sinusoids and the head."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.properties.transformer_cases import transformer_cases
from veriformer.properties.transformer_changes import (
    embedded,
    head_of,
    real_tokens,
    renamed,
    reordered,
    scored,
    small_numbers,
    sounding,
    untied,
)
from veriformer.subject import Subject

PRE = {"norm", "pre_norm"}


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/transformer_tokens.py."""
    return tuple(f"transformer_tokens.py:{name}" for name in names)


@law(
    "transformer",
    case=transformer_cases(),
    needs=PRE,
    source="R42, R43, R45, P41",
    kills=faults(
        "target_without_positions",
        "positions_from_one",
        "sines_then_cosines",
        "wavelengths_squared",
        "exponent_floored",
        "divisor_without_the_first_pair",
        "odd_width_ends_in_a_cosine",
        "scale_of_the_width_always",
        "final_norm_never_absent",
        "logits_over_the_root_of_the_width",
    ),
)
def silent_layers_leave_the_embedded_target(transformer: Subject, case: Case) -> None:
    """In pre-norm with silent sublayers the logits are (row of the table · scale + sinusoids) w + b."""
    mute = sounding(case)
    expect_equal(measure(transformer, mute), scored(mute, embedded(mute, "target")))


@law(
    "transformer",
    case=transformer_cases(least={"Vs": 2}),
    pick=PICKS,
    source="R77",
    relative=False,
    changes=("leak",),
    kills=faults("zero_is_padding", "source_from_the_target_table"),
)
def source_tokens_are_only_names(transformer: Subject, case: Case, pick: int) -> None:
    """Source tokens renamed together with the rows of their table have the same logits."""
    expect_unmoved(transformer, case, renamed(case, "source", reordered(case.size("Vs"), pick)))


@law(
    "transformer",
    case=transformer_cases(least={"V": 2}),
    pick=PICKS,
    source="R77",
    kills=faults("target_row_zero_is_padding", "first_logit_is_minus_infinity", "tied_head_of_the_source"),
)
def target_tokens_are_only_names(transformer: Subject, case: Case, pick: int) -> None:
    """Target tokens renamed together with the rows of their table and the columns of the head rename the logits."""
    order = reordered(case.size("V"), pick)
    expect_equal(measure(transformer, renamed(case, "target", order)), measure(transformer, case)[..., order])


@law(
    "transformer",
    case=transformer_cases(least={"Vs": 2, "V": 2}, tied=False),
    pick=PICKS,
    source="R41, B090",
    relative=False,
    changes=("leak",),
    kills=("transformer.py:encoder_mask_ignored", *faults("source_from_the_target_table")),
)
def unnamed_rows_have_no_influence(transformer: Subject, case: Case, pick: int) -> None:
    """Rows of either table that none of its own real tokens names change nothing, where the head is another one."""
    other = case.random(pick).integers(-3, 4, case["params.target_embedding"].shape)
    row = case["source"][real_tokens(case)][0] % case.size("V")
    target = np.where(case["target"] == row, (row + 1) % case.size("V"), case["target"])
    case = case.with_arrays(target=target)
    named = {"source": case["source"][real_tokens(case)], "target": target}
    tables = {}
    for name, tokens in named.items():
        table = case[f"params.{name}_embedding"]
        unnamed = ~np.isin(np.arange(len(table)), tokens)[:, None]
        tables[f"params.{name}_embedding"] = np.where(unnamed, table[::-1] + other[0] + 1, table)
    expect_unmoved(transformer, case, case.with_arrays(**tables))


@law(
    "transformer",
    case=transformer_cases(scaled=False),
    scale=choice(2.0, 0.5, 4.0),
    source="R42",
    kills=faults(
        "scale_forgotten",
        "scale_of_the_source_alone",
        "scale_of_the_target_alone",
        "scale_twice",
        "scale_of_the_sinusoids_too",
        "scale_of_the_tied_head_too",
    ),
)
def embedding_scale_multiplies_both_tables(transformer: Subject, case: Case, scale: float) -> None:
    """embedding_scale is as good as both tables multiplied by it, beside a head that stays as it is."""
    names = ("params.source_embedding", "params.target_embedding")
    multiplied = untied(case).with_arrays(**{name: case[name] * scale for name in names})
    scaled = case.with_arrays(**{"params.embedding_scale": np.asarray(scale)})
    expect_equal(measure(transformer, scaled), measure(transformer, multiplied))


@law(
    "transformer",
    case=transformer_cases(tied=True),
    source="P95, spec 3.8",
    kills=faults("tied_head_not_transposed", "tied_head_of_the_source", "scale_of_the_tied_head_too"),
)
def tied_head_is_the_transposed_table(transformer: Subject, case: Case) -> None:
    """Without a head the logits are those of a head that is the target's table transposed, unscaled."""
    expect_equal(measure(transformer, case), measure(transformer, untied(case)))


@law(
    "transformer",
    case=transformer_cases(tied=False),
    pick=PICKS,
    source="the operation's calling convention",
    kills=faults("head_bias_forgotten", "log_probabilities_for_logits", "head_ignored"),
)
def head_is_applied_last(transformer: Subject, case: Case, pick: int) -> None:
    """Twice the head gives twice the logits, and what is added to its bias, where it may have one, is added to them."""
    w, b = head_of(case)
    doubled = case.with_arrays(**{"params.head.w": 2 * w})
    shift = np.zeros_like(b)
    if transformer.capabilities.biases:
        shift = small_numbers(len(b), pick)
        doubled = doubled.with_arrays(**{"params.head.b": 2 * b + shift})
    expect_equal(measure(transformer, doubled), measure(transformer, case) * 2 + shift)
