"""torch's own softmax, log_softmax, logsumexp and layer_norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
# native_layer_norm returns mean and 1/deviation in x's own dtype, and its backward has nothing else.
# The backward of logsumexp is g exp(x - y) and that of log_softmax g - exp(y) sum g, with y rounded to x's dtype.
CAPABILITIES = {
    "layer_norm": Capabilities(saved_statistics="storage", gradient_accumulate="storage"),
    "log_softmax": Capabilities(saved_statistics="storage"),
    "logsumexp": Capabilities(saved_statistics="storage"),
}
EXPECTED = [
    Expected(
        "layer_norm/width-one-has-no-weight-gradient",
        reason="the kernel takes the difference of two roundings of r g x, which is not exactly 0",
        link="https://github.com/pytorch/pytorch/issues/188375",
        case={"x": [13.0], "weight": [1.0], "bias": [0.0]},
        when={"dtype": "float32, float64"},
    ),
    Expected(
        "layer_norm/width-one-gives-the-bias",
        reason="the low-precision kernel folds the mean into a shift: x r - m r with one fused rounding is not 0",
        link="https://github.com/pytorch/pytorch/issues/188375",
        case={"x": [10.0], "weight": [1.0], "bias": [0.0], "eps": 1e-3},
        when={"dtype": "bfloat16, float16"},
    ),
]


def softmax(x: Tensor, *, axis: int = -1, temperature: float = 1.0) -> Tensor:
    """torch.nn.functional.softmax of x / T, which has no temperature of its own.

    x[...] -> [...]
    p_i = exp(x_i / T) / sum_j exp(x_j / T)
    Source: the torch manual, torch.nn.functional.softmax. A row of -inf alone gives NaN.
    """
    return F.softmax(x if temperature == 1 else x / temperature, dim=axis)


def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """torch.nn.functional.log_softmax.

    x[...] -> [...]
    y_i = x_i - log sum_j exp(x_j)
    Source: the torch manual, torch.nn.functional.log_softmax. A row of -inf alone gives NaN.
    """
    return F.log_softmax(x, dim=axis)


def logsumexp(x: Tensor, *, axis: int = -1) -> Tensor:
    """torch.logsumexp.

    x[...] -> [... without axis]
    y = log sum_j exp(x_j)
    Source: the torch manual, torch.logsumexp. A row of -inf alone gives -inf.
    """
    return torch.logsumexp(x, dim=axis)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """torch.nn.functional.layer_norm over the last axis.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(variance + eps) + bias
    Source: the torch manual, torch.nn.functional.layer_norm. A constant row gives the bias.
    """
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
