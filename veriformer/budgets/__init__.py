"""Error budgets: the error a correct implementation of a declared precision may make, element by element.

Derived from the inputs, the operation and a `Precision`; no rtol, no atol.
Reading order: precision, bound, softmax, generation, loss, normalization, activations, positions, selection, logits,
attention, packed, halting, optim, claims.
"""

from veriformer.budgets.activations import feed_forward, gelu, relu
from veriformer.budgets.attention import attention, attention_with_lse
from veriformer.budgets.bound import Bound, error_ratio, exact, sum_of, undetermined
from veriformer.budgets.generation import next_token_probabilities
from veriformer.budgets.halting import act_loop, adaptive_computation_time, undecided
from veriformer.budgets.loss import cross_entropy
from veriformer.budgets.normalization import layer_norm, rms_norm
from veriformer.budgets.optim import adamw_step, clip_by_global_norm, noam_schedule
from veriformer.budgets.packed import cached_attention, varlen_attention
from veriformer.budgets.positions import alibi_bias, rotary_embedding, sinusoidal_positions
from veriformer.budgets.precision import Precision
from veriformer.budgets.selection import dropout, embedding
from veriformer.budgets.softmax import log_softmax, logsumexp, softmax

__all__ = [
    "Bound",
    "Precision",
    "act_loop",
    "adamw_step",
    "adaptive_computation_time",
    "alibi_bias",
    "attention",
    "attention_with_lse",
    "cached_attention",
    "clip_by_global_norm",
    "cross_entropy",
    "dropout",
    "embedding",
    "error_ratio",
    "exact",
    "feed_forward",
    "gelu",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "next_token_probabilities",
    "noam_schedule",
    "relu",
    "rms_norm",
    "rotary_embedding",
    "sinusoidal_positions",
    "softmax",
    "sum_of",
    "undecided",
    "undetermined",
    "varlen_attention",
]
