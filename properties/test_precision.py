"""Whether an implementation works in the precision that it declares: statistics of its errors on dense data."""

from __future__ import annotations

from veriformer.case import Case
from veriformer.law import law
from veriformer.properties.claimed import expect_declared_precision
from veriformer.properties.dense_cases import DENSE, dense_cases
from veriformer.subject import Subject


@law(
    tuple(DENSE),
    case=dense_cases(),
    kind="precision",
    source="Higham, Mary 2019 (A new approach to probabilistic rounding error analysis)",
    kills=(
        "precision.py:softmax_short_exponentials",
        "precision.py:log_softmax_short_sum",
        "precision.py:logsumexp_short_sum",
        "precision.py:layer_norm_short_input",
        "precision.py:layer_norm_sample_variance",
        "precision.py:rms_norm_short_squares",
        "precision.py:gelu_tanh_for_erf",
        "precision.py:feed_forward_tf32_inputs",
        "precision.py:feed_forward_short_accumulator",
        "precision.py:attention_tf32_inputs",
        "precision.py:attention_short_accumulator",
        "precision.py:attention_half_accumulator",
        "precision.py:attention_short_probabilities",
        "precision.py:attention_scale_off",
    ),
    changes=("accumulate", "intermediate", "rounds_probabilities"),
)
def works_in_the_declared_precision(subject: Subject, case: Case) -> None:
    """On dense random data errors are no larger than the declared precision typically makes them, and point no way."""
    expect_declared_precision(subject, case)
