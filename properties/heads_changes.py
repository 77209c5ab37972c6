"""What the laws of multi-head attention do to a case: change weights head by head, memory row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.properties.attention_changes import magnitudes
from veriformer.properties.attention_family_build import seen_rows

MATRICES = ("wq", "wk", "wv", "wo")
BIASES = ("bq", "bk", "bv", "bo")


@dataclass(frozen=True)
class Widths:
    """Heads H, key heads G, and the widths D of a query and Dv of a value."""

    heads: int
    groups: int
    width: int
    value_width: int

    @property
    def each(self) -> int:
        """How many query heads share a key head."""
        return self.heads // self.groups

    def of(self, name: str) -> tuple[int, int]:
        """Into how many heads a weight is cut, and how wide each part is."""
        return {
            "q": (self.heads, self.width),
            "k": (self.groups, self.width),
            "v": (self.groups, self.value_width),
            "o": (self.heads, self.value_width),
        }[name[1]]


def widths_of(case: Case) -> Widths:
    """Read off the weights."""
    heads = case["heads"]
    width = case["params.wq"].shape[1] // heads
    groups = case["params.wk"].shape[1] // width
    return Widths(heads, groups, width, case["params.wv"].shape[1] // groups)


def weight(case: Case, name: str) -> np.ndarray:
    """One weight; an absent bias is 0."""
    found = case[f"params.{name}"]
    return np.zeros(case[f"params.w{name[1]}"].shape[1]) if found is None else found


def with_weights(case: Case, **weights: np.ndarray | None) -> Case:
    """The case with other weights, by their short names."""
    return case.with_arrays(**{f"params.{name}": value for name, value in weights.items()})


def by_heads(case: Case, name: str) -> np.ndarray:
    """A weight as [rows, heads, width] (wo: [heads, width, columns], a bias: [heads, width])."""
    heads, width = widths_of(case).of(name)
    array = weight(case, name)
    return array.reshape(heads, width, -1) if name == "wo" else array.reshape(*array.shape[:-1], heads, width)


def with_each(case: Case, change: Callable[[str, np.ndarray], np.ndarray], names: str = "qkv") -> Case:
    """The case with the projections' matrices and biases changed head by head: change(name, [..., heads, width])."""
    found = {}
    for name in names:
        for one in (f"w{name}", f"b{name}"):
            if case[f"params.{one}"] is not None:
                array = weight(case, one)
                found[one] = change(name, by_heads(case, one)).reshape(*array.shape[:-1], -1)
    return with_weights(case, **found)


def only_head(case: Case, head: int) -> Case:
    """The case in which all weights of other heads are 0, and bo too."""
    group = head // widths_of(case).each
    one = with_each(case, lambda name, array: kept(array, head if name == "q" else group))
    wo = by_heads(case, "wo") * (np.arange(case["heads"]) == head)[:, None, None]
    one = with_weights(one, wo=wo.reshape(case["params.wo"].shape))
    return one if case["params.bo"] is None else with_weights(one, bo=np.zeros_like(case["params.bo"]))


def kept(array: np.ndarray, index: int) -> np.ndarray:
    """[..., heads, width] with 0 in all heads but one."""
    return array * (np.arange(array.shape[-2]) == index)[:, None]


def reordered(case: Case, groups: np.ndarray, members: np.ndarray) -> Case:
    """The case with its key heads in another order, and the query heads of each key head too."""
    order = (groups[:, None] * widths_of(case).each + members).ravel()
    moved = with_each(case, lambda name, array: array[..., order if name == "q" else groups, :])
    moved = with_weights(moved, wo=by_heads(case, "wo")[order].reshape(case["params.wo"].shape))
    mask = case["mask"]
    return moved if mask is None or mask.shape[1] == 1 else moved.with_arrays(mask=mask[:, order])


def regauged(case: Case, rng: np.random.Generator, values: bool) -> Case:
    """The case with channels of queries and keys, or of values, permuted and scaled by powers of two, and back."""
    w = widths_of(case)
    count = w.value_width if values else w.width
    orders = np.array([rng.permutation(count) for _ in range(w.groups)])
    factors = 2.0 ** rng.integers(-1, 2, (w.groups, count))

    def change(name: str, array: np.ndarray) -> np.ndarray:
        of = np.arange(array.shape[-2]) // (w.each if name == "q" else 1)
        moved = np.take_along_axis(array, np.broadcast_to(orders[of], array.shape), -1)
        return moved / factors[of] if name == "k" else moved * factors[of]

    if not values:
        return with_each(case, change, "qk")
    of = np.arange(w.heads) // w.each
    wo = np.take_along_axis(by_heads(case, "wo"), orders[of][..., None], 1) / factors[of][..., None]
    return with_weights(with_each(case, change, "v"), wo=wo.reshape(case["params.wo"].shape))


def first_position(case: Case, capabilities: Capabilities) -> int:
    """Where the first row of x stands among the rows of memory."""
    return 0 if capabilities.causal_alignment == "top_left" else case["memory"].shape[1] - case["x"].shape[1]


def is_alone(case: Case) -> bool:
    """Whether x attends to itself."""
    return np.array_equal(case["x"], case["memory"])


def with_memory(case: Case, memory: np.ndarray) -> Case:
    """The case with another memory; where x attends to itself, with another x as well."""
    return case.with_arrays(memory=memory, x=memory) if is_alone(case) else case.with_arrays(memory=memory)


def spoiled(case: Case, rows: np.ndarray, pick: int) -> Case:
    """The case with other finite rows of memory, up to 1e4, where rows[Tk] is True.

    They stay small enough for keys, values and scores to be finite in the dtype.
    """
    limit = 2e3 if case.dtype == "float16" else 1e8
    reach = max(np.abs(case[f"params.w{name}"]).sum(0).max() for name in "kv")
    queries = np.abs(case["x"]).max((0, 1)) @ np.abs(case["params.wq"]) + np.abs(weight(case, "bq"))
    top = min(1e4, limit / max(1.0, reach) / max(1.0, float(queries.max()) * widths_of(case).width))
    other = magnitudes(case.random(pick), case["memory"].shape, top)
    return with_memory(case, np.where(rows[:, None], other, case["memory"]))


def unaffected(case: Case, capabilities: Capabilities, rows: np.ndarray) -> np.ndarray:
    """The outputs [B,Tq] that do not depend on the rows of memory marked in rows[Tk]; none where none is marked."""
    free = ~(seen_rows(case, capabilities) & rows).any(-1).any(1) & rows.any()
    return free & ~rows if is_alone(case) else free


def loud(case: Case, top: float) -> Case:
    """The case with queries and keys whose largest entry lies between half of top and top."""
    found = {}
    for name, rows in (("q", case["x"]), ("k", case["memory"])):
        largest = np.abs(rows @ case[f"params.w{name}"] + weight(case, f"b{name}")).max()
        factor = 2.0 ** np.floor(np.log2(top / largest)) if largest else 1.0
        found |= {one: weight(case, one) * factor for one in (f"w{name}", f"b{name}")}
    return with_weights(case, **{one: array for one, array in found.items() if case[f"params.{one}"] is not None})
