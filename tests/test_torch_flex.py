"""flex_attention as the adapter calls it, without tracing, against the plain call, which traces."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention.flex_attention")


def inputs() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random) for shape in ((2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6))]


def test_plain_call_gives_what_the_adapter_gives() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from veriformer.impls.torch_flex import VARIANTS

    q, k, v = inputs()
    blocks = create_block_mask(lambda b, h, i, j: (j <= i + 2) & (j >= i + 1), 2, 4, 3, 5, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks to be compiled
        plain = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    for variant in VARIANTS.values():
        assert torch.equal(plain, variant["attention"](q, k, v, causal=True, window=(1, None)))


def test_warnings_of_others_are_left_alone() -> None:
    import torch.nn.attention.flex_attention as flex

    from veriformer.impls.torch_flex import VARIANTS

    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    out, lse = VARIANTS["flex"]["attention_with_lse"](*inputs())
    assert out.shape == (2, 4, 3, 6)
    assert lse.shape == (2, 4, 3)
    assert flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is before
