"""x-transformers' Attend and Attention along each path, and its rotary embedding, ALiBi and feed-forward.

True in masks may attend; the triangle begins at the bottom right. Of fewer key heads than query heads, query head h
takes number h mod G, not h div (H/G): the adapter puts the query heads in that order, and the outputs back. Scores are
capped after the bias, so that no variant takes both. Weights have no biases. rotary pairs are (2j, 2j + 1), ALiBi
is -m |distance|. softmax, rotary angles and slopes are in float32 whatever the tensors are.
"attend_told" and "attend_flash_told" say at the call whether they are causal, the others when they are made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.declarations import Capabilities, Expected

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it still compiles a function by torch.jit.script
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import (
        AlibiPositionalBias,
        Attention,
        FeedForward,
        RotaryEmbedding,
        apply_rotary_pos_emb,
    )

FRAMEWORK = "torch"
DISTRIBUTIONS = ("x-transformers", "torch")


def _attention(name: str, *, told: bool = False, capped: bool = False, **options: bool) -> Callable[..., Tensor]:
    def whole(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
        causal: bool = False, scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x_transformers.attend.Attend.

        q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
        softmax(q k^T scale + bias) v over the keys a row may see; query i sits at i + Tk - Tq
        Source: x_transformers.attend. A row that the mask leaves empty gives 0.
        """
        made = Attend(
            heads=q.shape[1], causal=causal and not told, scale=scale, head_learned_sink=sink is not None,
            softclamp_logits=softcap is not None, logit_softclamp_value=softcap or 1.0, **options,
        )  # fmt: skip
        groups = k.shape[1]
        weights = {} if sink is None else {"head_attn_sink": _dealt(sink, 0, groups)}
        said = {"mask": _dealt(mask, 1, groups), "attn_bias": _dealt(bias, 1, groups)}
        said |= {"causal": causal} if told else {}
        out: Tensor = torch.func.functional_call(made, weights, (_dealt(q, 1, groups), k, v), said)[0]
        return out.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)

    def flash_attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
        causal: bool = False, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        return whole(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale)

    def capped_attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        scale: float | None = None, softcap: float | None = None, sink: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return whole(q, k, v, mask=mask, causal=causal, scale=scale, softcap=softcap, sink=sink)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
        causal: bool = False, scale: float | None = None, sink: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return whole(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, sink=sink)

    chosen = flash_attention if options.get("flash") else capped_attention if capped else attention
    chosen.__doc__, chosen.__qualname__ = whole.__doc__, f"attention[{name}]"
    return chosen


