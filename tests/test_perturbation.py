"""Perturbation budgets: what they compute, where they are exact, separate, reproducible or open."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from perturbing import layer_arrays, leaves, normal, rounded

from veriformer import reference
from veriformer.budgets import Precision, error_ratio
from veriformer.budgets.directions import Directions
from veriformer.budgets.perturbation import perturbed
from veriformer.budgets.replicas import Stack, mapped, together
from veriformer.declarations import DTYPES
from veriformer.reference import layers

FLOAT32 = Precision("float32")
BF16 = "bfloat16"


def reference_layer(t, heads, norm):
    params = {}
    for path, array in t.items():
        part, _, name = path.partition(".")
        if name:
            params.setdefault(part, {})[name] = array
    return layers.encoder_layer(t["x"], params, heads=heads, norm=norm)


# --- what it computes -----------------------------------------------------------------------------

Q, K, V = normal(2, 4, 3, 2), normal(2, 2, 5, 2), normal(2, 2, 5, 3)
PACKED = {"q": normal(5, 2, 4), "k": normal(6, 1, 4), "v": normal(6, 1, 3), "a": np.array([0, 2, 5])}
CACHED = {
    "q": normal(2, 2, 2, 4), "k": normal(2, 1, 2, 4), "v": normal(2, 1, 2, 3), "n": np.array([1, 3]),
    "kc": normal(5, 1, 2, 4), "vc": normal(5, 1, 2, 3), "table": np.array([[0, 2, 0], [1, 4, 3]]),
}  # fmt: skip
FUNCTIONS = {
    "softmax": (lambda t: reference.softmax(t["x"], axis=1, temperature=0.3), {"x": normal(3, 4, 5)}),
    "log_softmax": (lambda t: reference.log_softmax(t["x"]), {"x": normal(3, 4)}),
    "logsumexp": (lambda t: reference.logsumexp(t["x"]), {"x": normal(3, 4)}),
    "layer_norm": (
        lambda t: reference.layer_norm(t["x"], t["w"], t["b"], eps=0, epsilon="outside", variance="unbiased"),
        {"x": normal(3, 4, 5), "w": normal(5), "b": normal(5, seed=1)},
    ),
    "rms_norm": (
        lambda t: reference.rms_norm(t["x"], t["w"], weight_form="one_plus"), {"x": normal(3, 5), "w": normal(5)}
    ),
    "gelu": (lambda t: (reference.gelu(t["x"]), reference.gelu(t["x"], form="tanh")), {"x": normal(3, 5)}),
    "rotary": (
        lambda t: reference.rotary_embedding(t["x"], t["p"], pairs="interleaved"),
        {"x": normal(2, 3, 4), "p": np.array([0, 7, 1000])},
    ),
    "cross_entropy": (
        lambda t: reference.cross_entropy(t["x"], t["y"], label_smoothing=0.1, reduction="none"),
        {"x": normal(3, 4), "y": np.array([1, -100, 3])},
    ),
    "embedding": (
        lambda t: reference.embedding(t["ids"], t["table"], padding_index=1),
        {"ids": np.array([[0, 1, 2], [2, 2, 1]]), "table": normal(4, 3)},
    ),
    "sinusoids": (lambda t: reference.sinusoidal_positions(3, 5, like=torch.zeros(1, dtype=torch.float64)), {}),
    "attention": (
        lambda t: reference.attention_with_lse(
            t["q"], t["k"], t["v"], mask=t["m"], bias=t["b"], sink=t["s"], softcap=3.0, window=(1, None)
        ),
        {"q": Q, "k": K, "v": V, "b": normal(1, 4, 1, 5), "s": normal(4), "m": normal(2, 1, 3, 5) > -1},
    ),
    "varlen": (
        lambda t: reference.varlen_attention(t["q"], t["k"], t["v"], t["a"], t["a"] + t["a"] // 3, causal=True),
        PACKED,
    ),
    "cached": (
        lambda t: reference.cached_attention(
            t["q"], t["k"], t["v"], t["kc"], t["vc"], t["n"], block_table=t["table"]
        ),
        CACHED,
    ),
    "layer": (lambda t: reference_layer(t, 4, "pre"), layer_arrays(1, 3, 8, 12)),
    "no keys": (
        lambda t: reference.attention(t["q"], t["k"], t["v"]),
        {"q": Q[:1, :2], "k": K[:1, :, :0], "v": V[:1, :, :0]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_the_reference_and_gradients_its_gradients(name):
    function, arrays = FUNCTIONS[name]
    tensors = leaves(arrays)
    wrt = [n for n, t in tensors.items() if t.requires_grad]
    results = function(tensors)
    results = (results,) if isinstance(results, torch.Tensor) else results
    cotangents = [normal(*y.shape, seed=i) for i, y in enumerate(results)]
    bounds, found = perturbed(function, arrays, FLOAT32, cotangents=cotangents, wrt=wrt)
    for y, bound in zip(results, bounds, strict=True):
        assert np.allclose(bound.value, y.detach(), rtol=1e-12, atol=1e-14)
        assert bound.allowed.shape == y.shape
    wanted = torch.autograd.grad(
        results, [tensors[n] for n in wrt], [torch.from_numpy(c) for c in cotangents]
    ) if wrt else ()  # fmt: skip
    for n, gradient in zip(wrt, wanted, strict=True):
        assert np.allclose(found[n].value, gradient, rtol=1e-9, atol=1e-12)
        assert found[n].allowed.shape == arrays[n].shape
        assert (found[n].allowed < 1e-3 * (1 + np.abs(found[n].value).max(initial=0.0))).all()


def test_budgets_depend_on_nothing_but_the_arguments():
    function, arrays = FUNCTIONS["attention"]

    def once():
        return perturbed(function, arrays, FLOAT32, cotangents=[normal(2, 4, 3, 3), None], wrt=["q", "s"])

    before = once()
    state = torch.random.get_rng_state()
    perturbed(lambda t: t["x"] * t["x"], {"x": normal(300, 300)}, FLOAT32)
    after = once()
    assert torch.equal(state, torch.random.get_rng_state())
    for one, other in ((before[0][0], after[0][0]), (before[1]["q"], after[1]["q"]), (before[1]["s"], after[1]["s"])):
        assert np.array_equal(one.allowed, other.allowed)


def test_what_nothing_depends_on_has_gradient_zero():
    arrays = {"x": normal(3), "unused": normal(2)}
    function = lambda t: (t["x"] * 3.0, t["unused"] * 2.0)  # noqa: E731
    _, found = perturbed(function, arrays, FLOAT32, cotangents=[normal(3), None], wrt=["unused", "x"])
    assert list(found) == ["unused", "x"]
    assert (found["unused"].value == 0).all() and (found["unused"].allowed == FLOAT32.eta).all()
    assert (found["x"].allowed > 1e-8 * np.abs(found["x"].value)).all()


def test_structural_zeros_stay_exact_beside_large_gradients():
    hidden = np.ones((1, 1, 1, 6), dtype=bool)
    hidden[..., 4:] = False
    arrays = {"q": normal(1, 1, 2, 3), "k": normal(1, 1, 6, 3), "v": normal(1, 1, 6, 3) * 30, "m": hidden}
    function = lambda t: reference.attention(t["q"], t["k"], t["v"], mask=t["m"])  # noqa: E731
    for dtype in DTYPES:
        p = Precision(dtype)
        given = {n: a if a.dtype == bool else rounded(a, dtype) for n, a in arrays.items()}
        _, found = perturbed(function, given, p, cotangents=[normal(1, 1, 2, 3)], wrt=["k", "v"])
        for name in ("k", "v"):
            assert (found[name].value[:, :, 4:] == 0).all() and (found[name].allowed[:, :, 4:] == p.eta).all()
            assert (found[name].allowed[:, :, :4] > p.eta).all()


def test_rows_do_not_lend_each_other_room():
    calm, wild = normal(3, 8), normal(3, 8)
    wild[1:] *= 1e4
    allowed = [
        perturbed(
            lambda t: reference.softmax(t["x"]), {"x": x}, FLOAT32, cotangents=[normal(3, 8, seed=1)], wrt=["x"]
        )[1]["x"].allowed
        for x in (calm, wild)
    ]  # fmt: skip
    assert np.allclose(allowed[0][0], allowed[1][0], rtol=1e-6)


def test_directions_try_both_sides_of_every_error_and_repeat_on_equal_values():
    half = Directions(16)
    value = torch.tensor([0.3, 0.3, -0.6, 7.0, 0.3000000000000001], dtype=torch.float64)
    shifts = half.shifts(value, torch.full((5,), 2.0, dtype=torch.float64), 11)
    assert shifts.shape == (17, 5) and (shifts[0] == 0).all()
    assert set(shifts[1:].abs().unique().tolist()) == {1.0, 2.0}
    assert (shifts[1:].sign().sum(0) == 0).all()
    keyed, free = shifts[1:9], shifts[9:]
    assert all(torch.equal(keyed[:, 0], keyed[:, i]) for i in (1, 2, 4))
    assert not torch.equal(free[:, 0], free[:, 1])


def test_an_operation_without_a_rule_is_named():
    with pytest.raises(NotImplementedError, match="lgamma"):
        perturbed(lambda t: torch.lgamma(t["x"]), {"x": normal(2)}, FLOAT32)


def test_torch_is_not_imported_before_it_is_needed():
    code = "import sys, veriformer.budgets.perturbation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_growth_by_the_root_asks_for_more_precision():
    function, arrays = (lambda t: (t["a"] @ t["b"]).sum()), {"a": normal(4, 256), "b": normal(256, 4)}
    bounds = [
        perturbed(function, arrays, Precision("float32", growth=growth), cotangents=[np.ones(())], wrt=["a"])
        for growth in ("worst", "typical")
    ]
    assert bounds[0][0][0].allowed > 5 * bounds[1][0][0].allowed


def test_undetermined_results_are_open_and_the_others_are_not():
    large = np.array([[300.0, 300.0], [1.0, 2.0]])
    function = lambda t: reference.softmax((t["x"] @ t["y"]) * 1e-3)  # noqa: E731
    (bound,), _ = perturbed(function, {"x": large, "y": large * 2}, Precision("float16"))
    assert np.isposinf(bound.allowed[0]).all() and np.isfinite(bound.allowed[1]).all()
    relu = lambda t: reference.relu(t["x"] @ t["y"] - 1.0)  # noqa: E731
    _, found = perturbed(
        relu, {"x": large, "y": large * 2}, Precision("float16"), cotangents=[np.ones((2, 2))], wrt=["x"]
    )
    assert np.isposinf(found["x"].allowed[0]).all() and np.isfinite(found["x"].allowed[1]).all()
    residual = np.stack([normal(8, dtype=BF16) / 64, 512 + np.zeros(8)])
    norm = lambda t: reference.layer_norm(t["x"] + 0.5 * t["y"], t["w"], t["w"])  # noqa: E731
    arrays = {"x": residual, "y": normal(2, 8, dtype=BF16), "w": np.ones(8)}
    (bound,), _ = perturbed(norm, arrays, Precision(BF16))
    assert np.isfinite(bound.allowed[0]).all() and np.isposinf(bound.allowed[1]).all()


# --- operations on all versions at once -----------------------------------------------------------

ATEN = torch.ops.aten
OPERATIONS = {
    "sum": (ATEN.sum.dim_IntList, ["x", [0, -1]], {}),
    "sum of all": (ATEN.sum.default, ["x"], {}),
    "sum, axes kept": (ATEN.sum.dim_IntList, ["x", [1], True], {}),
    "mean": (ATEN.mean.dim, ["x", [-1], True], {}),
    "amax": (ATEN.amax.default, ["x", [-2], True], {}),
    "any": (ATEN.any.dim, ["bool", -1], {}),
    "all of all": (ATEN.all.default, ["bool"], {}),
    "cumsum": (ATEN.cumsum.default, ["x", -1], {}),
    "flip": (ATEN.flip.default, ["x", [0, -1]], {}),
    "select": (ATEN.select.int, ["x", -2, 1], {}),
    "slice": (ATEN.slice.Tensor, ["x", 2, 1, 4, 2], {}),
    "transpose": (ATEN.transpose.int, ["x", 0, -1], {}),
    "permute": (ATEN.permute.default, ["x", [2, 0, -2]], {}),
    "t": (ATEN.t.default, ["y"], {}),
    "view": (ATEN.view.default, ["x", [-1, 4]], {}),
    "expand": (ATEN.expand.default, ["y", [3, -1, 4]], {}),
    "unsqueeze": (ATEN.unsqueeze.default, ["x", -1], {}),
    "squeeze": (ATEN.squeeze.dim, ["z", 1], {}),
    "squeeze all": (ATEN.squeeze.default, ["z"], {}),
    "cat": (ATEN.cat.default, [["x", "plain"], -1], {}),
    "stack": (ATEN.stack.default, [["x", "one"], -1], {}),
    "slice_backward": (ATEN.slice_backward.default, ["x", [2, 3, 9], -1, 1, 5, 1], {}),
    "select_backward": (ATEN.select_backward.default, ["y", [5, 3, 4], 0, 2], {}),
    "mm": (ATEN.mm.default, ["y", "square"], {}),
    "bmm": (ATEN.bmm.default, ["x", "plain transposed"], {}),
    "mul, fewer axes": (ATEN.mul.Tensor, ["x", "y"], {}),
    "mul, no axes": (ATEN.mul.Tensor, ["x", "number"], {}),
    "where": (ATEN.where.self, ["bool", "y", "plain"], {}),
    "index_select": (ATEN.index_select.default, ["x", -1, torch.tensor([3, 0, 0])], {}),
    "index_add": (ATEN.index_add.default, ["plain", 2, torch.tensor([3, 0, 0, 1]), "x"], {}),
    "gather, by the loop": (ATEN.gather.default, ["x", 2, torch.zeros(2, 3, 1, dtype=torch.int64)], {}),
    "sort, by the loop": (ATEN.sort.default, ["x", -1], {}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_all_versions_do_what_they_do_on_each(name):
    func, arguments, keywords = OPERATIONS[name]
    draw = torch.Generator().manual_seed(0)
    rows = {n: torch.randn(5, *s, generator=draw, dtype=torch.float64) for n, s in {
        "x": (2, 3, 4), "y": (3, 4), "z": (2, 1, 3), "square": (4, 4), "number": ()}.items()}  # fmt: skip
    rows |= {"bool": rows["x"] > 0, "one": rows["x"][:1]}
    plain = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    known = {n: Stack(r) for n, r in rows.items()} | {"plain": plain, "plain transposed": plain.transpose(1, 2)}

    def filled(arguments):
        return [filled(a) if isinstance(a, list) else known[a] if isinstance(a, str) else a for a in arguments]

    found, wanted = (rule(func, filled(arguments), keywords) for rule in (together, mapped))
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for one, other in pairs:
        assert torch.allclose(one.expand_as(other).double(), other.double(), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_temperature_may_divide_before_the_peak_is_subtracted(dtype: str) -> None:
    """Correct, and off by far more than u p: the quotients of large logits are rounded by themselves."""
    x, cotangent = np.array([1000.0, 1001.0, 1002.0]), np.array([1.0, 0.0, -2.0])
    kind = getattr(torch, dtype)
    native = torch.tensor(x, dtype=kind, requires_grad=True)
    torch.softmax(native / 3.0, -1).backward(torch.tensor(cotangent, dtype=kind))
    assert native.grad is not None
    _, found = perturbed(
        lambda arrays: reference.softmax(arrays["x"], temperature=3.0),
        {"x": x},
        Precision(dtype),
        cotangents=(cotangent,),
        wrt=("x",),
    )
    bound = found["x"]
    ratio = error_ratio(native.grad.double().numpy(), bound.value, bound.allowed, np.inf).max()
    assert 0.01 < ratio <= 1 and bound.allowed.max() < 0.5


def test_a_large_channel_does_not_hide_a_small_one() -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((4, 4)) for name in ("wq", "wk", "wv")}
    arrays |= {"x": rng.standard_normal((1, 3, 4)), "wo": np.diag([1e6, 1.0, 1.0, 1.0])}
    (bound,), _ = perturbed(
        lambda t: layers.multi_head_attention(t["x"], t["x"], {name: t[name] for name in t if name != "x"}, heads=1),
        arrays,
        FLOAT32,
    )
    assert (bound.allowed[..., 1:] < 1e-4 * np.abs(bound.value[..., 1:]).max()).all()
