"""From logits to text in torch: the probabilities of the next token, as filters that write -inf over logits; greedy
generation of whole batches, in which rows that have ended are fed with padding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FRAMEWORK = "torch"


def next_token_probabilities(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """torch's softmax of the logits after each filter has set to -inf what goes, all in the dtype of the logits.

    logits[..., V] -> p[..., V]
    top_k: what is less than the k-th largest goes; top_p: the least probable go while their mass is at most 1 - p
    Source: Fan, Lewis, Dauphin 2018, section 5; Holtzman et al. 2019, section 3.1.
    All that equal the k-th largest stay. top_p = 0 leaves the last of the sorted tokens.
    """
    scores = logits / temperature
    if top_k is not None:
        scores = _without_all_but_top_k(scores, top_k)
    if top_p is not None:
        scores = _without_tail(scores, top_p)
    return scores.softmax(dim=-1)


def generate(model: Any, prompt: Tensor, *, max_length: int, end: int | None = None, pad: int = 0) -> Tensor:
    """The prompt, and the likeliest token after it again and again, until every row has ended.

    model: a decoder_lm, prompt[B,T] -> ids[B, at most max_length]
    x_n = argmax of the logits after x_0 … x_(n-1); after end only pad
    Source: Vaswani et al. 2017, section 3.
    An end in the prompt does not count. Raises ValueError for an empty prompt or one longer than max_length.
    """
    if not 1 <= prompt.shape[1] <= max_length:
        raise ValueError(f"prompt: got {prompt.shape[1]} tokens, wanted 1 to {max_length}")
    pieces, new, cache = [prompt], prompt, None
    going = torch.ones(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    for _ in range(prompt.shape[1], max_length):
        logits, cache = model.step(new, cache)
        new = torch.where(going[:, None], logits[:, -1].argmax(dim=-1, keepdim=True), pad)
        pieces.append(new)
        if end is not None:
            going = going & (new[:, 0] != end)
            if not going.any():
                break
    return torch.cat(pieces, dim=1)


def _without_all_but_top_k(scores: Tensor, k: int) -> Tensor:
    """-inf for what is less than the k-th largest."""
    least = scores.topk(min(k, scores.shape[-1])).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf)


def _without_tail(scores: Tensor, mass: float) -> Tensor:
    """-inf for the least probable, as long as they do not cut into the mass; never for the most probable."""
    rising, tokens = scores.sort(dim=-1)
    goes = rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - mass
    goes[..., -1:] = False
    return scores.masked_fill(torch.empty_like(goes).scatter_(-1, tokens, goes), -math.inf)
