"""The reference multi-head attention and encoder layer: loops, torch's modules, heads, norms, edges."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import (
    attend,
    encoder_layer,
    feed_forward,
    keys_values,
    layer_norm,
    loops_layers,
    multi_head_attention,
    rms_norm,
)
from veriformer.reference.layers import enter, leave

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=100, deadline=None, database=None, derandomize=True)

# B, Tq, Tk, heads, key heads, head width, value width, model width, memory width
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1, 1, 1),
    (2, 3, 4, 4, 2, 3, 2, 5, 5),
    (1, 4, 2, 6, 2, 1, 3, 4, 2),
    (2, 2, 5, 3, 1, 2, 4, 6, 3),
]


def random_attention(generator, shape, biases=("bq", "bk", "bv", "bo")):
    _, _, _, heads, groups, size, values, width, other = shape
    columns = {"wq": (width, heads * size), "wk": (other, groups * size), "wv": (other, groups * values)}
    columns["wo"] = (heads * values, width)
    params = {name: generator.normal(size=size) for name, size in columns.items()}
    return params | {name: generator.normal(size=columns["w" + name[1]][1]) for name in biases}


def random_layer(generator, width, heads, groups, inner=7, norms=("weight", "bias")):
    norm = {name: generator.normal(size=width) for name in norms}
    sizes = {"w1": (width, inner), "b1": (inner,), "w2": (inner, width), "b2": (width,)}
    return {
        "attention": random_attention(generator, (0, 0, 0, heads, groups, 3, 2, width, width)),
        "feed_forward": {name: generator.normal(size=size) for name, size in sizes.items()},
        "norm1": norm,
        "norm2": {name: generator.normal(size=width) for name in norms},
    }


@st.composite
def attentions(draw):
    """(x, memory, params), keywords."""
    shape = draw(st.sampled_from(SHAPES))
    batch, queries, keys, heads, *_, width, other = shape
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    biases = draw(st.sampled_from([(), ("bq", "bv"), ("bq", "bk", "bv", "bo")]))
    params = random_attention(generator, shape, biases)
    x, memory = generator.normal(size=(batch, queries, width)), generator.normal(size=(batch, keys, other))
    mask = generator.random(draw(st.sampled_from([(1, 1, 1, keys), (batch, heads, queries, keys)]))) < 0.7
    return (x, memory, params), {
        "heads": heads,
        "mask": draw(st.sampled_from([None, mask])),
        "causal": draw(st.booleans()),
    }


@st.composite
def layers(draw):
    """(x, params), keywords."""
    width, heads, groups = draw(st.sampled_from([(4, 2, 2), (3, 4, 2), (5, 3, 1)]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    params = random_layer(
        generator, width, heads, groups, norms=draw(st.sampled_from([("weight",), ("weight", "bias")]))
    )
    length = draw(st.sampled_from([1, 3, 4]))
    keywords = {
        "heads": heads,
        "norm": draw(st.sampled_from(["post", "pre"])),
        "alpha": draw(st.sampled_from([1.0, 1.7])),
        "mask": draw(st.sampled_from([None, generator.random((2, 1, 1, length)) < 0.6])),
    }
    return (generator.normal(size=(2, length, width)), params), keywords


def converted(convert, tree):
    """Every array of nested tuples, lists and dicts in another framework."""
    if isinstance(tree, dict):
        return {name: converted(convert, part) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(converted(convert, part) for part in tree)
    return convert(tree) if isinstance(tree, np.ndarray) else tree


def close(got, wanted, relative=1e-13):
    """Equal up to `relative` of the largest entry."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=relative * np.abs(wanted).max(initial=0.0))


# against the loops and other frameworks


@SEARCH
@given(attentions())
def test_multi_head_attention_equals_the_loops(case):
    arrays, keywords = case
    close(multi_head_attention(*arrays, **keywords), loops_layers.multi_head_attention(*arrays, **keywords))


@SEARCH
@given(layers())
def test_encoder_layer_equals_the_loops(case):
    arrays, keywords = case
    close(encoder_layer(*arrays, **keywords), loops_layers.encoder_layer(*arrays, **keywords))


