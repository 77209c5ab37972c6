"""Contests of decoding: generation by a Llama, attention of grouped heads and of windows, caches of keys and values.

Rivals are Hugging Face's generate() with either kind of cache and its model in a bare loop, torch's own attention, and
torch.cat, by which a cache grows in many a tutorial and in Hugging Face's dynamic cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contest import Call, Contest, Maker, Unfit
from layer_rivals import inferring

from veriformer.impls import torch_grouped, torch_lean

PROMPT, VOCABULARY = 16, 1000
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
WEIGHTS = 4 * (4 * 256 * 256 + 3 * 256 * 688) + 256 * VOCABULARY
"""Numbers that must be read for a token, whatever the batch."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def llama() -> Any:
    """Hugging Face's Llama of random weights. Raises ImportError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, vocab_size=VOCABULARY, max_position_embeddings=2048, initializer_range=0.06,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def weights(model: Any) -> dict[str, Any]:
    """What veriformer calls the weights of Hugging Face's Llama; matrices are [in, out]."""

    def layer(one: Any) -> dict[str, Any]:
        attention = {f"w{n}": getattr(one.self_attn, f"{n}_proj").weight.detach().T for n in "qkvo"}
        names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        inner = {ours: getattr(one.mlp, theirs).weight.detach().T for ours, theirs in names.items()}
        norms = {"norm1": one.input_layernorm, "norm2": one.post_attention_layernorm}
        gains = {name: {"weight": norm.weight.detach()} for name, norm in norms.items()}
        return {"attention": attention, "feed_forward": inner, **gains}

    return {
        "embedding": model.model.embed_tokens.weight.detach(),
        "layers": [layer(one) for one in model.model.layers],
        "norm": {"weight": model.model.norm.weight.detach()},
        "head": {"w": model.lm_head.weight.detach().T},
    }


def prompts(batch: int) -> torch.Tensor:
    """Tokens[batch,PROMPT]."""
    return torch.randint(VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(1))


