"""Layers and stacks: every weight and every keyword counts, gradients come by and go past."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_different, expect_finite, expect_same
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_cases import PLAIN
from veriformer.properties.cotangents import differentiable
from veriformer.properties.layer_build import reach, seen_tokens
from veriformer.properties.layer_cases import LAYERED, layer_cases
from veriformer.properties.layer_changes import (
    TRIES,
    counting,
    expect_every_gradient,
    nudged,
    silenced,
    telling,
    without_final_norm,
)
from veriformer.subject import Subject

PRE = {"norm", "pre_norm"}
LEAST = {"T": 2, "S": 2, "d": 3, "f": 2}
"""Below these sizes some weights decide nothing."""
OPEN = layer_cases(mask=False, memory_mask=False, window=False, least=LEAST)
"""Cases in which everybody sees everything, but for what is causal."""
BARE = layer_cases(
    mask=False,
    memory_mask=False,
    window=False,
    alpha=False,
    rotary=False,
    alibi=False,
    least={**LEAST, "T": 3, "D": 2, "H": 2},
)
"""Cases without any keyword but norm; for a single head alibi decides next to nothing."""


@law(
    LAYERED,
    case=OPEN,
    pick=PICKS,
    source="R47, corpus B109",
    relative=False,
    kills=(
        "layers.py:first_norm_again",
        "layers.py:norm_bias_dropped",
        "layers.py:inner_bias_dropped",
        "layers.py:projection_biases_dropped",
        "decoder_layers.py:cross_with_the_weights_of_self",
        "stacks.py:first_layer_for_all",
        "stacks.py:feed_forward_of_the_first_layer",
        "stacks.py:final_norm_missing",
        "stacks.py:decoder_cross_keys_of_the_first_layer",
    ),
)
def every_weight_counts(layer: Subject, case: Case, pick: int) -> None:
    """Other numbers in any weight but the bias of the keys change the result."""
    moved = dict.fromkeys(counting(case), 0.0)
    for attempt in range(TRIES):
        drawn = telling(case, pick + 16 * attempt)
        before, rng = layer(drawn), case.random(pick + attempt)
        for name in [name for name, by in moved.items() if not by]:
            other = drawn.with_arrays(**{name: nudged(drawn[name], rng, 2.0 ** (attempt - 1))})
            moved[name] = np.abs(layer(other) - before).max()
        if all(moved.values()):
            break
    for name, by in moved.items():
        expect_different(by, 0.0, what=f"{name} has influence")


@law(
    LAYERED,
    case=BARE,
    pick=PICKS,
    needs={"norm or alpha or window or positions"},
    source="corpus kind DEAD",
    relative=False,
    kills=(
        "layers.py:always_post",
        "layers.py:alpha_ignored",
        "layers.py:window_needs_a_mask",
        "layers.py:alibi_ignored",
        "layers.py:rotary_ignored",
        "stacks.py:alpha_of_the_depth",
    ),
)
def every_keyword_counts(layer: Subject, case: Case, pick: int) -> None:
    """norm, alpha (in post-norm), window and positions change the result, as far as they may be given."""
    values = changes(layer, case)
    moved = dict.fromkeys(values, 0.0)
    for attempt in range(TRIES):
        drawn = telling(case, pick + 16 * attempt)
        before = layer(drawn)
        for word in [word for word, by in moved.items() if not by]:
            other = drawn.with_keywords(**{word.partition(" ")[0]: values[word]})
            moved[word] = np.abs(layer(other) - before).max()
        if all(moved.values()):
            break
    for word, by in moved.items():
        expect_different(by, 0.0, what=f"{word} has influence")


def changes(layer: Subject, case: Case) -> dict[str, object]:
    """Another value for each keyword that the implementation takes."""
    capabilities, post = layer.capabilities, case["norm"] == "post"
    other = "pre" if post else "post"
    found: dict[str, object] = {"norm": other} if getattr(capabilities, f"{other}_norm") else {}
    found |= {"alpha": 2.0} if post else {}
    found |= {"window": (0, 0), "positions alibi": "alibi"}
    found |= {} if case.size("D") % 2 else {"positions rotary": "rotary"}
    return {word: value for word, value in found.items() if word.partition(" ")[0] in layer.domain.accepts}


@law(
    LAYERED,
    case=OPEN,
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="R17",
    relative=False,
    kills=(
        "layers_gradient.py:queries_detached",
        "layers_gradient.py:norm_weight_detached",
        "layers_gradient.py:outer_bias_detached",
        "layers_gradient.py:memory_detached",
        "layers_gradient.py:final_norm_detached",
        "layers_gradient.py:input_of_later_layers_detached",
    ),
)
def gradient_reaches_every_weight(layer: Subject, case: Case, pick: int) -> None:
    """x, memory and every weight but the bias of the keys get a gradient of their own shape that is not 0."""
    expect_every_gradient(layer, case, pick, telling)


@law(
    LAYERED,
    case=layer_cases(pre=True),
    pick=PICKS,
    kind="gradient",
    needs=PRE | {"gradients"},
    source="P81",
    relative=False,
    kills=(
        "layers_gradient.py:residual_detached",
        "layers_gradient.py:residual_counted_twice",
        "layers_gradient.py:memory_pooled",
    ),
)
def gradient_passes_silent_sublayers(layer: Subject, case: Case, pick: int) -> None:
    """In pre-norm, where every sublayer gives 0, the gradient of x is the cotangent, bit for bit, that of memory 0."""
    silent = silenced(without_final_norm(case))
    cotangent = case.random(pick).integers(-3, 4, case["x"].shape).astype(float)
    found = layer.gradients(silent, tuple(name for name in ("x", "memory") if name in silent.arrays), cotangent)
    expect(found["x"] is not None, "no gradient", f"x got no gradient, wanted one of shape {case['x'].shape}")
    expect_same(found["x"], cotangent, what="the gradient of x is")
    if found.get("memory") is not None:
        expect_same(found["memory"], np.zeros_like(silent["memory"]), what="the gradient of memory is")


@law(
    LAYERED,
    case=layer_cases(hidden=True),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "mask or window"},
    source="P50, P54",
    relative=False,
    kills=(
        "layers_gradient.py:hidden_values_trained",
        "layers_gradient.py:tokens_pooled",
    ),
)
def gradient_of_hidden_tokens_is_zero(layer: Subject, case: Case, pick: int) -> None:
    """The gradient of one token's result is exactly 0 at tokens that it does not see, and in other samples."""
    unseen = ~reach(case)
    b, i = case.random(pick).choice(np.argwhere(unseen.any(-1)))
    cotangent = np.zeros(case["x"].shape)
    cotangent[b, i] = case.random(pick).integers(1, 4, case["x"].shape[2])
    gradient = layer.gradients(case, ("x",), cotangent)["x"]
    if gradient is not None:
        hidden = np.ones(gradient.shape[:2], bool)
        hidden[b] = unseen[b, i]
        expect_same(gradient[hidden], np.zeros_like(gradient[hidden]), what="the gradient of hidden tokens is")


@law(
    ("encoder_layer", "decoder_layer"),
    case=layer_cases(some_empty=True, mask=True, families=PLAIN),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "mask", "causal_with_mask"},
    source="P55, corpus item 6",
    relative=False,
    kills=("layers_gradient.py:empty_row_replaced",),
)
def gradient_ignores_unused_empty_rows(layer: Subject, case: Case, pick: int) -> None:
    """Tokens of which some head sees nothing, and whose results nobody uses, leave the gradients finite."""
    used = seen_tokens(case).any(-1).all(1)[..., None]
    cotangent = np.where(used, case.random(pick).integers(-3, 4, case["x"].shape), 0.0)
    for name, gradient in layer.gradients(case, differentiable(case), cotangent).items():
        if gradient is not None:
            expect_finite(gradient, what=f"the gradient of {name} is")
