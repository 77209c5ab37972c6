"""Contests of single kernels: softmax, layer norm, attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from contest import Call, Contest


def _softmax(rows: int, width: int) -> Contest:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))

    def ours() -> Call:
        from veriformer.impls.torch_functional import softmax

        return lambda: softmax(x)

    return Contest(
        f"softmax-{rows}x{width}", f"softmax of {rows} rows of {width}, float32",
        ours={"torch:functional": ours}, others={"torch.softmax": lambda: lambda: F.softmax(x, -1)},
        limit=1.05, flops=5 * rows * width, bytes=8 * rows * width,
    )  # fmt: skip


CONTESTS = [_softmax(128, 512), _softmax(2048, 1024)]
