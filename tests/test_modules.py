"""Modules of torch as targets: weights by a map, gradients through it, and what is said where it does not fit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from toys import Everything  # noqa: E402

import veriformer  # noqa: E402
from veriformer import reference  # noqa: E402
from veriformer.calling import UsageError, plan_call  # noqa: E402
from veriformer.catalogue import all_laws  # noqa: E402
from veriformer.checking import in_process  # noqa: E402
from veriformer.running import Item  # noqa: E402
from veriformer.targets import Options, load_functions  # noqa: E402

SEPARATE = {
    "wq": "q_proj.weight.T", "wk": "k_proj.weight.T", "wv": "v_proj.weight.T", "wo": "o_proj.weight.T",
    "bq": "q_proj.bias", "bk": "k_proj.bias", "bv": "v_proj.bias", "bo": "o_proj.bias",
}  # fmt: skip
PACKED = {
    "wq": "in_proj_weight[0:d].T", "wk": "in_proj_weight[d:2*d].T", "wv": "in_proj_weight[2*d:].T",
    "wo": "out_proj.weight.T", "bq": "in_proj_bias[:d]", "bk": "in_proj_bias[d:d+d]", "bv": "in_proj_bias[2*d:3*d]",
    "bo": "out_proj.bias",
}  # fmt: skip


class Separate(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Four linear layers, grouped heads, a boolean mask of True = may attend, aligned at the bottom right."""

    def __init__(self, d_model: int, heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.width = heads, head_dim
        self.q_proj = torch.nn.Linear(d_model, heads * head_dim)
        self.k_proj = torch.nn.Linear(d_model, num_kv_heads * head_dim)
        self.v_proj = torch.nn.Linear(d_model, num_kv_heads * head_dim)
        self.o_proj = torch.nn.Linear(heads * head_dim, d_model)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: Any, context: Any, attention_mask: Any = None, is_causal: bool = False) -> Any:
        q, k, v = (
            layer(rows).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer, rows in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        if is_causal:
            triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            attention_mask = triangle if attention_mask is None else triangle & attention_mask
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, enable_gqa=True)
        return self.dropout(self.o_proj(out.transpose(1, 2).flatten(2)))


def torch_mha(module: Any, x: Any, memory: Any, mask: Any, causal: bool) -> Any:
    """How nn.MultiheadAttention is called with our masks."""
    shape = (x.shape[0], module.num_heads, x.shape[1], memory.shape[1])
    seen = torch.ones(shape[2:], dtype=torch.bool).tril(shape[3] - shape[2] if causal else shape[3])
    hidden = ~(seen if mask is None else seen & mask).expand(shape).flatten(0, 1)
    return module(x, memory, memory, attn_mask=hidden, need_weights=False)


def inputs(dtype: Any = torch.float64, *, heads: int = 4, groups: int = 2, width: int = 3, model: int = 5) -> Any:
    """x[2,3,d], memory[2,4,d] and weights."""
    torch.manual_seed(0)
    sizes = {"wq": (model, heads * width), "wk": (model, groups * width), "wv": (model, groups * width)}
    sizes |= {"wo": (heads * width, model)}
    params = {name: torch.randn(shape, dtype=dtype) for name, shape in sizes.items()}
    params |= {f"b{name[1]}": torch.randn(shape[1], dtype=dtype) for name, shape in sizes.items()}
    return torch.randn(2, 3, model, dtype=dtype), torch.randn(2, 4, model, dtype=dtype), params


def packed_inputs() -> Any:
    return inputs(heads=2, groups=2, width=3, model=6)


def test_a_module_gives_what_its_weights_say() -> None:
    target = veriformer.torch_module(Separate, map=SEPARATE)
    x, memory, params = inputs()
    for words in ({}, {"causal": True}, {"mask": torch.rand(2, 1, 3, 4) < 0.8}):
        out, wanted = (f(x, memory, params, heads=4, **words) for f in (target, reference.multi_head_attention))
        assert float((out - wanted).abs().max()) < 1e-13


