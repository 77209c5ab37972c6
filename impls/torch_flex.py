"""torch's flex_attention in eager mode, which has no mask, bias, triangle or window of its own, but two functions.

"flex" hides by a BlockMask of mask_mod, "flex_scores" by -inf of score_mod; both add biases and cap scores in
score_mod. Index i of a query counts from 0, so that the alignment of the triangle is the caller's: bottom right here.
A sink is lacking. On a CPU it refuses tensors that ask for a gradient.

Plain calls trace the functions anew for many of the arguments, a second each; here the switch that torch's own warning
names for debugging leaves that out, and tests/test_torch_flex.py holds one against the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Window = tuple[int | None, int | None]
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _make(name: str, by_blocks: bool) -> dict[str, Callable[..., Any]]:
    """Both operations, hiding by blocks or by scores."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
        causal: bool = False, scale: float | None = None, window: Window | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """torch.nn.attention.flex_attention.flex_attention.

        q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
        softmax(softcap tanh(q k^T scale / softcap) + bias) v over the keys a row may see
        Source: the torch manual, torch.nn.attention.flex_attention. A row that may see nothing gives 0.
        Raises NotImplementedError for tensors that ask for a gradient on a CPU.
        """
        return attention_with_lse(
            q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, window=window, softcap=softcap
        )[0]

    def attention_with_lse(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
        causal: bool = False, scale: float | None = None, window: Window | None = None, softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same, asked for lse too.

        q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv], lse[B,H,Tq]
        lse = log sum_j exp(score_j) over the keys a row may see
        Source: the torch manual, torch.nn.attention.flex_attention, AuxRequest. Raises as attention does.
        """
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        visible = _visible((batch, heads, queries, keys), mask, causal, window)
        blocks = None
        with patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
            if by_blocks and visible is not None:
                blocks = flex.create_block_mask(visible, batch, heads, queries, keys, device=q.device)
            change = _change((batch, heads, queries, keys), bias, softcap, None if by_blocks else visible)
            out, extra = flex.flex_attention(
                q, k, v, score_mod=change, block_mask=blocks, scale=scale, enable_gqa=k.shape[1] < heads,
                return_aux=flex.AuxRequest(lse=True),
            )  # fmt: skip
        return out, extra.lse

    for function in (attention, attention_with_lse):
        function.__qualname__ = f"{function.__name__}[{name}]"
    return {"attention": attention, "attention_with_lse": attention_with_lse}


def _visible(
    shape: tuple[int, int, int, int], mask: Tensor | None, causal: bool, window: Window | None
) -> Visible | None:
    """May query i of head h in sample b see key j; None where all see all."""
    behind = shape[3] - shape[2]
    left, right = window or (None, None)
    right = 0 if causal and (right is None or right > 0) else right
    full = None if mask is None else mask.expand(shape)
    if full is None and left is None and right is None:
        return None

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j >= 0 if full is None else full[b, h, i, j]
        seen = seen if left is None else seen & (j >= i + behind - left)
        return seen if right is None else seen & (j <= i + behind + right)

    return visible


def _change(
    shape: tuple[int, int, int, int], bias: Tensor | None, softcap: float | None, visible: Visible | None
) -> Callable[..., Tensor] | None:
    """What becomes of a score; None where nothing does."""
    full = None if bias is None else bias.expand(shape)
    if full is None and softcap is None and visible is None:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        score = score if full is None else score + full[b, h, i, j]
        return score if visible is None else torch.where(visible(b, h, i, j), score, -float("inf"))

    return change


VARIANTS = {
    "flex": _make("flex", True),
    "flex_scores": {"attention": _make("flex_scores", False)["attention"]},
}
_SAID = Capabilities(gradients=False, nonpositive_scale=True, infinite_bias=True)
CAPABILITIES = {variant: dict.fromkeys(operations, _SAID) for variant, operations in VARIANTS.items()}
