"""torch's own rms_norm, gelu, relu, linear layers and embedding; dropout and layer_norm as one writes them by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
# The only sum of embedding is that of its gradient over repeated ids, which torch holds in the table's own dtype.
CAPABILITIES = {"embedding": Capabilities(accumulate={"bfloat16": "storage", "float16": "storage"})}


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Layer norm of elementary operations, whose gradient autograd composes; 16-bit numbers in float32.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(variance + eps) + bias
    Source: Ba, Kiros, Hinton 2016, equations 3 and 4. A constant row gives the bias.
    """
    z = _wide(x)
    centred = z - z.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    return (_wide(weight) * (centred * torch.rsqrt(variance + eps)) + _wide(bias)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """torch.nn.functional.rms_norm over the last axis.

    x[..., d], weight[d] -> [..., d]
    y = weight x / sqrt(mean x^2 + eps)
    Source: the torch manual, torch.nn.functional.rms_norm. A row of zeros gives zeros.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def gelu(x: Tensor) -> Tensor:
    """torch.nn.functional.gelu by the error function.

    x[...] -> [...]
    y = x/2 (1 + erf(x / sqrt(2)))
    Source: the torch manual, torch.nn.functional.gelu.
    """
    return F.gelu(x)


def relu(x: Tensor) -> Tensor:
    """torch.nn.functional.relu.

    x[...] -> [...]
    y = max(x, 0)
    Source: the torch manual, torch.nn.functional.relu.
    """
    return F.relu(x)


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Two times torch.nn.functional.linear, whose weights are transposed, with relu between.

    x[..., d], w1[d, f], b1[f], w2[f, d], b2[d] -> [..., d]
    y = relu(x w1 + b1) w2 + b2
    Source: the torch manual, torch.nn.functional.linear.
    """
    return F.linear(F.relu(F.linear(x, w1.T, b1)), w2.T, b2)


def dropout(x: Tensor, *, rate: float, uniform: Tensor) -> Tensor:
    """Dropout with given uniform numbers, which torch's own does not take.

    x[...], uniform[...] -> [...]
    y = x / (1 - rate) where uniform >= rate, else 0
    Source: Srivastava et al. 2014, section 10, scaled at training time. Rate 0 gives x, rate 1 zeros.
    """
    return torch.where(uniform >= rate, x / ((1 - rate) or 1.0), 0.0)


def embedding(ids: Tensor, table: Tensor, *, padding_index: int | None = None) -> Tensor:
    """torch.nn.functional.embedding.

    ids[...], table[V, d] -> [..., d]
    y = table[ids]
    Source: the torch manual, torch.nn.functional.embedding. padding_index stops the gradient of that row only.
    """
    return F.embedding(ids, table, padding_idx=padding_index)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
