"""Encoder and decoder layers: where the norms stand, what goes past a sublayer, what each sublayer adds."""

from __future__ import annotations

import numpy as np

from veriformer import reference
from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_same
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_cases import PLAIN
from veriformer.properties.layer_build import seen_memory, seen_tokens
from veriformer.properties.layer_cases import LAYERED, layer_cases
from veriformer.properties.layer_changes import (
    branches,
    coarse,
    last_norm,
    norms_alone,
    prefixes,
    silenced,
    without_final_norm,
)
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.reference.layers import normed
from veriformer.subject import Subject

LAYERS = ("encoder_layer", "decoder_layer")
PRE = {"norm", "pre_norm"}


@law(
    LAYERED,
    case=layer_cases(pre=True),
    needs=PRE,
    source="P75, R45",
    relative=False,
    kills=(
        "layers.py:attention_residual_missing",
        "layers.py:residual_of_the_normed",
        "layers.py:residual_in_bfloat16",
        "layers.py:norm_twice",
        "decoder_layers.py:cross_residual_missing",
        "stacks.py:final_norm_added",
        "stacks.py:decoder_final_norm_added",
        "stacks.py:input_added_at_the_end",
    ),
)
def silent_sublayers_leave_the_input(layer: Subject, case: Case) -> None:
    """In pre-norm, where every sublayer gives 0 and no norm follows, the result is x, bit for bit."""
    expect_same(layer(silenced(without_final_norm(case))), case["x"])


@law(
    LAYERED,
    case=layer_cases(pre=False),
    needs={"post_norm"},
    source="P75, P79, R45",
    kills=(
        "layers.py:residual_before_the_norm",
        "layers.py:residual_of_the_input",
        "layers.py:norms_swapped",
        "layers.py:norm_unbiased",
        "layers.py:norm_eps_of_rms",
        "layers.py:rms_norm_centred",
        "layers.py:alpha_squared",
        "layers.py:alpha_on_the_branch",
        "decoder_layers.py:alpha_not_in_cross",
        "stacks.py:alpha_grows",
        "stacks.py:norms_of_the_first_layer",
    ),
)
def silent_sublayers_leave_the_norms(layer: Subject, case: Case) -> None:
    """In post-norm, where every sublayer gives 0, the result is norm after norm of alpha x."""
    silent = silenced(case)
    expect_equal(measure(layer, silent), norms_alone(silent))


@law(
    LAYERED,
    case=layer_cases(),
    source="R46",
    relative=False,
    kills=(
        "layers.py:first_norm_again",
        "layers.py:norm_of_the_branch",
        "decoder_layers.py:last_norms_swapped",
        "stacks.py:final_norm_missing",
        "stacks.py:final_norm_first",
        "stacks.py:final_norm_in_pre_norm_alone",
        "stacks.py:final_norm_of_the_last_layer",
        "stacks.py:decoder_final_norm_missing",
    ),
)
def last_norm_scales_the_output(layer: Subject, case: Case) -> None:
    """Twice the weight and the bias of the norm that comes last give twice the result, bit for bit."""
    if not last_norm(case) and layer.capabilities.post_norm:
        case = case.with_keywords(norm="post")
    name = last_norm(case)
    if name:
        twice = {name + part: 2 * case[name + part] for part in ("weight", "bias") if case[name + part] is not None}
        expect_same(layer(case.with_arrays(**twice)), 2 * layer(case))


@law(
    LAYERED,
    case=layer_cases(pre=True, rms=False, families=PLAIN),
    pick=PICKS,
    needs=PRE,
    source="P76",
    kills=(
        "layers.py:residual_of_the_normed",
        "layers.py:norm_of_queries_alone",
        "layers.py:second_norm_forgotten",
        "layers.py:norm_not_centred",
        "decoder_layers.py:cross_queries_not_normed",
        "stacks.py:norm_in_the_first_layer_alone",
    ),
)
def a_shift_passes_through(layer: Subject, case: Case, pick: int) -> None:
    """In pre-norm with layer_norm, a number added to all channels of a token is added to its result, or normed away."""
    case = case.with_arrays(x=coarse(case["x"]))
    shift = case.random(pick).integers(-4, 5, (*case["x"].shape[:2], 1)).astype(float)
    moved = measure(layer, case.with_arrays(x=case["x"] + shift))
    expect_equal(moved, measure(layer, case) + (0.0 if last_norm(case) else shift))


@law(
    LAYERS,
    case=layer_cases(pre=False, rms=False, families=PLAIN),
    needs={"post_norm"},
    source="P77",
    kills=(
        "layers.py:norm_not_centred",
        "layers.py:norm_of_the_branch",
        "layers.py:norm_over_time",
        "decoder_layers.py:last_norms_swapped",
    ),
)
def post_norm_centres_each_token(layer: Subject, case: Case) -> None:
    """In post-norm with weight 1 and bias 0 at the end, each token has mean 0, and mean square 1 at most."""
    name, width = last_norm(case), case["x"].shape[-1]
    y = measure(layer, case.with_arrays(**{name + "weight": np.ones(width), name + "bias": np.zeros(width)}))
    expect_close(y.value.mean(-1), 0.0, y.allowed.mean(-1), what="the mean of a token is")
    error = (2 * np.abs(y.value) + y.allowed) * y.allowed
    square = np.square(y.value).mean(-1)
    expect_between(square, 0.0, 1.0, error.mean(-1), what="the mean square of a token is")


