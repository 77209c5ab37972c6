"""Reading a signature: the alias table, masks by dtype, what is missing or unknown, results to pick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from veriformer.boundary import Request
from veriformer.calling import ALIASES, CallPlan, UsageError, arguments, pick_results, plan_call
from veriformer.declarations import Capabilities
from veriformer.frameworks import Numpy
from veriformer.moves import Move
from veriformer.operations import OPERATIONS
from veriformer.targets import Options, load_functions

ONE = np.ones((1, 2, 3, 1))


def function_with(parameters: str) -> Callable[..., Any]:
    return eval(f"lambda {parameters}: None")  # type: ignore[no-any-return]


def given(plan: CallPlan, capabilities: Capabilities | None = None, **words: Any) -> dict[str, Any]:
    """The keyword arguments in the function's own terms for q, k, v of ones and these words."""
    arrays = {"q": ONE, "k": ONE, "v": ONE} | {n: a for n, a in words.items() if isinstance(a, np.ndarray)}
    keywords = {n: a for n, a in words.items() if not isinstance(a, np.ndarray)}
    return arguments(plan, capabilities or Capabilities(), Numpy(), Request(arrays, keywords, "float32"))[1]


ALIASED = [(ours, theirs) for ours, names in ALIASES.items() for theirs in names]


@pytest.mark.parametrize(("ours", "theirs"), ALIASED)
def test_every_name_of_the_table_is_understood(ours: str, theirs: str) -> None:
    operation = next(o for o, table in OPERATIONS.items() if ours in {**table.keywords, **table.options})
    table = OPERATIONS[operation]
    others = [f"{word}=None" for word in (*table.options, *table.keywords) if word in table.required - {ours}]
    plan = plan_call(function_with(f"{', '.join((*table.positional, '*', f'{theirs}=None', *others))}"), operation)
    assert plan.keywords[ours] == theirs and set(plan.keywords) == {ours} | table.required
    assert (ours if ours == theirs else f"{ours} -> {theirs}") in plan.mapping()


def test_eps_of_norms_inside_a_composite_is_no_halting_threshold() -> None:
    plan = plan_call(function_with("x, params, *, heads, max_steps, eps=1e-5"), "universal_transformer")
    assert "epsilon" not in plan.keywords and plan.left == ("eps",)
    plan = plan_call(function_with("halting, states, *, eps=0.01"), "adaptive_computation_time")
    assert plan.keywords["epsilon"] == "eps"


@pytest.mark.parametrize("names", ["eps=1e-5, epsilon=0.01", "epsilon=0.01, eps=1e-5"])
def test_our_own_name_comes_before_another_one_for_the_same(names: str) -> None:
    plan = plan_call(function_with(f"halting, states, *, {names}"), "adaptive_computation_time")
    assert plan.keywords["epsilon"] == "epsilon"


def test_what_every_call_gives_must_have_a_parameter() -> None:
    with pytest.raises(UsageError, match=r"dropout: no parameter for 'uniform'.*wanted \(x, \*, uniform, rate\)"):
        plan_call(function_with("x, *, p=0.5"), "dropout")


def test_scalars_and_weights_are_passed_by_position() -> None:
    plan = plan_call(function_with("length, width, offset=0"), "sinusoidal_positions")
    request = Request({}, {"length": 3, "width": 4, "offset": 2}, "float32")
    assert arguments(plan, Capabilities(), Numpy(), request)[:2] == ([3, 4], {"offset": 2})
    plan = plan_call(function_with("x, memory, params, *, heads"), "multi_head_attention")
    named = {"x": ONE, "memory": ONE, "params.wq": ONE, "params.wo": ONE}
    positional, keywords, _ = arguments(plan, Capabilities(), Numpy(), Request(named, {"heads": 1}, "float32"))
    assert list(positional[2]) == ["wq", "wo"] and keywords == {"heads": 1}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_name_of_the_table_means_two_things_in_one_operation(operation: str) -> None:
    known = (*OPERATIONS[operation].keywords, *OPERATIONS[operation].options)
    names = [name for ours in known for name in ALIASES.get(ours, (ours,))]
    assert len(names) == len(set(names))


def test_our_arrays_are_passed_by_position_whatever_they_are_called() -> None:
    plan = plan_call(function_with("query, key, value, is_causal=False"), "attention")
    positional, named, _ = arguments(
        plan, Capabilities(), Numpy(), Request({"q": ONE, "k": ONE * 2, "v": ONE * 3}, {"causal": True}, "float32")
    )
    assert [a.flat[0] for a in positional] == [1, 2, 3] and named == {"is_causal": True}


