"""torch: multi-head attention with grouped heads, packed sequences and caches around scaled_dot_product_attention.

torch's own causal triangle starts at the top left, so every triangle here is an explicit mask.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
Window = tuple[int | None, int | None]


def multi_head_attention(
    x: Tensor, memory: Tensor, params: Mapping[str, Tensor], *, heads: int, mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of several heads, each with its own projection of x and memory.

    x[B,Tq,d], memory[B,Tk,d], params: wq[d,H*D], wk[d,G*D], wv[d,G*Dv], wo[H*Dv,d] and perhaps biases -> [B,Tq,d]
    concat_h(softmax(q_h k_g^T D^-1/2) v_g) wo + bo
    Source: Vaswani et al. 2017, section 3.2.2. A row that may see nothing gives bo.
    """
    width = params["wq"].shape[1] // heads
    q = _linear(x, params, "q").unflatten(-1, (heads, width)).transpose(1, 2)
    groups = params["wk"].shape[1] // width
    k, v = (_linear(memory, params, name).unflatten(-1, (groups, -1)).transpose(1, 2) for name in "kv")
    if causal:
        triangle = _visible(torch.arange(q.shape[2], device=q.device) + k.shape[2] - q.shape[2], k.shape[2], True, None)
        mask = triangle if mask is None else triangle & mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups < heads)
    return _linear(out.transpose(1, 2).flatten(2), params, "o")


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, causal: bool = False,
    scale: float | None = None, window: Window | None = None,
) -> Tensor:  # fmt: skip
    """Attention within each of several packed sequences, one call for each.

    q[Nq,H,D], k[Nk,G,D], v[Nk,G,Dv], q_offsets[B+1], k_offsets[B+1] -> [Nq,H,Dv]
    rows q_offsets[b] to q_offsets[b+1] - 1 see rows k_offsets[b] to k_offsets[b+1] - 1
    Source: the torch manual, torch.nn.functional.scaled_dot_product_attention. A row that may see nothing gives zeros.
    """
    parts = []
    for b in range(len(q_offsets) - 1):
        one = [_sequence(rows, offsets, b) for rows, offsets in ((q, q_offsets), (k, k_offsets), (v, k_offsets))]
        position = torch.arange(one[0].shape[2], device=q.device) + one[1].shape[2] - one[0].shape[2]
        visible = _visible(position, one[1].shape[2], causal, window)
        parts.append(_grouped(*one, visible, scale)[0].transpose(0, 1))
    return torch.cat(parts)


def varlen_in_one_call(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, causal: bool = False,
    scale: float | None = None, window: Window | None = None,
) -> Tensor:  # fmt: skip
    """The same in one call, whose mask hides the other sequences.

    q[Nq,H,D], k[Nk,G,D], v[Nk,G,Dv], q_offsets[B+1], k_offsets[B+1] -> [Nq,H,Dv]
    query i of sequence b sits at k_offsets[b+1] - q_offsets[b+1] + i among the packed keys
    Source: the torch manual, torch.nn.functional.scaled_dot_product_attention. A row that may see nothing gives zeros.
    """
    rows, keys = (torch.arange(len(packed), device=q.device) for packed in (q, k))
    # the sequence of row i: how many of the ends lie at or before it
    mine, theirs = (torch.bucketize(*pair, right=True) for pair in ((rows, q_offsets[1:]), (keys, k_offsets[1:])))
    position = rows + (k_offsets - q_offsets)[1:][mine]
    visible = (mine[:, None] == theirs) & _visible(position, len(k), causal, window)
    packed = [a.transpose(0, 1)[None] for a in (q, k, v)]
    return _grouped(*packed, visible, scale)[0].transpose(0, 1)


def varlen_nested(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, scale: float | None = None
) -> Tensor:
    """The same with jagged nested tensors, for which torch has neither triangle nor mask here.

    q[N,H,D], k[M,H,D], v[M,H,Dv], q_offsets[B+1], k_offsets[B+1] -> [N,H,Dv]
    softmax(q k^T scale) v within each sequence
    Source: the torch manual, torch.nested.nested_tensor_from_jagged.
    """
    pairs = ((q, q_offsets), (k, k_offsets), (v, k_offsets))
    packed = [(rows.clone(memory_format=torch.contiguous_format), offsets) for rows, offsets in pairs]
    nested = [torch.nested.nested_tensor_from_jagged(*pair).transpose(1, 2) for pair in packed]
    return F.scaled_dot_product_attention(*nested, scale=scale).transpose(1, 2).values()


