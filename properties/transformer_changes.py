"""What laws of the encoder-decoder do to a case: silence sublayers, spread attention evenly, rename tokens.

In pre-norm a silent sublayer leaves everything as it is, so that a model in which few others sound is linear, and
its logits can be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.case import Case

LAST = {"attention": ("wo", "bo"), "cross_attention": ("wo", "bo"), "feed_forward": ("w2", "b2")}
"""A sublayer -> its last matrix, and the bias after it."""


def layers(case: Case, stack: str) -> list[str]:
    """The prefixes of the layers of the encoder or the decoder, such as "params.encoder.layers.0."."""
    start = f"params.{stack}.layers."
    numbers = {int(name.removeprefix(start).partition(".")[0]) for name in case.arrays if name.startswith(start)}
    return [f"{start}{number}." for number in sorted(numbers)]


def changed(case: Case, prefix: str, change: Callable[[np.ndarray], np.ndarray], *keys: str) -> Case:
    """The case with the weights of these names below a prefix changed, as far as it has them."""
    names = [name for name in (prefix + key for key in keys) if case[name] is not None]
    return case.with_arrays(**{name: change(case[name]) for name in names})


def silent(case: Case, prefix: str, sublayers: Sequence[str] = tuple(LAST)) -> Case:
    """The case in which these sublayers of one layer give 0."""
    for sublayer in sublayers:
        matrix, bias = (f"{prefix}{sublayer}.{key}" for key in LAST[sublayer])
        if case[matrix] is not None:
            case = case.with_arrays(**{matrix: np.zeros_like(case[matrix]), bias: None})
    return case


def without_norm(case: Case, stack: str) -> Case:
    """The case without the final norm of a stack."""
    return case.with_arrays(**{f"params.{stack}.norm.weight": None, f"params.{stack}.norm.bias": None})


def sounding(case: Case, sublayer: str = "") -> Case:
    """The case in pre-norm, without final norms, where only this sublayer of decoder layers does not give 0."""
    for stack in ("encoder", "decoder"):
        case = without_norm(case, stack)
        for prefix in layers(case, stack):
            case = silent(case, prefix, [name for name in LAST if stack == "encoder" or name != sublayer])
    return case.with_keywords(norm="pre")


def even(case: Case, sublayer: str) -> Case:
    """The case with zero queries in this sublayer of decoder layers: all keys in sight weigh the same."""
    for prefix in layers(case, "decoder"):
        case = changed(case, f"{prefix}{sublayer}.", np.zeros_like, "wq", "bq")
    return case


def plain_channels(case: Case, sublayer: str, value: int = 0) -> Case:
    """The case in which every logit is channel 0, to which each head adds this channel of what it sees.

    Nothing else is in channel 0, but for sinusoids.
    """
    for prefix in (f"{layer}{sublayer}." for layer in layers(case, "decoder")):
        wv, wo = (f"{prefix}{name}" for name in ("wv", "wo"))
        case = case.with_arrays(**dict.fromkeys(prefix + key for key in ("bq", "bk", "bv", "bo")))
        case = case.with_arrays(**{wv: row_of_ones(case[wv], value), wo: row_of_ones(case[wo].T, 0).T})
    table = "params.target_embedding"
    return with_plain_head(case.with_arrays(**{table: np.zeros_like(case[table])}))


def with_plain_head(case: Case) -> Case:
    """The case whose every logit is channel 0."""
    head = np.zeros((case.size("d"), case.size("V")))
    return case.with_arrays(**{"params.head.w": row_of_ones(head, 0), "params.head.b": None})


def row_of_ones(matrix: np.ndarray, row: int) -> np.ndarray:
    """A matrix of this shape with ones in one row and zeros elsewhere."""
    return np.broadcast_to((np.arange(len(matrix)) == row)[:, None], matrix.shape).astype(float)


def counting(case: Case, name: str, channel: int = 0) -> Case:
    """The case whose table of source or target holds 1 + the token's number in one channel, and else nothing."""
    table = np.zeros_like(case[f"params.{name}_embedding"])
    table[:, channel] = 1.0 + np.arange(len(table))
    return case.with_arrays(**{f"params.{name}_embedding": table})


