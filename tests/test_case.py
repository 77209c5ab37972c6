"""The case record: rounding, read-only arrays, JSON and back, literals and their errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from veriformer.case import LAYOUTS, NUMPY_DTYPES, PRINTED, Case, literal_case, round_to, show_array

VALUES = np.array([1 / 3, 1e-6, -65519.0, 65520.0, np.inf, -np.inf, np.nan, -0.0])


def attention_case(**more: object) -> Case:
    arrays = {"q": np.arange(4.0).reshape(1, 2, 2, 1) / 3, "k": np.ones((1, 1, 3, 1)), "v": np.zeros((1, 1, 3, 2))}
    return Case("attention", arrays | more.pop("arrays", {}), more.pop("keywords", {}), **more)  # type: ignore


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_values_are_rounded_to_the_dtype_once(dtype: str) -> None:
    with np.errstate(over="ignore"):
        wanted = VALUES.astype(NUMPY_DTYPES[dtype]).astype(float)
    got = Case("softmax", {"x": VALUES}, dtype=dtype)["x"]
    assert got.dtype == np.float64 and got.tobytes() == wanted.tobytes()
    assert round_to(got, dtype).tobytes() == got.tobytes()


def test_booleans_are_not_rounded() -> None:
    assert round_to([True, False], "float16").dtype == bool


def test_arrays_are_read_only_and_the_users_own_stay_writeable() -> None:
    mine = np.zeros(3)
    case = Case("softmax", {"x": mine}, dtype="float64")
    with pytest.raises(ValueError, match="read-only"):
        case["x"][0] = 1
    mine[0] = 5
    assert case["x"][0] == 0


def test_defaults_and_absent_options_are_left_out() -> None:
    case = attention_case(arrays={"mask": None}, keywords={"causal": False, "scale": None, "window": (1, None)})
    assert case.keywords == {"window": (1, None)} and "mask" not in case.arrays
    assert case["causal"] is False and case["mask"] is None


def test_edits_make_other_cases() -> None:
    case = attention_case(arrays={"mask": np.ones((1, 1, 1, 3), bool)})
    changed = case.with_arrays(mask=None, k=case["k"] / 3).with_keywords(causal=True).with_layout("strided")
    assert (changed["mask"], changed["causal"], changed.layout) == (None, True, "strided")
    assert changed["k"][0, 0, 0, 0] == np.float32(1 / 3)
    assert case["mask"] is not None and not case["causal"] and case.layout == "contiguous"


def test_sizes_are_named_also_for_free_shapes() -> None:
    assert attention_case().sizes() == {"B": 1, "H": 2, "Tq": 2, "D": 1, "G": 1, "Tk": 3, "Dv": 2}
    norm = Case("layer_norm", {"x": np.ones((2, 5, 3)), "weight": np.ones(3), "bias": np.ones(3)})
    assert norm.sizes() == {"0": 2, "1": 5, "d": 3}
    assert Case("softmax", {"x": np.ones((2, 3))}).sizes() == {"0": 2, "1": 3}


def test_an_operation_that_shares_the_arrays_takes_the_case() -> None:
    case = Case("softmax", {"x": np.ones(2)}, {"axis": 0, "temperature": 2.0}).as_operation("log_softmax")
    assert case.operation == "log_softmax" and case.keywords == {"axis": 0}


def test_randomness_depends_on_shapes_and_salt_alone() -> None:
    one, other = attention_case(), attention_case(arrays={"v": np.full((1, 1, 3, 2), 7.0)})
    assert one.random(3).random() == other.random(3).random() != one.random(4).random()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_json_and_back_is_the_same_case(layout: str) -> None:
    bias = np.array([0.1, -np.inf, np.nan]).reshape(1, 1, 1, 3)
    mask = np.array([[True, False, True]]).reshape(1, 1, 1, 3)
    keywords = {"window": (None, 2), "scale": 1 / 3, "causal": True}
    case = attention_case(arrays={"bias": bias, "mask": mask}, keywords=keywords, layout=layout, origin="pinned")
    back = Case.from_json(json.loads(json.dumps(case.to_json(), allow_nan=False)))
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in back.arrays.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in case.arrays.items()
    }
    assert (back.keywords, back.dtype, back.layout, back.origin) == (keywords, "float32", layout, "pinned")


def test_json_and_back_keeps_axes_of_length_zero() -> None:
    arrays = {"k": np.ones((1, 1, 0, 1)), "v": np.ones((1, 1, 0, 2)), "mask": np.ones((1, 1, 2, 0), bool)}
    case = attention_case(arrays=arrays)
    back = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert {n: (a.shape, a.dtype) for n, a in back.arrays.items()} == {
        n: (a.shape, a.dtype) for n, a in case.arrays.items()
    }


def test_a_large_case_leaves_its_arrays_to_a_file() -> None:
    small, large = (Case("softmax", {"x": np.arange(float(n))}) for n in (PRINTED, PRINTED + 1))
    assert "arrays" in small.to_json() and "arrays" not in large.to_json()
    assert large.to_json()["shapes"] == {"x": [65]}
    assert (Case.from_json(large.to_json(), {"x": large["x"]})["x"] == large["x"]).all()
    assert "65 numbers" in large.describe() and "63" in small.describe()


def test_a_line_of_json_is_one_line() -> None:
    assert "\n" not in json.dumps(attention_case().to_json())


@pytest.mark.parametrize(
    ("literal", "words"),
    [
        ({"x": [0.0], "axes": 1}, "'axes' is not one of its names; wanted x, axis, temperature"),
        ({"axis": 0}, "'x' is missing; wanted x, axis"),
    ],
)
def test_a_wrong_literal_says_what_is_wanted(literal: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=f"case of softmax: {words}"):
        literal_case("softmax", literal, "float32")


def test_a_literal_with_the_wrong_number_of_axes_is_refused() -> None:
    flat = {"q": [[0.0]], "k": [[[[0.0]]]], "v": [[[[0.0]]]]}
    with pytest.raises(ValueError, match="q has 2 axes, wanted B H Tq D"):
        literal_case("attention", flat, "float32")


def test_a_literal_takes_words_for_what_is_not_finite_and_lists_for_pairs() -> None:
    one = [[[[0.0]]]]
    literal = {"q": one, "k": one, "v": [[[["-inf"]]]], "mask": [[[[False]]]], "window": [0, None], "dtype": "float16"}
    case = literal_case("attention", literal, "float32")
    assert case["v"].item() == -np.inf and case["mask"].dtype == bool
    assert case["window"] == (0, None) and case.dtype == "float16"


def test_values_are_shown_as_short_as_they_can_be_read_back() -> None:
    assert show_array(np.array([[[1.0, -0.5], [1e-5, np.nan]]])) == "[[1,-0.5],[1e-05,nan]]"
    assert show_array(np.array([True, False])) == "[T,F]"
    assert float(show_array(np.float32(1 / 3)).strip()) == pytest.approx(float(np.float32(1 / 3)), rel=1e-8)
