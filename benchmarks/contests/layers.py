"""Contests of attention with its projections, layers, stacks and the encoder-decoder, forward and in training.

torch.nn is at its best: forward in eval and inference_mode, so that its fused layers are taken, and nested tensors
where there is padding. Whatever is compiled is so before it is timed. In training ours are made of their weights
anew in each step, as after an optimizer's step, and all weights get gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layer_rivals as rivals
import torch
import torch.nn.functional as F
from contest import Call, Contest, Maker
from torch import Tensor, nn

torch._dynamo.config.recompile_limit = 64  # contests compile the same function for their own shapes, many in all
NN, SDPA, NAIVE = "torch.nn", "torch.compile, sdpa", "torch.compile, naive"
OURS = "torch:packed"
HEADS, BIG, SMALL = 8, (8, 128, 256, 1024), (1, 16, 64, 256)
"""Heads; samples, tokens of each, width, inner width."""
LENGTHS = (8, 24, 40, 56, 72, 88, 104, 120)
"""Real tokens of eight samples of 128: half of all."""


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _seeded(make: Callable[[], Any]) -> Any:
    """A module of torch.nn with weights of its own, the same ones in each process, and biases that count."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        module = make()
        for name, weight in module.named_parameters():
            if "bias" in name:
                nn.init.normal_(weight)
    return module


def _encoder_layer(width: int, inner: int) -> Any:
    return _seeded(lambda: nn.TransformerEncoderLayer(width, HEADS, inner, 0.0, batch_first=True))


def _decoder_layer(width: int, inner: int) -> Any:
    return _seeded(lambda: nn.TransformerDecoderLayer(width, HEADS, inner, 0.0, batch_first=True))


def _mixing(batch: int, tokens: int, keys: int, width: int) -> float:
    """Arithmetic of attention with its projections; keys and values are projected too."""
    return 4.0 * batch * width * (width * (tokens + keys) + tokens * keys)


def _of_layer(batch: int, tokens: int, width: int, inner: int) -> float:
    return _mixing(batch, tokens, tokens, width) + 4.0 * batch * tokens * width * inner


def _size(batch: int, tokens: int, width: int, inner: int = 0) -> str:
    return f"B{batch} N{tokens} d{width} H{HEADS}" + f" f{inner}" * bool(inner)


def _attention(batch: int, tokens: int, width: int, inner: int, limit: float) -> Contest:
    x = _normal(batch, tokens, width)
    module = _seeded(lambda: nn.MultiheadAttention(width, HEADS, batch_first=True)).eval()

    def ours() -> Call:
        from veriformer.impls.torch_packed import PackedAttention

        made = PackedAttention(rivals.detached(rivals.attention_weights(module)), HEADS)
        return rivals.inferring(lambda: made(x, x))

    others: dict[str, Maker] = {
        NN: lambda: rivals.inferring(lambda: module(x, x, x, need_weights=False)[0]),
        SDPA: rivals.compiled(lambda x: rivals.attention(x, x, module), x),
        NAIVE: rivals.compiled(lambda x: rivals.attention(x, x, module, naive=True), x),
        "onnxruntime": rivals.onnx_attention(x, module),
        "jax.jit": rivals.jax_attention(x, module),
    }
    return Contest(
        f"self-attention-b{batch}-n{tokens}", f"self-attention with projections, {_size(batch, tokens, width)}",
        {OURS: ours}, others, limits={OURS: (limit, NN)}, flops=_mixing(batch, tokens, tokens, width),
        note="torch.nn: MultiheadAttention with need_weights=False, its fused path.",
    )  # fmt: skip


def _encoder(batch: int, tokens: int, width: int, inner: int, limit: float) -> Contest:
    x, layer = _normal(batch, tokens, width), _encoder_layer(width, inner).eval()

    def ours() -> Call:
        from veriformer.impls.torch_packed import PackedEncoder

        made = PackedEncoder({"layers": [rivals.detached(rivals.weights(layer))]}, heads=HEADS)
        return rivals.inferring(lambda: made(x))

    others: dict[str, Maker] = {
        NN: lambda: rivals.inferring(lambda: layer(x)),
        SDPA: rivals.compiled(rivals.handwritten(layer), x),
        NAIVE: rivals.compiled(rivals.handwritten(layer, naive=True), x),
        "onnxruntime": rivals.onnx_layer(x, layer),
        "jax.jit": rivals.jax_layer(x, layer),
    }
    return Contest(
        f"encoder-layer-b{batch}-n{tokens}", f"an encoder layer forward, {_size(batch, tokens, width, inner)}",
        {OURS: ours}, others, limits={OURS: (limit, NN)}, flops=_of_layer(batch, tokens, width, inner),
        note="torch.nn: TransformerEncoderLayer's fused path; onnxruntime: its Attention and SkipLayerNormalization.",
    )  # fmt: skip


