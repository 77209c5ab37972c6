"""Every operation against its float64 reference, element by element, within the derived error budget."""

from __future__ import annotations

from veriformer.case import Case
from veriformer.expect import expect_within
from veriformer.law import law
from veriformer.properties.attention_cases import attention_cases
from veriformer.properties.cases import TEMPERATURES, layer_norm_cases, softmax_cases
from veriformer.properties.encoder_decoder_cases import encoder_decoder_cases
from veriformer.properties.every_case import EVERY, by_operation
from veriformer.properties.families import FAMILIES
from veriformer.properties.generation_cases import next_token_cases
from veriformer.properties.layer_cases import LAYERED, layer_cases
from veriformer.properties.loss_cases import IGNORING, cross_entropy_cases
from veriformer.properties.model_cases import decoder_cases
from veriformer.properties.optimizer_cases import clip_cases
from veriformer.properties.universal_cases import universal_cases
from veriformer.subject import Subject

_ATTENTION = attention_cases(empty=True, examples=32)
_SOFTMAX = softmax_cases(axes=True, infinite=0.3, extras=True, temperatures=(2.0, *TEMPERATURES), examples=32)
ORACLE_CASES = by_operation(
    {
        "attention": _ATTENTION,
        "attention_with_lse": _ATTENTION,
        "layer_norm": layer_norm_cases(families=("near_epsilon", *FAMILIES), examples=32),
        "softmax": _SOFTMAX,
        "log_softmax": _SOFTMAX,
        "logsumexp": _SOFTMAX,
        "next_token_probabilities": next_token_cases(extras=True, examples=32),
        "clip_by_global_norm": clip_cases(extras=True, examples=32),
        "cross_entropy": cross_entropy_cases(ignoring=(*IGNORING, "all", "none"), examples=32),
        # budgets of composites cost far more than others
        **dict.fromkeys(LAYERED, layer_cases(examples=16)),
        "decoder_lm": decoder_cases(examples=12),
        "encoder_decoder": encoder_decoder_cases(examples=12),
        "universal_transformer": universal_cases(examples=12),
    },
    examples=32,
)


@law(
    EVERY,
    case=ORACLE_CASES,
    kind="oracle",
    source="P01-P24, P48, R01",
    kills=(
        "softmax.py:softmax_base_two",
        "softmax.py:softmax_probabilities_in_half",
        "softmax.py:log_softmax_log_of_softmax_plus_epsilon",
        "layer_norm.py:input_in_half",
        "layer_norm.py:squares_in_half",
        "softmax.py:logsumexp_mean_for_sum",
        "attention.py:bias_dropped_with_mask",
        "attention.py:bias_before_softcap",
        "attention.py:softcap_before_scale",
        "attention.py:softcap_clips",
        "attention.py:logits_in_half",
        "attention_tiled.py:score_tail_dropped",
        "attention_with_lse.py:lse_of_shifted",
    ),
    changes=("causal_alignment", "empty_row", "norm_epsilon", "norm_variance", "accumulate", "intermediate"),
)
def equals_the_reference(subject: Subject, case: Case) -> None:
    """Every result equals the float64 reference within the error that the declared precision may make."""
    results, bounds = subject.with_bounds(case)
    for name, result, bound in zip(subject.results_for(case), results, bounds, strict=True):
        expect_within(result, bound, largest=subject.largest, what=name if len(results) > 1 else "")
