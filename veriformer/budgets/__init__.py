"""Error budgets: the error a correct implementation of a declared precision may make, element by element.

Derived from the inputs, the operation and a `Precision`; no rtol, no atol.
Reading order: precision, bound, softmax, normalization, attention.
"""

from veriformer.budgets.attention import attention, attention_with_lse
from veriformer.budgets.bound import Bound, error_ratio, sum_of, undetermined
from veriformer.budgets.normalization import layer_norm
from veriformer.budgets.precision import Precision
from veriformer.budgets.softmax import log_softmax, logsumexp, softmax

__all__ = [
    "Bound",
    "Precision",
    "attention",
    "attention_with_lse",
    "error_ratio",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "softmax",
    "sum_of",
    "undetermined",
]
