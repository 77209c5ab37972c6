"""AdamW on one flat buffer: steps over several tensors are the reference's, and whoever leaves the buffer is told."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from veriformer.impls.torch_flat import FlatAdamW  # noqa: E402
from veriformer.reference import adamw_step, clip_by_global_norm  # noqa: E402

SHAPES = ((3, 5), (), (7,), (2, 1, 4))
WORDS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def tensors(dtype: Any = torch.float64, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in SHAPES]


def loss(params: list[Any], number: int) -> Any:
    """Something whose gradient depends on the parameters and changes from step to step."""
    return sum(((p * (number + i)).sin() * p).sum() for i, p in enumerate(params))


def test_many_steps_are_those_of_the_reference() -> None:
    params = tensors()
    wanted = [p.detach().numpy().copy() for p in params]
    moments = [(np.zeros(shape), np.zeros(shape)) for shape in SHAPES]
    own = FlatAdamW(params, **WORDS)
    for step in range(1, 21):
        own.zero_grad()
        loss(params, step).backward()
        leaves = [torch.tensor(p, requires_grad=True) for p in wanted]
        gradients = torch.autograd.grad(loss(leaves, step), leaves)
        own.step()
        for i, g in enumerate(gradients):
            wanted[i], *moments[i] = adamw_step(  # type: ignore[assignment]
                wanted[i], g.numpy(), *moments[i], step, lr=0.02, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1
            )
    for p, reference in zip(params, wanted, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), reference, rtol=1e-12, atol=1e-14)


def test_backward_adds_into_the_buffer() -> None:
    params = tensors()
    own = FlatAdamW(params)
    buffer = own.param_groups[0]["params"][0].grad
    assert all(p.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for p in params)
    views = [p.grad for p in params]
    for count in (1, 2, 3):
        loss(params, 1).backward()
        assert all(p.grad is view for p, view in zip(params, views, strict=True))
        fresh = torch.autograd.grad(loss(params, 1), params)
        for view, g in zip(views, fresh, strict=True):
            torch.testing.assert_close(view, count * g)
    own.zero_grad()
    assert not buffer.any() and all(p.grad is view for p, view in zip(params, views, strict=True))


def test_values_and_gradients_from_before_are_kept_and_parameters_become_contiguous() -> None:
    p = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    p.grad = torch.arange(6.0).reshape(3, 2)
    FlatAdamW([p])
    assert p.tolist() == [[0, 3], [1, 4], [2, 5]] and p.grad.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert p.is_contiguous() and p.is_leaf


def test_parameters_begin_where_allocations_do() -> None:
    params = tensors(torch.float32)
    FlatAdamW(params)
    assert [p.data_ptr() % 64 for p in params] == [0] * len(params)


@pytest.mark.parametrize("from_flat", [True, False])
def test_states_are_those_of_torch_in_both_directions(from_flat: bool) -> None:
    def run(own: Any, params: list[Any], numbers: range) -> None:
        for number in numbers:
            own.zero_grad()
            loss(params, number).backward()
            own.step()

    kinds: list[Callable[..., Any]] = [FlatAdamW, torch.optim.AdamW]
    first, second = kinds if from_flat else kinds[::-1]
    whole = tensors()
    run(torch.optim.AdamW(whole, **WORDS), whole, range(8))
    params = tensors()
    own = first(params, **WORDS)
    run(own, params, range(4))
    saved = own.state_dict()
    again = [p.detach().clone().requires_grad_() for p in params]
    other = second(again, lr=7.0)
    other.load_state_dict(saved)
    run(other, again, range(4, 8))
    for p, wanted in zip(again, whole, strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-12, atol=1e-14)


def test_a_saved_state_stays_as_it_was_saved() -> None:
    params = tensors()
    own = FlatAdamW(params)
    assert own.state_dict()["state"] == {}
    loss(params, 1).backward()
    own.step()
    saved = own.state_dict()["state"]
    before = [one["exp_avg"].clone() for one in saved.values()]
    own.step()
    assert all(torch.equal(one["exp_avg"], kept) for one, kept in zip(saved.values(), before, strict=True))
    own.load_state_dict({**own.state_dict(), "state": {}})
    assert own.state_dict()["state"] == {}


def test_a_schedule_sets_the_rate() -> None:
    params = tensors()
    own = FlatAdamW(params, lr=1.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 0.5 if step else 0.0)
    before = [p.detach().clone() for p in params]
    loss(params, 1).backward()
    own.step()
    assert all(torch.equal(p, kept) for p, kept in zip(params, before, strict=True))
    schedule.step()
    own.step()
    assert not any(torch.equal(p, kept) for p, kept in zip(params, before, strict=True))


@pytest.mark.parametrize("max_norm", [0.25, 1e3])
def test_clipping_is_that_of_the_reference(max_norm: float) -> None:
    params = tensors()
    own = FlatAdamW(params)
    loss(params, 3).backward()
    gradients = [p.grad.numpy().copy() for p in params]
    norm = own.clip(max_norm)
    assert float(norm) == pytest.approx(np.sqrt(sum((g**2).sum() for g in gradients)), rel=1e-14)
    for p, wanted in zip(params, clip_by_global_norm(gradients, max_norm=max_norm), strict=True):
        np.testing.assert_allclose(p.grad.numpy(), wanted, rtol=1e-14)


def test_a_norm_is_not_lost_with_its_squares_and_nothing_hides_what_is_not_finite() -> None:
    p, q = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    own = FlatAdamW([p, q])
    p.grad.copy_(torch.tensor([3e25, 4e25]))
    assert float(own.clip(1.0)) == pytest.approx(5e25)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    for value, max_norm in itertools.product((torch.inf, torch.nan), (1.0, torch.inf)):
        p.grad.fill_(1.0)
        q.grad.fill_(value)
        own.clip(max_norm)
        assert p.grad.isnan().all() and q.grad.isnan().all()


def test_a_graph_from_before_a_step_is_refused() -> None:
    params = tensors()
    own = FlatAdamW(params)
    old = loss(params, 1)
    loss(params, 1).backward()
    own.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


@pytest.mark.parametrize("act", ["step", "clip"])
def test_a_parameter_or_gradient_outside_of_the_buffer_is_noticed(act: str) -> None:
    def broken(change: Callable[[Any], Any]) -> Callable[[], Any]:
        params = tensors()
        own = FlatAdamW(params)
        change(params[2])
        return own.step if act == "step" else lambda: own.clip(1.0)

    for change, said in (
        (lambda p: setattr(p, "grad", None), r"parameter 2 of shape \(7,\): its \.grad is None, wanted the view"),
        (lambda p: setattr(p, "grad", torch.zeros(7).double()), r"its \.grad is a tensor of its own, wanted the view"),
        (lambda p: setattr(p, "data", p.data.clone()), r"parameter 2 of shape \(7,\): its memory is no longer in the"),
    ):
        with pytest.raises(RuntimeError, match=said):
            broken(change)()


def leaf(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


TWICE = leaf(1)


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        ([], ValueError, "params: got none, wanted at least one"),
        (
            [leaf(2), leaf(2, dtype=torch.bfloat16)],
            ValueError,
            "got torch.bfloat16 on cpu, torch.float32 on cpu",
        ),
        ([torch.zeros(2)], ValueError, "the one at 0, of torch.float32, is no floating leaf that requires grad"),
        ([leaf(2), leaf(2) * 2], ValueError, "the one at 1"),
        ([TWICE, TWICE], ValueError, "got one of them twice, wanted each once"),
        ([{"params": [leaf(2)]}], TypeError, "got dict at 0, wanted tensors; groups need an optimizer each"),
    ],
)
def test_parameters_that_no_buffer_can_hold_are_refused(params: list[Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        FlatAdamW(params)


def test_calls_that_make_no_sense_are_refused() -> None:
    own = FlatAdamW([leaf(2)])
    with pytest.raises(ValueError, match="set_to_none: got True, wanted False"):
        own.zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match="max_norm: got -1, wanted a number >= 0"):
        own.clip(-1)
    with pytest.raises(TypeError, match="step: got a closure, wanted none"):
        own.step(lambda: 1.0)
    with pytest.raises(ValueError, match="add_param_group: got another group, wanted an optimizer of its own"):
        own.add_param_group({"params": [leaf(3)]})
    with pytest.raises(TypeError, match="cannot be copied or pickled; save state_dict()"):
        copy.deepcopy(own)
    own.step(None)  # as those who wrap optimizers write it


def saved_of(shapes: tuple[tuple[int, ...], ...], **words: Any) -> dict[str, Any]:
    """What torch's own optimizer of these parameters saves after a step."""
    params = [leaf(*shape) for shape in shapes]
    own = torch.optim.AdamW(params, **words)
    for p in params:
        p.grad = torch.ones_like(p)
    own.step()
    return own.state_dict()


def uneven() -> dict[str, Any]:
    found = saved_of(((2,), (3,)))
    found["state"][1]["step"] = torch.tensor(5.0)
    return found


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (saved_of(((2,),)), "got groups of 1 parameters, wanted one of 2"),
        (saved_of(((2,), (4,))), r"got \(4,\) for parameter 1, wanted shape \(3,\)"),
        (saved_of(((2,), (3,)), amsgrad=True), "got amsgrad=True, wanted False"),
        (uneven(), "got parameters after different numbers of steps"),
    ],
)
def test_states_of_something_else_are_refused(saved: dict[str, Any], said: str) -> None:
    own = FlatAdamW([leaf(2), leaf(3)])
    with pytest.raises(ValueError, match=said):
        own.load_state_dict(saved)
