"""The reference attention: worked numbers, loops, other frameworks, every keyword, edges."""

import itertools

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import attention, attention_with_lse, loops, visible_keys

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=300, deadline=None, database=None, derandomize=True)
INF = np.inf

# B, H, G, Tq, Tk, D, Dv: rectangular both ways, grouped in pairs and in threes, D != Dv
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 2, 2, 2, 3, 1, 2),
    (2, 4, 2, 3, 5, 4, 3),
    (1, 6, 2, 5, 3, 2, 4),
    (2, 3, 1, 4, 4, 3, 2),
    (3, 2, 2, 1, 6, 2, 1),
]
FULL_AXES = [None, *itertools.product([False, True], repeat=4)]  # of a mask or bias; the others have length 1
WINDOWS = [None, (None, None), (0, 0), (1, None), (None, 1), (2, 1), (0, 9)]


def pick(draw, *choices):
    return draw(st.sampled_from(choices))


@st.composite
def cases(draw):
    """(q, k, v), keywords, with values moderate enough for 1e-13; arrays cannot be written to."""
    b, h, g, tq, tk, d, dv = draw(st.sampled_from(SHAPES))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    arrays = [generator.normal(size=size) for size in ((b, h, tq, d), (b, g, tk, d), (b, g, tk, dv))]
    keywords = {
        "causal": pick(draw, False, True),
        "scale": pick(draw, None, 0.7, 0.0, -1.5),
        "window": pick(draw, *WINDOWS),
        "softcap": pick(draw, None, 0.5, 3.0),
        "offset": pick(draw, None, 0, 2, -1),
        "sink": pick(draw, None, generator.normal(size=h)),
    }
    for name in ("mask", "bias"):
        axes = pick(draw, *FULL_AXES)
        if axes is not None:
            size = [n if full else 1 for n, full in zip((b, h, tq, tk), axes, strict=True)]
            hidden = generator.random(size) < pick(draw, 0.0, 0.4, 0.8)
            keywords[name] = ~hidden if name == "mask" else np.where(hidden, -INF, generator.normal(size=size))
    for array in (*arrays, *keywords.values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return arrays, keywords


def converted(convert, case):
    """The case with its arrays in another framework."""
    arrays, keywords = case
    there = {name: convert(a) if isinstance(a, np.ndarray) else a for name, a in keywords.items()}
    return [convert(array) for array in arrays], there


def close(got, wanted, relative=1e-13):
    """Equal up to `relative` of the largest finite entry; infinities exactly."""
    got, wanted = np.asarray(got), np.asarray(wanted, dtype=float)
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite])
    largest = np.abs(wanted[finite]).max(initial=1.0)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol=0, atol=relative * largest)


def problem(tq=3, tk=3, h=2, g=1, d=2, dv=3, seed=0):
    """Random q, k, v of one batch row."""
    generator = np.random.default_rng(seed)
    return tuple(generator.normal(size=(1, n, t, w)) for n, t, w in ((h, tq, d), (g, tk, d), (g, tk, dv)))


# worked numbers


def test_default_scale_on_worked_logits():
    """q·k = 10, 0, 0 at D = 64, and values that show the weights: softmax([10, 0, 0] / 8)."""
    q, k = np.zeros((1, 1, 1, 64)), np.zeros((1, 1, 3, 64))
    q[..., 0], k[0, 0, 0, 0] = 10, 1
    out, lse = attention_with_lse(q, k, np.eye(3)[None, None])
    np.testing.assert_allclose(out[0, 0, 0], [0.6357240, 0.1821380, 0.1821380], rtol=0, atol=5.1e-8)
    np.testing.assert_allclose(lse, np.log(np.exp(1.25) + 2), rtol=1e-15)


def test_order_is_scale_softcap_bias_mask():
    one = np.ones((1, 1, 1, 1))
    _, lse = attention_with_lse(one * 3, one, one, scale=2.0, softcap=5.0, bias=one * 7)
    np.testing.assert_allclose(lse, 5 * np.tanh(6 / 5) + 7, rtol=1e-15)


