"""The fused loss in torch: chunks that are not full, hopeless targets, all kinds of cotangents, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from veriformer.impls.torch_loss import FAINT, _make_fused  # noqa: E402

CHUNKS = [1, 8, 24, 10**6]
"""Elements of a chunk: a row at a time, one row, three rows, all of 7 rows of 8 classes."""


def inputs(dtype: Any = torch.float64, ignored: bool = False) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(8, (7,), generator=generator)
    if ignored:
        targets[[0, 2, 3]] = -100
    return logits, targets


@pytest.mark.parametrize("elements", CHUNKS)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_losses_and_gradients_are_those_of_torch(
    elements: int, ignored: bool, reduction: str, smoothing: float
) -> None:
    logits, targets = inputs(ignored=ignored)
    words: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    found, wanted = _make_fused("x", elements)(logits, targets, **words), F.cross_entropy(logits, targets, **words)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(_make_fused("x", elements)(logits.detach(), targets, **words), wanted.detach())
    for cotangent in (torch.ones_like(wanted), torch.linspace(-2, 3, wanted.numel()).double().view(wanted.shape)):
        mine, torchs = (torch.autograd.grad(one, logits, cotangent, retain_graph=True)[0] for one in (found, wanted))
        torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_target_whose_probability_is_nothing_costs_its_distance(ignored: bool) -> None:
    logits, targets = inputs(torch.float32, ignored)
    with torch.no_grad():
        for row, below in ((1, 80.0), (4, 300.0), (5, 1e5)):
            logits[row, targets[row]] = -below
    assert logits.softmax(-1)[4, targets[4]] < FAINT
    found = _make_fused("x", 24)(logits, targets, reduction="none")
    torch.testing.assert_close(found, F.cross_entropy(logits, targets, reduction="none"))
    with torch.no_grad():
        logits[6, targets[6]] = -torch.inf
    assert _make_fused("x", 24)(logits, targets, reduction="none", label_smoothing=0.1)[6] == torch.inf


@pytest.mark.parametrize("cotangent", [torch.inf, torch.nan])
def test_ignored_rows_have_no_gradient_whatever_the_cotangent(cotangent: float) -> None:
    logits, targets = inputs(ignored=True)
    for reduction in ("mean", "sum", "none"):
        loss = _make_fused("x", 8)(logits, targets, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss, logits, torch.full_like(loss, cotangent))
        assert not gradient[targets == -100].any() and not gradient[targets != -100].isfinite().any()


def test_small_gradients_of_float16_survive_the_mean_where_losses_are_scaled() -> None:
    logits = torch.zeros(2000, 64, dtype=torch.float16, requires_grad=True)
    loss = _make_fused("x", 2**10)(logits, torch.zeros(2000, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(2.0**15, dtype=torch.float16))
    torch.testing.assert_close(
        gradient[:, 1].double(), torch.full((2000,), 2.0**15 / 64 / 2000).double(), rtol=1e-3, atol=0
    )


def test_the_cotangent_1_costs_nothing_and_the_graph_can_be_used_again() -> None:
    logits, targets = inputs()
    loss = _make_fused("x", 8)(logits, targets)
    first, scaled, again = (
        torch.autograd.grad(loss, logits, torch.tensor(g).double(), retain_graph=True)[0] for g in (1.0, 2.0, 1.0)
    )
    assert first.data_ptr() == again.data_ptr() != scaled.data_ptr() and torch.equal(2 * first, scaled)
    with pytest.raises(RuntimeError, match="has no graph: got create_graph=True, wanted False"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_what_it_refuses_is_named() -> None:
    fused = _make_fused("x", 8)
    logits, targets = inputs()
    for arguments, words, said in (
        ((logits[0], targets), {}, r"logits: got shape \(8,\), wanted rows and at least one class"),
        ((logits[:, :0], targets), {}, r"logits: got shape \(7, 0\), wanted rows and at least one class"),
        ((logits, targets[:3]), {}, r"targets: got shape \(3,\), wanted \(7,\), one a row"),
        ((logits, targets), {"label_smoothing": 1.0}, "label_smoothing: got 1.0, wanted 0 <= label_smoothing < 1"),
        ((logits, targets), {"reduction": "average"}, "reduction: got 'average', wanted none, sum or mean"),
    ):
        with pytest.raises(ValueError, match=said):
            fused(*arguments, **words)
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused(logits, targets + 8)