def _padded() -> Contest:
    batch, tokens, width, inner = BIG
    layer = _encoder_layer(width, inner)
    stack = _seeded(lambda: nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)).eval()
    x, real = _normal(batch, tokens, width), torch.arange(tokens) < torch.tensor(LENGTHS)[:, None]
    layers = [rivals.handwritten(one, mask=real[:, None, None]) for one in stack.layers]

    def ours() -> Call:
        from veriformer.impls.torch_packed import PackedEncoder

        made = PackedEncoder({"layers": [rivals.detached(rivals.weights(one)) for one in stack.layers]}, heads=HEADS)
        return rivals.inferring(lambda: made.real(x, real))

    others: dict[str, Maker] = {
        NN: lambda: rivals.inferring(lambda: stack(x, src_key_padding_mask=~real)),
        SDPA: rivals.compiled(lambda x: layers[1](layers[0](x)) * real[..., None], x),
    }
    return Contest(
        "encoder-padding", f"2 encoder layers forward, {_size(*BIG)}, half of the tokens padding",
        {OURS: ours}, others, limits={OURS: (0.6, NN)},
        flops=2 * sum(_of_layer(1, length, width, inner) for length in LENGTHS),
        note=f"Lengths {', '.join(map(str, LENGTHS))}. torch.nn: TransformerEncoder, nested tensors, whose cost "
        "depends on the allocator: after other contests in the same process the ratio is about .7, in a process of its "
        "own (`run.py layers:encoder-padding`) .5 to .6.",
    )  # fmt: skip


def _decoder(batch: int, tokens: int, width: int, inner: int) -> Contest:
    x, memory = _normal(batch, tokens, width), _normal(batch, tokens, width).flip(1)
    layer = _decoder_layer(width, inner).eval()
    triangle = nn.Transformer.generate_square_subsequent_mask(tokens)

    def ours() -> Call:
        from veriformer.impls.torch_packed import PackedDecoder

        made = PackedDecoder({"layers": [rivals.detached(rivals.weights(layer))]}, heads=HEADS)
        return rivals.inferring(lambda: made(x, memory))

    others: dict[str, Maker] = {
        NN: lambda: rivals.inferring(lambda: layer(x, memory, tgt_mask=triangle, tgt_is_causal=True)),
        SDPA: rivals.compiled(rivals.handwritten(layer), x, memory),
    }
    return Contest(
        f"decoder-layer-b{batch}-n{tokens}", f"a decoder layer forward, {_size(batch, tokens, width, inner)}",
        {OURS: ours}, others,
        flops=_of_layer(batch, tokens, width, inner) + _mixing(batch, tokens, tokens, width),
    )  # fmt: skip


def _training(batch: int, tokens: int, width: int, inner: int, memory: bool = False) -> Contest:
    """A layer's forward and backward pass; results are its output, the gradient of x and some of weights."""
    inputs = [_normal(batch, tokens, width).requires_grad_()]
    inputs += [_normal(batch, tokens, width).flip(1).requires_grad_()] if memory else []
    layer = (_decoder_layer if memory else _encoder_layer)(width, inner).train()
    cotangent = _normal(batch, tokens, width).flip(2)
    words: dict[str, Any] = {}
    if memory:
        words = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(tokens), "tgt_is_causal": True}

    def stepping(forward: Callable[..., Tensor], chosen: list[Tensor], every: list[Tensor]) -> Call:
        def call() -> list[Tensor]:
            out = forward(*inputs)
            found = torch.autograd.grad(out, [*inputs, *chosen, *every], cotangent)
            return [out, *found[: len(inputs) + len(chosen)]]

        return call

    def ours() -> Call:
        from veriformer.impls.torch_packed import PackedDecoder, PackedEncoder

        mine = rivals.detached(rivals.weights(layer), True)
        chosen = [mine["attention"]["wo"], mine["norm1"]["weight"]]
        kind = PackedDecoder if memory else PackedEncoder
        step = stepping(lambda *given: kind({"layers": [mine]}, heads=HEADS)(*given), chosen, rivals.leaves(mine))
        return lambda: _turned(step(), len(inputs) + 1)

    theirs = ([layer.self_attn.out_proj.weight, layer.norm1.weight], list(layer.parameters()))
    fast = torch.compile(rivals.handwritten(layer), dynamic=False, fullgraph=True)
    others: dict[str, Maker] = {
        NN: lambda: stepping(lambda *given: layer(*given, **words), *theirs),
        "sdpa, eager": lambda: stepping(rivals.handwritten(layer), *theirs),
        SDPA: lambda: stepping(fast, *theirs),
    }
    name, what = ("decoder-layer", "a decoder layer") if memory else ("encoder-layer", "an encoder layer")
    more = _mixing(batch, tokens, tokens, width) if memory else 0.0
    return Contest(
        f"{name}-training-b{batch}-n{tokens}",
        f"{what}: output and gradients of input and weights, {_size(batch, tokens, width, inner)}",
        {OURS: ours}, others, flops=3 * (_of_layer(batch, tokens, width, inner) + more), tolerance=1e-2,
        note="Tolerance 0.01: an inner number so near to 0 that rounding decides its sign has a gradient or none.",
    )  # fmt: skip


