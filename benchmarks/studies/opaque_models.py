"""Decoder models whose weights nobody maps, made from configurations with random weights, and the reference's own.

Each has `full(tokens[B,T]) -> logits[B,T,V]` and `step(tokens[B,m], cache, *, mask, positions) -> (logits, cache)`,
`reorder(cache, rows)` and `crop(cache, length)`. Logits come out as float64 arrays, whatever the model computes in. A
cache is used once: every call may change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from veriformer import reference
from veriformer.case import round_to
from veriformer.reference import decoding

VOCABULARY = 48
CAPACITY = 40
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
DEEP = GATED | {
    "hidden_size": 128, "num_hidden_layers": 16, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": 256
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How one model is made: a configuration class, its arguments, and the sharpness of its attention."""

    config: str
    arguments: Mapping[str, Any]
    attention: str = "sdpa"
    cache: str = "dynamic"
    sharpness: float = 1.0
    split: bool = False
    """Whether the sums of linear layers are split by the number of rows, as kernels for other shapes split them."""
    window: str | None = None
    """Name of the argument that holds the window, where there is one."""


LLAMA = Recipe("LlamaConfig", GATED)
GPT2 = Recipe("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64})
MISTRAL = Recipe("MistralConfig", GATED | {"sliding_window": 4}, window="sliding_window")
GEMMA2 = Recipe(
    "Gemma2Config",
    GATED | {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
             "query_pre_attn_scalar": 8, "num_hidden_layers": 3},
    attention="eager",
    window="sliding_window",
)  # fmt: skip
RECIPES = {
    "llama": LLAMA,
    "llama, static cache": Recipe("LlamaConfig", GATED, cache="static"),
    "llama, eager": Recipe("LlamaConfig", GATED, attention="eager"),
    "llama, sharp attention": Recipe("LlamaConfig", GATED, sharpness=4.0),
    "llama, 16 layers": Recipe("LlamaConfig", DEEP),
    "llama, 16 layers, sharp attention": Recipe("LlamaConfig", DEEP, sharpness=4.0),
    "llama, 16 layers, sharp attention, eager": Recipe("LlamaConfig", DEEP, attention="eager", sharpness=4.0),
    "llama, 16 layers, sums split by shape": Recipe("LlamaConfig", DEEP, split=True),
    "llama, sums split by shape": Recipe("LlamaConfig", GATED, split=True),
    "gpt2": GPT2,
    "gpt2, 16 layers": Recipe("GPT2Config", GPT2.arguments | {"n_embd": 128, "n_layer": 16, "n_head": 8}),
    "mistral, window 4": MISTRAL,
    "mistral, window 4, static cache": Recipe(
        "MistralConfig", MISTRAL.arguments, cache="static", window="sliding_window"
    ),
    "gemma2, window 4, softcap": GEMMA2,
    "qwen3": Recipe("Qwen3Config", GATED),
    "phi": Recipe("PhiConfig", {**SMALL, "intermediate_size": 48, "partial_rotary_factor": 0.5}),
    "gpt-neox": Recipe("GPTNeoXConfig", {**SMALL, "intermediate_size": 48}),
}


@dataclass
class Kept:
    """A cache of transformers and how many tokens it has consumed."""

    inner: Any
    length: int = 0


@dataclass
class HuggingFace:
    """A model of transformers in one dtype."""

    recipe: Recipe
    dtype: str
    seed: int = 0
    widened: int = 0
    vocabulary: int = VOCABULARY
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        given = dict(self.recipe.arguments)
        if self.recipe.window:
            given[self.recipe.window] += self.widened
        config = getattr(transformers, self.recipe.config)(**given, **TOKENS)
        make = transformers.AutoModelForCausalLM.from_config
        model = make(config, attn_implementation=self.recipe.attention).eval()
        spread(model, self.seed, self.recipe.sharpness)
        self.model = model.to(getattr(torch, self.dtype))
        for layer in model.modules() if self.recipe.split else ():
            if isinstance(layer, torch.nn.Linear):
                layer.forward = split_by_shape(layer)  # type: ignore[method-assign]

    @property
    def window(self) -> int | None:
        """How many tokens a token may see, itself among them, in layers that have a window."""
        return self.recipe.arguments[self.recipe.window] + self.widened if self.recipe.window else None

    @property
    def inside(self) -> str:
        """The coarsest dtype that anything which depends on the weights is cast to."""
        with Casts() as casts:
            self.model(torch.tensor([[1, 2]]), use_cache=False)
        return max({self.dtype, *casts.seen}, key=lambda dtype: torch.finfo(getattr(torch, dtype)).eps)

    def other_window(self, by: int) -> HuggingFace:
        """The same weights with another window."""
        return HuggingFace(self.recipe, self.dtype, self.seed, by)

    def full(self, tokens: Any) -> Any:
        """tokens[B,T] -> logits[B,T,V], without a cache."""
        with torch.no_grad():
            return float64(self.model(torch.as_tensor(tokens), use_cache=False).logits)

    def step(self, tokens: Any, cache: Any, *, mask: Any = None, positions: Any = None) -> tuple[Any, Kept]:
        """tokens[B,m] after those in the cache -> logits[B,m,V], cache."""
        cache = cache or Kept(self._empty())
        given = {"attention_mask": mask, "position_ids": positions}
        given = {
            name: torch.as_tensor(np.asarray(array, np.int64)) for name, array in given.items() if array is not None
        }
        with torch.no_grad():
            out = self.model(torch.as_tensor(tokens), cache=cache.inner, use_cache=True, **given)
        return float64(out.logits), Kept(cache.inner, cache.length + tokens.shape[1])

    def reorder(self, cache: Kept, rows: Any) -> Kept:
        """The cache of the given rows of the batch."""
        cache.inner.reorder_cache(torch.as_tensor(rows))
        return cache

    def crop(self, cache: Kept, length: int) -> Kept:
        """The cache after its first tokens."""
        if self.window is not None and cache.length >= self.window:
            raise NotImplementedError("a cache that forgets what leaves the window cannot be cropped")
        cache.inner.crop(length - cache.length)
        return Kept(cache.inner, length)

    def rounded(self, cache: Kept, dtype: str) -> Kept:
        """The cache as if it were kept in another dtype."""
        for layer in cache.inner.layers:
            layer.keys = layer.keys.to(getattr(torch, dtype)).to(layer.keys.dtype)
            layer.values = layer.values.to(getattr(torch, dtype)).to(layer.values.dtype)
        return cache

    def _empty(self) -> Any:
        if self.recipe.cache == "static":
            return transformers.StaticCache(config=self.model.config, max_cache_len=CAPACITY)
        return transformers.DynamicCache(config=self.model.config)


class Casts(TorchDispatchMode):
    """Collects the dtypes that tensors with a gradient are cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), keywords: Any = None) -> Any:
        out = function(*given, **(keywords or {}))
        if function is torch.ops.aten._to_copy.default and given[0].requires_grad and out.is_floating_point():
            self.seen.add(str(out.dtype).removeprefix("torch."))
        return out


def spread(model: Any, seed: int, sharpness: float) -> None:
    """Weights drawn so that no layer is nearly constant: columns of length 1, norms about 1, biases about 0.3.

    Attention scores are of the size of `sharpness`.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            drawn = 0.3 * drawn + ("norm" in name or "ln_" in name) * ("bias" not in name) * (
                "gemma" not in str(type(model))
            )
        elif "embed" not in name and "wte" not in name and "wpe" not in name:
            fan_in = (
                parameter.shape[0]
                if model.config.model_type == "gpt2" and "lm_head" not in name
                else parameter.shape[1]
            )
            drawn = drawn * fan_in**-0.5 * (sharpness if "q_proj" in name else 1.0)
        parameter.data.copy_(drawn)


def split_by_shape(layer: Any) -> Any:
    """x W^T of a linear layer without bias in 1 to 4 parts, by the number of rows, each rounded to the dtype."""

    def forward(x: Any) -> Any:
        parts = 1 + (x.numel() // x.shape[-1]) % 4
        pairs = zip(x.chunk(parts, dim=-1), layer.weight.chunk(parts, dim=1), strict=True)
        return sum(part @ columns.T for part, columns in pairs)

    return forward


def float64(logits: torch.Tensor) -> Any:
    """Logits as a NumPy array of float64, which holds every other dtype."""
    return logits.detach().to(torch.float64).numpy()


@dataclass
class Reference:
    """The reference's decoder in NumPy, in float64 or float32."""

    dtype: str
    keywords: Mapping[str, Any]
    seed: int = 0
    vocabulary: int = VOCABULARY
    params: Any = field(init=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        sizes = {"vocabulary": VOCABULARY, "layers": 2, "width": 32, "inner": 48, "heads": 4, "groups": 2}
        self.params = self._drawn(reference.initial_decoder_lm(generator, biases=True, **sizes), generator)

    @property
    def inside(self) -> str:
        return self.dtype

    @property
    def window(self) -> int | None:
        window = self.keywords.get("window")
        return window and window[0] + 1

    def other_window(self, by: int) -> Reference:
        return Reference(self.dtype, {**self.keywords, "window": (self.window - 1 + by, 0)}, self.seed)

    def full(self, tokens: Any) -> Any:
        return np.asarray(reference.decoder_lm(tokens, self.params, heads=4, **self.keywords), np.float64)

    def step(self, tokens: Any, cache: Any, *, mask: Any = None, positions: Any = None) -> tuple[Any, Any]:
        given = {"mask": mask, "at": positions}
        logits, cache = reference.decoder_lm_step(tokens, cache, self.params, heads=4, **given, **self.keywords)
        assert logits.dtype == self.dtype
        return np.asarray(logits, np.float64), cache

    def reorder(self, cache: Any, rows: Any) -> Any:
        return decoding.reorder(cache, rows)

    def crop(self, cache: Any, length: int) -> Any:
        return decoding.crop(cache, length)

    def rounded(self, cache: Any, dtype: str) -> Any:
        return [tuple(round_to(part, dtype).astype(self.dtype) for part in kept) for kept in cache]

    def _drawn(self, part: Any, generator: Any) -> Any:
        """Random numbers in place of every array: matrices with columns of length 1, norms about 1."""
        if isinstance(part, dict):
            return {name: self._drawn(inner, generator) for name, inner in part.items()}
        if isinstance(part, list):
            return [self._drawn(inner, generator) for inner in part]
        drawn = generator.normal(size=part.shape)
        drawn = drawn * part.shape[0] ** -0.5 if part.ndim == 2 and len(part) != VOCABULARY else drawn
        return (part + 0.3 * drawn if part.ndim == 1 else drawn).astype(self.dtype)


REFERENCES: dict[str, Mapping[str, Any]] = {
    "reference, rotary": {},
    "reference, alibi, window 4": {"positions": "alibi", "window": (3, 0)},
}


def subjects() -> dict[str, Any]:
    """Every model by name, as a function that makes it of a dtype and a seed, or None where it has no such dtype."""
    made: dict[str, Any] = {name: partial(HuggingFace, recipe) for name, recipe in RECIPES.items()}
    return made | {name: partial(_reference, keywords) for name, keywords in REFERENCES.items()}


def _reference(keywords: Mapping[str, Any], dtype: str, seed: int = 0) -> Reference | None:
    return Reference(dtype, keywords, seed) if dtype in ("float64", "float32") else None