@law(
    LAYERED,
    case=layer_cases(pre=True),
    needs=PRE | {"alpha"},
    source="P79, DESIGN section 5",
    relative=False,
    kills=("layers.py:alpha_in_pre_norm",),
)
def alpha_acts_in_post_norm_only(layer: Subject, case: Case) -> None:
    """In pre-norm alpha changes no bit."""
    expect_same(layer(case.with_keywords(alpha=2.0)), layer(case.with_keywords(alpha=1.0)))


@law(
    LAYERS,
    case=layer_cases(pre=True, rotary=False, alibi=False, families=PLAIN),
    pick=PICKS,
    needs=PRE,
    source="P78, R45",
    kills=(
        "layers.py:norm_of_queries_alone",
        "layers.py:gelu_for_relu",
        "layers.py:outer_bias_dropped",
        "layers.py:scale_by_model_width",
        "layers.py:window_narrow",
        "decoder_layers.py:memory_normed",
        "decoder_layers.py:keys_of_memory_normed",
        "decoder_layers.py:cross_with_the_weights_of_self",
        "decoder_layers.py:causal_strict",
    ),
)
def a_sublayer_alone_adds_its_result(layer: Subject, case: Case, pick: int) -> None:
    """In pre-norm, where all sublayers but one give 0, it adds what it makes of the normed x to x."""
    branch = branches(case)[pick % len(branches(case))]
    expect_equal(measure(layer, silenced(case, branch)), case["x"] + result_of(case, branch))


def result_of(case: Case, branch: str) -> np.ndarray:
    """What one sublayer of a pre-norm layer makes of x, without positions."""
    params = case.params[branch]
    seen = normed(case["x"], case.params[f"norm{branches(case).index(branch) + 1}"])
    if branch == "feed_forward":
        return reference.feed_forward(seen, params["w1"], params.get("b1"), params["w2"], params.get("b2"))
    own = branch == "attention"
    mask = seen_tokens(case) if own else seen_memory(case)
    memory = seen if own else case["memory"]
    return reference.multi_head_attention(seen, memory, params, heads=case["heads"], mask=mask)


@law(
    LAYERS,
    case=layer_cases(bare=False),
    needs={"biases"},
    source="P82",
    relative=False,
    kills=(
        "layers.py:leaky",
        "layers.py:activation_missing",
        "layers.py:inner_bias_dropped",
    ),
)
def held_back_units_are_silent(layer: Subject, case: Case) -> None:
    """Hidden units that their bias holds below 0 give what w2 = 0 gives, bit for bit."""
    w1, b1 = "params.feed_forward.w1", "params.feed_forward.b1"
    top = np.abs(last_seen(case)).max() * np.abs(case[w1]).sum(0).max()
    held = case.with_arrays(**{b1: np.full_like(case[b1], -(2.0 ** np.ceil(np.log2(1 + top))))})
    w2 = np.zeros_like(case["params.feed_forward.w2"])
    expect_same(layer(held), layer(case.with_arrays(**{"params.feed_forward.w2": w2})))


def last_seen(case: Case) -> np.ndarray:
    """As much as the feed-forward sublayer of a layer can get to see: every norm bounds its result."""
    name = f"params.norm{len(branches(case)) - (case['norm'] == 'post')}."
    bias = case[name + "bias"]
    return np.sqrt(case["x"].shape[-1]) * np.abs(case[name + "weight"]) + (0 if bias is None else np.abs(bias))


@law(
    LAYERS,
    case=layer_cases(pre=True),
    needs=PRE,
    source="P82",
    kills=(
        "layers.py:activation_after_w2",
        "layers.py:feed_forward_first",
        "decoder_layers.py:feed_forward_before_cross",
    ),
)
def last_sublayer_takes_both_signs(layer: Subject, case: Case) -> None:
    """In pre-norm the results for w2, b2 and for -w2, -b2 lie on either side of the one for 0, equally far."""
    names = [f"{prefixes(case)[-1]}feed_forward.{name}" for name in ("w2", "b2")]
    names = [name for name in names if case[name] is not None]
    ahead, back, none = (
        measure(layer, case.with_arrays(**{name: sign * case[name] for name in names})) for sign in (1.0, -1.0, 0.0)
    )
    allowed = ahead.allowed + back.allowed + 2 * none.allowed
    expect_close(ahead.value + back.value, 2 * none.value, allowed, what="the sum over both signs")


@law(
    LAYERS,
    case=layer_cases(least={"T": 2}),
    pick=PICKS,
    source="P82",
    relative=False,
    changes=("leak",),
    kills=(
        "layers.py:feed_forward_over_time",
        "layers.py:norm_over_time",
    ),
)
def feed_forward_sees_one_token(layer: Subject, case: Case, pick: int) -> None:
    """Where attention gives 0, what becomes of a token depends on no other token."""
    alone, length = silenced(case, "feed_forward"), case["x"].shape[1]
    token = pick % length
    others = np.arange(length) != token
    moved = alone.with_arrays(x=np.where(others[:, None], 1.0 - alone["x"], alone["x"]))
    expect_unmoved(layer, alone, moved, np.s_[:, token])
