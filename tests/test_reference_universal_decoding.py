"""The Universal Transformer with a cache: chunks, what is kept, memory and padding, errors."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import close, converted
from universal_models import HEADS, random_states, random_universal

from veriformer.reference import crop, reorder
from veriformer.reference.universal import universal_transformer
from veriformer.reference.universal_decoding import universal_step

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=40, deadline=None, database=None, derandomize=True)
LENGTH, DEEP = 7, 5
VARIED = (4, 13)
WORDS = {"heads": HEADS, "max_steps": DEEP}


@st.composite
def partitions(draw):
    """Sizes of chunks, 0 among them, that make up LENGTH."""
    cuts = sorted(draw(st.lists(st.integers(0, LENGTH), max_size=4)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)]


def in_chunks(chunks, x, params, mask=None, **words):
    """The results of all chunks side by side, and the cache after each."""
    results, caches, start = [], [None], 0
    for size in chunks:
        seen = None if mask is None else mask[:, : start + size]
        one, cache = universal_step(x[:, start : start + size], caches[-1], params, mask=seen, **(WORDS | words))
        results.append(one)
        caches.append(cache)
        start += size
    return [np.concatenate(parts, axis=1) for parts in zip(*results, strict=True)], caches[1:]


@SEARCH
@given(partitions(), st.sampled_from([*VARIED, 1]), st.sampled_from(["post", "pre"]), st.booleans(), st.booleans())
def test_any_chunks_give_the_whole(chunks, seed, norm, cross, padded):
    x, params = random_states(seed, 2, LENGTH), random_universal(seed, cross=cross)
    words = {"norm": norm} | ({"memory": random_states(1, 2, 3)} if cross else {})
    mask = np.arange(LENGTH) < np.asarray([[LENGTH], [4]]) if padded else None
    results, _ = in_chunks(chunks, x, params, mask, **words)
    whole = universal_transformer(x, params, causal=True, mask=mask, **(WORDS | words))
    for got, wanted in zip(results, whole, strict=True):
        close(got, wanted, 1e-12)
    assert np.array_equal(results[1], whole[1])


@pytest.mark.parametrize("seed", VARIED)
def test_rows_are_appended_and_earlier_ones_never_change(seed):
    x, params = random_states(seed, 1, LENGTH), random_universal(seed)
    _, caches = in_chunks([3, 1, 2, 1], x, params)
    for before, after in zip(caches, caches[1:], strict=False):
        assert len(before) == len(after) == DEEP
        for one, other in zip(before, after, strict=True):
            for kept, now in zip(one, other, strict=True):
                assert np.array_equal(now[:, :, : kept.shape[2]], kept)
    assert caches[-1][0][0].shape[2] == LENGTH


def test_a_cache_may_be_cropped_and_reordered():
    x, params = random_states(4, 2, LENGTH), random_universal(4)
    _, caches = in_chunks([5], x, params)
    (got, *_), _ = universal_step(x[::-1, 3:], reorder(crop(caches[0], 3), np.asarray([1, 0])), params, **WORDS)
    whole, *_ = universal_transformer(x[::-1], params, causal=True, **WORDS)
    close(got, whole[:, 3:], 1e-12)


@pytest.mark.parametrize("convert", [torch.from_numpy, strict.asarray], ids=["torch", "strict"])
def test_other_frameworks_give_the_same(convert):
    x, params = random_states(4, 2, 4), random_universal(4)
    (_, cache), (_, other) = (
        universal_step(f(x[:, :3]), None, converted(f, params), **WORDS) for f in (np.asarray, convert)
    )
    wanted, _ = universal_step(x[:, 3:], cache, params, **WORDS)
    found, _ = universal_step(convert(x[:, 3:]), other, converted(convert, params), **WORDS)
    for one, two in zip(found, wanted, strict=True):
        close(one, two, 1e-12)


def test_a_cache_that_does_not_fit_is_refused():
    x, params = random_states(4, 2, 3), random_universal(4)
    _, cache = universal_step(x, None, params, **WORDS)
    with pytest.raises(ValueError, match="cache: got 5 steps, wanted 3"):
        universal_step(x, cache, params, heads=HEADS, max_steps=3)
    with pytest.raises(ValueError, match="cache: got 2 batch rows, wanted 1"):
        universal_step(x[:1], cache, params, **WORDS)
    with pytest.raises(ValueError, match=r"mask: got shape \(2, 3\), wanted \(2, 6\)"):
        universal_step(x, cache, params, mask=np.ones((2, 3), bool), **WORDS)
