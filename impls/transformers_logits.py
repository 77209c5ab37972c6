"""What Hugging Face transformers does with logits: the filters of sampling, and the losses of training.

Filters want two axes and give logits; the softmax after them is torch's, as in generate. A batch without a real label
has the mean NaN. ForCausalLMLoss is given labels that are shifted already; it computes in float32, whatever the
dtype, and returns that. The label smoother is there only for a smoothing above 0, as in the trainer, else it is
ForCausalLMLoss. A number of items may take the place of the count, but there is no loss of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
DISTRIBUTIONS = ("transformers",)


def next_token_probabilities(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The warpers one after the other, in the order in which generate puts them, and a softmax.

    logits[...,V] -> p[...,V]
    what is less than the k-th largest goes; of the rest the least probable go while their mass is at most 1 - p
    Source: the manual of transformers, Utilities for generation. All that equal the k-th largest stay.
    Raises ValueError for a temperature that is not above 0.
    """
    scores = logits.reshape(-1, logits.shape[-1])
    ids = torch.zeros(scores.shape[0], 0, dtype=torch.int64)
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k is not None else []
    warpers += [TopPLogitsWarper(top_p)] if top_p is not None else []
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(dim=-1).reshape(logits.shape)


def cross_entropy_smoothed(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """LabelSmoother of the trainer.

    logits[N,V], targets[N] -> mean loss over targets other than ignore_index
    (1 - e) times the loss, e times the mean over all classes
    Source: the manual of transformers, Trainer, label_smoothing_factor.
    """
    if label_smoothing == 0:
        return cross_entropy_causal(logits, targets, ignore_index=ignore_index)
    return LabelSmoother(label_smoothing, ignore_index)({"logits": logits}, targets)


def cross_entropy_causal(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """ForCausalLMLoss, which every …ForCausalLM calls.

    logits[N,V], targets[N] -> the mean over targets other than ignore_index, in float32
    Source: the manual of transformers, Loss functions.
    """
    return ForCausalLMLoss(logits, None, logits.shape[-1], ignore_index=ignore_index, shift_labels=targets)


VARIANTS = {
    "sampling": {"next_token_probabilities": next_token_probabilities, "cross_entropy": cross_entropy_smoothed},
    "causal_loss": {"cross_entropy": cross_entropy_causal},
}
# float64 is rounded to float32 before the loss; the smoother sums -log p over the classes in float32
_SINGLE = Capabilities(accumulate={"float64": "float32"}, intermediate={"float64": "float32"})
CAPABILITIES = {"sampling": {"cross_entropy": _SINGLE}, "causal_loss": {"cross_entropy": _SINGLE}}
EXPECTED = [
    Expected(
        "cross_entropy/keeps-the-dtype",
        reason="losses are made in float32, whatever the dtype of the logits, and stay so",
        link="reports/findings/transformers_loss_in_float32.py",
        case={"logits": [[0.0]], "targets": [0]},
        when={"dtype": "float64, bfloat16, float16"},
    ),
    Expected(
        "cross_entropy/finite-for-finite-logits",
        reason="the label smoother sums float16 losses in float16 before it divides by their number",
        link="reports/findings/transformers_label_smoother_float16_overflow.py",
        case={"logits": [[10000.0, 0.0]] * 7, "targets": [1] * 7, "label_smoothing": 0.1},
        when={"dtype": "float16"},
        where="label_smoothing > 0",
        variants=("sampling",),
    ),
]