def test_packed_rows_are_put_together_in_order() -> None:
    target = veriformer.torch_module(
        lambda heads, embed_dim: torch.nn.MultiheadAttention(embed_dim, heads, batch_first=True),
        map=dict(reversed(PACKED.items())),
        call=torch_mha,
    )
    x, memory, params = packed_inputs()
    out, wanted = (f(x, memory, params, heads=2, causal=True) for f in (target, reference.multi_head_attention))
    assert float((out - wanted).abs().max()) < 1e-13


def test_gradients_reach_the_weights() -> None:
    x, memory, params = inputs()
    found = []
    for function in (veriformer.torch_module(Separate, map=SEPARATE), reference.multi_head_attention):
        leaves = {name: array.clone().requires_grad_() for name, array in params.items()}
        out = function(x, memory, leaves, heads=4)
        found.append(torch.autograd.grad(out.square().sum(), list(leaves.values())))
    assert all(float((a - b).abs().max()) < 1e-11 for a, b in zip(*found, strict=True))


def test_an_absent_bias_is_zero_and_a_module_without_biases_refuses_one() -> None:
    x, memory, params = inputs()
    bare = {name: array for name, array in params.items() if name.startswith("w")}
    target = veriformer.torch_module(Separate, map=SEPARATE)
    out, wanted = (f(x, memory, bare, heads=4) for f in (target, reference.multi_head_attention))
    assert float((out - wanted).abs().max()) < 1e-13
    without = veriformer.torch_module(
        lambda heads, d_model: torch.nn.MultiheadAttention(d_model, heads, bias=False, batch_first=True),
        map={name: place for name, place in PACKED.items() if name.startswith("w")},
        call=torch_mha,
    )
    x, memory, params = packed_inputs()
    with pytest.raises(NotImplementedError, match="no entry for 'bq'"):
        without(x, memory, params, heads=2)
    bare = {name: array for name, array in params.items() if name.startswith("w")}
    assert without(x, memory, bare, heads=2).shape == x.shape


def test_a_module_is_made_once_for_each_set_of_shapes_and_uses_up_no_random_numbers() -> None:
    made: list[int] = []

    def factory(heads: int, d_model: int, num_kv_heads: int, head_dim: int) -> Any:
        made.append(d_model)
        return Separate(d_model, heads, num_kv_heads, head_dim)

    target, state = veriformer.torch_module(factory, map=SEPARATE), None
    for model in (5, 5, 7):
        x, memory, params = inputs(model=model)
        state = torch.random.get_rng_state()
        target(x, memory, params, heads=4)
        assert torch.equal(state, torch.random.get_rng_state())
    x, memory, params = inputs(torch.float32)
    assert target(x, memory, params, heads=4).dtype == torch.float32 and made == [5, 7, 5]


def test_the_plan_knows_what_the_module_takes() -> None:
    assert plan_call(veriformer.torch_module(Separate, map=SEPARATE), "multi_head_attention").accepts == {
        "heads", "mask", "causal"
    }  # fmt: skip

    class NoCausal(Separate):
        def forward(self, x: Any, context: Any, attention_mask: Any = None) -> Any:
            return super().forward(x, context, attention_mask)

    target = veriformer.torch_module(NoCausal, map=SEPARATE)
    assert plan_call(target, "multi_head_attention").accepts == {"heads", "mask"}
    accepts = veriformer.torch_module(Separate, map=SEPARATE, accepts=["causal"])
    assert plan_call(accepts, "multi_head_attention").accepts == {"heads", "causal"}
    with pytest.raises(UsageError, match="accepts: got 'masks'"):
        veriformer.torch_module(Separate, map=SEPARATE, accepts=["masks"])


