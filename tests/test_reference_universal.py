"""The reference Universal Transformer: loops, frameworks, extremes, padding, who sees whom, gradients, errors."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import close, converted
from universal_models import HEADS, random_states, random_universal, with_halting

from veriformer.reference import encoder_layer, loops_universal, ponder_cost, sinusoidal_positions
from veriformer.reference.layers import block, keys_values
from veriformer.reference.universal import halting_probability, universal_transformer

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=60, deadline=None, database=None, derandomize=True)
DEEP = 5
VARIED = (4, 13)
"""Seeds with which positions halt at three steps or more."""


def run(x, params, **keywords):
    return universal_transformer(x, params, **{"heads": HEADS, "max_steps": DEEP, **keywords})


@st.composite
def problems(draw):
    """(x, params), keywords, of two sequences."""
    seed, cross = draw(st.integers(0, 99)), draw(st.booleans())
    generator = np.random.default_rng(seed)
    length, memory = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3]))
    keywords = {
        "norm": draw(st.sampled_from(["post", "pre"])),
        "causal": draw(st.booleans()),
        "mask": draw(st.sampled_from([None, generator.random((2, length)) < 0.7])),
        "max_steps": draw(st.sampled_from([1, 2, 4])),
        "epsilon": draw(st.sampled_from([0.01, 0.0, 0.3])),
    }
    if cross:
        keywords["memory"] = random_states(seed + 1, 2, memory)
        keywords["memory_mask"] = draw(st.sampled_from([None, generator.random((2, memory)) < 0.7]))
    return (random_states(seed, 2, length), random_universal(seed, cross=cross)), keywords


# against loops and other frameworks


@SEARCH
@given(problems())
def test_it_equals_the_loops(case):
    (x, params), keywords = case
    out, steps, remainder = run(x, params, **keywords)
    batched = ("mask", "memory", "memory_mask")
    for b in range(2):
        own = {k: v[b].tolist() if k in batched and v is not None else v for k, v in keywords.items()}
        wanted = loops_universal.universal_transformer(x[b], params, heads=HEADS, **own)
        close(out[b], wanted[0], 1e-12)
        assert steps[b].tolist() == wanted[1]
        np.testing.assert_allclose(remainder[b], wanted[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("convert", [torch.from_numpy, strict.asarray], ids=["torch", "strict"])
def test_other_frameworks_give_the_same(convert, cross):
    x, params = random_states(10, 2, 6), random_universal(10, cross=cross)
    keywords = {"mask": np.arange(6) < np.asarray([[6], [4]]), "causal": True}
    if cross:
        keywords |= {"memory": random_states(11, 2, 3), "memory_mask": np.arange(3) < np.asarray([[2], [3]])}
    wanted = run(x, params, **keywords)
    found = run(convert(x), converted(convert, params), **converted(convert, keywords))
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 1e-12)
        assert str(one.dtype).rpartition(".")[2] == str(other.dtype)


def test_results_are_of_these_shapes_and_kinds():
    out, steps, remainder = run(random_states(4, 2, 6), random_universal(4))
    assert out.shape == (2, 6, 8) and steps.shape == remainder.shape == (2, 6)
    assert steps.dtype == np.int64 and out.dtype == remainder.dtype == np.float64
    assert len(np.unique(steps)) >= 3, "the data should have positions that halt at different steps"


# extremes: P91, P93, P98, P104, P105


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_halting_at_once_and_a_single_step_are_one_layer_on_the_signalled_input(norm):
    x, params = random_states(4, 2, 6), random_universal(4)
    signal = sinusoidal_positions(6, 8, like=x) + sinusoidal_positions(1, 8, offset=1, like=x)
    wanted = encoder_layer(x + signal, params["layer"], heads=HEADS, norm=norm)
    for given_params, words in (
        (with_halting(params, 40.0), {}),
        (params, {"max_steps": 1}),
        (params, {"epsilon": 1 - 1e-16}),
    ):
        out, steps, remainder = run(x, given_params, norm=norm, **words)
        assert np.array_equal(out, wanted) and (steps == 1).all() and (remainder == 1).all()
        assert ponder_cost(steps, remainder) == 2 * x.shape[0] * x.shape[1]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_without_halting_all_steps_are_made_and_the_last_state_is_the_output(norm):
    x, params = random_states(4, 2, 6), with_halting(random_universal(4), -800.0)
    state = x
    for n in range(1, DEEP + 1):
        signal = sinusoidal_positions(6, 8, like=x) + sinusoidal_positions(1, 8, offset=n, like=x)
        state = encoder_layer(state + signal, params["layer"], heads=HEADS, norm=norm)
    out, steps, remainder = run(x, params, norm=norm)
    assert np.array_equal(out, state) and (steps == DEEP).all() and (remainder == 1).all()


def test_an_identity_layer_gives_the_sums_of_signals_in_closed_form():
    params = random_universal(4)
    layer = {name: {k: a * 0.0 if k in ("wo", "bo", "w2", "b2") else a for k, a in part.items()}
             for name, part in params["layer"].items()}  # fmt: skip
    x = random_states(4, 1, 3)
    halt = {"w": np.zeros((8, 1)), "b": np.asarray([np.log(0.3 / 0.7)])}  # h = 0.3 at every step: N = 4, R = 0.1
    out, steps, remainder = run(x, {"layer": layer, "halt": halt}, norm="pre")
    assert (steps == 4).all() and np.allclose(remainder, 0.1, rtol=0, atol=1e-15)
    positions = sinusoidal_positions(3, 8, like=x)
    after = [x + n * positions + sinusoidal_positions(n, 8, offset=1, like=x).sum(0) for n in range(1, 5)]
    close(out, sum(w * s for w, s in zip((0.3, 0.3, 0.3, 0.1), after, strict=True)), 1e-14)


def test_more_steps_change_nothing_once_all_have_halted():
    x, params = random_states(4, 2, 6), random_universal(4, bias=1.0)
    first = run(x, params, max_steps=7)
    assert first[1].max() < 7
    for more in (int(first[1].max()), 8, 12):
        assert all(np.array_equal(a, b) for a, b in zip(first, run(x, params, max_steps=more), strict=True))


@pytest.mark.parametrize("y", [-800.0, -30.0, -1e-300, 0.0, 2.0, 800.0])
def test_halting_probability_is_the_sigmoid_everywhere(y):
    s = torch.full((1, 1, 1), y, dtype=torch.float64, requires_grad=True)
    h = halting_probability(s, {"w": torch.ones((1, 1), dtype=torch.float64)})
    (gradient,) = torch.autograd.grad(h.sum(), s)
    wanted, other = torch.sigmoid(s.detach()), torch.sigmoid(-s.detach())
    assert torch.allclose(h, wanted[..., 0], rtol=1e-14, atol=0)
    assert torch.allclose(gradient, wanted * other, rtol=1e-14, atol=0)


# what a position depends on: 3.13, P106


@pytest.mark.parametrize("seed", VARIED)
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_future_decides_nothing_and_a_prefix_is_enough(seed, norm):
    x, params = random_states(seed, 2, 7), random_universal(seed)
    whole = run(x, params, norm=norm, causal=True)
    other = np.concatenate([x[:, :4], 5 * random_states(seed + 50, 2, 3)], axis=1)
    for a, b in zip(whole, run(other, params, norm=norm, causal=True), strict=True):
        assert np.array_equal(a[:, :4], b[:, :4]) and not np.array_equal(a[:, 4:], b[:, 4:])
    for a, b in zip(whole, run(x[:, :4], params, norm=norm, causal=True), strict=True):
        close(b, a[:, :4], 1e-12)
    assert not np.allclose(run(other, params, norm=norm)[0][:, :4], run(x, params, norm=norm)[0][:, :4])


@pytest.mark.parametrize("seed", VARIED)
def test_padding_is_nobody_s_key_gives_zeros_and_may_hold_anything(seed):
    x, params = random_states(seed, 2, 6), random_universal(seed)
    mask = np.arange(9) < np.asarray([[6], [4]])
    padded = np.where(mask[..., None], np.concatenate([x, random_states(1, 2, 3)], axis=1), np.nan)
    results = run(padded, params, mask=mask)
    for b, length in enumerate((6, 4)):
        for got, wanted in zip(results, run(x[b : b + 1, :length], params), strict=True):
            close(got[b : b + 1, :length], wanted, 1e-12)
            assert (got[b, length:] == 0).all()


def test_gradients_stay_finite_where_padding_is_not():
    params = converted(torch.from_numpy, random_universal(4))
    x = torch.from_numpy(random_states(4, 1, 4))
    x[:, 2:] = np.nan
    mask = torch.arange(4)[None] < 2
    leaves = [a.requires_grad_() for a in arrays_of(params)]
    out, _, remainder = run(x.requires_grad_(), params, mask=mask)
    for gradient in torch.autograd.grad(out.sum() + remainder.sum(), [x, *leaves]):
        assert torch.isfinite(gradient).all()


def test_rows_of_the_batch_do_not_meet():
    x, params = random_states(4, 3, 6), random_universal(4)
    whole = run(x, params)
    for got, alone in zip(whole, run(x[1:2], params), strict=True):
        close(got[1:2], alone, 1e-13)
    other = np.concatenate([20 * x[:1], x[1:2], -x[2:]])
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(whole, run(other, params), strict=True))


def test_every_step_sees_the_memory_by_its_mask():
    x, memory, params = random_states(10, 2, 5), random_states(11, 2, 4), random_universal(10, cross=True)
    mask = np.arange(4) < np.asarray([[4], [2]])
    plain = run(x, params, memory=memory, memory_mask=mask)
    hidden = np.where(mask[..., None], memory, np.nan)
    assert all(
        np.array_equal(a, b) for a, b in zip(plain, run(x, params, memory=hidden, memory_mask=mask), strict=True)
    )
    assert all(
        np.array_equal(a, b)
        for a, b in zip(plain, run(x, params, memory=memory, memory_mask=mask, causal=True), strict=True)
    )
    seen = keys_values(memory, params["layer"]["cross_attention"], heads=HEADS)
    state = x
    for n in range(1, 4):
        signal = sinusoidal_positions(5, 8, like=x) + sinusoidal_positions(1, 8, offset=n, like=x)
        words = {"heads": HEADS, "causal": True, "memory_mask": mask[:, None, None, :]}
        state, _ = block(state + signal, params["layer"], None, seen, **words)
    last, _, _ = run(x, with_halting(params, -800.0), memory=memory, memory_mask=mask, max_steps=3)
    assert np.array_equal(last, state)


def test_a_halted_position_keeps_its_state_and_stays_a_key():
    """Position 0 halts at once, position 1 never: it sees, at every step, the state with which position 0 halted."""
    params = random_universal(4)
    x = random_states(4, 1, 2)
    first = states_of(x, params, 1)
    w = np.zeros((8, 1))
    gap = first[0][0, 0] - first[0][0, 1]
    w[:, 0] = 80 * gap / (gap @ gap)
    halt = {"w": w, "b": -(first[0][0].mean(0) @ w)}  # +40 at position 0, -40 at position 1
    out, steps, _ = run(x, params | {"halt": halt}, max_steps=3)
    assert steps[0].tolist()[0] == 1
    frozen = first[0][:, :1]
    state = first[0]
    for n in (2, 3):
        if steps[0, 1] < n:
            break
        state = states_of(np.concatenate([frozen, state[:, 1:]], axis=1), params, 1, start=n)[0]
    assert steps[0, 1] == 3, "position 1 should need all steps, or this shows nothing"
    close(out[:, 1], state[:, 1], 1e-12)
    close(out[:, 0], frozen[:, 0], 1e-15)


def states_of(x, params, count, start=1):
    """The states after steps start, start + 1, … with nobody halting."""
    found = []
    for n in range(start, start + count):
        signal = sinusoidal_positions(x.shape[1], 8, like=x) + sinusoidal_positions(1, 8, offset=n, like=x)
        x = encoder_layer(x + signal, params["layer"], heads=HEADS)
        found.append(x)
    return found


# gradients


def arrays_of(params):
    """All arrays of nested dicts."""
    return [a for part in params.values() for a in (arrays_of(part) if isinstance(part, dict) else [part])]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_gradients_of_output_and_remainder_are_right(norm):
    params = random_universal(4)
    names = [("layer", "attention", "wv"), ("layer", "feed_forward", "w1"), ("halt", "w"), ("halt", "b")]
    tensors = converted(torch.from_numpy, params)
    x = torch.from_numpy(random_states(4, 1, 3))

    def function(x, *weights):
        tree = tensors
        for path, weight in zip(names, weights, strict=True):
            tree = replaced(tree, path, weight)
        out, steps, remainder = run(x, tree, norm=norm, causal=True, max_steps=3)
        assert steps.max() > 1
        return out, remainder

    given = [x, *(leaf(tensors, path) for path in names)]
    assert torch.autograd.gradcheck(function, [a.clone().requires_grad_() for a in given], eps=1e-6, atol=1e-6)


def leaf(tree, path):
    return leaf(tree[path[0]], path[1:]) if path else tree


def replaced(tree, path, value):
    return {**tree, path[0]: replaced(tree[path[0]], path[1:], value)} if path else value


@pytest.mark.parametrize("seed", VARIED)
def test_a_larger_halting_bias_makes_pondering_cheaper(seed):
    """d(N + R)/db = -Σ_(n<N) h_n (1 - h_n), and 0 where a position halts at once (P102)."""
    params = converted(torch.from_numpy, random_universal(seed))
    bias = params["halt"]["b"].requires_grad_()
    x = torch.from_numpy(random_states(seed, 1, 6))
    _, steps, remainder = run(x, params)
    for i in range(6):
        (gradient,) = torch.autograd.grad(remainder[0, i], bias, retain_graph=True)
        assert gradient.item() < 0 if steps[0, i] > 1 else gradient.item() == 0


def test_the_gradient_of_shared_weights_is_the_sum_over_steps():
    params = converted(torch.from_numpy, with_halting(random_universal(4), -800.0))
    x = torch.from_numpy(random_states(4, 1, 4))
    shared = params["layer"]["feed_forward"]["w1"].requires_grad_()
    out, _, _ = run(x, params, max_steps=3)
    (whole,) = torch.autograd.grad(out.square().sum(), shared)
    copies, state = [shared.detach().clone().requires_grad_() for _ in range(3)], x
    for n, copy in enumerate(copies, 1):
        layer = replaced(params["layer"], ("feed_forward", "w1"), copy)
        signal = sinusoidal_positions(4, 8, like=x) + sinusoidal_positions(1, 8, offset=n, like=x)
        state = encoder_layer(state + signal, layer, heads=HEADS)
    parts = torch.autograd.grad(state.square().sum(), copies)
    close(whole, sum(parts), 1e-12)


# errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"max_steps": 0}, "max_steps: got 0, wanted at least 1"),
        ({"epsilon": 1.0}, "epsilon: got 1.0"),
        ({"epsilon": -0.1}, "epsilon: got -0.1"),
        ({"mask": np.ones((2, 4), bool)}, r"mask: got shape \(2, 4\), wanted \(2, 5\)"),
        ({"memory": np.zeros((2, 3, 8))}, "memory: got one, wanted none"),
        ({"memory_mask": np.ones((2, 3), bool)}, "memory_mask: got one without a memory"),
        ({"norm": "deep"}, "norm: got 'deep'"),
    ],
)
def test_what_makes_no_sense_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        run(random_states(4, 2, 5), random_universal(4), **words)


def test_a_decoder_layer_wants_its_memory_and_a_halting_unit_one_column():
    x, params = random_states(4, 2, 5), random_universal(4, cross=True)
    with pytest.raises(ValueError, match="memory: got none, wanted one"):
        run(x, params)
    with pytest.raises(ValueError, match=r"memory_mask: got shape \(2, 2\), wanted \(2, 3\)"):
        run(x, params, memory=random_states(1, 2, 3), memory_mask=np.ones((2, 2), bool))
    with pytest.raises(ValueError, match=r"halt: got w of shape \(8, 2\)"):
        run(x, random_universal(4) | {"halt": {"w": np.zeros((8, 2))}})