def test_attn_mask_is_mask_or_bias_by_dtype_and_never_both() -> None:
    loaded = load_functions({"attention": function_with("q, k, v, attn_mask=None")}, Options())
    plan = loaded.description.plans["attention"]
    assert plan.keywords == {"mask": "attn_mask", "bias": "attn_mask"} and plan.exclusive()
    assert not loaded.description.capabilities["attention"].mask_with_bias
    mask, bias = np.ones((1, 1, 1, 3), bool), np.zeros((1, 1, 1, 3))
    assert given(plan, mask=mask)["attn_mask"].dtype == bool
    assert given(plan, bias=bias)["attn_mask"].dtype == np.float32


def test_a_mask_is_translated_into_the_declared_meaning() -> None:
    plan = plan_call(function_with("q, k, v, mask=None"), "attention")
    mask = np.array([True, False, True]).reshape(1, 1, 1, 3)
    drop, added = Capabilities(mask_means="drop"), Capabilities(mask_means="additive")
    assert given(plan, drop, mask=mask)["mask"].ravel().tolist() == [False, True, False]
    assert given(plan, added, mask=mask)["mask"].ravel().tolist() == [0, -math.inf, 0]


def test_an_unlimited_window_is_minus_one_for_window_size_alone() -> None:
    ours, theirs = (plan_call(function_with(f"q, k, v, {n}=None"), "attention") for n in ("window", "window_size"))
    assert given(ours, window=(None, 1)) == {"window": (None, 1)}
    assert given(theirs, window=(None, 1)) == {"window_size": (-1, 1)}


def test_enable_gqa_is_set_only_for_grouped_heads() -> None:
    plan = plan_call(function_with("q, k, v, enable_gqa=False"), "attention")
    assert plan.grouped == "enable_gqa" and not plan.accepts
    assert given(plan) == {}
    assert given(plan, k=ONE[:, :1], v=ONE[:, :1]) == {"enable_gqa": True}


def test_bthd_arrays_have_their_heads_behind_the_rows() -> None:
    plan = plan_call(function_with("q, k, v"), "attention")
    request = Request({"q": ONE, "k": ONE, "v": ONE}, {}, "float32")
    positional, _, _ = arguments(plan, Capabilities(layout="BTHD"), Numpy(), request)
    assert {a.shape for a in positional} == {(1, 3, 2, 1)} and positional[0].flags.c_contiguous


def test_parameters_of_other_meaning_stay_at_their_defaults() -> None:
    plan = plan_call(function_with("q, k, v, dropout_p=0.0, *, causal=False, **rest"), "attention")
    assert plan.left == ("dropout_p",) and plan.accepts == {"causal"}
    assert "left at their defaults: dropout_p" in plan.mapping()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("q, k, v, sm_scal", "parameter 'sm_scal' has no default and no known meaning; nearest is 'sm_scale'"),
        ("q, k, v, *, causl", "parameter 'causl' has no default and no known meaning; nearest is 'causal'"),
        ("q, k", r"takes 2 positional arguments \(q, k\), wanted 3: q, k, v"),
        ("q, k, *, v", r"'v' is not parameter 3 of \(q, k, v\), and arrays are passed by position; wrap it as def"),
    ],
)
def test_a_signature_that_does_not_fit_is_one_line(parameters: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        plan_call(function_with(parameters), "attention")
    assert "\n" not in str(caught.value)


def test_star_arguments_take_the_arrays() -> None:
    assert plan_call(function_with("*arrays, causal=False"), "attention").accepts == {"causal"}


def test_a_parameter_that_must_be_given_always_is() -> None:
    plan = plan_call(function_with("q, k, v, mask, is_causal, scale=None"), "attention")
    assert given(plan) == {"mask": None, "is_causal": False}
    assert given(plan, causal=True, scale=2.0) == {"mask": None, "is_causal": True, "scale": 2.0}


def test_a_default_of_none_does_not_decide_what_ours_decides() -> None:
    plan = plan_call(function_with("x, dim=None, temperature=None"), "softmax")
    request = Request({"x": np.ones(2)}, {"temperature": 2.0}, "float32")
    assert arguments(plan, Capabilities(), Numpy(), request)[1] == {"dim": -1, "temperature": 2.0}
    assert given(plan_call(function_with("q, k, v, scale=None, causal=False"), "attention")) == {}


def test_a_builtin_without_a_signature_needs_accepts() -> None:
    with pytest.raises(UsageError, match="'type' has no signature to read; say what it accepts, e.g. --accepts axis"):
        plan_call(type, "softmax")
    plan = plan_call(type, "softmax", accepts=["dim"])
    assert plan.keywords == {"axis": "dim"} and plan.always == ("axis",)
    assert plan_call(type, "softmax", accepts=["none"]).accepts == frozenset()


def test_an_unknown_word_in_accepts_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="--accepts 'axs' has no known meaning; nearest is 'axis'"):
        plan_call(type, "softmax", accepts=["axs"])