def _multi_head(name: str, flash: bool) -> Callable[..., Tensor]:
    def multi_head_attention(
        x: Tensor, memory: Tensor, params: Mapping[str, Tensor], *, heads: int, mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """x_transformers.Attention; a mask of keys alone goes in as context_mask.

        x[B,Tq,d], memory[B,Tk,d], params: wq, wk, wv, wo -> [B,Tq,d]
        concat_h(softmax(q_h k_h^T D^-1/2) v_h) wo
        Source: x_transformers.x_transformers.Attention.
        """
        width, inner = x.shape[-1], params["wq"].shape[1] // heads
        groups = params["wk"].shape[1] // inner
        with torch.device("meta"):  # its own weights, drawn at random, are not wanted
            module = Attention(
                width, inner, dim_context=memory.shape[-1], heads=heads, kv_heads=groups, causal=causal, flash=flash,
                value_dim_head=params["wv"].shape[1] // groups, project_out=True,
            )  # fmt: skip
        by_head = params["wq"].unflatten(1, (heads, -1)), params["wo"].unflatten(0, (heads, -1))
        weights = {
            "to_q.weight": _dealt(by_head[0], 1, groups).flatten(1).T,
            "to_k.weight": params["wk"].T,
            "to_v.weight": params["wv"].T,
            "to_out.weight": _dealt(by_head[1], 0, groups).flatten(0, 1).T,
        }
        out: Tensor = torch.func.functional_call(module, weights, (x, memory), _masks(mask, memory, groups))
        return out

    multi_head_attention.__qualname__ = f"multi_head_attention[{name}]"
    return multi_head_attention


def _dealt(heads: Any, axis: int, groups: int) -> Any:
    """Heads in the order in which h mod G says their key head, where this axis holds them all."""
    if heads is None or heads.shape[axis] == 1:
        return heads
    return heads.unflatten(axis, (groups, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)


def _masks(mask: Tensor | None, memory: Tensor, groups: int) -> dict[str, Tensor]:
    if mask is None:
        return {}
    if mask.shape[1] == mask.shape[2] == 1:
        return {"context_mask": mask[:, 0, 0].expand(memory.shape[:2])}
    return {"attn_mask": _dealt(mask, 1, groups)}


def rotary_embedding(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """x_transformers' RotaryEmbedding and apply_rotary_pos_emb.

    x[...,T,D], positions[T] -> [...,T,D]
    channels 2j and 2j + 1 turned by position * base^(-2j/D)
    Source: x_transformers.x_transformers. Raises ValueError for D = 2.
    """
    if x.shape[-1] == 2:
        raise ValueError("rotary_embedding: x-transformers divides by D - 2; D = 2 is not possible")
    frequencies, scale = RotaryEmbedding(x.shape[-1], base=base)(positions)
    turned: Tensor = apply_rotary_pos_emb(x.reshape(-1, *x.shape[-2:]), frequencies, scale)
    return turned.reshape(x.shape)


def alibi_bias(heads: int, query_length: int, key_length: int) -> Tensor:
    """x_transformers.AlibiPositionalBias.

    -> [heads, query_length, key_length]
    -m_h |i + Tk - Tq - j|
    Source: x_transformers.x_transformers.AlibiPositionalBias.
    """
    bias: Tensor = AlibiPositionalBias(heads)(query_length, key_length)
    return bias.clone()


def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """x_transformers.FeedForward with relu.

    x[...,d], w1[d,f], b1[f], w2[f,d], b2[d] -> [...,d]
    relu(x w1 + b1) w2 + b2
    Source: x_transformers.x_transformers.FeedForward.
    """
    width, inner = w1.shape
    with torch.device("meta"):
        module = FeedForward(width, mult=(inner + 0.5) / width, custom_activation=nn.ReLU())
    names = [name for name, _ in module.named_parameters()]
    weights = dict(zip(names, (w1.T, b1, w2.T, b2), strict=True))
    out: Tensor = torch.func.functional_call(module, weights, (x,))
    return out


VARIANTS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "attend": {"attention": _attention("attend"), "multi_head_attention": _multi_head("attend", False)},
    "attend_flash": {
        "attention": _attention("attend_flash", flash=True),
        "multi_head_attention": _multi_head("attend_flash", True),
    },
    "attend_capped": {"attention": _attention("attend_capped", capped=True)},
    "attend_told": {"attention": _attention("attend_told", told=True)},
    "attend_flash_told": {"attention": _attention("attend_flash_told", told=True, flash=True)},
    "attend_onnxable": {"attention": _attention("attend_onnxable", onnxable=True)},
    "parts": {"rotary_embedding": rotary_embedding, "alibi_bias": alibi_bias, "feed_forward": feed_forward},
}
_SINGLE: dict[str, Any] = {"intermediate": {"float64": "float32"}, "accumulate": {"float64": "float32"}}
_WIDE = Capabilities(nonpositive_scale=True, **_SINGLE)
_FLASH = Capabilities(nonpositive_scale=True)
_MODULE = Capabilities(biases=False)
CAPABILITIES = {
    "attend": {
        "attention": _WIDE,
        "multi_head_attention": replace(_MODULE, **_SINGLE),
    },
    "attend_flash": {"attention": _FLASH, "multi_head_attention": _MODULE},
    "attend_capped": {"attention": _WIDE},
    "attend_told": {"attention": _WIDE},
    "attend_flash_told": {"attention": _FLASH},
    "attend_onnxable": {"attention": _WIDE},
    "parts": {
        "rotary_embedding": Capabilities(rotary_pairs="interleaved", **_SINGLE),
        "alibi_bias": Capabilities(alibi="distance"),
    },
}
_MORE_QUERIES = {"q": [[[[0.0], [0.0]]]], "k": [[[[0.0]]]], "v": [[[[1.0]]]], "causal": True}
_MORE_ROWS = {
    "x": [[[0.0], [0.0]]], "memory": [[[1.0]]], "heads": 1, "causal": True,
    **{f"params.{name}": [[1.0]] for name in ("wq", "wk", "wv", "wo")},
}  # fmt: skip
_NOTHING_SEEN = {"q": [[[[0.0]]]], "k": [[[[0.0]]]], "v": [[[[1.0]]]], "mask": [[[[False]]]]}
_NO_ROW_SEEN = {**_MORE_ROWS, "x": [[[0.0]]], "causal": False, "mask": [[[[False]]]]}
_SQUARE = {"q": [[[[0.0], [0.0]]]], "k": [[[[0.0], [0.0]]]], "v": [[[[0.0], [1.0]]]], "causal": True}
_SLOW, _FAST = ("attend", "attend_capped", "attend_told", "attend_onnxable"), ("attend_flash",)


def _known(laws: str, case: dict[str, Any], where: str, reason: str, finding: str, **more: Any) -> list[Expected]:
    said = {"reason": reason, "link": finding, "case": case, "where": where, **more}
    return [Expected(law, spreads=law == "attention/equals-the-reference", **said) for law in laws.split()]


EXPECTED = [
    *_known(
        "attention/future-has-no-influence attention/empty-rows-pass-nothing-on",
        _MORE_QUERIES,
        "causal and (Tq > Tk or mask)",
        "a row that the triangle leaves empty gets the mean of all values; only masks are looked at for empty rows",
        "reports/findings/x_transformers_causal_empty_rows.py",
        variants=_SLOW,
        when={"dtype": "float32, bfloat16, float16"},
    ),
    *_known(
        "attention/equals-the-reference attention/empty-row-is-as-declared",
        _MORE_QUERIES,
        "causal and (Tq > Tk or mask)",
        "a row that the triangle leaves empty gets the mean of all values; only masks are looked at for empty rows",
        "reports/findings/x_transformers_causal_empty_rows.py",
        variants=_SLOW,
    ),
    *_known(
        "multi_head_attention/empty-row-is-as-declared",
        _MORE_ROWS,
        "causal and (Tq > Tk or mask)",
        "a row that the triangle leaves empty gets the mean of all values; only masks are looked at for empty rows",
        "reports/findings/x_transformers_causal_empty_rows.py",
        variants=("attend",),
    ),
    *_known(
        "attention/equals-the-reference attention/empty-row-is-as-declared attention/empty-rows-pass-nothing-on "
        "attention/value-gradients-sum-to-the-cotangents attention/hidden-content-has-no-influence "
        "attention/gradient-equals-the-reference attention/future-has-no-influence",
        _MORE_QUERIES,
        "causal and Tq > Tk",
        "with more queries than keys flash leaves the triangle to torch, which begins it at the top left",
        "reports/findings/x_transformers_causal_empty_rows.py",
        variants=_FAST,
    ),
    *_known(
        "multi_head_attention/empty-row-is-as-declared",
        _MORE_ROWS,
        "causal and Tq > Tk",
        "with more queries than keys flash leaves the triangle to torch, which begins it at the top left",
        "reports/findings/x_transformers_causal_empty_rows.py",
        variants=_FAST,
    ),
    *_known(
        "attention/value-gradients-sum-to-the-cotangents attention/empty-rows-pass-nothing-on "
        "attention/gradient-is-finite attention/gradient-equals-the-reference",
        _NOTHING_SEEN,
        "mask or causal",
        "-finfo(float64).max is -inf in the softmax, which is in float32: NaN for a row that sees nothing",
        "reports/findings/x_transformers_float64_empty_rows.py",
        variants=_SLOW,
        when={"dtype": "float64"},
    ),
    *_known(
        "multi_head_attention/gradient-ignores-unused-empty-rows",
        _NO_ROW_SEEN,
        "mask or causal",
        "-finfo(float64).max is -inf in the softmax, which is in float32: NaN for a row that sees nothing",
        "reports/findings/x_transformers_float64_empty_rows.py",
        variants=("attend",),
        when={"dtype": "float64"},
    ),
    *_known(
        "attention/equals-the-reference attention/future-has-no-influence attention/masks-combine "
        "attention/single-visible-key-gives-its-value attention/gradient-of-hidden-keys-is-zero "
        "attention/hidden-equals-deleted attention/hidden-content-has-no-influence attention/zero-scale-averages "
        "attention/output-lies-between-the-values attention/gradient-equals-the-reference",
        _SQUARE,
        "causal",
        "with flash Attend does not look at the causal of its call, only at that of its making",
        "reports/findings/x_transformers_flash_ignores_causal.py",
        variants=("attend_flash_told",),
    ),
    *_known(
        "attention/empty-row-is-as-declared attention/empty-rows-pass-nothing-on "
        "attention/value-gradients-sum-to-the-cotangents",
        _MORE_QUERIES,
        "causal",
        "with flash Attend does not look at the causal of its call, only at that of its making",
        "reports/findings/x_transformers_flash_ignores_causal.py",
        variants=("attend_flash_told",),
    ),
]