def test_a_module_without_memory_is_asked_where_x_attends_to_itself() -> None:
    class Alone(Separate):
        def forward(self, hidden_states: Any, attention_mask: Any = None) -> Any:
            return super().forward(hidden_states, hidden_states, attention_mask), None

    target = veriformer.torch_module(Alone, map=SEPARATE)
    x, memory, params = inputs()
    assert target(x, x.clone(), params, heads=4).shape == x.shape
    with pytest.raises(NotImplementedError, match="attends to x alone"):
        target(x, memory, params, heads=4)
    with pytest.raises(NotImplementedError, match="no parameter for causal"):
        target(x, x, params, heads=4, causal=True)


MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "a matrix without an entry": ({"wo": ""}, "map: 'wo' is missing; wanted wq, wk"),
    "a weight that is none": ({"wqq": "q_proj.weight.T"}, "map: 'wqq' is no weight here; nearest is 'wq'"),
    "text that is no place": ({"wq": "q_proj.weight[1].T"}, r"map: 'wq': cannot read 'q_proj.weight\[1\].T'"),
    "a parameter that is not there": ({"bq": "qproj.bias"}, "no parameter 'qproj.bias'; nearest is 'q_proj.bias'"),
    "a transpose too few": ({"wq": "q_proj.weight"}, r"the shape \(5, 12\), wanted \(12, 5\); is .T missing"),
    "another shape": ({"bq": "q_proj.bias[0:3]"}, r"'bq' gives 'q_proj.bias' the shape \(12,\), wanted \(3,\)"),
    "a parameter that nothing reaches": ({"bv": ""}, "nothing reaches the module's 'v_proj.bias'"),
    "rows that nothing reaches": ({"bq": "q_proj.bias[2:]"}, "'bq' starts at row 2 of 'q_proj.bias', wanted row 0"),
    "a size that is none": ({"bq": "q_proj.bias[0:n]"}, "'bq': cannot read 'n'; wanted numbers and d, H, G, D, Dv"),
}
"""Changes of a right map (empty: the entry is left out), and what is said of them."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_map_that_does_not_fit_is_explained(mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    places = {name: place for name, place in {**SEPARATE, **changes}.items() if place}
    x, memory, params = inputs()
    params = {name: array for name, array in params.items() if name in places or name.startswith("w")}
    # sizes that do not fit may be those that the module cannot have: that case is declined
    kind = ValueError if mistake == "another shape" else UsageError
    with pytest.raises(kind, match=message):
        veriformer.torch_module(Separate, map=places)(x, memory, params, heads=4)


def test_a_factory_and_a_forward_that_need_more_are_explained() -> None:
    x, memory, params = inputs()
    with pytest.raises(UsageError, match="'layers' of the factory is no known size"):
        veriformer.torch_module(lambda layers: Separate(5, 4, 2, 3), map=SEPARATE)(x, memory, params, heads=4)
    with pytest.raises(UsageError, match="made a str, wanted an nn.Module"):
        veriformer.torch_module(lambda: "module", map=SEPARATE)(x, memory, params, heads=4)

    class Rotary(Separate):
        def forward(self, x: Any, context: Any, positions: Any) -> Any:
            return super().forward(x, context)

    with pytest.raises(UsageError, match="forward needs 'positions'; say call=lambda"):
        veriformer.torch_module(Rotary, map=SEPARATE)(x, memory, params, heads=4)


def verdicts(places: dict[str, str]) -> dict[str, str]:
    """What some laws say of a module under a map."""
    target = veriformer.torch_module(Separate, map=places)
    options = Options(declare={"value_width": "equal"})
    one = in_process(load_functions({"multi_head_attention": target}, options))
    names = ("equals-the-reference", "heads-add-up", "gradient-equals-the-reference", "keeps-global-state")
    laws = [law for law in all_laws() if law.operation == "multi_head_attention" and law.name in names]
    return {law.name: Item(law, one, "float32", "smoke", reduced=Everything()).run().verdict for law in laws}


def test_the_laws_judge_a_module_and_notice_weights_in_the_wrong_place() -> None:
    assert set(verdicts(SEPARATE).values()) == {"pass"}
    swapped = {**SEPARATE, "wk": SEPARATE["wv"], "wv": SEPARATE["wk"]}
    assert verdicts(swapped)["equals-the-reference"] == "fail"
