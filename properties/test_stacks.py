"""Stacks of layers: a layer acts the same wherever it stands, one follows the other, all see the same memory."""

from __future__ import annotations

from veriformer.case import Case
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_cases import PLAIN
from veriformer.properties.layer_build import STACKS
from veriformer.properties.layer_cases import layer_cases
from veriformer.properties.layer_changes import coarse, last_norm, layers_of, silenced, with_layers
from veriformer.properties.measured import expect_equal, measure
from veriformer.subject import Subject

PRE = {"norm", "pre_norm"}


@law(
    STACKS,
    case=layer_cases(pre=True),
    pick=PICKS,
    needs=PRE,
    source="P75, P90",
    kills=(
        "stacks.py:last_layer_skipped",
        "stacks.py:one_layer_too_many",
        "stacks.py:final_norm_in_every_layer",
        "stacks.py:norm_in_the_first_layer_alone",
        "stacks.py:positions_in_the_first_layer_alone",
        "stacks.py:decoder_causal_in_the_first_layer_alone",
        "stacks.py:decoder_memory_in_the_first_layer_alone",
    ),
)
def silent_layers_change_nothing(stack: Subject, case: Case, pick: int) -> None:
    """In pre-norm one layer more, whose sublayers give 0, changes nothing, wherever it stands."""
    layers, (silent, *_) = layers_of(case), layers_of(silenced(case))
    place = pick % (len(layers) + 1)
    longer = with_layers(case, [*layers[:place], silent, *layers[place:]])
    expect_equal(measure(stack, longer), measure(stack, case))


@law(
    STACKS,
    case=layer_cases(pre=True, families=PLAIN),
    pick=PICKS,
    needs=PRE | {"biases"},
    source="P78, R47",
    kills=(
        "stacks.py:layers_reversed",
        "stacks.py:first_layer_skipped",
        "stacks.py:attention_of_the_first_layer",
        "stacks.py:decoder_layers_reversed",
        "stacks.py:input_added_at_the_end",
    ),
)
def layers_run_in_order(stack: Subject, case: Case, pick: int) -> None:
    """In pre-norm a layer that only adds its b2, put in front, does what adding b2 to x does; behind, to the result."""
    case, shift = case.with_arrays(x=coarse(case["x"])), case.random(pick).integers(-4, 5, case["x"].shape[2])
    layers, adding = layers_of(case), dict(layers_of(silenced(case))[0])
    adding["feed_forward"] = {**adding["feed_forward"], "b2": shift.astype(float)}
    if pick % 2 and not last_norm(case):
        expect_equal(measure(stack, with_layers(case, [*layers, adding])), measure(stack, case) + shift)
    else:
        front = measure(stack, with_layers(case, [adding, *layers]))
        expect_equal(front, measure(stack, case.with_arrays(x=case["x"] + shift)))


@law(
    "decoder",
    case=layer_cases(pre=True, least={"L": 2}),
    needs=PRE,
    source="P90",
    kills=(
        "stacks.py:decoder_memory_in_the_first_layer_alone",
        "stacks.py:decoder_memory_mask_in_the_first_layer_alone",
        "stacks.py:decoder_cross_keys_of_the_first_layer",
    ),
)
def every_layer_sees_the_memory(decoder: Subject, case: Case) -> None:
    """In pre-norm, where all but the cross-attention of one layer give 0, it does not matter which layer that is."""
    heard = silenced(silenced(case, "cross_attention"), layers=[1])
    expect_equal(measure(decoder, with_layers(heard, layers_of(heard)[::-1])), measure(decoder, heard))