@pytest.mark.parametrize(
    ("function", "recipe"),
    [(multi_head_attention, attentions()), (encoder_layer, layers())],
    ids=["attention", "layer"],
)
@settings(SEARCH)
@given(data=st.data())
def test_frameworks_agree(function, recipe, data):
    case = data.draw(recipe)
    wanted = function(*case[0], **case[1])
    there, those = converted(strict.asarray, case)
    np.testing.assert_array_equal(np.asarray(function(*there, **those)), wanted)
    there, those = converted(torch.tensor, case)
    close(function(*there, **those), wanted)


# against torch's modules


def from_torch(module):
    """params of attention, in [in, out], as views of nn.MultiheadAttention's parameters."""
    names = ("q", "k", "v")
    params = {f"w{n}": w.T for n, w in zip(names, module.in_proj_weight.chunk(3), strict=True)}
    params |= {f"b{n}": b for n, b in zip(names, module.in_proj_bias.chunk(3), strict=True)}
    return params | {"wo": module.out_proj.weight.T, "bo": module.out_proj.bias}


def layer_from_torch(module):
    return {
        "attention": from_torch(module.self_attn),
        "feed_forward": {
            "w1": module.linear1.weight.T,
            "b1": module.linear1.bias,
            "w2": module.linear2.weight.T,
            "b2": module.linear2.bias,
        },
        "norm1": {"weight": module.norm1.weight, "bias": module.norm1.bias},
        "norm2": {"weight": module.norm2.weight, "bias": module.norm2.bias},
    }


def randomized(module):
    """The module with all of its parameters random: those that torch sets to 0 and 1 would hide a mistake."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_multihead_attention_and_its_gradients(masked):
    module = randomized(torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64))
    x, memory = (torch.randn(2, length, 12, dtype=torch.float64) for length in (4, 5))
    padding = torch.tensor([[False] * 5, [False, False, True, False, True]]) if masked else None
    theirs, _ = module(x, memory, memory, key_padding_mask=padding)
    mask = None if padding is None else ~padding[:, None, None, :]
    ours = multi_head_attention(x, memory, from_torch(module), heads=3, mask=mask)
    close(ours.detach(), theirs.detach())
    parameters, weights = list(module.parameters()), torch.randn_like(ours)
    gradients = [torch.autograd.grad((y * weights).sum(), parameters) for y in (ours, theirs)]
    for mine, yours in zip(*gradients, strict=True):
        # The key bias has gradient 0 in reals: what is left is noise, to be measured by the other gradients.
        np.testing.assert_allclose(mine, yours, rtol=0, atol=1e-13 * max(g.abs().max() for g in gradients[1]))


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_the_encoder_layer(norm, masked):
    module = randomized(
        torch.nn.TransformerEncoderLayer(
            12, 4, 20, dropout=0.0, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
        )
    )
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]]) if masked else None
    mask = None if padding is None else ~padding[:, None, None, :]
    theirs = module(x, src_key_padding_mask=padding)
    ours = encoder_layer(x, layer_from_torch(module), heads=4, norm=norm, mask=mask)
    close(ours.detach(), theirs.detach())


def test_agrees_with_torch_under_causality():
    module = randomized(torch.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    theirs, _ = module(x, x, x, attn_mask=hidden)
    close(multi_head_attention(x, x, from_torch(module), heads=2, causal=True).detach(), theirs.detach())


# heads


def problem(seed=0, shape=SHAPES[1]):
    generator = np.random.default_rng(seed)
    batch, queries, keys, *_, width, other = shape
    arrays = generator.normal(size=(batch, queries, width)), generator.normal(size=(batch, keys, other))
    return (*arrays, random_attention(generator, shape))


def test_it_is_keys_values_and_attend():
    x, memory, params = problem()
    k, v = keys_values(memory, params, heads=4)
    assert k.shape == (2, 2, 4, 3) and v.shape == (2, 2, 4, 2)
    np.testing.assert_array_equal(
        attend(x, (k, v), params, heads=4, causal=True),
        multi_head_attention(x, memory, params, heads=4, causal=True),
    )


def test_kept_keys_and_values_are_a_cache():
    x, _, params = problem()
    whole = multi_head_attention(x, x, params, heads=4, causal=True)
    past = keys_values(x[:, :2], params, heads=4)
    new = keys_values(x[:, 2:], params, heads=4)
    kv = tuple(np.concatenate(pair, axis=2) for pair in zip(past, new, strict=True))
    close(attend(x[:, 2:], kv, params, heads=4, causal=True), whole[:, 2:])


def test_key_heads_are_shared_by_neighbouring_query_heads():
    """The same as wk, wv with each key head's columns written out for both of its query heads."""
    x, memory, params = problem()
    wide = dict(params)
    for name, size in (("wk", 3), ("bk", 3), ("wv", 2), ("bv", 2)):
        first, second = np.split(params[name], 2, axis=-1)
        assert first.shape[-1] == size
        wide[name] = np.concatenate([first, first, second, second], axis=-1)
    close(multi_head_attention(x, memory, wide, heads=4), multi_head_attention(x, memory, params, heads=4))


