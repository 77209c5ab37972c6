"""The recipes of the Universal Transformer: what every case keeps, and what laws may ask for."""

from __future__ import annotations

import numpy as np
import pytest

from veriformer.case import Case
from veriformer.declarations import PRESETS, Capabilities
from veriformer.law import Domain
from veriformer.properties.universal_build import MARGINS, halted, real_tokens, seen
from veriformer.properties.universal_cases import plain_universal, universal_cases
from veriformer.properties.universal_changes import leaving_one_running

ID = "universal_transformer"
ALL = frozenset({"mask", "memory", "memory_mask", "causal", "norm", "epsilon", "heads", "max_steps", "preset"})


def domain(dtype: str = "float32", accepts: frozenset[str] = ALL, **able: object) -> Domain:
    return Domain(ID, dtype, accepts, Capabilities(**able))


def examples(where: Domain, **wishes: object) -> list[Case]:
    return list(universal_cases(**{"examples": 12, **wishes}).examples(where))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", MARGINS)
def test_every_sum_that_decides_keeps_a_distance_from_the_threshold(dtype: str) -> None:
    for case in examples(domain(dtype)):
        (_, steps, _), sums = halted(case)
        n = np.arange(1, sums.shape[-1] + 1)
        decides = (n <= steps[..., None]) & (n < sums.shape[-1])
        assert (np.abs(sums - (1 - case["epsilon"]))[decides] >= MARGINS[dtype]).all()
        assert (steps[~real_tokens(case)] == 0).all()


def test_positions_halt_at_several_steps_at_the_last_alone_or_all_alike() -> None:
    mixed = [set(halted(case)[0][1].ravel().tolist()) - {0} for case in examples(domain(), least={"T": 2, "L": 2})]
    assert sum(len(steps) > 1 for steps in mixed) >= len(mixed) // 3
    for case in examples(domain(), pace="none", presets=("default",)):
        assert set(halted(case)[0][1].ravel().tolist()) <= {0, case["max_steps"]}
    for case in examples(domain(), pace="even", presets=("default",)):
        assert len(set(halted(case)[0][1].ravel().tolist()) - {0}) == 1


def test_a_memory_makes_causal_and_hidden_rows_are_there_where_asked_for() -> None:
    cases = examples(domain(), hidden=True) + examples(domain(), hidden_memory=True)
    assert all(case["causal"] for case in cases if case["memory"] is not None)
    assert all((~case["mask"]).any() for case in cases[:12])
    assert all((~case["memory_mask"]).any() and case["memory_mask"].any(1).all() for case in cases[12:])
    assert all(seen(case)[real_tokens(case)].any(-1).all() for case in cases)


def test_presets_are_those_declared_and_asked_for() -> None:
    assert {case["preset"] for case in examples(domain())} == {"default"}
    assert len({case["preset"] for case in examples(domain(presets=PRESETS))}) >= 5
    assert examples(domain(presets=("fixed",)), presets=("default",)) == []
    wanted = domain(presets=PRESETS)
    assert wanted.provides("preset fixed") and not domain().provides("preset fixed")
    assert {case["preset"] for case in examples(wanted, presets=("fixed",))} == {"fixed"}


def test_what_is_lacking_is_not_drawn() -> None:
    few = domain(accepts=frozenset({"heads", "max_steps"}), biases=False, grouped_heads=False, rms_norms=False)
    for case in [*examples(few), *plain_universal(few)]:
        assert set(case.keywords) <= {"heads", "max_steps"} and case["mask"] is None and case["memory"] is None
        assert not [name for name in case.arrays if name.rpartition(".")[2] in ("b", "b1", "bq", "bo")]
        assert case.size("G") == case["heads"] and "params.layer.norm1.bias" in case.arrays


def test_one_token_halts_and_the_other_goes_on_in_most_cases() -> None:
    cases = examples(domain(), mask=False, memory=False, bare=False, least={"T": 2})
    found = [made for case in cases if (made := leaving_one_running(case)) is not None]
    assert len(found) > len(cases) // 2
    assert all(halted(case)[0][1].tolist() == [[1, 3]] for case in found)
