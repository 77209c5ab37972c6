"""The error budget of cross entropy: right kernels keep it, in whatever order they add up; wrong ones do not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from judging import cases, data, one_by_one, plain, rounder, stored, tensor, work, worst

from veriformer import oracle
from veriformer.budgets import Precision, undetermined
from veriformer.budgets.loss import cross_entropy as budget
from veriformer.case import Case
from veriformer.declarations import DTYPES, Capabilities
from veriformer.reference import cross_entropy
from veriformer.reference.loss import SMOOTHING, smoothed_targets

INTERMEDIATE = {"fused": "float32", "unfused": "storage"}
SHAPES = ((1, 2), (2, 3), (5, 4), (3, 1), (9, 17), (40, 3), (2, 200), (3, 33))
INF = float("inf")


def loss_case(rng, dtype):
    """logits[N,V], targets[N], keywords of any convention."""
    rows, size = SHAPES[rng.integers(len(SHAPES))]
    logits = data(rng, (rows, size), dtype)
    ignored = int(rng.choice([-100, 0, size - 1, size]))
    targets = np.where(rng.random(rows) < rng.choice([0.0, 0.3]), ignored, rng.integers(0, size, rows))
    conventions = ["all", "others"][: min(size, 2)] + ["others_but_padding"] * (size > 2 and 0 <= ignored < size)
    words = {
        "label_smoothing": float(rng.choice([0.0, 0.1, 0.9])),
        "ignore_index": ignored,
        "reduction": str(rng.choice(["mean", "sum", "none"])),
        "smoothing": str(rng.choice(conventions)),
    }
    return logits, targets, words


def reduced(loss, kept, reduction, rd):
    """The reduction of stored losses of rows, the sum from the first to the last."""
    loss = np.where(kept, loss, 0).astype(loss.dtype)
    if reduction == "none":
        return loss
    total = rd(one_by_one(loss))[0]
    return total if reduction == "sum" else rd(total / rd(loss.dtype.type(kept.sum())))


def log_probabilities(x, rd):
    t = rd(x - x.max(-1, keepdims=True))
    return rd(t - rd(np.log(rd(one_by_one(rd(np.exp(t)))))))


def by_weights(x, targets, rd, q, epsilon, smoothing, padding):
    """Every logarithm times its weight, stored, then added up."""
    terms = rd(rd(q.astype(x.dtype)) * log_probabilities(x, rd))
    return rd(-one_by_one(np.where(q > 0, terms, 0).astype(x.dtype)))[:, 0]


def shares(x, targets, smoothing, padding):
    """The targets and the classes that share epsilon, both [N,V], and how many of these a row has."""
    classes = np.arange(x.shape[1])
    hit = classes == targets[:, None]
    sharing = (smoothing == "all") | ~hit & ((classes != padding) | (smoothing == "others"))
    return hit, sharing, max(x.shape[1] - SMOOTHING.index(smoothing), 1)


def apart(x, targets, rd, q, epsilon, smoothing, padding):
    """The logarithm at the target and the sum of those that share epsilon, each stored."""
    log_p = log_probabilities(x, rd)
    hit, sharing, number = shares(x, targets, smoothing, padding)
    hard = -np.where(hit, log_p, 0).sum(-1)
    if not epsilon:
        return hard
    spread = rd(one_by_one(np.where(sharing, -log_p, 0).astype(x.dtype)))[:, 0]
    return rd(rd(x.dtype.type(1 - epsilon) * hard) + rd(x.dtype.type(epsilon / number) * spread))


def by_logits(x, targets, rd, q, epsilon, smoothing, padding):
    """logsumexp less the logits, their sum apart, as fused kernels do it."""
    top = x.max(-1, keepdims=True)
    lse = (top + np.log(one_by_one(np.exp(x - top))))[:, 0]
    hit, sharing, number = shares(x, targets, smoothing, padding)
    scaled = one_by_one(np.where(sharing, x * x.dtype.type(-epsilon / number), 0).astype(x.dtype))[:, 0]
    return (lse - (x * hit).sum(-1)) * x.dtype.type(1 - epsilon) + (scaled + x.dtype.type(epsilon) * lse)


KERNELS = [(by_weights, "unfused"), (by_weights, "fused"), (apart, "unfused"), (apart, "fused"), (by_logits, "fused")]


@pytest.mark.parametrize(("kernel", "kind"), KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_by_hand_stay_within_the_budget(dtype, kernel, kind):
    precision, rd = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused")
    for rng in cases(150, kind + kernel.__name__):
        logits, targets, words = loss_case(rng, dtype)
        rest = (words["label_smoothing"], words["smoothing"], words["ignore_index"])
        kept = targets != words["ignore_index"]
        told = {name: word for name, word in words.items() if name != "reduction"}
        with np.errstate(all="ignore"):
            q = smoothed_targets(targets, logits, **told)
            loss = kernel(logits.astype(work(dtype)), targets, rd, q, *rest)
            computed = stored(reduced(loss, kept, words["reduction"], rd), dtype)
        assert worst(computed, budget(logits, targets, **words, precision=precision), precision) <= 1, (words, logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_stays_within_the_budget(dtype):
    torch = pytest.importorskip("torch")
    precision, ratios, left = Precision(dtype), [], 0
    for rng in cases(120, "torch"):
        logits, targets, words = loss_case(rng, dtype)
        words["smoothing"] = "all"
        told = {name: word for name, word in words.items() if name != "smoothing"}
        found = torch.nn.functional.cross_entropy(tensor(logits, dtype), torch.tensor(targets), **told)
        bound = budget(logits, targets, **words, precision=precision)
        left += undetermined(bound)
        ratios.append(worst(plain(found), bound, precision))
    assert max(ratios) <= 1 and (left == 0) == (dtype != "float16")


def gradients(rng, dtype):
    """torch's gradient of a case, the case, and its cotangent."""
    torch = pytest.importorskip("torch")
    logits, targets, words = loss_case(rng, dtype)
    told = {name: word for name, word in words.items() if name != "smoothing"}
    x = tensor(logits, dtype).requires_grad_()
    loss = torch.nn.functional.cross_entropy(x, torch.tensor(targets), **told)
    cotangent = np.asarray(rng.integers(1, 4, tuple(loss.shape)), float)
    loss.backward(torch.tensor(cotangent).to(loss.dtype))
    return plain(x.grad), Case("cross_entropy", {"logits": logits, "targets": targets}, told, dtype), cotangent


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_gradients_stay_within_the_budget_and_those_of_another_smoothing_do_not(dtype):
    declared = Capabilities(saved_statistics="storage")
    precision, told_apart = Precision.of(declared, dtype), 0
    for rng in cases(24, "gradients"):
        found, case, cotangent = gradients(rng, dtype)
        for smoothing in ("all", "others") if case.size("V") > 1 else ("all",):
            capabilities = replace(declared, smoothing=smoothing)
            bound = oracle.gradient_bounds(case, ("logits",), (cotangent,), capabilities, precision)["logits"]
            ratio = worst(found, bound, precision)
            assert ratio <= 1 or smoothing == "others"
            told_apart += ratio > 1
    assert told_apart >= 5