def test_permuting_heads_changes_nothing():
    x, memory, params = problem(shape=(2, 3, 4, 2, 2, 3, 2, 5, 5))
    swapped = {
        name: np.concatenate(np.split(array, 2, axis=0 if name == "wo" else -1)[::-1], axis=0 if name == "wo" else -1)
        for name, array in params.items()
        if name != "bo"
    }
    close(
        multi_head_attention(x, memory, swapped | {"bo": params["bo"]}, heads=2),
        multi_head_attention(x, memory, params, heads=2),
    )


def test_absent_biases_are_zeros():
    x, memory, params = problem()
    bare = {name: array for name, array in params.items() if name[0] == "w"}
    zeros = bare | {name: np.zeros_like(array) for name, array in params.items() if name[0] == "b"}
    np.testing.assert_array_equal(
        multi_head_attention(x, memory, bare, heads=4), multi_head_attention(x, memory, zeros, heads=4)
    )


def test_a_query_that_sees_nothing_gives_the_last_bias():
    x, memory, params = problem()
    mask = np.ones((2, 1, 3, 4), dtype=bool)
    mask[1, 0, 2] = False
    out = multi_head_attention(x, memory, params, heads=4, mask=mask)
    np.testing.assert_array_equal(out[1, 2], params["bo"])
    np.testing.assert_array_equal(out[0], multi_head_attention(x, memory, params, heads=4)[0])


def test_hidden_memory_may_be_nan():
    x, memory, params = problem()
    mask = np.asarray([True, False, True, True])[None, None, None]
    wanted = multi_head_attention(x, memory, params, heads=4, mask=mask)
    memory[:, 1] = np.nan
    np.testing.assert_array_equal(multi_head_attention(x, memory, params, heads=4, mask=mask), wanted)


# norms and residuals


@pytest.mark.parametrize("norms", [("weight",), ("weight", "bias")])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_layer_is_its_parts(norms, norm):
    params = random_layer(np.random.default_rng(1), 4, 2, 1, norms=norms)
    x = np.random.default_rng(2).normal(size=(2, 3, 4))

    def normed(x, which):
        return (rms_norm if norms == ("weight",) else layer_norm)(x, *params[which].values())

    def attending(x):
        return multi_head_attention(x, x, params["attention"], heads=2)

    if norm == "pre":
        y = x + attending(normed(x, "norm1"))
        y = y + feed_forward(normed(y, "norm2"), *params["feed_forward"].values())
    else:
        y = normed(1.5 * x + attending(x), "norm1")
        y = normed(1.5 * y + feed_forward(y, *params["feed_forward"].values()), "norm2")
    np.testing.assert_array_equal(encoder_layer(x, params, heads=2, norm=norm, alpha=1.5), y)


def test_enter_and_leave():
    x, y, params = np.asarray([[3.0, 4.0]]), np.asarray([[1.0, -1.0]]), {"weight": np.asarray([2.0, 1.0])}
    assert enter(x, params, "post") is x
    np.testing.assert_array_equal(enter(x, params, "pre"), rms_norm(x, params["weight"]))
    np.testing.assert_array_equal(leave(x, y, params, "pre", 7.0), [[4.0, 3.0]])
    np.testing.assert_array_equal(leave(x, y, params, "post", 2.0), rms_norm(2 * x + y, params["weight"]))


def test_pre_norm_with_silent_sublayers_is_the_identity():
    params = random_layer(np.random.default_rng(1), 4, 2, 2)
    for part, names in (("attention", ("wo", "bo")), ("feed_forward", ("w2", "b2"))):
        for name in names:
            params[part][name] = np.zeros_like(params[part][name])
    x = np.random.default_rng(2).normal(size=(2, 3, 4))
    np.testing.assert_array_equal(encoder_layer(x, params, heads=2, norm="pre"), x)


