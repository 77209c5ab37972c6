"""The reducer: known mistakes end in the case a person would have picked, in at most 200 tries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference_models import random_transformer
from toys import attention_with, implementation, judged

from veriformer import oracle, reference
from veriformer.case import Case, flattened
from veriformer.catalogue import all_laws
from veriformer.declarations import Capabilities
from veriformer.dialect import reference_call
from veriformer.expect import Broken
from veriformer.impls import numpy_plain
from veriformer.law import find_laws
from veriformer.reduce import STAGES, TRIES, as_clear, candidates, simplicity, smallest, with_kept
from veriformer.surprises import surprises

ORACLE = "attention/equals-the-reference"
MINIMAL: dict[str, dict[str, int]] = {
    "tiled heads": {"B": 1, "H": 4, "G": 2, "Tq": 1, "Tk": 1, "D": 1, "Dv": 1},
    "top left": {"B": 1, "H": 1, "G": 1, "Tq": 1, "Tk": 2, "D": 1, "Dv": 1},
    "no maximum": {"B": 1, "H": 1, "G": 1, "Tq": 1, "Tk": 1, "D": 1, "Dv": 1},
    "mask inverted": {"B": 1, "H": 1, "G": 1, "Tq": 1, "Tk": 1, "D": 1, "Dv": 1},
    "head 2, row 4": {"B": 1, "Tq": 5, "Tk": 1, "D": 1, "Dv": 1},
}


@pytest.mark.parametrize("fault", MINIMAL)
def test_a_known_mistake_ends_in_its_smallest_case(fault: str) -> None:
    failure = judged(ORACLE, effort="ci", attention=attention_with(fault)).failure
    assert failure is not None and failure.tries <= TRIES == 200 and failure.case.numbers <= 64
    assert MINIMAL[fault].items() <= failure.case.sizes().items()


def test_nothing_that_the_failure_does_not_need_is_left() -> None:
    case = judged(ORACLE, attention=attention_with("tiled heads")).failure.case  # type: ignore[union-attr]
    assert not case.keywords and set(case.arrays) == {"q", "k", "v"}
    assert not case["q"].any() and not case["k"].any() and sorted(case["v"].ravel()) == [0, 1]
    case = judged(ORACLE, attention=attention_with("mask inverted")).failure.case  # type: ignore[union-attr]
    assert set(case.arrays) == {"q", "k", "v", "mask"} and case["v"].item() == 1


def test_the_failure_shown_belongs_to_the_case_shown() -> None:
    failure = judged(ORACLE, attention=attention_with("top left")).failure
    assert failure is not None and failure.calls[-1].case.describe() == failure.case.describe()
    got = attention_with("top left")(*(failure.case[n].astype(np.float32) for n in "qkv"), **failure.case.keywords)
    assert got[tuple(failure.facts["index"])] == np.float32(failure.facts["got"])


@pytest.mark.parametrize("operation", ["softmax", "logsumexp", "layer_norm", "attention", "attention_with_lse"])
def test_every_candidate_is_a_consistent_case(operation: str) -> None:
    toy = implementation(**{operation: getattr(numpy_plain, operation)})
    law, domain = find_laws(all_laws(), [f"{operation}/equals-the-reference"])[0], toy.domain(operation, "float32")
    precision = oracle.Precision.of(domain.capabilities, "float32")
    for (case,) in law.pinned(domain)[3::9]:
        shapes = [oracle.shapes(c) for (c,) in list(candidates((case,)))[:60]]
        bounds = [oracle.bounds(c, domain.capabilities, precision) for (c,) in list(candidates((case,)))[:60]]
        assert [tuple(b.value.shape for b in found) for found in bounds] == shapes


def reduce_softmax(x: list[Any], holds: Any) -> tuple[Case, int]:
    broken = Broken("value", "wrong", got=0.0, wanted=1.0)
    found, _, tries = smallest(
        (Case("softmax", {"x": np.array(x)}),), broken, lambda a: broken if holds(a[0]) else None
    )
    return found[0], tries


def test_sizes_and_values_reach_the_threshold() -> None:
    case, tries = reduce_softmax([[0.3, 7.7, 12.5], [3.0, 1.0, 2.0]], lambda case: (case["x"] >= 10).any())
    assert case["x"].tolist() == [10] and tries <= TRIES
    case, _ = reduce_softmax([0.5] * 40, lambda case: case["x"].size >= 7)
    assert case["x"].tolist() == [0] * 7


def test_a_common_offset_that_does_not_matter_goes() -> None:
    case, _ = reduce_softmax([1e4, 1e4 + 2, 1e4 + 1], lambda case: np.ptp(case["x"]) == 2)
    assert case["x"].tolist() == [0, 2]


def test_at_most_200_tries_are_made() -> None:
    _, tries = reduce_softmax(
        list(np.linspace(0.1, 0.9, 64)), lambda case: case["x"].size == 64 and (case["x"] % 1).all()
    )
    assert tries <= TRIES


def test_a_failure_of_another_kind_is_not_followed() -> None:
    before = Broken("value", "", got=1.0, wanted=2.0)
    assert not as_clear(Broken("not finite", "", got=np.nan, wanted=2.0), before)
    assert as_clear(Broken("value", "", got=3.0, wanted=2.0), before)
    assert not as_clear(Broken("value", "", got=2.000001, wanted=2.0), before)


def square(length: int) -> Case:
    arrays = {name: np.ones((1, 1, length, 1)) for name in "qkv"}
    return Case("attention", arrays, {"causal": True})


def test_empty_rows_are_not_brought_in() -> None:
    def fails(case: Case) -> bool:
        return bool(case["causal"]) and case.size("Tq") >= 2

    broken = Broken("value", "wrong", got=0.0, wanted=1.0)
    (found,), _, _ = smallest((square(4),), broken, lambda a: broken if fails(a[0]) else None)
    assert (found.size("Tq"), found.size("Tk")) == (2, 2)
    empty = found.with_arrays(k=np.ones((1, 1, 1, 1)), v=np.ones((1, 1, 1, 1)))
    assert surprises((found,)) == 0 and surprises((empty,)) == 1


def test_numbers_are_simpler_in_the_order_people_find_them_so() -> None:
    order = [0.0, 1.0, -1.0, 2.0, 3.0, 100.0, 17.0, 0.3, np.nan]
    assert sorted(order, key=simplicity) == order[:-1] + [order[-1]]


def some(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape) % 5 - 2.0


NEW_CASES = [
    Case("rms_norm", {"x": some(2, 3, 4), "weight": some(4)}),
    Case("feed_forward", {"x": some(2, 3, 4), "w1": some(4, 5), "b1": some(5), "w2": some(5, 4), "b2": some(4)}),
    Case("rotary_embedding", {"x": some(2, 3, 4), "positions": np.array([0, 3, 1])}),
    Case("embedding", {"ids": np.array([[1, 2, 0]]), "table": some(3, 2)}),
    Case("dropout", {"x": some(2, 3), "uniform": (some(2, 3) + 2) / 5}, {"rate": 0.5}),
    Case("sinusoidal_positions", {}, {"length": 5, "width": 4, "offset": 2}),
    Case("alibi_bias", {}, {"heads": 3, "query_length": 2, "key_length": 4}),
    Case(
        "varlen_attention",
        {
            "q": some(5, 4, 3),
            "k": some(7, 2, 3),
            "v": some(7, 2, 2),
            "q_offsets": np.array([0, 2, 5]),
            "k_offsets": np.array([0, 3, 7]),
        },
    ),
    Case(
        "cached_attention",
        {
            "q": some(2, 4, 2, 3),
            "k_new": some(2, 2, 2, 3),
            "v_new": some(2, 2, 2, 2),
            "k_cache": some(2, 2, 6, 3),
            "v_cache": some(2, 2, 6, 2),
            "lengths": np.array([1, 3]),
        },
    ),
    Case(
        "multi_head_attention",
        {
            "x": some(2, 3, 6),
            "memory": some(2, 4, 6),
            "mask": np.ones((2, 1, 3, 4), bool),
            "params.wq": some(6, 12),
            "params.wk": some(6, 6),
            "params.wv": some(6, 4),
            "params.wo": some(8, 6),
            "params.bq": some(12),
        },
        {"heads": 4},
    ),
    Case("next_token_probabilities", {"logits": some(2, 3, 5)}, {"top_k": 3, "top_p": 0.7, "temperature": 0.5}),
]


@pytest.mark.parametrize("case", NEW_CASES, ids=lambda case: case.operation)
def test_candidates_of_the_other_operations_suit_the_reference(case: Case) -> None:
    found = [one for (one,) in list(candidates((case,)))[:80]]
    kept = 0
    for one in found:
        try:
            result = reference_call(one.operation, Capabilities(), one.arrays, one.keywords)
        except (ValueError, KeyError, IndexError):
            continue
        results = result if isinstance(result, tuple) else (result,)
        assert tuple(np.shape(r) for r in results) == oracle.shapes(one), one.describe()
        kept += 1
    assert kept >= 3 and 2 * kept >= len(found), f"{kept} of {len(found)}"


@pytest.mark.parametrize(
    ("case", "label", "wanted"),
    [
        (NEW_CASES[9], "R", {"H": 2, "G": 2, "heads": 2}),
        (NEW_CASES[9], "G", {"H": 2, "G": 1, "heads": 2}),
        (NEW_CASES[9], "d", {"d": 1, "H": 4}),
        (NEW_CASES[9], "Dv", {"Dv": 1}),
        (NEW_CASES[7], "B", {"B": 1, "Nq": 2, "Nk": 3}),
        (NEW_CASES[7], "Nk", {"B": 2, "Nq": 5, "Nk": 1}),
        (NEW_CASES[8], "B", {"B": 1, "N": 1}),
    ],
)
def test_one_index_of_an_axis_is_kept_everywhere(case: Case, label: str, wanted: dict[str, int]) -> None:
    small = with_kept(case, label, np.arange(1))
    sizes = small.sizes() | dict(small.keywords)
    assert wanted.items() <= sizes.items()
    result = reference_call(small.operation, Capabilities(), small.arrays, small.keywords)
    assert np.shape(result[0] if isinstance(result, tuple) else result) == oracle.shapes(small)[0]


def two_layers() -> Case:
    """An encoder-decoder with a layer more than it needs in each stack, biases, final norms and a head."""
    params = random_transformer(layers=(2, 2), norm="pre") | {"head": {"w": some(8, 7), "b": some(7)}}
    arrays = {"source": np.array([[1, 6, 2]]), "target": np.array([[5, 0]]), **flattened(params, "params")}
    return Case("transformer", arrays, {"heads": 4})


def gone(before: Case, after: Case) -> set[str]:
    return set(before.arrays) - set(after.arrays)


def test_tokens_stay_in_range_when_their_table_gets_smaller() -> None:
    small = with_kept(with_kept(two_layers(), "Vs", np.array([2, 6])), "V", np.array([4, 5, 6]))
    assert small["source"].tolist() == [[0, 1, 0]] and small["target"].tolist() == [[1, 0]]
    assert small["params.head.w"].shape == (8, 3) and oracle.shapes(small) == ((1, 2, 3),)
    ids = Case("embedding", {"ids": np.array([4, 1]), "table": some(5, 2)}, {"padding_index": 4})
    small = with_kept(ids, "V", np.array([3, 4]))
    assert small["ids"].tolist() == [1, 0] and small["padding_index"] == 1
    loss = Case("cross_entropy", {"logits": some(3, 5), "targets": np.array([4, -7, 1])}, {"ignore_index": -7})
    small = with_kept(loss, "V", np.array([3, 4]))
    assert small["targets"].tolist() == [1, -7, 0] and small["ignore_index"] == -7


def test_parts_of_a_composite_go_as_a_whole() -> None:
    case = two_layers()
    removed = [gone(case, smaller) for (smaller,) in candidates((case,), STAGES[:1])]
    layer = {name for name in case.arrays if name.startswith("params.decoder.layers.1.")}
    assert layer in removed and {"params.head.w", "params.head.b"} in removed
    assert {"params.encoder.norm.weight", "params.encoder.norm.bias"} in removed
    assert {name for name in case.arrays if case[name].ndim == 1 and ".weight" not in name} in removed
    single = case.with_arrays(**dict.fromkeys(layer))
    first = {name for name in single.arrays if name.startswith("params.decoder.layers.0.")}
    assert first not in [
        gone(single, smaller) for (smaller,) in candidates((single,), STAGES[:1])
    ]  # it is the only one


def test_a_composite_of_many_weights_ends_small() -> None:
    broken = Broken("value", "wrong", got=0.0, wanted=1.0)

    def fails(case: Case) -> bool:
        if case["heads"] == 0 or case["params.head.w"] is None:
            return False
        return bool((case["params.head.w"] == 1).any() and case["target"].shape[1] == 2)

    (found,), _, tries = smallest((two_layers(),), broken, lambda a: broken if fails(a[0]) else None)
    assert tries <= TRIES and found.numbers <= 32 and found["params.head.w"].tolist() == [[1]]


def test_a_source_of_nothing_but_padding_is_not_brought_in() -> None:
    case = two_layers().with_arrays(mask=np.array([[False, True, True]]))
    assert surprises((case,)) == 0 and surprises((with_kept(case, "S", np.array([0])),)) == 1


def test_an_optional_memory_goes_with_all_that_attends_to_it() -> None:
    subject = implementation(universal_transformer=reference.universal_transformer)
    domain = subject.domain("universal_transformer", "float64")
    (law,) = find_laws(all_laws(), ["universal_transformer/hidden-memory-has-no-influence"])
    case = law.pinned(domain)[-1][0]
    assert case["memory_mask"] is not None
    without = next(one for (one,) in candidates((case,), STAGES[:1]) if one["memory"] is None)
    assert gone(case, without) >= {"memory", "memory_mask", "params.layer.norm3.weight"}
    assert not [name for name in without.arrays if "cross_attention" in name]
    assert (without["params.layer.norm2.weight"] == case["params.layer.norm3.weight"]).all()
    output = reference_call(without.operation, Capabilities(), without.arrays, without.keywords)[0]
    assert output.shape == case["x"].shape


def test_numbers_of_steps_stay_at_least_1() -> None:
    case = Case("act_loop", {"state": some(2), "step.drive": some(1, 2), "step.halting": np.ones(1)}, {"max_steps": 1})
    assert all(one["max_steps"] >= 1 for (one,) in candidates((case,)))


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("adaptive_computation_time", "halting"),
        ("act_loop", "step.halting"),
        ("adamw_step", "v"),
        ("dropout", "uniform"),
    ],
)
def test_numbers_that_an_operation_does_not_speak_of_are_not_brought_in(operation: str, name: str) -> None:
    (law,) = find_laws(all_laws(), [f"{operation}/equals-the-reference"])
    domain = implementation(**{operation: getattr(reference, operation)}).domain(operation, "float64")
    case = law.pinned(domain)[-1][0]
    other = case.with_arrays(**{name: np.where(np.arange(case[name].size).reshape(case[name].shape) == 0, -1.0, 0.5)})
    assert surprises((other,)) == 1 + surprises((case,))


def test_smoothing_of_one_class_alone_is_not_brought_in() -> None:
    arrays = {"logits": np.zeros((2, 2)), "targets": np.array([0, 0])}
    case = Case("cross_entropy", arrays, {"label_smoothing": 0.1})
    assert surprises((case,)) == 0 and surprises((with_kept(case, "V", np.array([0])),)) == 1
    assert surprises((with_kept(case, "V", np.array([0])).with_keywords(label_smoothing=0.0),)) == 0
