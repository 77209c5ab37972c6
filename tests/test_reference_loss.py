"""The reference cross entropy: worked numbers, loops, torch, other frameworks, conventions, gradients, edges."""

import math

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import loops_loss
from veriformer.reference.loss import cross_entropy

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)
FRAMEWORKS = [np.asarray, torch.tensor, strict.asarray]
HAND = np.asarray([[2.0, 1.0, 0.1, -1.0]])
PRINTED = np.asarray([[0.0172, -0.3558, -0.1536, 0.0199, -0.1594, -0.005]])
INF, NAN = np.inf, np.nan


def close(got, wanted, relative=1e-13):
    """Equal up to `relative`; infinities and NaN exactly."""
    got, wanted = np.asarray(got), np.asarray(wanted, dtype=float)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=relative, atol=relative)


def drawn(generator, rows, size):
    """Logits, some of them huge or equal, and targets of which some are -7."""
    x = generator.integers(-3, 4, (rows, size)) * generator.choice([0.3, 1.0, 37.0, 1e4])
    return x + generator.choice([0.0, 0.01]) * generator.normal(size=x.shape), generator.integers(0, size, rows)


@st.composite
def losses(draw):
    """logits[N,V], targets[N], keywords of any convention."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, size = draw(st.sampled_from([(1, 3), (4, 3), (5, 7), (2, 4), (0, 3)]))
    logits, targets = drawn(generator, rows, size)
    ignored = draw(st.sampled_from([-100, -1, 0, size - 1, size]))
    targets = np.where(generator.random(rows) < draw(st.sampled_from([0.0, 0.4, 1.0])), ignored, targets)
    smoothing = draw(st.sampled_from(["all", "others", "others_but_padding"]))
    epsilon = draw(st.sampled_from([0.0, 0.1, 0.9]))
    if smoothing == "others_but_padding" and not 0 <= ignored < size:
        epsilon = 0.0
    return logits, targets, {
        "label_smoothing": epsilon,
        "ignore_index": ignored,
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "smoothing": smoothing,
        "all_ignored": draw(st.sampled_from(["nan", "zero"])),
    }  # fmt: skip


# worked numbers


@pytest.mark.parametrize("convert", FRAMEWORKS)
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({}, 1.4493130),
        ({"label_smoothing": 0.1}, 1.4968130),
        ({"label_smoothing": 0.1, "smoothing": "others"}, 1.5126463),
    ],
)
def test_worked_example(convert, words, wanted):
    loss = cross_entropy(convert(HAND), convert(np.asarray([1])), **words)
    np.testing.assert_allclose(float(loss), wanted, rtol=0, atol=5.1e-8)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({}, 1.6745265),
        ({"label_smoothing": 0.1}, 1.6871246),
        ({"label_smoothing": 0.1, "smoothing": "others"}, 1.6896443),
    ],
)
def test_printed_logits(words, wanted):
    """They are printed to four digits."""
    np.testing.assert_allclose(cross_entropy(PRINTED, np.asarray([3]), **words), wanted, rtol=0, atol=1e-4)


def test_worked_gradient():
    x = torch.tensor(HAND, requires_grad=True)
    cross_entropy(x, torch.tensor([1])).backward()
    np.testing.assert_allclose(x.grad[0], [0.6380664, -0.7652685, 0.0954347, 0.0317675], rtol=0, atol=5.1e-8)


@pytest.mark.parametrize("smoothing", ["all", "others"])
def test_no_loss_is_below_the_entropy_of_its_target(smoothing):
    """And one is as low: that of the logarithms of the target itself."""
    q = np.full(6, 0.1 / 6 if smoothing == "all" else 0.1 / 5)
    q[3] = 0.9 + q[3] if smoothing == "all" else 0.9
    least = -(q * np.log(q)).sum()
    np.testing.assert_allclose(least, {"all": 0.4209558, "others": 0.4860268}[smoothing], rtol=0, atol=5.1e-8)
    words = {"label_smoothing": 0.1, "smoothing": smoothing}
    np.testing.assert_allclose(cross_entropy(np.log(q)[None], np.asarray([3]), **words), least, rtol=1e-14)


# against the loops and other frameworks


@SEARCH
@given(losses())
def test_equals_the_loops_in_all_frameworks(case):
    logits, targets, words = case
    wanted = loops_loss.cross_entropy(logits, targets, **words)
    for convert in FRAMEWORKS:
        close(np.asarray(cross_entropy(convert(logits), convert(targets), **words)), wanted)


@SEARCH
@given(losses())
def test_values_and_gradients_agree_with_torch(case):
    logits, targets, words = case
    plain = {name: words[name] for name in ("label_smoothing", "ignore_index", "reduction")}
    kept = torch.tensor(targets != words["ignore_index"])
    found = []
    for function in (cross_entropy, torch.nn.functional.cross_entropy):
        x = torch.tensor(logits, requires_grad=True)
        loss = function(x, torch.tensor(targets), **plain)
        loss.sum().backward()
        found.append((loss.detach(), x.grad))
    close(found[0][0], found[1][0])
    close(found[0][1][kept], found[1][1][kept])
    assert (found[0][1][~kept] == 0).all()


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_dtype_is_kept(convert):
    single = np.float32(HAND)
    for reduction in ("mean", "sum", "none"):
        loss = cross_entropy(convert(single), convert(np.asarray([1])), label_smoothing=0.1, reduction=reduction)
        assert str(loss.dtype).endswith("float32")


# conventions


def test_smoothing_over_the_others_is_more_smoothing_over_all():
    logits, targets = drawn(np.random.default_rng(1), 6, 5)
    others = cross_entropy(logits, targets, label_smoothing=0.2, smoothing="others", reduction="none")
    close(others, cross_entropy(logits, targets, label_smoothing=0.2 * 5 / 4, reduction="none"))


def test_smoothing_without_padding_is_smoothing_over_the_others_of_a_smaller_vocabulary():
    """The padding class gets nothing, though its logit counts in softmax."""
    logits, targets = np.random.default_rng(0).normal(size=(6, 5)), np.asarray([1, 4, 0, 3, 0, 1])
    words = {"label_smoothing": 0.2, "ignore_index": 0, "reduction": "none"}
    loss = cross_entropy(logits, targets, smoothing="others_but_padding", **words)
    alone = cross_entropy(logits[:, 1:], targets - 1, label_smoothing=0.2, smoothing="others", ignore_index=-1,
                          reduction="none")  # fmt: skip
    shares = np.exp(logits)[:, 1:].sum(-1) / np.exp(logits).sum(-1)
    kept = targets != 0
    close(loss, np.where(kept, alone - np.log(shares), 0.0))


@pytest.mark.parametrize("smoothing", ["all", "others", "others_but_padding"])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.7])
def test_uniform_logits_cost_log_v(smoothing, epsilon):
    words = {"label_smoothing": epsilon, "smoothing": smoothing, "ignore_index": 2}
    close(cross_entropy(np.full((3, 4), -7.0), np.asarray([0, 1, 3]), **words), math.log(4))


@pytest.mark.parametrize("smoothing", ["all", "others", "others_but_padding"])
def test_the_gradient_is_what_is_missing_to_the_target(smoothing):
    """(p - q) / count, with q as each convention says."""
    logits, targets = np.random.default_rng(0).normal(size=(4, 5)), np.asarray([2, 0, 4, 2])
    x = torch.tensor(logits, requires_grad=True)
    cross_entropy(x, torch.tensor(targets), label_smoothing=0.3, ignore_index=0, smoothing=smoothing).backward()
    q = np.asarray(torch.softmax(x.detach(), -1) - 3 * x.grad)
    wanted = {"all": [0.06] * 5, "others": [0.075] * 5, "others_but_padding": [0, 0.1, 0.1, 0.1, 0.1]}[smoothing]
    for row, target in zip(q[[0, 2, 3]], targets[[0, 2, 3]], strict=True):
        close(row, [*wanted[:target], 0.76 if smoothing == "all" else 0.7, *wanted[target + 1 :]])
    assert (np.asarray(x.grad[1]) == 0).all()


# rows that do not count


@pytest.mark.parametrize("convert", FRAMEWORKS)
@pytest.mark.parametrize("ignored", [-100, 1, 4])
def test_rows_that_are_ignored_leave_no_trace(convert, ignored):
    logits = np.asarray([[0.5, -1.0, 2.0], [NAN, INF, -INF], [0.0, 1.0, 0.25]])
    targets, kept = np.asarray([2, ignored, 0]), np.asarray([0, 2])
    for epsilon in (0.0, 0.1):
        words = {"label_smoothing": epsilon, "ignore_index": ignored}
        for reduction in ("mean", "sum"):
            got = cross_entropy(convert(logits), convert(targets), reduction=reduction, **words)
            close(got, cross_entropy(logits[kept], targets[kept], reduction=reduction, **words))
        rows = np.asarray(cross_entropy(convert(logits), convert(targets), reduction="none", **words))
        assert rows[1] == 0 and rows.shape == (3,)


def test_no_gradient_comes_out_of_an_ignored_row():
    x = torch.tensor([[0.5, -1.0, 2.0], [NAN, INF, -INF]], dtype=torch.float64, requires_grad=True)
    cross_entropy(x, torch.tensor([2, 0]), ignore_index=0, label_smoothing=0.1).backward()
    assert (x.grad[1] == 0).all() and (x.grad[0] != 0).all()


@pytest.mark.parametrize("convert", FRAMEWORKS)
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_nothing_kept(convert, rows, epsilon):
    logits, targets = convert(np.zeros((rows, 3))), convert(np.full(rows, -100))
    words = {"label_smoothing": epsilon}
    assert math.isnan(float(cross_entropy(logits, targets, **words)))
    assert float(cross_entropy(logits, targets, all_ignored="zero", **words)) == 0
    assert float(cross_entropy(logits, targets, reduction="sum", **words)) == 0
    assert np.asarray(cross_entropy(logits, targets, reduction="none", **words)).tolist() == [0.0] * rows


@pytest.mark.parametrize("all_ignored", ["nan", "zero"])
def test_nothing_kept_has_the_gradient_0(all_ignored):
    x = torch.zeros((2, 3), dtype=torch.float64, requires_grad=True)
    cross_entropy(x, torch.tensor([-100, -100]), all_ignored=all_ignored, label_smoothing=0.1).backward()
    assert (x.grad == 0).all()


# edges


def test_a_class_that_is_absent_costs_nothing_unless_it_is_wanted():
    logits = np.asarray([[0.0, -INF, 0.0, 5.0]])
    close(cross_entropy(logits[:, :3], np.asarray([2])), math.log(2))
    assert cross_entropy(logits, np.asarray([1])) == INF
    for smoothing in ("all", "others"):
        assert cross_entropy(logits, np.asarray([2]), label_smoothing=0.1, smoothing=smoothing) == INF
    words = {"label_smoothing": 0.1, "ignore_index": 1, "smoothing": "others_but_padding"}
    assert math.isfinite(cross_entropy(logits, np.asarray([2]), **words))


def test_an_absent_class_gets_no_gradient():
    x = torch.tensor([[0.0, -INF, 0.5]], dtype=torch.float64, requires_grad=True)
    cross_entropy(x, torch.tensor([2])).backward()
    assert x.grad[0, 1] == 0 and torch.isfinite(x.grad).all() and x.grad[0, 0] > 0


@pytest.mark.parametrize("gap", [20.0, 800.0, 1e4, 1e300])
def test_far_from_the_target_the_loss_is_the_gap(gap):
    close(cross_entropy(np.asarray([[gap, 0.0]]), np.asarray([1])), gap, 1e-8)
    close(cross_entropy(np.asarray([[0.0, -gap]]), np.asarray([1])), gap, 1e-8)


def test_one_class_costs_nothing():
    for epsilon in (0.0, 0.5):
        assert cross_entropy(np.asarray([[7.0], [-3.0]]), np.asarray([0, 0]), label_smoothing=epsilon) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", ["all", "others", "others_but_padding"])
def test_gradients(reduction, smoothing):
    x = torch.randn((5, 4), dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([2, 0, 3, 1, 1])
    words = {"label_smoothing": 0.2, "ignore_index": 0, "reduction": reduction, "smoothing": smoothing}
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets, **words), (x,))


@pytest.mark.parametrize("convert", FRAMEWORKS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": np.asarray([0, 3])}, r"targets: got 3, wanted 0 to 2, or -100 to ignore"),
        ({"targets": np.asarray([-1, 0])}, r"targets: got -1"),
        ({"targets": np.asarray([-100, 0]), "ignore_index": -1}, r"targets: got -100, wanted 0 to 2, or -1 to ignore"),
        ({"targets": np.asarray([[0], [1]])}, r"targets: got shape \(2, 1\), wanted \(2,\), one a row"),
        ({"targets": np.asarray([0])}, r"targets: got shape \(1,\)"),
        ({"targets": np.asarray([0.0, 1.0])}, r"targets: got .*float64, wanted integers"),
        ({"logits": np.ones(2)}, r"logits: got shape \(2,\), wanted 2 axes"),
        ({"label_smoothing": -0.1}, r"label_smoothing: got -0.1, wanted 0 <= label_smoothing < 1"),
        ({"label_smoothing": 1.0}, r"label_smoothing: got 1.0"),
        ({"label_smoothing": NAN}, r"label_smoothing: got nan"),
        ({"reduction": "average"}, r"reduction: got 'average', wanted one of mean, sum, none"),
        ({"smoothing": "V"}, r"smoothing: got 'V', wanted one of all, others, others_but_padding"),
        ({"all_ignored": "0"}, r"all_ignored: got '0', wanted one of nan, zero"),
        ({"label_smoothing": 0.1, "smoothing": "others_but_padding"}, r"ignore_index: got -100, wanted the padding"),
        (
            {"logits": np.ones((2, 1)), "targets": np.asarray([0, 0]), "label_smoothing": 0.1, "smoothing": "others"},
            r"logits: got 1 classes, wanted one more",
        ),
    ],
)
def test_errors(convert, change, message):
    arguments = {"logits": np.ones((2, 3)), "targets": np.asarray([0, 2]), **change}
    arguments = {name: convert(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    with pytest.raises(ValueError, match=f"cross_entropy: {message}"):
        cross_entropy(**arguments)