def test_sink_dilutes_by_the_sigmoid_of_lse_minus_sink():
    q, k, v = problem()
    sink = np.asarray([0.3, -40.0])
    plain, lse = attention_with_lse(q, k, v)
    out, same_lse = attention_with_lse(q, k, v, sink=sink)
    np.testing.assert_array_equal(same_lse, lse)
    close(out, plain / (1 + np.exp(sink[:, None] - lse))[..., None])


@pytest.mark.parametrize(
    ("keywords", "picture"),
    [
        ({}, "111 111"),
        ({"causal": True}, "110 111"),
        ({"causal": True, "offset": 0}, "100 110"),
        ({"window": (0, 0)}, "010 001"),
        ({"window": (1, None), "offset": 1}, "111 011"),
        ({"window": (None, 0), "offset": 0}, "100 110"),
        ({"window": (0, 2), "causal": True}, "010 001"),
        ({"causal": True, "offset": -1}, "000 100"),
    ],
)
def test_visible_keys_of_two_queries_and_three_keys(keywords, picture):
    wanted = [[mark == "1" for mark in row] for row in picture.split()]
    for like in (np.zeros(1), torch.zeros(1), strict.zeros(1)):
        got = visible_keys(2, 3, **keywords, like=like)
        assert type(got) is type(like)
        np.testing.assert_array_equal(np.asarray(got), wanted)


# against the loops and other frameworks


@SEARCH
@given(cases())
def test_equals_the_loops(case):
    arrays, keywords = case
    out, lse = attention_with_lse(*arrays, **keywords)
    wanted_out, wanted_lse = loops.attention_with_lse(*arrays, **keywords)
    close(out, wanted_out)
    close(lse, wanted_lse)
    np.testing.assert_array_equal(attention(*arrays, **keywords), out)


@SEARCH
@given(cases())
def test_frameworks_agree(case):
    arrays, keywords = case
    there, those = converted(strict.asarray, case)
    for here, other in zip(attention_with_lse(*arrays, **keywords), attention_with_lse(*there, **those), strict=True):
        np.testing.assert_array_equal(np.asarray(other), here)
    there, those = converted(torch.tensor, case)
    for here, other in zip(attention_with_lse(*arrays, **keywords), attention_with_lse(*there, **those), strict=True):
        close(other, here)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_huge_logits_equal_the_loops(size):
    """Integers, so that the scores are exact; ties and gaps beyond the range of exp."""
    generator = np.random.default_rng(1)
    q, k, v = (generator.integers(-3, 4, (1, 2, 6, 4)).astype(float) for _ in range(3))
    close(attention(q * size, k, v, causal=True), loops.attention(q * size, k, v, causal=True))


@pytest.mark.parametrize(("tq", "tk"), [(4, 4), (3, 5)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_agrees_with_torch_under_an_explicit_mask(tq, tk, scale):
    q, k, v = map(torch.tensor, problem(tq, tk, h=4, g=2))
    repeated = [rows.repeat_interleave(2, 1) for rows in (k, v)]
    mask = torch.ones(tq, tk, dtype=torch.bool).tril(tk - tq)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, *repeated, attn_mask=mask, scale=scale)
    close(attention(q, k, v, causal=True, scale=scale), theirs, 1e-14)
    close(attention(q, k, v, mask=mask[None, None], scale=scale), theirs, 1e-14)


def test_agrees_with_torch_under_a_bias():
    q, k, v = map(torch.tensor, problem(3, 5, h=2, g=2))
    bias = torch.linspace(-3, 3, 30, dtype=torch.float64).reshape(1, 2, 3, 5)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    close(attention(q, k, v, bias=bias), theirs, 1e-14)


# structure


def test_queries_may_be_cut_with_their_offset():
    q, k, v = problem(tq=5, tk=4)
    whole = attention(q, k, v, causal=True, window=(2, None))
    parts = [attention(q[:, :, i : i + 2], k, v, causal=True, window=(2, None), offset=i - 1) for i in (0, 2, 4)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), whole)


