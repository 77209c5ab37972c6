"""Cases of adaptive computation time are what they promise; implementations equal scalar loops; failures end small."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from toys import faulty

from veriformer.budgets import Precision
from veriformer.budgets.halting import halting_steps, undecided
from veriformer.case import Case
from veriformer.catalogue import all_laws
from veriformer.checking import in_process
from veriformer.declarations import DTYPES, Capabilities
from veriformer.given_models import GivenStep
from veriformer.guard import reference_keeps
from veriformer.law import Domain
from veriformer.oracle import gradient_bounds
from veriformer.properties.halting_cases import ACT, BOTH, LOOP, SPEEDS, halting_cases
from veriformer.running import Item
from veriformer.targets import Options, load

WORDS = {ACT: {"epsilon"}, LOOP: {"epsilon", "max_steps"}}
HALTING = {ACT: "halting", LOOP: "step.halting"}
OURS = [(f"{file}", variant) for file, variants in (
    ("numpy_act", ("act", "act_by_position")), ("torch_act", ("act", "act_masked", "act_compacted"))
) for variant in variants]  # fmt: skip


def domain(operation: str, dtype: str = "float32") -> Domain:
    return Domain(operation, dtype, frozenset(WORDS[operation]), Capabilities())


def drawn(operation: str, speed: str, dtype: str = "float32", count: int = 40) -> list[Case]:
    return list(halting_cases(speeds=(speed,), examples=count).examples(domain(operation, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("speed", SPEEDS)
def test_halting_is_a_probability_and_mostly_decided(speed: str, dtype: str) -> None:
    open_ended = positions = 0
    for case in drawn(ACT, speed, dtype):
        halting = case["halting"]
        assert ((halting >= 0) & (halting <= 1)).all()
        rows = undecided(halting, case["epsilon"], Precision(dtype))
        open_ended, positions = open_ended + int(rows.sum()), positions + rows.size
    near = speed == "close" or speed == "beyond" and dtype == "bfloat16"
    limit = (0.5 if near else 0.2) if dtype in DTYPES[2:] else 0.1
    assert open_ended <= limit * positions


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_lie_exactly_on_the_threshold(dtype: str) -> None:
    touched = positions = 0
    for case in drawn(ACT, "ties", dtype):
        sums = np.cumsum(case["halting"], -1)
        on = (sums == 1 - case["epsilon"])[..., :-1].any(-1)
        assert not undecided(case["halting"], case["epsilon"], Precision(dtype))[on].any()
        touched, positions = touched + int(on.sum()), positions + on.size
    assert touched > 0.6 * positions


def test_positions_of_one_case_halt_at_once_later_and_never() -> None:
    kinds: list[set[str]] = []
    for case in drawn(ACT, "mixed"):
        size = case.size("M")
        first, _ = halting_steps(case["halting"], case["epsilon"], Precision("float32"))
        forced = np.cumsum(case["halting"], -1)[..., -1] < 1 - case["epsilon"]
        found = {
            "never" if f else "at once" if n == 1 else "later" for n, f in zip(first.flat, forced.flat, strict=True)
        }
        kinds.append(found if first.size > 2 and size > 2 else {"small"})
    large = [found for found in kinds if found != {"small"}]
    assert len(large) > 10 and all({"at once", "never"} <= found for found in large)
    assert sum("later" in found for found in large) > len(large) / 3


@pytest.mark.parametrize("operation", BOTH)
def test_cases_survive_json(operation: str) -> None:
    for case in halting_cases().examples(domain(operation))[:8]:
        again = Case.from_json(case.to_json(), dict(case.arrays))
        assert again.keywords == case.keywords and again.describe() == case.describe()
        assert list(again.arrays) == list(case.arrays)


# implementations against scalar loops


def by_hand(case: Case) -> list[np.ndarray]:
    """Output, steps and remainder of a case, one number at a time."""
    halting = case[HALTING[case.operation]]
    shape, bound = halting.shape[:-1], 1 - case["epsilon"]
    step = GivenStep(case["step.drive"], halting) if case.operation == LOOP else None
    state = case["state"] if step else case["states"][..., 0, :]
    out, steps, left = np.zeros(state.shape), np.zeros(shape), np.ones(shape)
    total, running = np.zeros(shape), np.ones(shape, bool)
    for n in range(1, halting.shape[-1] + 1):
        state = step(state, n)[0] if step else case["states"][..., n - 1, :]
        for row in np.ndindex(shape):
            if running[row]:
                h = float(halting[row][n - 1])
                halts = total[row] + h >= bound or n == halting.shape[-1]
                left[row] = 1 - total[row]
                out[row] = out[row] + (left[row] if halts else h) * state[row]
                steps[row], total[row], running[row] = n, total[row] + h, not halts
    return [out, steps, left]


@pytest.mark.parametrize(("file", "variant"), OURS)
def test_implementations_equal_scalar_loops(file: str, variant: str) -> None:
    if file.startswith("torch"):
        pytest.importorskip("torch")
    functions = importlib.import_module(f"veriformer.impls.{file}").VARIANTS[variant]
    one = {
        each.description.name.partition(":")[2]: in_process(each)
        for each in load(f"veriformer.impls.{file}", Options())
    }
    for operation in set(functions) & set(BOTH):
        subject = subject_of(one[variant], operation)
        for case in halting_cases(examples=60).examples(domain(operation, "float64")):
            clear = ~undecided(case[HALTING[operation]], case["epsilon"], Precision("float64"))
            for got, wanted in zip(subject(case), by_hand(case), strict=True):
                np.testing.assert_allclose(got[clear], wanted[clear], rtol=1e-13, atol=1e-12)


def subject_of(one: Any, operation: str) -> Any:
    from veriformer.subject import Subject

    return Subject(one, operation, "float64")


# laws


@pytest.mark.parametrize("operation", BOTH)
def test_the_reference_keeps_every_law(operation: str) -> None:
    one, broken = faulty("act" if operation == ACT else "act_loop")["correct"], []
    for law in all_laws():
        if law.operation == operation and law.kind == "metamorphic":
            arguments = law.pinned(one.domain(operation, "float32"))
            if not all(reference_keeps(law, one, "float32", each) for each in arguments):
                broken.append(law.id)
    assert not broken


@pytest.mark.parametrize(
    ("file", "variant", "law", "most"),
    [
        ("act", "no_remainder_at_the_limit", f"{ACT}/weights-sum-to-one", 4),
        ("act", "strict_undeclared", f"{ACT}/a-sum-on-the-threshold-halts", 6),
        ("act", "stops_with_the_first_position", f"{ACT}/positions-are-independent", 12),
        ("act_loop", "interpolates", f"{LOOP}/weights-sum-to-one", 7),
        ("act_loop", "usual_epsilon_always", f"{LOOP}/halts-where-the-sum-first-reaches-the-threshold", 8),
    ],
)
def test_failures_end_in_small_cases_of_probabilities(file: str, variant: str, law: str, most: int) -> None:
    (found,) = [one for one in all_laws() if one.id == law]
    failure = Item(found, faulty(file)[variant], "float32", "ci").run().failure
    assert failure is not None and failure.case.numbers <= most, failure and failure.case.describe()
    halting = failure.case[HALTING[found.operation]]
    assert ((halting >= 0) & (halting <= 1)).all()


def test_gradients_of_undecided_positions_are_open() -> None:
    pytest.importorskip("torch")
    halting = np.asarray([[0.495, 0.495, 0.5], [0.3, 0.3, 0.3]])
    case = Case(ACT, {"halting": halting, "states": np.arange(12.0).reshape(2, 3, 2)}, {}, "float32")
    bounds = gradient_bounds(
        case, ("halting", "states"), (np.ones((2, 2)), None, None), Capabilities(), Precision("float32")
    )
    for bound in bounds.values():
        assert np.isinf(bound.allowed[0]).all() and np.isfinite(bound.allowed[1]).all()
