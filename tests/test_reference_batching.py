"""Gradients of the reference for many cotangents or perturbed inputs at once: vmap of vjp equals one after another.

The budgets rely on it: they differentiate the reference on a stack of inputs. Whole numbers (ids,
positions, lengths, offsets, block tables) and masks are the same for the whole stack.
"""

import numpy as np
import pytest
import torch

from veriformer.reference import (
    attention_with_lse,
    cached_attention,
    cross_entropy,
    dropout,
    embedding,
    encoder_layer,
    feed_forward,
    gelu,
    layer_norm,
    log_softmax,
    logsumexp,
    multi_head_attention,
    relu,
    rms_norm,
    rotary_embedding,
    softmax,
    varlen_attention,
)

ATTENTION = {"wq": (4, 6), "wk": (4, 3), "wv": (4, 2), "wo": (4, 4), "bq": (6,), "bk": (3,), "bv": (2,), "bo": (4,)}
FEED_FORWARD = {"w1": (4, 5), "b1": (5,), "w2": (5, 4), "b2": (4,)}
MASK = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])[None, None]


def multi_head(x, memory, *arrays):
    return multi_head_attention(x, memory, dict(zip(ATTENTION, arrays, strict=True)), heads=2, mask=MASK)


def layer(norm):
    def function(x, *arrays):
        parts = iter(arrays)
        params = {
            "attention": {name: next(parts) for name in ATTENTION},
            "feed_forward": {name: next(parts) for name in FEED_FORWARD},
            "norm1": {"weight": next(parts), "bias": next(parts)},
            "norm2": {"weight": next(parts)},
        }
        return encoder_layer(x, params, heads=2, norm=norm, alpha=1.3)

    return function


def attending(q, k, v, bias, sink):
    out, lse = attention_with_lse(q, k, v, bias=bias, sink=sink, mask=MASK, softcap=2.0)
    return out, torch.where(torch.isinf(lse), 0.0, lse)


# function, shapes of its arrays
FUNCTIONS = {
    "softmax": (softmax, [(2, 3)]),
    "log_softmax": (log_softmax, [(2, 3)]),
    "logsumexp": (logsumexp, [(2, 3)]),
    "layer_norm": (layer_norm, [(2, 3), (3,), (3,)]),
    "layer_norm without eps": (lambda *a: layer_norm(*a, eps=0.0, epsilon="outside"), [(2, 3), (3,), (3,)]),
    "rms_norm": (rms_norm, [(2, 3), (3,)]),
    "rms_norm without eps": (lambda *a: rms_norm(*a, eps=0.0, weight_form="one_plus"), [(2, 3), (3,)]),
    "relu": (relu, [(5,)]),
    "gelu": (gelu, [(5,)]),
    "gelu by tanh": (lambda x: gelu(x, form="tanh"), [(5,)]),
    "feed_forward": (feed_forward, [(2, 3, 4), *FEED_FORWARD.values()]),
    "rotary": (lambda x: rotary_embedding(x, torch.tensor([0, 7, 2])), [(2, 3, 4)]),
    "rotary, interleaved": (lambda x: rotary_embedding(x, torch.tensor([5, 7]), pairs="interleaved"), [(2, 4)]),
    "embedding": (lambda table: embedding(torch.tensor([[2, 0], [2, 1]]), table, padding_index=1), [(4, 3)]),
    "cross_entropy": (lambda x: cross_entropy(x, torch.tensor([2, -100]), label_smoothing=0.1), [(2, 3)]),
    "dropout": (lambda x: dropout(x, rate=0.5, uniform=torch.tensor([0.75, 0.25, 0.5])), [(3,)]),
    "attention": (attending, [(2, 4, 3, 2), (2, 2, 3, 2), (2, 2, 3, 3), (1, 4, 3, 1), (4,)]),
    "multi_head_attention": (multi_head, [(2, 3, 4), (2, 3, 4), *ATTENTION.values()]),
    "encoder_layer": (
        layer("post"),
        [(2, 3, 4), *ATTENTION.values(), *FEED_FORWARD.values(), (4,), (4,), (4,)],
    ),
    "encoder_layer, pre": (
        layer("pre"),
        [(2, 3, 4), *ATTENTION.values(), *FEED_FORWARD.values(), (4,), (4,), (4,)],
    ),
    "varlen_attention": (
        lambda *a: varlen_attention(*a, torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 3, 6]), causal=True),
        [(5, 2, 3), (6, 1, 3), (6, 1, 2)],
    ),
    "cached_attention": (
        lambda *a: cached_attention(*a, torch.tensor([1, 3])),
        [(2, 2, 2, 3), (2, 1, 2, 3), (2, 1, 2, 2), (2, 1, 6, 3), (2, 1, 6, 2)],
    ),
    "cached_attention in blocks": (
        lambda *a: cached_attention(*a, torch.tensor([1, 3]), block_table=torch.tensor([[2, 0], [1, 3]])),
        [(2, 2, 2, 3), (2, 1, 2, 3), (2, 1, 2, 2), (5, 1, 3, 3), (5, 1, 3, 2)],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_a_stack_equal_those_of_each(name):
    function, shapes = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(1)
    stack = [torch.randn(3, *shape, dtype=torch.float64, generator=generator) for shape in shapes]

    def gradients(*arrays):
        result, pull = torch.func.vjp(function, *arrays)
        parts = result if isinstance(result, tuple) else (result,)
        cotangents = tuple(
            torch.cos(torch.arange(part.numel(), dtype=part.dtype)).reshape(part.shape) for part in parts
        )
        return (*parts, *pull(cotangents if isinstance(result, tuple) else cotangents[0]))

    together = torch.func.vmap(gradients)(*stack)
    for i in range(3):
        arrays = [array[i].clone().requires_grad_() for array in stack]
        for got, wanted in zip(together, plainly(function, arrays), strict=True):
            assert got[i].shape == wanted.shape
            np.testing.assert_allclose(got[i], wanted, rtol=0, atol=1e-13 * max(1.0, wanted.abs().max()))


def plainly(function, arrays):
    """Results and gradients by torch.autograd, without torch.func."""
    result = function(*arrays)
    parts = result if isinstance(result, tuple) else (result,)
    cotangents = [torch.cos(torch.arange(part.numel(), dtype=part.dtype)).reshape(part.shape) for part in parts]
    return [part.detach() for part in (*parts, *torch.autograd.grad(parts, arrays, cotangents))]
