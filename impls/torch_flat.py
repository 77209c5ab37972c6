"""AdamW and clipping over many tensors that are views of one buffer: one kernel a step, however many there are.

"flat" is what large-scale trainers do: parameters and gradients become parts of two long tensors, and torch's fused
AdamW sees a single parameter. Backward adds into the gradients where they lie.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
ALIGNED = 64
"""Bytes at whose multiples every parameter begins, as torch's own allocations do."""
CHUNK = 2**16
"""Gradients whose squares are summed at a time, in float64."""
_STATE = ("exp_avg", "exp_avg_sq")


class FlatAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) of one long parameter, of which the given ones become views.

    params: leaves that require grad, of any shapes, one dtype and device, each once; they keep their values and are
    contiguous from now on. Their .grad are views, too, and stay so: `zero_grad` fills them with zeros, and backward
    adds to them. `state_dict` and `load_state_dict` speak of each parameter by itself, as torch.optim.AdamW does, and
    either reads what the other wrote. Schedulers of torch.optim.lr_scheduler change `param_groups[0]["lr"]`.
    Source: Loshchilov, Hutter 2019, algorithm 2; the torch manual, torch.optim.AdamW; Rajbhandari et al. 2020 (ZeRO),
    section 6.2, for the buffer.
    Raises ValueError for no parameters, several dtypes or devices, one that is no floating leaf, does not require grad
    or is given twice, and TypeError for groups of parameters.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self.parameters = list(params)
        _check_parameters(self.parameters)
        first = self.parameters[0]
        step = max(1, ALIGNED // first.element_size())
        self._starts = [0]
        for p in self.parameters:
            self._starts.append(self._starts[-1] + math.ceil(p.numel() / step) * step)
        self._flat = torch.zeros(self._starts[-1], dtype=first.dtype, device=first.device)
        self._flat.grad = torch.zeros_like(self._flat)
        self._gradients = self._views(self._flat.grad)
        with torch.no_grad():
            for p, view, gradient in zip(self.parameters, self._views(self._flat), self._gradients, strict=True):
                view.copy_(p)
                if p.grad is not None:
                    gradient.copy_(p.grad)
                p.data, p.grad = view, gradient
        self._places = [p.data_ptr() for p in self.parameters]
        super().__init__([self._flat.requires_grad_()], lr, betas, eps, weight_decay, fused=True)
        self.register_step_pre_hook(_before)
        self.register_step_post_hook(_after)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a long tensor that belong to the parameters, in their shapes."""
        pairs = zip(self._starts, self.parameters, strict=False)
        return [flat.detach()[start : start + p.numel()].view(p.shape) for start, p in pairs]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For torch.optim.Optimizer's own use. Raises ValueError afterwards, for one buffer is one group."""
        if self.param_groups:
            raise ValueError("add_param_group: got another group, wanted an optimizer of its own for it")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Raises TypeError, for a copy's parameters would not lie in its buffer."""
        raise TypeError("FlatAdamW cannot be copied or pickled; save state_dict(), and load it into one of the copies")

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill all gradients with zeros, in one pass.

        Raises ValueError with set_to_none, for the gradients would no longer be views.
        """
        if set_to_none:
            raise ValueError("set_to_none: got True, wanted False: the gradients are views of one buffer and stay so")
        assert self._flat.grad is not None
        self._flat.grad.zero_()

    def clip(self, max_norm: float) -> Tensor:
        """Make all gradients shorter by one factor, so that together they are no longer than max_norm; their norm.

        g min(1, max_norm / norm), norm[] in float64; without a temporary of the buffer's size
        Source: Pascanu, Mikolov, Bengio 2013, algorithm 1. NaN or infinity anywhere makes all of them NaN.
        Raises ValueError for a max_norm below 0, RuntimeError as `step` does.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm: got {max_norm}, wanted a number >= 0")
        self._check_views()
        flat = self._flat.grad
        assert flat is not None
        parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in flat.split(CHUNK)]
        norm = torch.linalg.vector_norm(torch.stack(parts))
        if not (norm <= max_norm and norm.isfinite()):
            flat.mul_(max_norm / norm if norm.isfinite() else math.nan)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """What torch.optim.AdamW of the same parameters would save, in tensors of its own."""
        found = super().state_dict()
        long = found["state"].get(0)
        found["state"] = {}
        if long:
            parts = {name: self._views(long[name]) for name in _STATE}
            for i in range(len(self.parameters)):
                moments = {name: parts[name][i].clone() for name in _STATE}
                found["state"][i] = {"step": long["step"].clone(), **moments}
        found["param_groups"][0]["params"] = list(range(len(self.parameters)))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what this class or torch.optim.AdamW saved of the same parameters in the same order.

        Raises ValueError for another number of groups or parameters, other shapes, steps that differ, or options
        that the fused kernel of one buffer has not got.
        """
        state = _checked_state(state_dict, self.parameters)
        long: dict[int, dict[str, Tensor]] = {}
        if state:
            moments = {name: torch.zeros_like(self._flat.detach()) for name in _STATE}
            for name, whole in moments.items():
                for view, saved in zip(self._views(whole), state, strict=True):
                    view.copy_(saved[name])
            long = {0: {"step": torch.as_tensor(state[0]["step"], dtype=torch.float32), **moments}}
        group = {**state_dict["param_groups"][0], "params": [0], "fused": True, "foreach": None}
        super().load_state_dict({"state": long, "param_groups": [group]})

    def _check_views(self) -> None:
        """RuntimeError for a parameter that this optimizer would not move, or would move without its gradient."""
        if any(map(operator.is_not, [p.grad for p in self.parameters], self._gradients)):
            pairs = zip(self.parameters, self._gradients, strict=True)
            i, p = next((i, p) for i, (p, view) in enumerate(pairs) if p.grad is not view)
            got = "None" if p.grad is None else "a tensor of its own"
            raise RuntimeError(
                f"parameter {i} of shape {tuple(p.shape)}: its .grad is {got}, wanted the view of the buffer; "
                "clear gradients by this optimizer's zero_grad(), and let backward add to them"
            )
        if [p.data_ptr() for p in self.parameters] != self._places:
            i, p = next((i, p) for i, p in enumerate(self.parameters) if p.data_ptr() != self._places[i])
            raise RuntimeError(
                f"parameter {i} of shape {tuple(p.shape)}: its memory is no longer in the buffer; move and cast "
                "a model before the optimizer is made, and load weights by copying into them"
            )


def _before(own: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A hook, for each override of `step` costs as much time as what torch wraps around it."""
    if any(one is not None for one in (*args[1:], *keywords.values())):
        raise TypeError("step: got a closure, wanted none: call it before")
    own._check_views()


