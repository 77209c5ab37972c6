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
    decoder_lm              embedding[V, d], layers: a list of encoder_layer, norm, head: linear
    universal_transformer   layer: encoder_layer or decoder_layer, halt: linear[d, 1]
    cache                   a list of (k[B,G,L,D], v[B,G,L,Dv]), one a layer; universal: one a step

Head h is columns h·D … (h+1)·D - 1 of wq and rows h·Dv … of wo; key heads are cut from wk and wv alike.
In reports and adapters a parameter goes by its dotted path, `encoder.layers.0.attention.wq`.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from veriformer.reference.attention import attention
from veriformer.reference.feed_forward import feed_forward, linear
from veriformer.reference.normalization import layer_norm, rms_norm

Params = dict[str, Any]


def multi_head_attention(
    x: Any, memory: Any, params: Params, *, heads: int, mask: Any = None, causal: bool = False
) -> Any:
    """Attention in several heads, each on projections of its own, whose results are joined by one more.

    x[B,Tq,d], memory[B,Tk,d], params: attention -> y[B,Tq,d].

        head_h = attention(x wq_h, memory wk_g, memory wv_g),   y = concat(head_1 … head_H) wo

    Biases are added to the projections where they are given. Query head h uses key head g = h // (H/G).
    mask: bool, 4-D, each axis full or 1, True = may attend; causal: the last query stands beside the last key.
    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.2.2; P83.
    Edges: a query that sees nothing gives bo.
    Raises ValueError for widths that heads do not divide and for shapes that do not fit.
    """
    return attend(x, keys_values(memory, params, heads=heads), params, heads=heads, mask=mask, causal=causal)


def keys_values(memory: Any, params: Params, *, heads: int) -> tuple[Any, Any]:
    """The keys and values that `attend` looks at; kept, they are a cache.

    memory[B,Tk,d], params: attention -> k[B,G,Tk,D], v[B,G,Tk,Dv].

        k = memory wk + bk,   v = memory wv + bv,   cut into key heads

    Source: Vaswani et al. 2017, section 3.2.2; fewer key heads: Ainslie et al. 2023 (GQA), section 2.2.
    Raises ValueError as `multi_head_attention` does.
    """
    _check("memory", memory, params, heads)
    groups = params["wk"].shape[1] // (params["wq"].shape[1] // heads)
    k = linear(memory, params["wk"], params.get("bk"))
    v = linear(memory, params["wv"], params.get("bv"))
    return _split(k, groups), _split(v, groups)


def attend(x: Any, kv: tuple[Any, Any], params: Params, *, heads: int, mask: Any = None, causal: bool = False) -> Any:
    """What the tokens of x make of given keys and values.

    x[B,Tq,d], kv: k[B,G,Tk,D] and v[B,G,Tk,Dv], params: attention -> y[B,Tq,d].

        y = concat(attention(x wq + bq, k, v)) wo + bo

    The keywords and the source are those of `multi_head_attention`.
    Raises ValueError as `multi_head_attention` and `attention` do.
    """
    _check("x", x, params, heads)
    q = _split(linear(x, params["wq"], params.get("bq")), heads)
    out = attention(q, *kv, mask=mask, causal=causal)
    return linear(_join(out), params["wo"], params.get("bo"))


def encoder_layer(
    x: Any, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Any = None
) -> Any:
    """Self-attention, then the feed-forward sublayer, each beside a residual connection and a norm.

    x[B,T,d], params: encoder_layer -> y[B,T,d].

        post:  x = norm(alpha x + F(x))        pre:  x = x + F(norm(x))        for either sublayer F

    mask: bool, 4-D, each axis full or 1, True = may attend. alpha acts in post-norm only.
    Source: Vaswani et al. 2017, section 3.1; pre: Xiong et al. 2020 (On Layer Normalization), section 3;
    alpha: Wang et al. 2022 (DeepNet), section 2; P75 to P79.
    Raises ValueError for an unknown norm and as its sublayers do.
    """
    entered = enter(x, params["norm1"], norm)
    y = multi_head_attention(entered, entered, params["attention"], heads=heads, mask=mask)
    x = leave(x, y, params["norm1"], norm, alpha)
    inner = params["feed_forward"]
    y = feed_forward(enter(x, params["norm2"], norm), inner["w1"], inner.get("b1"), inner["w2"], inner.get("b2"))
    return leave(x, y, params["norm2"], norm, alpha)


def enter(x: Any, params: Params, norm: str) -> Any:
    """What a sublayer sees of x[…, d]: the normed x in pre-norm, x itself in post-norm; params: norm."""
    if norm not in ("post", "pre"):
        raise ValueError(f"layer: norm: got {norm!r}, wanted 'post' or 'pre'")
    return normed(x, params) if norm == "pre" else x


def leave(x: Any, y: Any, params: Params, norm: str, alpha: float = 1.0) -> Any:
    """What becomes of x[…, d] after a sublayer made y[…, d] of it: the residual sum, normed in post-norm."""
    return x + y if norm == "pre" else normed(alpha * x + y, params)


def normed(x: Any, params: Params) -> Any:
    """layer_norm of x[…, d] if params (norm) have a bias, else rms_norm, each with its default eps."""
    if "bias" in params:
        return layer_norm(x, params["weight"], params["bias"])
    return rms_norm(x, params["weight"])


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
