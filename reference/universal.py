"""The Universal Transformer: one layer, applied again and again, for as many steps as each position asks for.

Conventions:
- Positions count from 0, steps n from 1 to M = max_steps. Before every step the sinusoids of position and step are
  added to the state: P[i] to that of position i, P[n] to all.
- Halting is read off the state after the step. A position that has halted keeps its state s^N, which the others
  go on to see, with the sinusoid of the step that they take.
- What is no real token (mask) is nobody's key, and its output, steps and remainder are 0.
- All M steps are made. What a position holds after its own N decides nothing, so a loop that stops once all have
  halted gives the same.

`universal_decoding` has the same token by token, `universal_dialects` what the paper's text and other code do.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device

from veriformer.reference.act import adaptive_computation_time
from veriformer.reference.feed_forward import linear
from veriformer.reference.layers import KV, Params, block, keys_values, rows
from veriformer.reference.positions import sinusoidal_positions

Result = tuple[Any, Any, Any]


def universal_transformer(
    x: Any, params: Params, *, heads: int, norm: str = "post", mask: Any = None, causal: bool = False,
    memory: Any = None, memory_mask: Any = None, max_steps: int, epsilon: float = 0.01,
) -> Result:  # fmt: skip
    """One layer, repeated until every position has halted, and the mean of each position's states.

    x[B,T,d], params: universal_transformer, mask[B,T], memory[B,S,d], memory_mask[B,S]; True = a real token
    -> out[B,T,d], N[B,T] int64, R[B,T].

        s^n = layer(u^(n-1) + P[position] + P[n]),   h^n = sigmoid(s^n w + b),   u^0 = x
        u^n = s^n up to n = N, and then u^N
        out = p_1 s^1 + … + p_N s^N,   p, N and R as in `adaptive_computation_time`

    memory: given if and only if the layer is a decoder_layer, whose self-attention is always causal; every step
    sees the same memory. norm: as in `encoder_layer`; there is no norm after the last step.
    Source: Dehghani et al. 2019 (Universal Transformers), sections 2.1 and 2.2; the weighted mean is that of
    Graves 2016 (Adaptive Computation Time), section 2, and of the paper's listing; P91 to P108.
    Edges: max_steps = 1 is one layer on x + P[position] + P[1]; halting 0 everywhere gives s^M.
    Raises ValueError for max_steps < 1, a memory that the layer has no use for, or lacks, masks that do not fit,
    and as the layer and `adaptive_computation_time` do.
    """
    result, _ = recur(
        x, params, None, heads=heads, norm=norm, mask=mask, causal=causal, memory=memory, memory_mask=memory_mask,
        max_steps=max_steps, epsilon=epsilon,
    )  # fmt: skip
    return result


def recur(
    x: Any, params: Params, past: list[KV] | None = None, *, heads: int, norm: str = "post", mask: Any = None,
    causal: bool = False, memory: Any = None, memory_mask: Any = None, max_steps: int, epsilon: float = 0.01,
) -> tuple[Result, list[KV]]:  # fmt: skip
    """The steps of `universal_transformer` on new tokens, after L earlier ones of which keys and values were kept.

    x[B,T,d], past: k[B,G,L,D], v[B,G,L,Dv] for each step or None -> (out, N, R), the same of all L + T tokens.

    mask[B,L+T] covers all tokens.
    Source: as `universal_transformer`; what is kept: P66, P67.
    Raises ValueError as `universal_transformer` does.
    """
    layer, first = params["layer"], rows(past and past[0])
    real, seen, masks = sight(x, params, first, mask, causal, memory, memory_mask, heads)
    xp = array_namespace(x)
    u, running, total = xp.where(real[..., None], x, 0.0), real, 0.0
    halting, states, kept = [], [], []
    for n in steps_of(max_steps):
        z = u + signals(x, first, n)
        s, kv = block(z, layer, past and past[n - 1], seen, heads=heads, norm=norm, **masks)
        h = halting_probability(s, params["halt"])
        u = xp.where(running[..., None], s, u)
        total = total + h
        running = running & (total < 1 - epsilon)
        halting.append(h)
        states.append(u)
        kept.append(kv)
    result = adaptive_computation_time(xp.stack(halting, axis=-1), xp.stack(states, axis=-2), epsilon=epsilon)
    return of_real_tokens(real, *result), kept


def signals(x: Any, first: int, n: int) -> Any:
    """What is added to x[B,T,d] before a step: the sinusoids of positions first, first + 1, … and of n -> [T,d]."""
    xp, (_, length, width) = array_namespace(x), x.shape
    position, step = (
        sinusoidal_positions(count, width, offset=offset, like=x) for count, offset in ((length, first), (1, n))
    )
    return xp.astype(position + step, x.dtype)


def halting_probability(s: Any, params: Params) -> Any:
    """sigmoid(s w + b), s[B,T,d], params: linear, of one column -> h[B,T]; exp of nothing positive."""
    y = linear(s, params["w"], params.get("b"))[..., 0]
    xp, below = array_namespace(y), y < 0
    e = xp.exp(xp.where(below, y, -y))
    return xp.where(below, e, 1.0) / (1.0 + e)


def of_real_tokens(real: Any, out: Any, steps: Any, remainder: Any) -> Result:
    """The three results, 0 at what is no real token; real[B,T]."""
    xp = array_namespace(out)
    return xp.where(real[..., None], out, 0.0), xp.where(real, steps, 0), xp.where(real, remainder, 0.0)


def steps_of(max_steps: int) -> range:
    """1, 2, … max_steps."""
    if max_steps < 1:
        raise ValueError(f"universal_transformer: max_steps: got {max_steps}, wanted at least 1")
    return range(1, max_steps + 1)


def sight(
    x: Any, params: Params, first: int, mask: Any, causal: bool, memory: Any, memory_mask: Any, heads: int
) -> tuple[Any, KV | None, dict[str, Any]]:
    """Which of x[B,T,d] are real, [B,T], the keys and values of the memory, and what `block` is told of masks.

    mask[B,first+T]. Raises ValueError for what would be seen by nobody, or broadcast, without a word.
    """
    _check(x, params, first, mask, memory, memory_mask)
    xp = array_namespace(x)
    real = xp.ones(x.shape[:2], dtype=xp.bool, device=device(x)) if mask is None else mask[:, first:]
    seen = None if memory is None else keys_values(memory, params["layer"]["cross_attention"], heads=heads)
    mask, memory_mask = (None if m is None else m[:, None, None, :] for m in (mask, memory_mask))
    return real, seen, {"mask": mask, "memory_mask": memory_mask, "causal": causal or memory is not None}


def _check(x: Any, params: Params, first: int, mask: Any, memory: Any, memory_mask: Any) -> None:
    where, (batch, length, width) = "universal_transformer", x.shape
    crosses, halt = "cross_attention" in params["layer"], tuple(params["halt"]["w"].shape)
    if halt != (width, 1):
        raise ValueError(f"{where}: halt: got w of shape {halt}, wanted ({width}, 1)")
    if crosses != (memory is not None):
        got, wanted = "none" if memory is None else "one", "one" if crosses else "none"
        raise ValueError(f"{where}: memory: got {got}, wanted {wanted}: the layer has cross_attention, or has it not")
    if memory is None and memory_mask is not None:
        raise ValueError(f"{where}: memory_mask: got one without a memory, wanted both or none")
    for name, given, shape in (
        ("mask", mask, (batch, first + length)),
        ("memory_mask", memory_mask, memory is not None and tuple(memory.shape[:2])),
    ):
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{where}: {name}: got shape {tuple(given.shape)}, wanted {shape}")