def test_a_bias_of_minus_infinity_is_a_mask():
    q, k, v = problem(tq=4, tk=5)
    mask = np.random.default_rng(2).random((1, 2, 4, 5)) < 0.5
    got = attention_with_lse(q, k, v, bias=np.where(mask, 0.0, -INF))
    for ours, wanted in zip(got, attention_with_lse(q, k, v, mask=mask), strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("sink", [None, np.asarray([0.5, -INF])])
def test_an_empty_row_gives_zero_and_leaves_the_others(sink):
    q, k, v = problem(tq=4, tk=3)
    mask = np.ones((1, 2, 4, 3), dtype=bool)
    mask[0, :, 1] = False
    out, lse = attention_with_lse(q, k, v, mask=mask, sink=sink)
    np.testing.assert_array_equal(out[:, :, 1], np.zeros((1, 2, 3)))
    np.testing.assert_array_equal(lse[:, :, 1], np.full((1, 2), -INF))
    np.testing.assert_array_equal(out[:, :, [0, 2, 3]], attention(q[:, :, [0, 2, 3]], k, v, sink=sink))


@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "value width"])
@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, strict.asarray])
def test_axes_of_length_zero(empty, convert):
    b, tq, tk, dv = (0 if empty == name else 2 for name in ("batch", "queries", "keys", "value width"))
    q, k, v = (convert(np.ones(size)) for size in ((b, 4, tq, 3), (b, 2, tk, 3), (b, 2, tk, dv)))
    out, lse = attention_with_lse(q, k, v, causal=True, sink=convert(np.zeros(4)), bias=convert(np.zeros((1, 1, 1, 1))))
    assert out.shape == (b, 4, tq, dv) and lse.shape == (b, 4, tq)
    if empty == "keys":
        np.testing.assert_array_equal(np.asarray(out), np.zeros((2, 4, 2, 2)))
        np.testing.assert_array_equal(np.asarray(lse), np.full((2, 4, 2), -INF))


# hidden content


HIDING = {
    "mask": {"mask": np.asarray([True, True, False])[None, None, None]},
    "bias": {"bias": np.asarray([0.5, -1.0, -INF])[None, None, None]},
    "causal": {"causal": True, "offset": 0},
    "window": {"window": (None, 0), "offset": 0},
    "mask over a bad bias": {
        "mask": np.asarray([True, True, False])[None, None, None],
        "bias": np.asarray([0.5, -1.0, np.nan])[None, None, None],
    },
}


@pytest.mark.parametrize("poison", [np.nan, INF, -INF, 1e300])
@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0, "sink": np.asarray([0.1, 0.2])}])
def test_hidden_content_reaches_neither_output_nor_gradient(how, poison, extra):
    """Key 2 is hidden from both queries, whatever it holds."""
    q, k, v = problem(tq=2, tk=3)
    results = []
    for content in (0.0, poison):
        for rows in (k, v):
            rows[:, :, 2] = content
        results.append(_results_and_gradients((q, k, v), {**HIDING[how], **extra}))
    for clean, poisoned in zip(*results, strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(poisoned, clean)
    for gradient in results[0][3:]:
        assert not gradient[:, :, 2].any() and gradient[:, :, :2].all()


def _results_and_gradients(arrays, keywords):
    (q, k, v), there = converted(torch.tensor, (arrays, keywords))
    inputs = [array.requires_grad_() for array in (q, k, v)]
    out, lse = attention_with_lse(*inputs, **there)
    weights = torch.arange(1.0, out.numel() + 1).reshape(out.shape)
    ((out * weights).sum() + (lse * weights[..., 0]).sum()).backward()
    return [array.detach().numpy() for array in (out, lse, q.grad, k.grad, v.grad)]


def test_nan_in_the_future_stays_in_the_rows_that_see_it():
    q, k, v = problem(tq=3, tk=3)
    wanted = attention(q, k, v, causal=True)
    k[:, :, 2] = v[:, :, 2] = np.nan
    out = attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out[:, :, :2], wanted[:, :, :2])
    assert np.isnan(out[:, :, 2]).all()


# gradients