def test_pre_norm_passes_a_shift_of_the_residual_on():
    params = random_layer(np.random.default_rng(1), 4, 2, 2)
    x = np.random.default_rng(2).normal(size=(2, 3, 4))
    shifted, plain = (encoder_layer(z, params, heads=2, norm="pre") for z in (x + 2.0, x))
    close(shifted, plain + 2.0)


def test_a_feed_forward_without_biases():
    params = random_layer(np.random.default_rng(1), 4, 2, 2)
    inner = params["feed_forward"]
    x = np.random.default_rng(2).normal(size=(1, 3, 4))
    zeros = encoder_layer(x, params | {"feed_forward": inner | {"b1": np.zeros(7), "b2": np.zeros(4)}}, heads=2)
    bare = encoder_layer(x, params | {"feed_forward": {"w1": inner["w1"], "w2": inner["w2"]}}, heads=2)
    np.testing.assert_array_equal(bare, zeros)


# gradients


def test_gradients_of_multi_head_attention():
    """Three queries, two keys, so that bottom-right causality leaves the first query empty."""
    x, memory, params = converted(torch.tensor, problem(shape=(1, 3, 2, 4, 2, 2, 1, 3, 2)))
    inputs = [array.requires_grad_() for array in (x, memory, *params.values())]

    def function(x, memory, *arrays):
        return multi_head_attention(x, memory, dict(zip(params, arrays, strict=True)), heads=4, causal=True)

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("norms", [("weight",), ("weight", "bias")])
def test_gradients_of_the_layer(norm, norms):
    params = converted(torch.tensor, random_layer(np.random.default_rng(3), 3, 2, 1, inner=4, norms=norms))
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(1, 2, 3).cos()
    inputs = [x, params["attention"]["wk"], params["norm1"]["weight"], params["feed_forward"]["w1"]]

    def function(x, wk, weight, w1):
        changed = params | {
            "attention": params["attention"] | {"wk": wk},
            "norm1": params["norm1"] | {"weight": weight},
            "feed_forward": params["feed_forward"] | {"w1": w1},
        }
        return encoder_layer(x, changed, heads=2, norm=norm)

    assert torch.autograd.gradcheck(function, [array.requires_grad_() for array in inputs])


# errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"heads: got 5, wanted a divisor of 12, the width of wq"),
        ({"heads": 0}, r"heads: got 0"),
        ({"wk": np.ones((5, 7))}, r"wk: got width 7, wanted 3, the width of a head, times a divisor of 4"),
        ({"wk": np.ones((5, 9))}, r"wk: got width 9, wanted 3"),
        ({"wk": np.ones((5, 2))}, r"wk: got width 2, wanted 3"),
        ({"wv": np.ones((5, 5))}, r"wv: got width 5, wanted a multiple of 2, the key heads of wk"),
        ({"wo": np.ones((9, 5))}, r"wo: got 9 rows, wanted 8, 4 heads as wide as those of wv"),
        ({"bq": np.ones(1)}, r"bq: got shape \(1,\), wanted \(12,\)"),
        ({"bo": np.ones((1, 5))}, r"bo: got shape \(1, 5\), wanted \(5,\)"),
        ({"x": np.ones((3, 5))}, r"x: got shape \(3, 5\), wanted 3 axes"),
        ({"memory": np.ones((2, 4, 1))}, r"memory: got shape \(2, 4, 1\), wanted 3 axes"),
    ],
)
def test_errors(change, message):
    x, memory, params = problem()
    given = {"x": x, "memory": memory, "heads": 4, **{n: a for n, a in change.items() if n in ("x", "memory", "heads")}}
    params |= {name: array for name, array in change.items() if name not in given}
    with pytest.raises(ValueError, match=f"multi_head_attention: {message}"):
        multi_head_attention(given["x"], given["memory"], params, heads=given["heads"])


def test_an_unknown_norm():
    params = random_layer(np.random.default_rng(1), 4, 2, 2)
    with pytest.raises(ValueError, match="layer: norm: got 'deep', wanted 'post' or 'pre'"):
        encoder_layer(np.ones((1, 2, 4)), params, heads=2, norm="deep")
