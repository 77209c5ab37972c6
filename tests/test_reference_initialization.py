"""The parameters that the reference begins with: counts, bounds, gains, shapes that run, errors."""

import math

import numpy as np
import pytest
import torch

from veriformer.reference import (
    decoder_lm,
    deep_norm,
    initial_decoder_lm,
    initial_layer,
    initial_transformer,
    transformer,
)
from veriformer.reference.initialization import BASE, xavier

SMALL = {"width": 16, "inner": 32, "heads": 4}


def leaves(tree, path=""):
    """Dotted path and array of every leaf."""
    if isinstance(tree, dict):
        return [leaf for name, part in tree.items() for leaf in leaves(part, f"{path}.{name}" if path else name)]
    if isinstance(tree, list):
        return [leaf for i, part in enumerate(tree) for leaf in leaves(part, f"{path}.{i}")]
    return [(path, tree)] if hasattr(tree, "shape") else []


def count(params):
    """Parameters, those that are shared only once."""
    return sum(array.size for array in {id(array): array for _, array in leaves(params)}.values())


class Unmade:
    """Arrays of any size that take no memory."""

    @staticmethod
    def uniform(low, high, size):
        return np.broadcast_to(np.float64(high), size)

    normal = uniform


def test_the_base_model_has_as_many_parameters_as_the_paper_says():
    """65 million in its table; here without biases in attention and with one vocabulary of 37,000."""
    params = initial_transformer(Unmade, vocabulary=37000, **BASE)
    encoder = 4 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 2 * 2 * 512
    decoder = encoder + 4 * 512**2 + 2 * 512
    assert count(params) == 6 * encoder + 6 * decoder + 37000 * 512 == 63_045_632
    biased = initial_transformer(Unmade, vocabulary=37000, biases=True, **BASE)
    assert count(biased) - count(params) == 6 * (1 + 2) * 4 * 512
    assert params["embedding_scale"] == math.sqrt(512)
    assert params["source_embedding"] is params["target_embedding"] and "head" not in params


def test_torch_counts_the_same():
    inner = torch.nn.Transformer(16, 4, 2, 3, 32, batch_first=True)
    ours = initial_transformer(Unmade, vocabulary=9, layers=(2, 3), norm="pre", biases=True, **SMALL)
    assert count(ours) - 9 * 16 == sum(parameter.numel() for parameter in inner.parameters())


def test_heads_do_not_change_the_count_but_key_heads_do():
    counts = [
        count(initial_layer(Unmade, width=16, inner=32, heads=h, groups=g))
        for h, g in ((1, None), (16, None), (4, 4), (4, 1))
    ]
    assert counts[0] == counts[1] == counts[2] == counts[3] + 2 * 16 * 12


def test_dotted_paths():
    paths = {path for path, _ in leaves(initial_transformer(Unmade, vocabulary=3, layers=1, norm="pre", **SMALL))}
    assert {"encoder.layers.0.attention.wq", "encoder.norm.weight", "decoder.layers.0.norm3.bias"} <= paths
    assert {"decoder.layers.0.cross_attention.wo", "decoder.layers.0.feed_forward.b2"} <= paths
    assert not any(path.endswith((".bq", ".bk", ".bv", ".bo")) for path in paths)


def test_numbers_are_distributed_as_the_sources_say():
    """Standard deviations of many numbers, to within five of their own standard errors."""
    params = initial_decoder_lm(np.random.default_rng(0), vocabulary=400, width=64, inner=200, heads=4, layers=2)
    table = params["embedding"]
    assert abs(table.std() * 8 - 1) < 5 / math.sqrt(2 * table.size)
    for path, array in leaves(params["layers"]):
        if array.ndim == 1:
            assert (array == ("weight" in path)).all()
            continue
        bound = math.sqrt(6 / sum(array.shape))
        assert bound * 0.99 < np.abs(array).max() <= bound
        assert abs(array.std() * math.sqrt(3) / bound - 1) < 5 / math.sqrt(array.size)
        assert abs(array.mean()) < 5 * array.std() / math.sqrt(array.size)


def test_no_two_matrices_are_alike():
    params = initial_transformer(np.random.default_rng(0), vocabulary=5, layers=2, norm="pre", **SMALL)
    arrays = [array for path, array in leaves(params) if path != "target_embedding"]
    matrices = [array for array in arrays if array.ndim == 2]
    assert len({array[0, 0] for array in matrices}) == len(matrices)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_the_gain_acts_on_values_outputs_and_the_feed_forward_alone():
    plain, scaled = (
        initial_transformer(np.random.default_rng(0), vocabulary=5, layers=(2, 1), beta=beta, **SMALL)
        for beta in (1.0, (0.5, 0.25))
    )
    for (path, a), (_, b) in zip(leaves(plain), leaves(scaled), strict=True):
        gains = path.endswith((".wv", ".wo", ".w1", ".w2"))
        gain = (0.5 if path.startswith("encoder") else 0.25) if gains else 1.0
        np.testing.assert_array_equal(b, gain * a, err_msg=path)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_models_run_and_start_near_even_chances(norm):
    generator = np.random.default_rng(0)
    alpha, beta = deep_norm(2, 2)
    ids = generator.integers(0, 11, (2, 6))
    params = initial_transformer(generator, vocabulary=11, layers=2, beta=beta, norm=norm, **SMALL)
    assert transformer(ids, ids, params, heads=4, norm=norm, alpha=alpha).shape == (2, 6, 11)
    assert ("norm" in params["encoder"]) == ("norm" in params["decoder"]) == (norm == "pre")
    lm = initial_decoder_lm(generator, vocabulary=11, layers=2, groups=2, norm=norm, **SMALL)
    logits = decoder_lm(ids, lm, heads=4, norm=norm)
    assert logits.shape == (2, 6, 11) and 0.5 < logits.std() < 2


def test_xavier():
    got = xavier(np.random.default_rng(3), 2, 4, gain=0.5)
    np.testing.assert_array_equal(got, np.random.default_rng(3).uniform(-0.5, 0.5, (2, 4)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": 0}, "vocabulary: got 0, wanted at least 1"),
        ({"heads": 3}, "heads: got 3, 3 of keys, wanted a divisor of width, 16, and one of that"),
        ({"heads": 0}, "heads: got 0"),
        ({"groups": 3}, "heads: got 4, 3 of keys"),
    ],
)
def test_errors(change, message):
    shape = {"vocabulary": 5, "layers": 1, **SMALL} | change
    with pytest.raises(ValueError, match=message):
        initial_decoder_lm(np.random.default_rng(0), **shape)
