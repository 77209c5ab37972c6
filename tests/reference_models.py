"""Small models with random parameters, and how the tests of the reference convert and compare them."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.reference import initial_decoder_lm, initial_layer, initial_transformer

SHAPE = {"width": 8, "inner": 10, "heads": 4}
VOCABULARY = 7


def randomized(params: Any, generator: np.random.Generator) -> Any:
    """Every array of the tree drawn anew: the zeros and ones of the first weights would hide a mistake."""
    if isinstance(params, dict):
        return {name: randomized(part, generator) for name, part in params.items()}
    if isinstance(params, list):
        return [randomized(part, generator) for part in params]
    if not isinstance(params, np.ndarray):
        return params
    return generator.normal(size=params.shape) * (params.shape[0] ** -0.5 if params.ndim == 2 else 1.0)


def random_layer(seed: int = 0, *, cross: bool = False, groups: int = 2) -> Any:
    generator = np.random.default_rng(seed)
    return randomized(initial_layer(generator, **SHAPE, groups=groups, biases=True, cross=cross), generator)


def random_lm(
    seed: int = 0, *, layers: int = 2, groups: int = 2, head: bool = False, scale: float | None = None
) -> Any:
    generator = np.random.default_rng(seed)
    params = initial_decoder_lm(generator, vocabulary=VOCABULARY, layers=layers, groups=groups, biases=True, **SHAPE)
    params = randomized(params, generator)
    if head:
        params["head"] = {"w": generator.normal(size=(8, VOCABULARY)), "b": generator.normal(size=VOCABULARY)}
    return params if scale is None else params | {"embedding_scale": scale}


def random_transformer(seed: int = 0, *, layers: Any = (2, 1), norm: str = "post") -> Any:
    generator = np.random.default_rng(seed)
    params = initial_transformer(generator, vocabulary=VOCABULARY, layers=layers, norm=norm, biases=True, **SHAPE)
    return randomized(params, generator)


def converted(convert: Any, tree: Any) -> Any:
    """Every array of nested tuples, lists and dicts in another framework."""
    if isinstance(tree, dict):
        return {name: converted(convert, part) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(converted(convert, part) for part in tree)
    return convert(tree) if isinstance(tree, np.ndarray) else tree


def close(got: Any, wanted: Any, relative: float = 1e-13) -> None:
    """Equal up to `relative` of the largest entry."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=relative * np.abs(wanted).max(initial=0.0))


def attention_from_torch(module: Any) -> Any:
    """params of attention, in [in, out], as views of the parameters of nn.MultiheadAttention."""
    names = ("q", "k", "v")
    params = {f"w{n}": w.T for n, w in zip(names, module.in_proj_weight.chunk(3), strict=True)}
    params |= {f"b{n}": b for n, b in zip(names, module.in_proj_bias.chunk(3), strict=True)}
    return params | {"wo": module.out_proj.weight.T, "bo": module.out_proj.bias}


def norm_from_torch(module: Any) -> Any:
    return {"weight": module.weight, "bias": module.bias}


def layer_from_torch(module: Any) -> Any:
    """params of encoder_layer or decoder_layer from torch's layers of these names."""
    params = {"attention": attention_from_torch(module.self_attn)}
    if hasattr(module, "multihead_attn"):
        params |= {"cross_attention": attention_from_torch(module.multihead_attn)}
        params |= {"norm3": norm_from_torch(module.norm3)}
    return params | {
        "feed_forward": {
            "w1": module.linear1.weight.T,
            "b1": module.linear1.bias,
            "w2": module.linear2.weight.T,
            "b2": module.linear2.bias,
        },
        "norm1": norm_from_torch(module.norm1),
        "norm2": norm_from_torch(module.norm2),
    }


def stack_from_torch(module: Any) -> Any:
    """params of a stack from nn.TransformerEncoder or nn.TransformerDecoder."""
    params = {"layers": [layer_from_torch(layer) for layer in module.layers]}
    return params | ({} if module.norm is None else {"norm": norm_from_torch(module.norm)})


def random_module(module: Any, seed: int = 0) -> Any:
    """A torch module with all of its parameters random, and no two layers alike."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return module
