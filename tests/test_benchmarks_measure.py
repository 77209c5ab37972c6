"""How cost and bytes are taken: in turn, exactly, and never of what is wrong, whichever call is the first wrong one."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from veriformer.benchmarks import measure
from veriformer.benchmarks.implementations import Prepared, named, one_thread
from veriformer.benchmarks.judging import Wrong
from veriformer.benchmarks.measure import bytes_of, cost_of, in_turn, judged
from veriformer.benchmarks.memory import allocated, counting
from veriformer.benchmarks.workloads import BY_ID, Workload, normal
from veriformer.targets import Options, load_functions

pytest.importorskip("torch")
SHAPE = (16, 32)
FORWARD = Workload("tiny-softmax", "softmax", normal(x=SHAPE), 1.0, 1.0)
BACKWARD = Workload("tiny-softmax-backward", "softmax", normal(x=SHAPE), 1.0, 1.0, direction="backward")
MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def _alone() -> None:
    one_thread()


def softmax(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def softmax_vjp(cotangent: np.ndarray, x: np.ndarray, *, axis: int = -1) -> tuple[np.ndarray]:
    y = softmax(x, axis=axis)
    return (y * (cotangent - (y * cotangent).sum(axis=axis, keepdims=True)),)


def ready(forward: Callable[..., Any] = softmax, vjp: Callable[..., Any] | None = None) -> Prepared:
    """Functions of ours at the tiny workload, with a vjp at its gradient."""
    functions = {"softmax": forward} | ({"softmax_vjp": vjp} if vjp else {})
    return Prepared(load_functions(functions, Options(), "mine"), BACKWARD if vjp else FORWARD)


def cached(function: Callable[..., Any], key: Callable[..., Any], after: int = 0) -> Callable[..., Any]:
    """A function that after so many calls gives what it gave before for the same key."""
    kept: dict[Any, Any] = {}
    calls = itertools.count()

    def cheat(*arrays: np.ndarray, axis: int = -1) -> Any:
        found = function(*arrays, axis=axis)
        earlier = kept.setdefault(key(*arrays), found)
        return earlier if next(calls) >= after else found

    return cheat


def shape(*arrays: np.ndarray) -> Any:
    """Where two inputs look alike."""
    return tuple(array.shape for array in arrays)


def test_what_is_right_has_a_cost() -> None:
    for one in (ready(), ready(vjp=softmax_vjp)):
        cost = cost_of(one, pairs=5)
        assert cost.cost > 0 and cost.seconds > 0 and 0 <= cost.accuracy.ratio <= 1


@pytest.mark.parametrize("wrong", [
    ready(lambda x, *, axis=-1: softmax(x, axis=axis) * 1.001),
    ready(lambda x, *, axis=-1: softmax(x, axis=axis)[:1]),
    ready(lambda x, *, axis=-1: softmax(x, axis=axis) * np.nan),
    ready(cached(softmax, shape)),
    ready(vjp=lambda g, x, *, axis=-1: (softmax_vjp(g, x, axis=axis)[0] * 1.01,)),
    ready(vjp=lambda g, x, *, axis=-1: (None,)),
    ready(vjp=cached(softmax_vjp, shape)),
], ids=["values", "shape", "nan", "cached", "gradient", "no gradient", "cached gradient"])  # fmt: skip
def test_what_is_wrong_is_refused_before_it_is_timed(wrong: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*_: Any) -> None:
        raise AssertionError("it was timed")

    monkeypatch.setattr(measure, "in_turn", timed)
    with pytest.raises(Wrong, match="mine"):
        cost_of(wrong)
    with pytest.raises(Wrong, match="mine"):
        for number in (0, 1):
            judged(wrong, number)


@pytest.mark.parametrize("late", [
    ready(cached(softmax, shape, after=10)),
    ready(vjp=cached(softmax_vjp, shape, after=10)),
], ids=["forward", "gradient"])  # fmt: skip
def test_what_becomes_wrong_while_it_is_timed_is_refused(late: Prepared) -> None:
    for number in (0, 1):
        judged(late, number)
    with pytest.raises(Wrong, match="mine"):
        cost_of(late, pairs=9)


def test_no_call_has_values_that_another_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_USED", itertools.count(2))  # this small input has but 1536 turns
    seen: list[bytes] = []

    def looked(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
        seen.append(x.tobytes())
        return softmax(x, axis=axis)

    in_turn(one := ready(looked), ready(), pairs=9)
    assert len(set(seen)) == len(seen) - 2  # three first calls, to see how long one takes, are the same
    for number in (0, 5, 700):
        one.fresh(number)
        assert np.array_equal(one.case(number)["x"], one.natives["x"])


def test_what_is_looked_up_by_a_part_of_the_values_is_refused() -> None:
    """Turned round, an input of which a part is at its place again is another one."""
    with pytest.raises(Wrong, match="mine"):
        cost_of(ready(cached(softmax, lambda x: x[3, :1].tobytes() > x[3, 1:2].tobytes())), pairs=15)


def in_place(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    found = softmax(x, axis=axis)
    x *= 2
    return found


def loss(logits: np.ndarray, targets: np.ndarray, *, label_smoothing: float = 0.0) -> np.ndarray:
    return np.float32(0 * logits.sum())


def test_what_writes_into_its_inputs_or_gives_another_dtype_is_refused() -> None:
    with pytest.raises(Wrong, match="mine wrote into its input x"):
        judged(ready(in_place), 0)
    with pytest.raises(Wrong, match="mine returned float64, wanted float32"):
        judged(ready(lambda x, *, axis=-1: softmax(x.astype(float), axis=axis)), 0)


def test_of_a_training_the_forward_pass_is_judged_too() -> None:
    right = named("numpy:loss", "cross_entropy").boundaries["cross_entropy"].vjp
    functions = {"cross_entropy": loss, "cross_entropy_vjp": right}
    with pytest.raises(Wrong, match="mine: result 0"):
        judged(Prepared(load_functions(functions, Options(), "mine"), BY_ID["loss-smoothed"]), 0)


def a_model(after: int) -> Prepared:
    """A cached decoder whose logits are off after so many steps."""
    one = Prepared(named("numpy:decoder_growing", "decoder_lm"), BY_ID["generate-cached"])
    make, steps = one.boundary.function, itertools.count()

    def cheat(*given: Any, **words: Any) -> Any:
        model = make(*given, **words)

        def step(tokens: Any, cache: Any, **options: Any) -> Any:
            logits, cache = model.step(tokens, cache, **options)
            return logits * (1.01 if next(steps) >= after else 1), cache

        return SimpleNamespace(step=step)

    one.boundary = copy.copy(one.boundary)
    one.boundary.function = cheat
    return one


@pytest.mark.parametrize(("after", "before"), [(3, True), (40, False)])
def test_a_generation_that_is_wrong_is_refused(after: int, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []
    timed = measure.in_turn
    monkeypatch.setattr(measure, "in_turn", lambda *given: reached.append(1) or timed(*given))
    with pytest.raises(Wrong, match="decoder_growing"):
        cost_of(a_model(after), pairs=3)
    assert bool(reached) != before


class Turns:
    """A source of calls that say when they were made."""

    def __init__(self, name: str, log: list[str], work: int) -> None:
        self.name, self.log, self.work = name, log, work
        self.matrix = np.ones((100, 100))

    def fresh(self, number: int) -> Callable[[], int]:
        """A call that multiplies matrices so many times."""

        def call() -> int:
            self.log.append(self.name)
            for _ in range(self.work):
                self.matrix @ self.matrix
            return number

        return call


def test_calls_are_taken_in_turn_the_other_way_round_each_time() -> None:
    log: list[str] = []
    pairs = in_turn(Turns("a", log, 40), Turns("b", log, 40), pairs=6)
    runs = "".join(name for name, _ in itertools.groupby(log))
    assert (
        runs == "abababab"
    )  # a and b to warm up, then ba ab ba ab ba ab; always the same way round it would be longer
    assert len(pairs.ratios) == len(pairs.seconds[0]) == len(pairs.seconds[1]) == 6
    assert [len(kept) for kept in pairs.kept] == [2, 2]
    assert all(number == returned for kept in pairs.kept for number, returned in kept)


def test_samples_of_both_are_about_as_long() -> None:
    log: list[str] = []
    in_turn(Turns("a", log, 10), Turns("b", log, 40), pairs=8)
    assert 2 < log.count("a") / log.count("b") < 8


def test_twice_the_work_is_found_as_about_two() -> None:
    """Medians of a machine that does other things too; a second try where it did."""
    found = []
    for _ in range(2):
        found.append(statistics.median(in_turn(Turns("a", [], 60), Turns("b", [], 30), pairs=21).ratios))
        if 1.6 < found[-1] < 2.4:
            return
    raise AssertionError(found)


def test_bytes_of_numpy_are_exact() -> None:
    x = np.ones(MIB // 8)
    assert MIB <= allocated(lambda: x.copy(), "numpy") < MIB + 4096
    assert allocated(lambda: x.sum(), "numpy") < 4096


def test_a_needless_copy_that_is_freed_at_once_is_seen() -> None:
    def wasteful(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
        return softmax(x.copy(), axis=axis)

    size = 4 * SHAPE[0] * SHAPE[1]
    assert bytes_of(ready(wasteful)) - bytes_of(ready()) == size
    assert bytes_of(ready()) == bytes_of(ready())


def test_counting_ends_with_its_block_also_by_an_exception_and_inside_another() -> None:
    from numpy._core.multiarray import get_handler_name

    before = get_handler_name()
    with counting():
        assert get_handler_name() == "veriformer_counting"
        with counting():
            np.ones(10)
        assert get_handler_name() == "veriformer_counting"
    assert get_handler_name() == before
    with pytest.raises(ZeroDivisionError):
        allocated(lambda: 1 // 0, "numpy")
    assert get_handler_name() == before


def test_what_is_counted_inside_counts_outside_too() -> None:
    with counting() as outer:
        np.ones(MIB // 8)
        inner = allocated(lambda: np.ones(MIB // 8), "numpy")
        assert MIB <= inner < MIB + 4096
    assert 2 * MIB <= outer[0] < 2 * MIB + 8192


def test_bytes_of_torch_are_exact() -> None:
    import torch

    x = torch.ones(MIB // 4)
    assert allocated(lambda: x.clone(), "torch") == MIB
    assert allocated(lambda: (x.clone(), x.clone()) and None, "torch") == 2 * MIB


def test_bytes_of_what_is_wrong_are_refused() -> None:
    with pytest.raises(Wrong, match="mine"):
        bytes_of(ready(lambda x, *, axis=-1: x))