def _turned(results: list[Tensor], place: int) -> list[Tensor]:
    """With the gradient at a place as torch.nn has it, [out, in]."""
    return [*results[:place], results[place].T, *results[place + 1 :]]


class _Embedded(nn.Module):
    """torch.nn.Transformer between tables of tokens and a head; positions are left to whoever uses it."""

    def __init__(self, vocabulary: int, width: int, inner: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, HEADS, 2, 2, inner, 0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor, triangle: Tensor) -> Tensor:
        x, y = self.source(source), self.target(target)
        out = self.body(
            x, y, tgt_mask=triangle, src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True
        )
        return F.linear(out, self.head.weight, self.head.bias)


def _encoder_decoder(vocabulary: int = 1000) -> Contest:
    batch, tokens, width, inner = BIG
    module = _seeded(lambda: _Embedded(vocabulary, width, inner)).eval()
    drawn = torch.randint(0, vocabulary, (2, batch, tokens), generator=torch.Generator().manual_seed(0))
    real, triangle = (
        torch.arange(tokens) < torch.tensor(LENGTHS)[:, None],
        nn.Transformer.generate_square_subsequent_mask(tokens),
    )

    def ours() -> Call:
        from veriformer.impls.torch_packed_models import PackedTransformer

        body = module.body
        stacks = {
            name: {
                "layers": [rivals.weights(layer) for layer in stack.layers],
                "norm": {"weight": stack.norm.weight, "bias": stack.norm.bias},
            }
            for name, stack in (("encoder", body.encoder), ("decoder", body.decoder))
        }
        tables = {"source_embedding": module.source.weight, "target_embedding": module.target.weight}
        head = {"head": {"w": module.head.weight.T.contiguous(), "b": module.head.bias}}
        made = PackedTransformer(rivals.detached({**stacks, **tables, **head}), heads=HEADS, positions=None)
        return rivals.inferring(lambda: made(*drawn, real))

    of_source = sum(_of_layer(1, length, width, inner) + 4.0 * length * width**2 for length in LENGTHS)
    of_target = _of_layer(batch, tokens, width, inner) + 4.0 * batch * tokens * width**2
    crossed = 4.0 * tokens * width * sum(LENGTHS)
    return Contest(
        "encoder-decoder-padding",
        f"an encoder-decoder of 2 + 2 layers forward, {_size(*BIG)}, V{vocabulary}, half of the source padding",
        {"torch:packed_models": ours},
        {NN: lambda: rivals.inferring(lambda: module(*drawn, ~real, triangle))},
        flops=2 * (of_source + of_target + crossed) + 2.0 * batch * tokens * width * vocabulary,
        note="torch.nn: Transformer, whose encoder goes by nested tensors.",
    )  # fmt: skip


CONTESTS = [
    _attention(*BIG, 0.95), _attention(*SMALL, 0.7), _encoder(*BIG, 1.0), _encoder(*SMALL, 0.7), _padded(),
    _decoder(*BIG), _decoder(*SMALL), _encoder_decoder(), _training(*BIG), _training(2, 64, 256, 1024),
    _training(*BIG, memory=True), _training(2, 64, 256, 1024, memory=True),
]  # fmt: skip