def scale_of(case: Case) -> Any:
    """What embeddings are multiplied by."""
    found = case["params.embedding_scale"]
    return 1.0 if found is None else found


def embedded(case: Case, name: str) -> np.ndarray:
    """What enters the stack of source or target: rows of its table, scaled, and sinusoids, if they are added."""
    x: np.ndarray = case[f"params.{name}_embedding"][case[name]] * scale_of(case)
    if case["positions"] != "sinusoidal":
        return x
    return x + reference.sinusoidal_positions(x.shape[1], x.shape[2], like=np.zeros(0))


def head_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The head's matrix and bias; a tied one is the target's table transposed."""
    w, b = case["params.head.w"], case["params.head.b"]
    w = case["params.target_embedding"].T if w is None else w
    return w, np.zeros(w.shape[1]) if b is None else b


def scored(case: Case, y: np.ndarray) -> np.ndarray:
    """The logits of what left the decoder."""
    w, b = head_of(case)
    return y @ w + b


def handed(case: Case, prefix: str, seen: np.ndarray) -> np.ndarray:
    """What attention makes of a mixture[…,d] that all of its heads see: values, joined, times wo."""
    weight = {key: case[f"{prefix}{key}"] for key in ("wq", "wk", "wv", "wo", "bv", "bo")}
    width = weight["wq"].shape[1] // case["heads"]
    groups = weight["wk"].shape[1] // width
    values = seen @ weight["wv"] + (0 if weight["bv"] is None else weight["bv"])
    heads = np.repeat(values.reshape(*seen.shape[:-1], groups, -1), case["heads"] // groups, -2)
    out: np.ndarray = heads.reshape(*seen.shape[:-1], -1) @ weight["wo"]
    return out if weight["bo"] is None else out + weight["bo"]


def normed(case: Case, x: np.ndarray, prefix: str) -> np.ndarray:
    """x[…,d] by the norm of these names."""
    weight, bias = case[f"{prefix}weight"], case[f"{prefix}bias"]
    found: np.ndarray = reference.rms_norm(x, weight)
    return found if bias is None else np.asarray(reference.layer_norm(x, weight, bias))


def real_tokens(case: Case) -> np.ndarray:
    """Which source tokens are no padding, bool[B,S]."""
    return np.ones(case["source"].shape, bool) if case["mask"] is None else case["mask"]


def padded(case: Case, count: int, front: bool = False) -> Case:
    """The case with tokens that are padding behind the source, or in front of it."""
    shape, front_first = (len(case["source"]), count), -1 if front else 1
    tokens = (case["source"], case.random(count).integers(0, case.size("Vs"), shape))[::front_first]
    masks = (real_tokens(case), np.zeros(shape, bool))[::front_first]
    return case.with_arrays(source=np.concatenate(tokens, 1), mask=np.concatenate(masks, 1))


def renamed(case: Case, name: str, order: np.ndarray) -> Case:
    """The case with the rows of a table in another order, and its tokens named after them; a head with the target."""
    table, tokens = f"params.{name}_embedding", np.argsort(order)[case[name]]
    moved = case.with_arrays(**{table: case[table][order], name: tokens})
    if name == "target":
        moved = changed(moved, "params.head.", lambda array: array[..., order], "w", "b")
    return moved


def untied(case: Case) -> Case:
    """The case with a head of its own that equals the tied one."""
    return case.with_arrays(**{"params.head.w": head_of(case)[0]})


def one_row(case: Case, b: int) -> Case:
    """The case of one batch row."""
    names = [name for name in ("source", "target", "mask") if case[name] is not None]
    return case.with_arrays(**{name: case[name][b : b + 1] for name in names})


def reordered(count: int, pick: int) -> np.ndarray:
    """Another order of so many things, never the same as before if there are two: backwards, or turned."""
    return np.arange(count)[::-1] if pick % 2 else np.roll(np.arange(count), 1 + pick // 2 % max(count - 1, 1))


def small_numbers(count: int, pick: int) -> np.ndarray:
    """1, 2, 3, 1, … from one of them on."""
    return (np.arange(count) + pick) % 3 + 1.0


def powers_of_two(count: int, pick: int) -> np.ndarray:
    """Exact factors, different from channel to channel."""
    return 2.0 ** (small_numbers(count, pick) - 2)