GRADIENT_CASES = {
    "plain": {},
    "causal, empty rows": {"causal": True},
    "window, softcap": {"window": (1, 0), "softcap": 1.5},
    "all hidden": {"mask": np.zeros((1, 1, 1, 1), dtype=bool)},
    "mask, empty row": {"mask": np.asarray([[True, False], [False, False], [True, True]])[None, None]},
    "scale": {"scale": -0.6, "offset": 0, "causal": True},
    "softcap, causal": {"softcap": 0.7, "causal": True},
}


@pytest.mark.parametrize("name", GRADIENT_CASES)
@pytest.mark.parametrize("with_sink_and_bias", [False, True])
def test_gradients(name, with_sink_and_bias):
    """Three queries, two keys, so that bottom-right causality leaves row 0 empty; H = 4, G = 2."""
    (q, k, v), keywords = converted(torch.tensor, (problem(3, 2, h=4, g=2), GRADIENT_CASES[name]))
    bias = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(1, 4, 3, 1)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    inputs = [array.requires_grad_() for array in ((q, k, v, bias, sink) if with_sink_and_bias else (q, k, v))]

    def differentiable(q, k, v, bias=None, sink=None):
        out, lse = attention_with_lse(q, k, v, bias=bias, sink=sink, **keywords)
        return out, torch.where(torch.isinf(lse), 0.0, lse)

    assert torch.autograd.gradcheck(differentiable, inputs)


@pytest.mark.parametrize("sink", [None, np.zeros(2)])
def test_gradients_of_an_empty_row_are_exactly_zero(sink):
    (q, k, v), keywords = converted(torch.tensor, (problem(tq=3, tk=2), {"causal": True, "sink": sink}))
    inputs = [array.requires_grad_() for array in (q, k, v)]
    out, lse = attention_with_lse(*inputs, **keywords)
    (out[:, :, 0].sum() + lse[:, :, 0].sum()).backward()
    for array in inputs:
        np.testing.assert_array_equal(array.grad, torch.zeros_like(array))


# errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.ones((4, 3, 2))}, r"q: got shape \(4, 3, 2\), wanted 4 axes"),
        ({"k": np.ones((1, 2, 5, 3))}, r"k: got shape \(1, 2, 5, 3\), wanted \(2, 2, 5, 2\)"),
        ({"k": np.ones((2, 2, 5, 1))}, r"k: got shape \(2, 2, 5, 1\), wanted \(2, 2, 5, 2\)"),
        ({"v": np.ones((2, 1, 5, 3))}, r"v: got shape \(2, 1, 5, 3\), wanted \(2, 2, 5, 3\)"),
        ({"v": np.ones((2, 2, 1, 3))}, r"v: got shape \(2, 2, 1, 3\), wanted \(2, 2, 5, 3\)"),
        ({"q": np.ones((2, 3, 3, 2))}, r"heads: got 3 of q and 2 of k"),
        ({"mask": np.ones((3, 5), dtype=bool)}, r"mask: got shape \(3, 5\), wanted \(2, 4, 3, 5\)"),
        ({"mask": np.ones((2, 2, 3, 5), dtype=bool)}, r"mask: got shape \(2, 2, 3, 5\)"),
        ({"mask": np.zeros((1, 1, 3, 5))}, r"mask: got float64, wanted booleans"),
        ({"bias": np.zeros((5,))}, r"bias: got shape \(5,\)"),
        ({"sink": np.zeros(1)}, r"sink: got shape \(1,\), wanted \(4,\)"),
        ({"softcap": 0.0}, r"softcap: got 0.0, wanted a number > 0"),
        ({"softcap": -3.0}, r"softcap: got -3.0"),
        ({"window": (-1, 0)}, r"window: got \(-1, 0\), wanted two numbers of keys >= 0"),
    ],
)
def test_errors(change, message):
    arrays = {"q": np.ones((2, 4, 3, 2)), "k": np.ones((2, 2, 5, 2)), "v": np.ones((2, 2, 5, 3))}
    with pytest.raises(ValueError, match=message):
        attention(**{**arrays, **change})