def greedy(model: torch_lean.DecoderLM, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """The prompt and so many tokens after it, each the likeliest."""
    logits, cache = model.step(prompt, None)
    found = [prompt, logits[:, -1:].argmax(2)]
    for _ in range(count - 1):
        logits, cache = model.step(found[-1], cache)
        found.append(logits.argmax(2))
    return torch.cat(found, 1)


def torch_lean_greedy(batch: int, count: int) -> Call:
    """Ours in torch."""
    model, prompt = torch_lean.DecoderLM(weights(llama()), heads=SIZES["num_attention_heads"]), prompts(batch)
    return lambda: greedy(model, prompt, count)


def numpy_lean_greedy(batch: int, count: int) -> Call:
    """Ours in NumPy."""
    from veriformer.impls import numpy_lean

    def arrays(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: arrays(part) for name, part in tree.items()}
        return [arrays(part) for part in tree] if isinstance(tree, list) else tree.numpy()

    model, prompt = numpy_lean.DecoderLM(arrays(weights(llama())), heads=8), prompts(batch).numpy()

    def call() -> np.ndarray:
        logits, cache = model.step(prompt, None)
        found = [prompt, logits[:, -1:].argmax(2)]
        for _ in range(count - 1):
            logits, cache = model.step(found[-1], cache)
            found.append(logits.argmax(2))
        return np.concatenate(found, 1)

    return call


def generate(batch: int, count: int, **words: Any) -> Call:
    """Hugging Face's generate()."""
    model, prompt = llama(), prompts(batch)
    mask = torch.ones_like(prompt)
    return lambda: model.generate(prompt, attention_mask=mask, max_new_tokens=count, do_sample=False, **words)


def forward_loop(batch: int, count: int) -> Call:
    """Hugging Face's model in a loop of one's own, with its dynamic cache."""
    from transformers import DynamicCache

    model, prompt = llama(), prompts(batch)

    @torch.inference_mode()
    def call() -> torch.Tensor:
        found, cache = [prompt], DynamicCache(config=model.config)
        for _ in range(count):
            logits = model(found[-1], cache=cache, use_cache=True, logits_to_keep=1).logits
            found.append(logits.argmax(2))
        return torch.cat(found, 1)

    return call


GENERATE = "transformers generate, dynamic cache"


def _generation(count: int, batch: int, best: float, mine: float, slow: bool = False) -> Contest:
    """slow: generate() with its default alone, so that all rounds are held within minutes."""

    def maker(make: Any, **words: Any) -> Maker:
        return lambda: make(batch, count, **words)

    more = {
        "transformers generate, static cache": maker(generate, cache_implementation="static", disable_compile=True),
        "transformers model in a loop": maker(forward_loop),
    }

    return Contest(
        f"generate-{count}-batch-{batch}",
        f"greedy generation of {count} tokens after {PROMPT}, batch {batch}, by a random Llama of 4 layers, d 256, "
        "8 heads, float32; tokens identical",
        ours={"torch:lean": maker(torch_lean_greedy), "numpy:lean": maker(numpy_lean_greedy)},
        others={GENERATE: maker(generate), **({} if slow else more)},
        limit=best, against=GENERATE, limits={"torch:lean": (mine, GENERATE)},
        # identical: tokens are whole numbers below VOCABULARY
        tolerance=0.5 / VOCABULARY, calls=1,
        flops=2.0 * batch * count * WEIGHTS, bytes=4.0 * count * WEIGHTS,
        note="The floor is that of reading the weights for each token, or of multiplying with them.",
    )  # fmt: skip


def _grouped(length: int) -> Contest:
    q, k, v = drawn(1, 8, 1, 64), drawn(1, 2, length, 64, seed=1), drawn(1, 2, length, 64, seed=2)
    expanded = [a.repeat_interleave(4, 1) for a in (k, v)]
    return Contest(
        f"grouped-decode-{length}", f"one query of 8 heads, 2 key heads of width 64, {length} keys, float32",
        ours={"torch:grouped": lambda: lambda: torch_grouped.attention(q, k, v)},
        others={
            "SDPA, enable_gqa": lambda: lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "SDPA, keys repeated beforehand": lambda: lambda: F.scaled_dot_product_attention(q, *expanded),
        },
        limit=0.7, against="SDPA, enable_gqa", flops=4.0 * 8 * 64 * length, bytes=8.0 * 2 * 64 * length,
    )  # fmt: skip


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> Call:
    """torch's flex_attention with a mask of blocks, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < window)

    blocks = create_block_mask(seen, None, None, q.shape[2], k.shape[2], device="cpu")
    try:
        compiled = torch.compile(flex_attention)
        with torch.inference_mode():
            compiled(q, k, v, block_mask=blocks)
    except Exception as error:
        raise Unfit(f"does not compile here: {type(error).__name__}") from error

    @torch.inference_mode()
    def call() -> Any:
        return compiled(q, k, v, block_mask=blocks)

    return call


def _window(length: int, window: int) -> Contest:
    q, k, v = (drawn(1, 8, length, 64, seed=seed) for seed in range(3))
    behind = torch.arange(length)[:, None] - torch.arange(length)
    mask = (behind >= 0) & (behind < window)
    return Contest(
        f"window-prefill-{length}", f"{length} tokens, 8 heads of width 64, each sees the last {window}, float32",
        ours={"torch:grouped": lambda: lambda: torch_grouped.attention(q, k, v, causal=True, window=(window - 1, 0))},
        others={
            "SDPA with a mask": lambda: lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
            "flex_attention, compiled": lambda: _flex(q, k, v, window),
        },
        limit=1.0, flops=4.0 * 8 * 64 * float(mask.sum()), bytes=16.0 * 8 * 64 * length,
    )  # fmt: skip


def _room(length: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of `length` tokens alone and at the beginning of caches with room for more, and of a new one."""
    old = [drawn(1, 8, length, 64, seed=seed) for seed in (1, 2)]
    caches = [torch.cat([a, torch.zeros(1, 8, 64, 64)], 2) for a in old]
    return old, caches, [drawn(1, 8, 1, 64, seed=seed) for seed in (3, 4)]


STATIC = "index_copy_, a static cache"


def _put(new: list[torch.Tensor], caches: list[torch.Tensor], at: torch.Tensor) -> list[torch.Tensor]:
    """Rows put into caches by index, as Hugging Face's static cache does."""
    return [cache.index_copy_(2, at, rows) for cache, rows in zip(caches, new, strict=True)]


def _append(length: int) -> Contest:
    """Writing alone: what is read afterwards are views that were made before."""
    old, caches, new = _room(length)
    lengths, views = torch.tensor([length]), [cache[:, :, : length + 1] for cache in caches]

    def ours() -> list[torch.Tensor]:
        torch_grouped.append(*new, *caches, lengths)
        return views

    def static() -> list[torch.Tensor]:
        _put(new, caches, lengths)
        return views

    return Contest(
        f"append-{length}", f"keys and values of one token behind those of {length}, 8 heads of width 64, float32",
        ours={"torch:append": lambda: inferring(ours)},
        others={
            "torch.cat": lambda: inferring(lambda: [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]),
            STATIC: lambda: inferring(static),
        },
        limit=0.02, against="torch.cat", bytes=2 * 2 * 4.0 * 8 * 64,
        note="index_copy_ has its place as a tensor of one number and asks nothing: no limit goes by it.",
    )  # fmt: skip


def _step(length: int) -> Contest:
    old, caches, new = _room(length)
    q, lengths = drawn(1, 8, 1, 64), torch.tensor([length])

    def cat() -> torch.Tensor:
        k, v = (torch.cat(pair, 2) for pair in zip(old, new, strict=True))
        return F.scaled_dot_product_attention(q, k, v)

    def in_place() -> torch.Tensor:
        k, v = (cache[:, :, : length + 1] for cache in _put(new, caches, lengths))
        return F.scaled_dot_product_attention(q, k, v)

    return Contest(
        f"cached-step-{length}", f"one token behind {length} and its attention, 8 heads of width 64, float32",
        ours={"torch:append": lambda: lambda: torch_grouped.cached_attention(q, *new, *caches, lengths)[0]},
        others={"torch.cat and SDPA": lambda: cat, f"{STATIC} and SDPA": lambda: in_place},
        limit=1.0, against="torch.cat and SDPA", limits={"torch:append": (1.1, f"{STATIC} and SDPA")},
        flops=4.0 * 8 * 64 * length, bytes=2 * 4.0 * 8 * 64 * length,
    )  # fmt: skip


CONTESTS = [
    _generation(128, 1, best=0.35, mine=0.5),
    _generation(1024, 1, best=0.35, mine=0.5, slow=True),
    _generation(128, 8, best=0.55, mine=0.55),
    _grouped(1024),
    _window(1024, 128),
    _append(2048),
    _step(2048),
]
