"""What is called a Universal Transformer elsewhere: the paper's text, other code, and what is known to go wrong.

Every switch of `Dialect` has the default's value first. All sinusoids are those of `sinusoidal_positions`; that
tensor2tensor puts all sines before all cosines, and may learn the signal of steps, is left out.

    default           `universal_transformer`
    graves            Graves 2016 read for a Universal Transformer (our reading; the paper has a recurrent network):
                      the input is added again at every step, and no signal tells steps or positions apart
    ut_paper_text     Dehghani et al. 2019, section 2.2 as written: the output is the last state, which is copied
                      onward; positions and steps count from 1. The halting unit gets no gradient from the output
    t2t_basic         tensor2tensor's universal_transformer_act_basic: h is read off what the step is given; a sum
                      must exceed 1 - epsilon; halted positions move on; output = w s + (1 - w) output, whose
                      weights do not sum to 1 if N > 1; at max_steps nothing is forced, R is then 0; steps from 0
    t2t_accumulated   its universal_transformer_act_accumulated: the same with the weighted sum
    t2t_global        its universal_transformer_act_global: t2t_basic with one h, the mean, for a whole sequence;
                      it knows the future. Padding is left out of the mean here, not there
    pondernet         Banino et al. 2021 (PonderNet), section 2: h_n is the chance to halt at n if not before; the
                      output is the expectation over all M steps, R what is left for step M
    fixed             no halting: N = M, R = 1, output s^M
"""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from veriformer.reference.act import halting_weights
from veriformer.reference.layers import Params, block
from veriformer.reference.pondering import stick_breaking
from veriformer.reference.positions import sinusoidal_positions
from veriformer.reference.universal import Result, halting_probability, of_real_tokens, sight, signals, steps_of


class Dialect(NamedTuple):
    """One choice for each question that the paper leaves open, or answers in two ways.

    halting: "act", "stick_breaking" (h_n of what is left) or "never". read: h is read "after" the step, off s^n, or
    "before" it, off what the step is given. comparison: as in `halting_weights`. forced: at max_steps the
    "remainder" is the last weight, or "none": h_M is. scope: each "position" halts for itself, or a "global" h is
    the mean over a sequence. state: of a halted position it stays a "copy", or will "evolve". output: "mean_field"
    is Σ p s; "ema" p s + (1 - p) output; "last" the state at the end, which for evolving states is that of the last
    step that anybody, in any sequence, needs. again: x is added at every step. position, step: the numbers of the
    first ones; None: no signal.
    """

    halting: str = "act"
    read: str = "after"
    comparison: str = "at_least"
    forced: str = "remainder"
    scope: str = "position"
    state: str = "copy"
    output: str = "mean_field"
    again: bool = False
    position: int | None = 0
    step: int | None = 1


_T2T = Dialect(read="before", comparison="above", forced="none", state="evolve", step=0)
PRESETS = {
    "default": Dialect(),
    "graves": Dialect(again=True, position=None, step=None),
    "ut_paper_text": Dialect(output="last", position=1),
    "t2t_basic": _T2T._replace(output="ema"),
    "t2t_accumulated": _T2T,
    "t2t_global": _T2T._replace(output="ema", scope="global"),
    "pondernet": Dialect(halting="stick_breaking", state="evolve"),
    "fixed": Dialect(halting="never", state="evolve"),
}


def universal_dialect(x: Any, params: Params, *, preset: str | Dialect = "default", **keywords: Any) -> Result:
    """The Universal Transformer of a preset, or of any choice of switches.

    x[B,T,d], params and keywords as in `universal_transformer` -> out[B,T,d], N[B,T] int64, R[B,T].

        z^n = u^(n-1) + signals,   s^n = layer(z^n),   h^n of s^n or z^n;   then as the switches say

    Source: of each preset above; what they keep and what not: P97, P98, P108a.
    Edges: preset = "default" is `universal_transformer`, bit for bit.
    Raises ValueError for an unknown preset, and as `universal_transformer` does.
    """
    result, _ = dialect_and_halting(x, params, preset=preset, **keywords)
    return result


