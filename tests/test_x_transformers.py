"""x-transformers' adapters at a look: what holds holds, what is known fails as it is known."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("x_transformers")

from veriformer import check

LAWS = (
    "equals-the-reference",
    "finite-on-plain-data",
    "empty-row-is-as-declared",
    "future-has-no-influence",
    "cache-changes-nothing",
    "steps-are-taken",
)


@pytest.mark.parametrize("variant", ["attend", "attend_flash_told", "parts", "decoder", "decoder_shift_tokens"])
def test_a_look_finds_nothing_unknown(variant: str) -> None:
    report = check(f"x_transformers:{variant}", effort="look", laws=LAWS, dtypes=["float32"], isolate=False)
    assert not report.failures, report.failures


def test_query_heads_are_dealt_and_taken_back() -> None:
    import torch

    from veriformer.impls.x_transformers_attention import VARIANTS

    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 5, 2)
    grouped = VARIANTS["attend"]["attention"](q, k, k)
    repeated = VARIANTS["attend"]["attention"](q, *[k.repeat_interleave(2, 1)] * 2)
    assert torch.allclose(grouped, repeated, atol=1e-6)