def test_returns_says_where_the_results_are() -> None:
    both, one = OPERATIONS["attention_with_lse"], OPERATIONS["attention"]
    assert pick_results(both, ["lse", "out"]) == (1, 0)
    assert pick_results(one, ["weights", "out"]) == (1,)
    assert pick_results(one, []) is None
    with pytest.raises(UsageError, match="--returns out does not name 'lse'"):
        pick_results(both, ["out"])


def test_a_composite_may_be_a_factory_that_gets_the_weights_first() -> None:
    plan = plan_call(function_with("params, *, heads, mask=None"), "multi_head_attention")
    assert plan.factory and plan.accepts == {"heads", "mask"}
    assert not plan_call(function_with("x, memory, params, heads"), "multi_head_attention").factory


def test_what_a_factory_makes_is_called_with_the_arrays() -> None:
    def make(params: dict[str, np.ndarray], *, heads: int) -> Any:
        return lambda x, memory: (x + memory[:, :1]) @ params["wq"] * heads

    loaded = load_functions({"multi_head_attention": make}, Options(framework="numpy"))
    arrays = {"x": np.ones((1, 2, 1)), "memory": np.ones((1, 3, 1)), "params.wq": np.full((1, 1), 3.0)}
    outcome = loaded.boundaries["multi_head_attention"].cross(Request(arrays, {"heads": 2}, "float32"))
    assert outcome.kind == "ok" and (outcome.results[0] == 12).all()


def test_every_mask_is_given_in_the_terms_that_are_declared() -> None:
    plan = CallPlan("decoder_layer", {word: word for word in ("heads", "mask", "memory_mask")})
    mask = np.array([[[[True, False]]]])
    arrays = {"x": ONE[0], "memory": ONE[0], "mask": mask, "memory_mask": mask, "params.norm1.weight": ONE[0, 0, 0]}
    for means, wanted in (("drop", [False, True]), ("additive", [0.0, -math.inf])):
        request = Request(arrays, {"heads": 1}, "float32")
        named = arguments(plan, Capabilities(mask_means=means), Numpy(), request)[1]
        assert named["mask"].ravel().tolist() == named["memory_mask"].ravel().tolist() == wanted


def test_a_model_gets_its_masks_in_these_terms_too() -> None:
    seen: list[Any] = []

    class Model:
        vocabulary = 2

        def full(self, tokens: Any) -> Any:
            return self.step(tokens, None)[0]

        def step(self, tokens: Any, cache: Any, *, mask: Any = None) -> Any:
            seen.append(mask)
            return np.zeros((*tokens.shape, 2), np.float32), 0

    options = Options(framework="numpy", declare={"mask_means": "additive"})
    boundary = load_functions({"decoder_lm": Model()}, options, "toy").boundaries["decoder_lm"]
    move = Move("step", {"tokens": np.array([[0, 1]]), "mask": np.array([[False, True]])}, into=1)
    assert boundary.cross(Request({}, {}, "float32", program=(move,))).kind == "ok"
    assert seen[-1].tolist() == [[-math.inf, 0.0]]


def test_a_default_of_another_value_is_not_left_to_decide() -> None:
    plan = plan_call(function_with("logits, targets, *, ignore_index=0, label_smoothing=0.0"), "cross_entropy")
    assert plan.always == ("ignore_index",)
    arrays = {"logits": ONE[0, 0], "targets": np.array([0, 0, 0])}
    assert arguments(plan, Capabilities(), Numpy(), Request(arrays, {}, "float32"))[1] == {"ignore_index": -100}
    plan = plan_call(function_with("q, k, v, *, causal=True, scale=1.0"), "attention")
    assert plan.always == ("causal",)  # for the scale ours says nothing