@pytest.mark.parametrize("again", [True, False])
def test_probabilities_may_be_formed_anew_from_logsumexp_unless_that_is_denied(again):
    torch, capabilities = pytest.importorskip("torch"), Capabilities(recomputes_probabilities=again)
    precision, ratios = Precision.of(capabilities, "float32"), []
    for rng in cases(12, "anew"):
        logits, targets = stored(rng.normal(size=(3, 5)) * 3 + 300, "float32"), rng.integers(0, 5, 3)
        x = tensor(logits, "float32").requires_grad_()
        loss = (torch.logsumexp(x, -1) - x.gather(1, torch.tensor(targets)[:, None])[:, 0]).mean()
        loss.backward()
        case = Case("cross_entropy", {"logits": logits, "targets": targets}, {}, "float32")
        bound = oracle.gradient_bounds(case, ("logits",), (np.ones(()),), capabilities, precision)["logits"]
        ratios.append(worst(plain(x.grad), bound, precision))
    assert (max(ratios) <= 1) == again


def wrong_answers(logits, targets):
    """Mistakes that no precision excuses: keywords, and the answer in float64."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    hard, kept = cross_entropy(logits, targets, reduction="none"), targets != -100
    guarded = -np.log(p + 1e-2)[np.arange(3), np.maximum(targets, 0)]
    smoothed = {"label_smoothing": 0.3}
    return {
        "a guard inside the logarithm": ({}, (guarded * kept).sum() / kept.sum()),
        "divided by all rows": ({}, hard.sum() / 3),
        "not divided": ({}, hard.sum()),
        "smoothing dropped": (smoothed, hard.sum() / kept.sum()),
        "smoothing over the others": (smoothed, cross_entropy(logits, targets, **smoothed, smoothing="others")),
        "logarithm to base 2": ({}, hard.sum() / kept.sum() / math.log(2)),
        "rows of the sum in the wrong order": ({"reduction": "none"}, hard[::-1]),
        "the next class": ({}, cross_entropy(logits, np.where(kept, (targets + 1) % 4, -100))),
        "an ignored row counted": ({"reduction": "sum"}, hard.sum() + math.log(4)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_gross_mistakes_exceed_the_budget_in_every_dtype(dtype):
    precision = Precision(dtype)
    logits = stored(np.array([[2.0, 1.0, 0.0, -1.0], [0.0, 0.5, 3.0, 1.0], [-6.0, 0.0, 0.0, 2.0]]), dtype)
    targets = np.array([2, -100, 0])
    for name, (words, computed) in wrong_answers(logits, targets).items():
        bound = budget(logits, targets, **words, precision=precision)
        assert worst(stored(computed, dtype), bound, precision) > 1, name


def test_a_small_guard_inside_the_logarithm_exceeds_the_budget_where_the_probability_underflows():
    logits, targets = np.array([[0.0, 30.0]]), np.array([0])
    bound = budget(logits, targets, precision=Precision("float32"))
    assert worst(np.asarray(-math.log(math.exp(-30) + 1e-8)), bound, Precision("float32")) > 1e5


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_exact_has_no_budget(dtype):
    logits, targets = np.array([[0.0, -INF, 1.0], [5.0, 5.0, 5.0]]), np.array([1, -100])
    precision = Precision(dtype)
    rows = budget(logits, targets, reduction="none", precision=precision)
    assert rows.value.tolist() == [INF, 0] and rows.allowed.tolist() == [0, 0]
    smoothed = budget(logits[:1], np.array([2]), label_smoothing=0.1, precision=precision)
    assert smoothed.value == INF and smoothed.allowed == 0
    hard = budget(logits[:1], np.array([2]), precision=precision)
    assert np.isfinite(hard.value) and 0 < hard.allowed < 0.1
    for words, wanted in (({}, math.nan), ({"all_ignored": "zero"}, 0.0), ({"reduction": "sum"}, 0.0)):
        bound = budget(logits[1:], targets[1:], **words, precision=precision)
        np.testing.assert_array_equal(bound.value, wanted)
        assert bound.allowed == 0 and bound.value.shape == ()


def test_what_an_ignored_row_holds_does_not_count():
    logits = np.array([[0.0, 2.0], [np.nan, INF]])
    one = budget(logits, np.array([1, -100]), precision=Precision("float32"))
    alone = budget(logits[:1], np.array([1]), precision=Precision("float32"))
    assert one.value == alone.value and one.allowed == alone.allowed


def test_sums_that_leave_a_short_dtype_are_undetermined_only_where_they_are_stored_in_it():
    logits, targets = np.zeros((200, 2)), np.zeros(200, int)
    logits[:, 1] = 400.0
    for intermediate, left in (("storage", 1), ("float32", 0)):
        precision = Precision("float16", intermediate=intermediate)
        assert undetermined(budget(logits, targets, precision=precision)) == left
        assert undetermined(budget(logits, targets, reduction="none", precision=precision)) == 0
    wide = np.zeros((1, 200))
    wide[0, 0] = 400.0
    assert undetermined(budget(wide, targets[:1], label_smoothing=0.1, precision=Precision("float16"))) == 1
    assert undetermined(budget(wide, targets[:1], precision=Precision("float16"))) == 0


def test_typical_errors_are_smaller_than_the_worst_and_the_terms_add_up():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(50, 30)), rng.integers(0, 30, 50)
    worst_case = Precision("float32")
    for reduction in ("mean", "sum", "none"):
        found = [
            budget(logits, targets, label_smoothing=0.1, reduction=reduction, precision=p)
            for p in (worst_case, replace(worst_case, growth="typical"))
        ]
        assert (found[1].allowed < found[0].allowed / 1.5).all()
        for bound in found:
            np.testing.assert_allclose(sum(bound.terms.values()), bound.allowed, rtol=1e-12)
            assert bound.dominant((0,) * bound.value.ndim) in bound.terms
