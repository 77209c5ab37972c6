"""Multi-head attention, the encoder layer, packed sequences and the cache as loops over Python numbers.

The continuation of `loops`, to check the reference: nested lists in, nested lists out, and not a line
shared with any file but that one.
"""

from __future__ import annotations

from typing import Any

from veriformer.reference import loops


def multi_head_attention(
    x: Any, memory: Any, params: Any, *, heads: int, mask: Any = None, causal: bool = False
) -> Any:
    """multi_head_attention on nested lists x[B][Tq][d], memory[B][Tk][d] -> [B][Tq][d]; Tk >= 1."""
    size = len(params["wq"][0]) // heads
    groups = len(params["wk"][0]) // size
    q = _projected(x, params, "q", heads)
    k, v = _projected(memory, params, "k", groups), _projected(memory, params, "v", groups)
    out = loops.attention(q, k, v, mask=mask, causal=causal)
    return [
        [
            loops.affine([a for head in batch for a in head[i]], params["wo"], params.get("bo"))
            for i in range(len(batch[0]))
        ]
        for batch in out
    ]


def encoder_layer(x: Any, params: Any, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Any = None) -> Any:
    """encoder_layer on nested lists x[B][T][d] -> like x."""

    def attending(x: Any) -> Any:
        return multi_head_attention(x, x, params["attention"], heads=heads, mask=mask)

    def feeding(x: Any) -> Any:
        inner = params["feed_forward"]
        return loops.feed_forward(x, inner["w1"], inner.get("b1"), inner["w2"], inner.get("b2"))

    for sublayer, weights in ((attending, params["norm1"]), (feeding, params["norm2"])):
        if norm == "pre":
            x = _sum(x, 1.0, sublayer(_normed(x, weights)))
        else:
            x = _normed(_sum(x, alpha, sublayer(x)), weights)
    return x


def varlen_attention(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, *, causal: bool = False,
    scale: float | None = None, window: Any = None, alignment: str = "bottom_right",
) -> Any:  # fmt: skip
    """varlen_attention on nested lists q[Nq][H][D], k[Nk][G][D], v[Nk][G][Dv] -> [Nq][H][Dv].

    Query by query: its sequence and its place in it are looked up, as if there were no other query.
    """
    out = []
    for i in range(len(q)):
        s = max(s for s in range(len(q_offsets) - 1) if q_offsets[s] <= i)
        keys = range(int(k_offsets[s]), int(k_offsets[s + 1]))
        if not keys:
            out.append([[0.0] * len(v[0][0]) for _ in q[i]])
            continue
        position = i - int(q_offsets[s])
        if alignment == "bottom_right":
            position += len(keys) - int(q_offsets[s + 1] - q_offsets[s])
        one = [[[head] for head in q[i]]]
        rows = [[[[row[j][g] for j in keys] for g in range(len(row[0]))]] for row in (k, v)]
        y = loops.attention(one, *rows, causal=causal, scale=scale, window=window, offset=position)
        out.append([head[0] for head in y[0]])
    return out


def cached_attention(
    q: Any, k_new: Any, v_new: Any, k_cache: Any, v_cache: Any, lengths: Any, *, causal: bool = True,
    scale: float | None = None, window: Any = None, block_table: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """cached_attention on nested lists, the caches [B][G][C][…], or with a block_table [blocks][G][S][…].

    Row by row: where a row lies is looked up for each one, nothing is gathered or cut.
    """
    k_cache, v_cache = _copy(k_cache), _copy(v_cache)
    size, out = len(k_cache[0][0]), []

    def place(b: int, t: int) -> tuple[int, int]:
        return (b, t) if block_table is None else (int(block_table[b][t // size]), t % size)

    for b in range(len(q)):
        start, m = int(lengths[b]), len(q[b][0])
        for i in range(m):
            block, row = place(b, start + i)
            for g in range(len(k_new[b])):
                k_cache[block][g][row] = list(k_new[b][g][i])
                v_cache[block][g][row] = list(v_new[b][g][i])
        at = [place(b, t) for t in range(start + m)]
        k, v = (
            [[cache[block][g][row] for block, row in at] for g in range(len(k_new[b]))] for cache in (k_cache, v_cache)
        )
        out.append(loops.attention([q[b]], [k], [v], causal=causal, scale=scale, window=window, offset=start)[0])
    return out, k_cache, v_cache


def _projected(x: Any, params: Any, which: str, heads: int) -> Any:
    """x[B][T][d] by the matrix and bias of q, k or v, head after head: [B][heads][T][width]."""
    w, b = params["w" + which], params.get("b" + which)
    width = len(w[0]) // heads
    rows = [[loops.affine(row, w, b) for row in batch] for batch in x]
    return [[[row[h * width : (h + 1) * width] for row in batch] for h in range(heads)] for batch in rows]


def _normed(x: Any, weights: Any) -> Any:
    if "bias" in weights:
        return loops.layer_norm(x, weights["weight"], weights["bias"])
    return loops.rms_norm(x, weights["weight"])


def _sum(x: Any, alpha: float, y: Any) -> Any:
    """alpha x + y, number by number."""
    if hasattr(x, "__len__"):
        return [_sum(a, alpha, b) for a, b in zip(x, y, strict=True)]
    return alpha * float(x) + float(y)


def _copy(x: Any) -> Any:
    """Nested lists of floats, none shared with x."""
    return [_copy(part) for part in x] if hasattr(x, "__len__") else float(x)