def cached_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *,
    causal: bool = True, scale: float | None = None, window: Window | None = None, block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """New keys and values put into copies of the caches, then attention over the whole capacity under a mask.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], caches [B,G,C,D] and [B,G,C,Dv], lengths[B]
    -> (out[B,H,m,Dv], k_cache, v_cache); with block_table[B,P] the caches are [blocks,G,S,..]
    row lengths[b] + i = new row i; query i, at that position, sees the rows up to it (causal) or all
    Source: Kwon et al. 2023 (PagedAttention), section 4.1.
    Raises ValueError where lengths[b] + m exceeds the capacity.
    """
    (batch, _, new, _), slots = q.shape, k_cache.shape[2]
    table = torch.arange(batch, device=q.device)[:, None] if block_table is None else block_table
    capacity = slots * table.shape[1]
    if int(lengths.max()) + new > capacity:
        raise ValueError(f"lengths: got {int(lengths.max())} rows beside {new} new ones, wanted at most {capacity}")
    position = lengths[:, None] + torch.arange(new, device=q.device)
    block, slot = table.gather(1, position // slots), position % slots
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    k_cache[block, :, slot] = k_new.transpose(1, 2)
    v_cache[block, :, slot] = v_new.transpose(1, 2)
    # blocks beyond the valid rows may be listed as anything: the mask hides what is read there
    listed = table.clamp(0, len(k_cache) - 1)
    k, v = (cache[listed].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache))
    valid = torch.arange(capacity, device=q.device) < (lengths + new)[:, None, None]
    visible = _visible(position, capacity, causal, window) & valid
    return _grouped(q, k, v, visible[:, None], scale), k_cache, v_cache


def _linear(rows: Tensor, params: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(rows, params["w" + name].T, params.get("b" + name))


def _visible(position: Tensor, keys: int, causal: bool, window: Window | None) -> Tensor:
    """[..,Tq,Tk]: may the query at that position see key j."""
    ahead = torch.arange(keys, device=position.device) - position[..., None]
    left, right = window if window is not None else (None, None)
    visible = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    visible = visible if left is None else visible & (ahead >= -left)
    return visible if right is None else visible & (ahead <= right)


def _grouped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    grouped = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped)


def _sequence(rows: Tensor, offsets: Tensor, b: int) -> Tensor:
    """Sequence b of packed rows[N,H,D] as [1,H,T,D]."""
    return rows[int(offsets[b]) : int(offsets[b + 1])].transpose(0, 1)[None]


VARIANTS = {
    "attention": {
        "multi_head_attention": multi_head_attention,
        "varlen_attention": varlen_attention,
        "cached_attention": cached_attention,
    },
    "one_call": {"varlen_attention": varlen_in_one_call},
    "nested": {"varlen_attention": varlen_nested},
}
CAPABILITIES = {
    "attention": {
        "multi_head_attention": Capabilities(),
        "varlen_attention": Capabilities(nonpositive_scale=True, zero_lengths=True),
        "cached_attention": Capabilities(nonpositive_scale=True),
    },
    "one_call": {"varlen_attention": Capabilities(nonpositive_scale=True, zero_lengths=True)},
    "nested": {"varlen_attention": Capabilities(nonpositive_scale=True, grouped_heads=False)},
}
EXPECTED = [
    Expected(
        "varlen_attention/gradient-does-not-depend-on-the-layout",
        reason="the backward of jagged nested tensors reads a cotangent from the start of its storage, not its offset",
        link="reports/findings/torch_nested_backward_offset.py",
        case={
            "q": [[[0.0]]], "k": [[[0.0]]], "v": [[[1.0]]], "q_offsets": [0, 1, 1], "k_offsets": [0, 1, 1],
            "layout": "offset",
        },
        variants=("nested",),
    ),
]  # fmt: skip