def _after(own: Any, *_: Any) -> None:
    """A graph from before the step is refused, as torch does where parameters are changed in place."""
    torch.autograd.graph.increment_version(own.parameters)


def _check_parameters(params: list[Any]) -> None:
    if not params:
        raise ValueError("params: got none, wanted at least one")
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            raise TypeError(f"params: got {type(p).__name__} at {i}, wanted tensors; groups need an optimizer each")
        if not (p.is_leaf and p.requires_grad and p.is_floating_point()):
            raise ValueError(f"params: the one at {i}, of {p.dtype}, is no floating leaf that requires grad")
    if len({id(p) for p in params}) < len(params):
        raise ValueError("params: got one of them twice, wanted each once")
    kinds = {(str(p.dtype), str(p.device)) for p in params}
    if len(kinds) > 1:
        got = ", ".join(" on ".join(kind) for kind in sorted(kinds))
        raise ValueError(f"params: got {got}; wanted one dtype and device: one buffer holds them all")


def _checked_state(state_dict: dict[str, Any], params: list[Tensor]) -> list[dict[str, Any]]:
    """The saved states in the order of the parameters, or none of all.

    Raises ValueError where they are not of these parameters.
    """
    groups, state = state_dict["param_groups"], state_dict["state"]
    if len(groups) != 1 or len(groups[0]["params"]) != len(params):
        got = ", ".join(str(len(group["params"])) for group in groups)
        raise ValueError(f"state: got groups of {got} parameters, wanted one of {len(params)}")
    lacking = [word for word in ("amsgrad", "maximize") if groups[0].get(word)]
    if lacking:
        raise ValueError(f"state: got {lacking[0]}=True, wanted False")
    if not state:
        return []
    found = [state.get(key) for key in groups[0]["params"]]
    for i, (saved, p) in enumerate(zip(found, params, strict=True)):
        if saved is None or saved["exp_avg"].shape != p.shape:
            got = "nothing" if saved is None else tuple(saved["exp_avg"].shape)
            raise ValueError(f"state: got {got} for parameter {i}, wanted shape {tuple(p.shape)}")
    if len({float(saved["step"]) for saved in found if saved}) > 1:
        raise ValueError("state: got parameters after different numbers of steps, wanted one number")
    return [saved for saved in found if saved]


def _pieces(x: Tensor) -> list[Tensor]:
    """Copies of up to three parts of a tensor, of different sizes."""
    row = x.reshape(-1)
    sizes = [size for size in (row.numel() // 2, row.numel() // 3) if size]
    return [part.clone() for part in row.split([*sizes, row.numel() - sum(sizes)])]


def adamw_step(
    param: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of FlatAdamW from a given state, over the pieces into which the tensor is cut.

    param[...], grad[...], m[...], v[...], step from 1 -> (param, m, v)
    Source: Loshchilov, Hutter 2019, algorithm 2. The arguments are copied.
    """
    params = [piece.requires_grad_() for piece in _pieces(param)]
    own = FlatAdamW(params, lr, (beta1, beta2), eps, weight_decay)
    moments = zip(_pieces(m), _pieces(v), strict=True)
    state = {i: {"step": torch.tensor(step - 1.0), "exp_avg": a, "exp_avg_sq": b} for i, (a, b) in enumerate(moments)}
    own.load_state_dict({**own.state_dict(), "state": state})
    for p, piece in zip(params, _pieces(grad), strict=True):
        assert p.grad is not None
        p.grad.copy_(piece)
    own.step()
    after = own.state_dict()["state"].values()
    found = ([p.detach() for p in params], *([one[name] for one in after] for name in _STATE))
    theta, mean, square = (torch.cat([part.reshape(-1) for part in parts]).view(param.shape) for parts in found)
    return theta, mean, square


def clip_by_global_norm(grads: list[Tensor], *, max_norm: float) -> list[Tensor]:
    """FlatAdamW.clip of parameters that have these gradients.

    grads: tensors of any shapes -> a list like it
    g min(1, max_norm / norm)
    Source: Pascanu, Mikolov, Bengio 2013, algorithm 1. The arguments are copied.
    """
    if not grads:
        return []
    params = [torch.zeros_like(g, requires_grad=True) for g in grads]
    own = FlatAdamW(params)
    for p, g in zip(params, grads, strict=True):
        assert p.grad is not None
        p.grad.copy_(g)
    own.clip(max_norm)
    return [p.grad.clone() for p in params if p.grad is not None]


VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "flat": {"adamw_step": adamw_step, "clip_by_global_norm": clip_by_global_norm}
}
CAPABILITIES = {"flat": {"clip_by_global_norm": Capabilities(extreme_values=True)}}
