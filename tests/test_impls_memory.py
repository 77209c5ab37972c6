"""Memory of what calls itself fused: it grows with the length of the input, not with its square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from veriformer.benchmarks.memory import allocated  # noqa: E402
from veriformer.impls import torch_loss, torch_sdpa  # noqa: E402

HEADS, WIDTH = 2, 16


def bytes_of_prefill(attention: Callable[..., Any], length: int) -> int:
    """Bytes that causal attention over so many tokens allocates."""
    q, k, v = (torch.randn(1, HEADS, length, WIDTH) for _ in range(3))
    return allocated(lambda: attention(q, k, v, causal=True), "torch")


def naive(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    assert causal
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def grows_linearly(attention: Callable[..., Any]) -> bool:
    """Whether twice the length takes about twice the memory, where scores would be most of it."""
    few, more, most = (bytes_of_prefill(attention, length) for length in (1024, 2048, 4096))
    return more < 2.2 * few and most < 2.2 * more


@pytest.mark.parametrize("variant", ["default", "flash"])
def test_memory_of_fused_prefill_grows_linearly(variant: str) -> None:
    attention = torch_sdpa.VARIANTS[variant]["attention"]
    assert grows_linearly(attention)
    assert bytes_of_prefill(attention, 2048) < 8 * HEADS * 2048 * WIDTH * 4


def test_memory_of_naive_prefill_does_not() -> None:
    assert not grows_linearly(naive)


def bytes_of_loss(loss: Callable[..., Any], dtype: Any, wanted: bool, ignored: bool) -> float:
    """Bytes that a loss with its gradient allocates, in arrays of the logits' size."""
    logits = torch.randn(512, 2048).to(dtype).requires_grad_(wanted)
    targets = torch.randint(2048, (512,))
    if ignored:
        targets[::3] = -100

    def call() -> Any:
        found = loss(logits, targets, label_smoothing=0.1)
        return torch.autograd.grad(found, logits) if wanted else found

    return allocated(call, "torch") / (logits.numel() * logits.element_size())


SMALL = torch_loss._make_fused("small", 2**12)
"""The fused loss with chunks that are next to nothing beside the logits."""


@pytest.mark.parametrize("ignored", [False, True])
def test_the_fused_loss_makes_no_array_of_the_logits_size_beside_the_gradient(ignored: bool) -> None:
    # with ignored rows the chunks are copies of rows, and what is counted is the sum of all, one after the other
    assert 1 <= bytes_of_loss(SMALL, torch.float32, True, ignored) < (2.1 if ignored else 1.1)
    assert bytes_of_loss(F.cross_entropy, torch.float32, True, ignored) > 2.5


def test_the_fused_loss_makes_a_gradient_only_where_it_will_be_asked_for() -> None:
    assert bytes_of_loss(SMALL, torch.float32, False, False) < 0.1
