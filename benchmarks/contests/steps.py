"""Contests of a whole training step: an encoder-decoder forward and backward, its smoothed loss, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layer_rivals as rivals
import torch
import torch.nn.functional as F
from contest import Call, Contest
from torch import Tensor, nn

WIDTH, HEADS, INNER, LAYERS, WORDS = 256, 8, 1024, 2, 1000
RATE, SMOOTHING = 1e-4, 0.1


class _Plain(nn.Module):
    """nn.Transformer between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.inside = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)
        self.hidden = {}

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source[B,S], target[B,T] -> logits[B,T,V]."""
        hidden = self.hidden.setdefault(
            target.shape[1], nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        )
        return self.head(self.inside(self.source(source), self.target(target), tgt_mask=hidden, tgt_is_causal=True))


def _weights(model: _Plain) -> dict[str, Any]:
    """The same numbers by our names, [in,out], as leaves of their own."""

    def stack(module: nn.Module) -> dict[str, Any]:
        norm = {"weight": module.norm.weight, "bias": module.norm.bias}
        return {"layers": [rivals.weights(one) for one in module.layers], "norm": norm}

    found = {
        "source_embedding": model.source.weight, "target_embedding": model.target.weight,
        "encoder": stack(model.inside.encoder), "decoder": stack(model.inside.decoder),
        "head": {"w": model.head.weight.T.contiguous(), "b": model.head.bias},
    }  # fmt: skip
    return rivals.detached(found, wanted=True)


def _step(batch: int, tokens: int) -> Contest:
    """One step; the losses of the first three are compared before anything is timed."""
    generator = torch.Generator().manual_seed(0)
    source, target, wanted = (torch.randint(WORDS, (batch, tokens), generator=generator) for _ in range(3))

    def plain_model() -> _Plain:
        torch.manual_seed(0)
        return _Plain().train()

    def stepping(forward: Callable[[], Tensor], loss: Callable[..., Tensor], optimizer: Any) -> Call:
        def step() -> list[Tensor]:
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                losses.append(loss(forward().flatten(0, 1), wanted.flatten(), label_smoothing=SMOOTHING))
                losses[-1].backward()
                optimizer.step()
            return [one.detach() for one in losses]

        return step

    def ours() -> Call:
        from veriformer.impls.torch_flat import FlatAdamW
        from veriformer.impls.torch_loss import VARIANTS as LOSSES
        from veriformer.impls.torch_packed_models import VARIANTS as MODELS

        params = _weights(plain_model())
        make, optimizer = MODELS["packed_models"]["transformer"], FlatAdamW(rivals.leaves(params), lr=RATE)
        forward = lambda: make(params, heads=HEADS, positions=None)(source, target)  # noqa: E731
        return stepping(forward, LOSSES["loss_fused"]["cross_entropy"], optimizer)

    def plain(**options: bool) -> Callable[[], Call]:
        def make() -> Call:
            model = plain_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, **options)
            return stepping(lambda: model(source, target), F.cross_entropy, optimizer)

        return make

    return Contest(
        f"training-step-b{batch}-t{tokens}",
        f"three steps of an encoder-decoder, {LAYERS}+{LAYERS} layers of {WIDTH}, {batch} x {tokens} + {tokens} tokens",
        ours={"torch:packed, loss_fused, flat": ours},
        others={
            "nn.Transformer, F.cross_entropy, AdamW(fused)": plain(fused=True),
            "nn.Transformer, F.cross_entropy, AdamW": plain(),
        },
        tolerance=1e-3, note="Packing the weights anew in every step is part of ours.",
    )  # fmt: skip


CONTESTS = [_step(8, 64), _step(1, 32)]
