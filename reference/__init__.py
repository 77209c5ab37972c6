"""The mathematics of the operations, written once, to be read and to be the oracle.

Array-API style: the same lines run on NumPy, torch and array-api-strict. Pure functions.
Reading order: softmax, normalization, attention; `loops` says the same again in scalar loops.

Take functions from here or from their file (`from veriformer.reference.attention import attention`).
"""

from veriformer.reference.attention import attention, attention_with_lse, visible_keys
from veriformer.reference.normalization import layer_norm
from veriformer.reference.softmax import log_softmax, logsumexp, softmax

__all__ = [
    "attention",
    "attention_with_lse",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "softmax",
    "visible_keys",
]
