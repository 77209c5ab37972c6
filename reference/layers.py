"""Multi-head attention and the layers made of it, on parameters in nested dicts.

The layout of the parameters, frozen. Matrices are [in, out] and applied as x @ w. An absent key is an
absent part: a bias, a final norm, a head (then the embedding, transposed, is the head). The number of
layers, key heads G and widths are read off the arrays; only the number of query heads, H, is told.

    norm                    weight[d], bias[d]; without bias it is rms_norm
    attention               wq[d, H·D], wk[d, G·D], wv[d, G·Dv], wo[H·Dv, d], bq, bk, bv, bo
    feed_forward            w1[d, f], b1[f], w2[f, d], b2[d]
    linear                  w[d, V], b[V]
    stack                   layers: a list of layers, norm
    encoder_layer           attention, norm1, feed_forward, norm2
    decoder_layer           attention, norm1, cross_attention, norm2, feed_forward, norm3
    transformer             source_embedding[Vs, d], target_embedding[V, d], encoder: stack, decoder: stack,
                            head: linear, embedding_scale
    decoder_lm              embedding[V, d], layers: a list of encoder_layer, norm, head: linear, embedding_scale
    universal_transformer   layer: encoder_layer or decoder_layer, halt: linear[d, 1]
    cache                   a list of (k[B,G,L,D], v[B,G,L,Dv]), one a layer; universal: one a step

Head h is columns h·D … (h+1)·D - 1 of wq and rows h·Dv … of wo; key heads are cut from wk and wv alike.
In reports and adapters a parameter goes by its dotted path, `encoder.layers.0.attention.wq`.

Keywords that mean the same in every layer, stack and model:
    norm, alpha     where the norm stands and how much the residual counts: `encoder_layer`
    mask            bool, 4-D, each axis full or 1, True = may attend; of a model: [B, T], True = a real token
    window          (left, right): how many keys before and after its own position a query sees, None = no limit
    positions       None, "rotary" (self-attention turns queries and keys) or "alibi" (-m_h |i - j| is added to
                    its logits; to a causal one that is `alibi_bias`); of a model also "sinusoidal"
    at              position numbers of the tokens, [T] or [B, T], that rotary and sinusoidal go by; by default
                    they count on from what is cached. alibi and window count rows, so padding must stand in front
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from veriformer.reference.attention import Window, attention
from veriformer.reference.feed_forward import feed_forward, linear
from veriformer.reference.normalization import layer_norm, rms_norm
from veriformer.reference.positions import alibi_bias, rotary_embedding

Params = dict[str, Any]
KV = tuple[Any, Any]


def multi_head_attention(
    x: Any, memory: Any, params: Params, *, heads: int, mask: Any = None, causal: bool = False,
    offset: int | None = None,
) -> Any:  # fmt: skip
    """Attention in several heads, each on projections of its own, whose results are joined by one more.

    x[B,Tq,d], memory[B,Tk,d], params: attention -> y[B,Tq,d].

        head_h = attention(x wq_h, memory wk_g, memory wv_g),   y = concat(head_1 … head_H) wo

    Biases are added to the projections where they are given. Query head h uses key head g = h // (H/G).
    mask: bool, 4-D, each axis full or 1, True = may attend; causal: the last query stands beside the last key,
    or query 0 at the position `offset`, if given.
    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.2.2; P83.
    Edges: a query that sees nothing gives bo.
    Raises ValueError for widths that heads do not divide and for shapes that do not fit.
    """
    kv = keys_values(memory, params, heads=heads)
    return attend(x, kv, params, heads=heads, mask=mask, causal=causal, offset=offset)


def keys_values(memory: Any, params: Params, *, heads: int, at: Any = None) -> KV:
    """The keys and values that `attend` looks at; kept, they are a cache.

    memory[B,Tk,d], params: attention, at[B,Tk] or None -> k[B,G,Tk,D], v[B,G,Tk,Dv].

        k = memory wk + bk,   v = memory wv + bv,   cut into key heads; k turned by its positions `at`, if given

    Source: Vaswani et al. 2017, section 3.2.2; fewer key heads: Ainslie et al. 2023 (GQA), section 2.2.
    Raises ValueError as `multi_head_attention` does.
    """
    _check("memory", memory, params, heads)
    groups = params["wk"].shape[1] // (params["wq"].shape[1] // heads)
    k = linear(memory, params["wk"], params.get("bk"))
    v = linear(memory, params["wv"], params.get("bv"))
    return _turned(_split(k, groups), at), _split(v, groups)


def attend(
    x: Any, kv: KV, params: Params, *, heads: int, mask: Any = None, causal: bool = False,
    window: Window | None = None, bias: Any = None, offset: int | None = None, at: Any = None,
) -> Any:  # fmt: skip
    """What the tokens of x make of given keys and values.

    x[B,Tq,d], kv: k[B,G,Tk,D] and v[B,G,Tk,Dv], params: attention, at[B,Tq] or None -> y[B,Tq,d].

        y = concat(attention(x wq + bq, k, v)) wo + bo,   the queries turned by their positions `at`, if given

    window, bias and offset are those of `attention`, the other keywords and the source of `multi_head_attention`.
    Raises ValueError as `multi_head_attention` and `attention` do.
    """
    _check("x", x, params, heads)
    q = _turned(_split(linear(x, params["wq"], params.get("bq")), heads), at)
    out = attention(q, *kv, mask=mask, causal=causal, window=window, bias=bias, offset=offset)
    return linear(_join(out), params["wo"], params.get("bo"))


def encoder_layer(
    x: Any, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Any = None,
    window: Window | None = None, positions: str | None = None,
) -> Any:  # fmt: skip
    """Self-attention, then the feed-forward sublayer, each beside a residual connection and a norm.

    x[B,T,d], params: encoder_layer -> y[B,T,d].

        post:  x = norm(alpha x + F(x))        pre:  x = x + F(norm(x))        for either sublayer F

    alpha acts in post-norm only.
    Source: Vaswani et al. 2017, section 3.1; pre: Xiong et al. 2020 (On Layer Normalization), section 3;
    alpha: Wang et al. 2022 (DeepNet), section 2; P75 to P79.
    Raises ValueError for unknown norm or positions and as its sublayers do.
    """
    y, _ = block(x, params, heads=heads, norm=norm, alpha=alpha, mask=mask, window=window, positions=positions)
    return y


def decoder_layer(
    x: Any, memory: Any, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Any = None,
    memory_mask: Any = None, window: Window | None = None, positions: str | None = None,
) -> Any:  # fmt: skip
    """Causal self-attention, then attention to the memory, then the feed-forward sublayer, each as in an encoder layer.

    x[B,T,d], memory[B,S,d], params: decoder_layer -> y[B,T,d].

    memory: the encoder's final output; a token sees all of it that memory_mask, [B|1,H|1,T|1,S|1], allows.
    mask, window and positions are those of self-attention.
    Source: Vaswani et al. 2017, section 3.1; P88 to P90.
    Raises ValueError as `encoder_layer` does.
    """
    kv = keys_values(memory, params["cross_attention"], heads=heads)
    y, _ = block(
        x, params, memory=kv, heads=heads, norm=norm, alpha=alpha, mask=mask, memory_mask=memory_mask,
        causal=True, window=window, positions=positions,
    )  # fmt: skip
    return y


def block(
    x: Any, params: Params, past: KV | None = None, memory: KV | None = None, *, heads: int, norm: str = "post",
    alpha: float = 1.0, mask: Any = None, memory_mask: Any = None, causal: bool = False,
    window: Window | None = None, positions: str | None = None, at: Any = None,
) -> tuple[Any, KV]:  # fmt: skip
    """One layer of any kind on new tokens, after earlier ones of which keys and values were kept.

    x[B,T,d], params: encoder_layer or decoder_layer, past: k[B,G,L,D], v[B,G,L,Dv] or None
    -> y[B,T,d], the keys and values of all L + T tokens.

    memory: keys and values for cross-attention, which only a decoder_layer has. mask covers the keys of all
    L + T tokens. If causal, a token's y is the same whether the tokens before it come along or were kept.
    Source: as `encoder_layer` and `decoder_layer`; past: Pope et al. 2022, section 2.1; P66.
    Raises ValueError as they do.
    """
    sight = {"mask": mask, "causal": causal, "window": window}
    seen = enter(x, params["norm1"], norm)
    y, kv = _self_attention(seen, params["attention"], past, positions, at, heads=heads, **sight)
    x, last = leave(x, y, params["norm1"], norm, alpha), "norm2"
    if memory is not None:
        seen, last = enter(x, params["norm2"], norm), "norm3"
        y = attend(seen, memory, params["cross_attention"], heads=heads, mask=memory_mask)
        x = leave(x, y, params["norm2"], norm, alpha)
    inner, seen = params["feed_forward"], enter(x, params[last], norm)
    y = feed_forward(seen, inner["w1"], inner.get("b1"), inner["w2"], inner.get("b2"))
    return leave(x, y, params[last], norm, alpha), kv


def enter(x: Any, params: Params, norm: str) -> Any:
    """What a sublayer sees of x[…, d]: the normed x in pre-norm, x itself in post-norm; params: norm."""
    if norm not in ("post", "pre"):
        raise ValueError(f"layer: norm: got {norm!r}, wanted 'post' or 'pre'")
    return normed(x, params) if norm == "pre" else x


def leave(x: Any, y: Any, params: Params, norm: str, alpha: float = 1.0) -> Any:
    """What becomes of x[…, d] after a sublayer made y[…, d] of it: the residual sum, normed in post-norm."""
    return x + y if norm == "pre" else normed(alpha * x + y, params)


def deep_norm(encoder_layers: int, decoder_layers: int = 0) -> tuple[Any, Any]:
    """DeepNorm's residual factor alpha and the gain beta of its initial weights, for stacks of these depths.

    -> alpha, beta: numbers where one of the depths is 0, else pairs (encoder, decoder), as `transformer` takes them.

        one stack of N layers:   alpha = (2N)^(1/4),   beta = (8N)^(-1/4)
        N encoder layers:        alpha = 0.81 (N^4 M)^(1/16),   beta = 0.87 (N^4 M)^(-1/16)
        M decoder layers:        alpha = (3M)^(1/4),   beta = (12M)^(-1/4)

    Source: Wang et al. 2022 (DeepNet), figure 2; P79. beta scales w1, w2, wv and wo, not wq and wk.
    Raises ValueError for depths that are negative or both 0.
    """
    n, m = encoder_layers, decoder_layers
    if min(n, m) < 0 or n == m == 0:
        raise ValueError(f"deep_norm: layers: got {n} and {m}, wanted numbers >= 0, not both 0")
    if n == 0 or m == 0:
        return (2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25
    both = (n**4 * m) ** (1 / 16)
    return (0.81 * both, (3 * m) ** 0.25), (0.87 / both, (12 * m) ** -0.25)


def normed(x: Any, params: Params) -> Any:
    """layer_norm of x[…, d] if params (norm) have a bias, else rms_norm, each with its default eps."""
    if "bias" in params:
        return layer_norm(x, params["weight"], params["bias"])
    return rms_norm(x, params["weight"])


def rows(kv: KV | None) -> int:
    """How many tokens the keys and values k[B,G,L,D], v[B,G,L,Dv] were kept of: L."""
    return kv[0].shape[2] if kv else 0


def places(x: Any, start: int, at: Any = None) -> Any:
    """The position numbers of the tokens of x[B,T,…]: `at`[T] or [B,T] if given, else start, start + 1, … -> [B,T]."""
    xp, (batch, length) = array_namespace(x), x.shape[:2]
    if at is None:
        at = xp.arange(length, device=device(x)) + start
    if tuple(at.shape) not in ((length,), (batch, length)):
        raise ValueError(f"layer: at: got shape {tuple(at.shape)}, wanted ({length},) or ({batch}, {length})")
    return xp.broadcast_to(at, (batch, length))


def _self_attention(
    x: Any, params: Params, past: KV | None, positions: str | None, at: Any, **keywords: Any
) -> tuple[Any, KV]:
    """What the tokens of x make of the earlier tokens and of themselves; the keys and values of all."""
    if positions not in (None, "rotary", "alibi"):
        raise ValueError(f"layer: positions: got {positions!r}, wanted None, 'rotary' or 'alibi'")
    xp, heads = array_namespace(x), keywords["heads"]
    at = places(x, rows(past), at) if positions == "rotary" else None
    kv = keys_values(x, params, heads=heads, at=at)
    if past is not None:
        kv = tuple(xp.concat(pair, axis=2) for pair in zip(past, kv, strict=True))
    bias = None
    if positions == "alibi":
        bias = alibi_bias(heads, x.shape[1], rows(kv), form="distance", like=x)[None, ...]
        bias = xp.astype(bias, x.dtype)
    return attend(x, kv, params, bias=bias, at=at, **keywords), kv


def _turned(x: Any, at: Any) -> Any:
    """x[B,heads,T,D] by `rotary_embedding`, each row by its own position at[B,T]; x itself without positions."""
    if at is None:
        return x
    xp, (batch, heads, length, width) = array_namespace(x), x.shape
    flat = xp.reshape(xp.moveaxis(x, 1, 0), (heads, batch * length, width))
    flat = rotary_embedding(flat, xp.reshape(at, (-1,)))
    return xp.moveaxis(xp.reshape(flat, (heads, batch, length, width)), 0, 1)


def _split(x: Any, heads: int) -> Any:
    """x[B,T,heads·D] -> [B,heads,T,D]."""
    xp = array_namespace(x)
    batch, length, width = x.shape
    return xp.moveaxis(xp.reshape(x, (batch, length, heads, width // heads)), 2, 1)


def _join(x: Any) -> Any:
    """x[B,heads,T,D] -> [B,T,heads·D]."""
    xp = array_namespace(x)
    batch, heads, length, width = x.shape
    return xp.reshape(xp.moveaxis(x, 1, 2), (batch, length, heads * width))


def _check(name: str, x: Any, params: Params, heads: int) -> None:
    """ValueError for what would be cut or broadcast into a wrong answer without a word."""
    wq, wk, wv, wo = (params[key] for key in ("wq", "wk", "wv", "wo"))
    where, width = "multi_head_attention", wq.shape[1]
    if heads < 1 or width == 0 or width % heads:
        raise ValueError(f"{where}: heads: got {heads}, wanted a divisor of {width}, the width of wq")
    size = width // heads
    groups = wk.shape[1] // size
    if groups == 0 or wk.shape[1] % size or heads % groups:
        raise ValueError(
            f"{where}: wk: got width {wk.shape[1]}, wanted {size}, the width of a head, times a divisor of {heads}"
        )
    if wv.shape[1] % groups:
        raise ValueError(f"{where}: wv: got width {wv.shape[1]}, wanted a multiple of {groups}, the key heads of wk")
    inner = heads * (wv.shape[1] // groups)
    if wo.shape[0] != inner:
        raise ValueError(f"{where}: wo: got {wo.shape[0]} rows, wanted {inner}, {heads} heads as wide as those of wv")
    if x.ndim != 3 or x.shape[2] != (wq if name == "x" else wk).shape[0]:
        raise ValueError(f"{where}: {name}: got shape {tuple(x.shape)}, wanted 3 axes: batch, time, rows of its matrix")
    for bias, matrix in (("bq", wq), ("bk", wk), ("bv", wv), ("bo", wo)):
        if bias in params and tuple(params[bias].shape) != (matrix.shape[1],):
            raise ValueError(f"{where}: {bias}: got shape {tuple(params[bias].shape)}, wanted ({matrix.shape[1]},)")
