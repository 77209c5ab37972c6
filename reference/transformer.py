"""Whole models: stacks of layers between the embedding of tokens and the logits of the next ones.

The keywords and the layout of the parameters are those of `layers`. Every model is `embed`, `stack`,
`to_logits`; `decoding` has the same models token by token.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from veriformer.reference.attention import Window
from veriformer.reference.embedding import embedding
from veriformer.reference.feed_forward import linear
from veriformer.reference.layers import KV, Params, block, keys_values, normed, places
from veriformer.reference.positions import sinusoidal_positions


def encoder(
    x: Any, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Any = None,
    window: Window | None = None, positions: str | None = None,
) -> Any:  # fmt: skip
    """Encoder layers one after the other, then the final norm if there is one.

    x[B,T,d], params: stack of encoder_layer -> y[B,T,d].

    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.1, without a final norm; pre-norm
    needs one: Xiong et al. 2020 (On Layer Normalization), section 3. torch's Transformer has it in both.
    Raises ValueError as `encoder_layer` does.
    """
    y, _ = stack(x, params, heads=heads, norm=norm, alpha=alpha, mask=mask, window=window, positions=positions)
    return y


def decoder(
    x: Any, memory: Any, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Any = None,
    memory_mask: Any = None, window: Window | None = None, positions: str | None = None,
) -> Any:  # fmt: skip
    """Decoder layers one after the other, all on the same memory, then the final norm if there is one.

    x[B,T,d], memory[B,S,d], params: stack of decoder_layer -> y[B,T,d].

    Source: Vaswani et al. 2017, section 3.1; P89, P90.
    Raises ValueError as `decoder_layer` does.
    """
    y, _ = stack(
        x, params, memory=keys_values_of(memory, params, heads), heads=heads, norm=norm, alpha=alpha, mask=mask,
        memory_mask=memory_mask, causal=True, window=window, positions=positions,
    )  # fmt: skip
    return y


def transformer(
    source: Any, target: Any, params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0,
    mask: Any = None, positions: str | None = "sinusoidal",
) -> Any:  # fmt: skip
    """The encoder-decoder: what token may come after each of the target's, given all of the source.

    source[B,S], target[B,T] of token numbers, params: transformer -> logits[B,T,V].

        memory = encoder(embed(source)),   logits = decoder(embed(target), memory) w + b

    The target is shifted by the caller: it begins with the start token, and logits at i score what follows i.
    alpha: a number, or a pair (encoder, decoder). mask[B,S]: what is no real source token is nobody's key.
    Source: Vaswani et al. 2017, section 3; P87 to P90.
    Raises ValueError for tokens outside the vocabulary, an empty vocabulary, and as its layers do.
    """
    first, second = both(alpha)
    seen, dialect = padding(mask, source), {"heads": heads, "norm": norm, "positions": in_layers(positions)}
    x = embed(source, params, "source_embedding", positions)
    memory = encoder(x, params["encoder"], alpha=first, mask=seen, **dialect)
    y = embed(target, params, "target_embedding", positions)
    y = decoder(y, memory, params["decoder"], alpha=second, memory_mask=seen, **dialect)
    return to_logits(y, params, "target_embedding")


def decoder_lm(
    tokens: Any, params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, mask: Any = None,
    window: Window | None = None, positions: str | None = "rotary", at: Any = None,
) -> Any:  # fmt: skip
    """The decoder-only model: what token may come after each one, given those up to it.

    tokens[B,T], params: decoder_lm, at[B,T] or None -> logits[B,T,V].

        logits = stack(embed(tokens)) w + b,   causal

    mask[B,T]: what is no real token is nobody's key. With padding in front, `at` numbers the real tokens from 0.
    Source: Radford et al. 2018 (Improving Language Understanding by Generative Pre-Training), section 3.1;
    pre-norm and a final norm: Radford et al. 2019 (Language Models are Unsupervised Multitask Learners),
    section 2.3; P68, P72.
    Raises ValueError as `transformer` does.
    """
    x = embed(tokens, params, "embedding", positions, at=at)
    x, _ = stack(
        x, params, heads=heads, norm=norm, alpha=alpha, mask=padding(mask, tokens), causal=True, window=window,
        positions=in_layers(positions), at=at,
    )  # fmt: skip
    return to_logits(x, params, "embedding")


def stack(
    x: Any, params: Params, past: list[KV] | None = None, memory: list[KV] | None = None, **keywords: Any
) -> tuple[Any, list[KV]]:
    """The layers as `block`s, each with its own past and memory, and the final norm; every layer's keys and values."""
    layers, kept = params["layers"], []
    for name, given in (("cache", past), ("memory", memory)):
        if given is not None and len(given) != len(layers):
            raise ValueError(f"stack: {name}: got {len(given)} entries, wanted one for each of {len(layers)} layers")
    for i, layer in enumerate(layers):
        x, kv = block(x, layer, past and past[i], memory and memory[i], **keywords)
        kept.append(kv)
    return (normed(x, params["norm"]) if "norm" in params else x), kept


def keys_values_of(memory: Any, params: Params, heads: int) -> list[KV]:
    """What every decoder layer of params (stack) looks at in the one memory[B,S,d]."""
    return [keys_values(memory, layer["cross_attention"], heads=heads) for layer in params["layers"]]


def embed(tokens: Any, params: Params, name: str, positions: str | None, at: Any = None) -> Any:
    """tokens[B,T] -> x[B,T,d]: rows of the table, times embedding_scale; plus sinusoids, if they are the positions."""
    table = params[name]
    if tokens.ndim != 2:
        raise ValueError(f"{name}: tokens: got shape {tuple(tokens.shape)}, wanted 2 axes: batch, time")
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(f"{name}: got shape {tuple(table.shape)}, wanted [V, d] with at least one token, V >= 1")
    x, at = embedding(tokens, table) * params.get("embedding_scale", 1.0), places(tokens, 0, at)
    if positions != "sinusoidal" or 0 in tokens.shape:
        return x
    xp = array_namespace(x)
    signal = embedding(at, sinusoidal_positions(int(xp.max(at)) + 1, x.shape[2], like=x))
    return x + xp.astype(signal, x.dtype)


def to_logits(x: Any, params: Params, name: str) -> Any:
    """x[B,T,d] -> logits[B,T,V] by the head, or if there is none by the transposed table, without its scale."""
    if "head" in params:
        return linear(x, params["head"]["w"], params["head"].get("b"))
    return linear(x, array_namespace(x).matrix_transpose(params[name]))


def padding(mask: Any, tokens: Any) -> Any:
    """mask[B,T] for tokens[B,T] as the mask of their keys, [B,1,1,T]; None stays None."""
    if mask is not None and tuple(mask.shape) != tuple(tokens.shape):
        raise ValueError(f"mask: got shape {tuple(mask.shape)}, wanted {tuple(tokens.shape)}, one entry for each token")
    return None if mask is None else mask[:, None, None, :]


def both(alpha: Any) -> tuple[float, float]:
    """alpha of the encoder and of the decoder, from such a pair or one number for both."""
    return tuple(alpha) if isinstance(alpha, (tuple, list)) else (alpha, alpha)


def in_layers(positions: str | None) -> str | None:
    """What layers do about positions: nothing if the sinusoids were added to the embedding."""
    return None if positions == "sinusoidal" else positions