def dialect_and_halting(
    x: Any, params: Params, *, preset: str | Dialect = "default", heads: int, norm: str = "post", mask: Any = None,
    causal: bool = False, memory: Any = None, memory_mask: Any = None, max_steps: int, epsilon: float = 0.01,
) -> tuple[Result, Any]:  # fmt: skip
    """What `universal_dialect` gives, and the halting probabilities h[B,T,M] that led there."""
    how = preset if isinstance(preset, Dialect) else PRESETS.get(preset)
    if how is None:
        near, known = _nearest(preset), ", ".join(PRESETS)
        raise ValueError(f"universal_dialect: preset: got {preset!r}, nearest is {near!r}; wanted one of {known}")
    real, seen, masks = sight(x, params, 0, mask, causal, memory, memory_mask, heads)
    xp = array_namespace(x)
    x = xp.where(real[..., None], x, 0.0)
    u, running, total = x, real, 0.0
    halting, states = [], []
    for n in steps_of(max_steps):
        z = _signalled(u + x if how.again and n > 1 else u, how, n)
        s, _ = block(z, params["layer"], None, seen, heads=heads, norm=norm, **masks)
        h = _halting(z if how.read == "before" else s, params, how, real)
        u = xp.where(running[..., None], s, u) if how.state == "copy" else s
        total = total + h
        running = running & (total <= 1 - epsilon if how.comparison == "above" else total < 1 - epsilon)
        halting.append(h)
        states.append(u)
    heard = xp.stack(halting, axis=-1)
    weights, steps, remainder = _weights(heard, how, epsilon)
    out = _output(weights, steps, xp.stack(states, axis=-2), real, how)
    return of_real_tokens(real, out, steps, remainder), heard


def _signalled(u: Any, how: Dialect, n: int) -> Any:
    """The state u[B,T,d] before step n with the sinusoids of position and step, as far as there are any."""
    if how.position is not None and how.step is not None:
        return u + signals(u, how.position, how.step + n - 1)
    count, offset = (u.shape[1], how.position) if how.step is None else (1, how.step + n - 1)
    if offset is None:
        return u
    return u + array_namespace(u).astype(sinusoidal_positions(count, u.shape[2], offset=offset, like=u), u.dtype)


def _halting(s: Any, params: Params, how: Dialect, real: Any) -> Any:
    """h[B,T] of s[B,T,d]: each position's own, the mean over the real tokens of its sequence, or 0."""
    xp, h = array_namespace(s), halting_probability(s, params["halt"])
    if how.halting == "never":
        return xp.zeros_like(h)
    if how.scope == "position":
        return h
    count = xp.sum(xp.astype(real, h.dtype), axis=-1, keepdims=True)
    mean = xp.sum(xp.where(real, h, 0.0), axis=-1, keepdims=True) / xp.where(count == 0, 1.0, count)
    return xp.broadcast_to(mean, h.shape)


def _weights(h: Any, how: Dialect, epsilon: float) -> Result:
    """p[B,T,M], N[B,T] and R[B,T] of h[B,T,M]."""
    xp = array_namespace(h)
    if how.halting == "stick_breaking":
        p = stick_breaking(h)
        return p, xp.full_like(h[..., 0], h.shape[-1], dtype=xp.int64), p[..., -1]
    weights, steps, remainder = halting_weights(h, epsilon=epsilon, comparison=how.comparison)
    if how.forced == "remainder":
        return weights, steps, remainder
    more = xp.concat([h, xp.zeros_like(h[..., :1])], axis=-1)
    _, beyond, _ = halting_weights(more, epsilon=epsilon, comparison=how.comparison)
    forced = beyond > h.shape[-1]  # one step more would have been made
    return xp.where(forced[..., None], h, weights), steps, xp.where(forced, 0.0, remainder)


def _output(weights: Any, steps: Any, states: Any, real: Any, how: Dialect) -> Any:
    """out[B,T,d] of p[B,T,M], N[B,T] and s[B,T,M,d]."""
    xp, count = array_namespace(states), states.shape[-2]
    n = xp.arange(1, count + 1, device=device(states))
    if how.output == "last":
        end = steps if how.state == "copy" else xp.broadcast_to(xp.max(xp.where(real, steps, 0)), steps.shape)
        return xp.sum(xp.where((n == end[..., None])[..., None], states, 0.0), axis=-2)
    states = xp.where((n <= steps[..., None])[..., None], states, 0.0)
    if how.output == "mean_field":
        return xp.sum(weights[..., None] * states, axis=-2)
    out = xp.zeros_like(states[..., 0, :])
    for i in range(count):
        w = weights[..., i, None]
        out = w * states[..., i, :] + (1 - w) * out
    return out


def _nearest(name: Any) -> str:
    """The preset that has most pairs of neighbouring letters in common with a name."""

    def pairs(word: str) -> set[str]:
        return {word[i : i + 2] for i in range(len(word) - 1)}

    own = pairs(str(name))
    return max(PRESETS, key=lambda preset: len(own & pairs(preset)) / max(len(own | pairs(preset)), 1))
