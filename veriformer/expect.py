"""The only ways in which a law fails, and the record of what one attempt judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from veriformer.budgets import Bound, error_ratio
from veriformer.case import show_number


class Refused(Exception):
    """The implementation declined the case cleanly."""


class Broken(Exception):
    """A law does not hold. kind names the way, and stays the same while the case is made smaller."""

    def __init__(self, kind: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.kind, self.message, self.facts = kind, message, facts


@dataclass
class Trial:
    """What one attempt at a law saw: elements judged, worst ratio, and the calls made.

    bits: log2 of the unit roundoff that the results behave like, where a law measured it. compared:
    (got, other) arrays of every comparison, while `keep` is set. lenient: nothing fails; for a look at
    how compared values depend on outputs.
    """

    judged: int = 0
    undetermined: int = 0
    ratio: float = 0.0
    bits: float | None = None
    calls: list[Any] = field(default_factory=list)
    compared: list[tuple[np.ndarray, np.ndarray | None]] = field(default_factory=list)
    keep: bool = False
    lenient: bool = False

    def note(self, got: np.ndarray, other: np.ndarray | None = None) -> bool:
        """Count and perhaps keep one comparison; True where it must not fail."""
        if self.keep:
            self.compared.append((got, other))
        return self.lenient


_trials: list[Trial] = [Trial()]


def current() -> Trial:
    """The attempt in progress."""
    return _trials[-1]


class recording:
    """A context in which a fresh `Trial` records what the law judges."""

    def __init__(self, keep: bool = False, lenient: bool = False) -> None:
        self.trial = Trial(keep=keep, lenient=lenient)

    def __enter__(self) -> Trial:
        _trials.append(self.trial)
        return self.trial

    def __exit__(self, *_: Any) -> None:
        _trials.pop()


def expect_close(
    got: Any,
    wanted: Any,
    allowed: Any,
    *,
    largest: float = np.inf,
    bound: Bound | None = None,
    what: str = "",
) -> None:
    """Every element of got lies within allowed of wanted; allowed is an error budget, never a guess.

    got, wanted, allowed: arrays that broadcast to one shape. allowed = inf: undetermined, counted
    apart. what: words for the message when the values are not simply an output.
    """
    got, wanted, allowed = np.broadcast_arrays(
        np.asarray(got, float), np.asarray(wanted, float), np.asarray(allowed, float)
    )
    trial = current()
    open_ended = ~np.isfinite(allowed)
    trial.undetermined += int(open_ended.sum())
    trial.judged += int(got.size - open_ended.sum())
    if trial.note(got, wanted) or not got.size:
        return
    ratio = np.asarray(error_ratio(got, wanted, allowed, largest))
    index = place_of(int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio))), got.shape)
    worst = tuple(index)
    value = float(ratio[worst])
    if value <= 1:
        trial.ratio = max(trial.ratio, value)
        return
    facts: dict[str, Any] = {
        "index": index,
        "got": float(got[worst]),
        "wanted": float(wanted[worst]),
        "allowed": float(allowed[worst]),
        "ratio": value,
        "term": bound.dominant(worst) if bound is not None else "",
        "what": what,
        "comparison": len(trial.compared) - 1,
    }
    finite = np.isfinite(facts["got"]) or not np.isfinite(facts["wanted"])
    raise Broken("value" if finite else "not finite", value_message(facts), **facts)


def place_of(flat: int, shape: tuple[int, ...]) -> list[int]:
    """The index of an element counted in C order."""
    return [int(i) for i in np.unravel_index(flat, shape)]


def value_message(facts: Mapping[str, Any]) -> str:
    """'-0.5 at [0,0,1,0], wanted 0 ± 4.8e-07 (1.0e+06 error budgets off)'."""
    got, wanted, allowed = facts["got"], facts["wanted"], facts["allowed"]
    place = " at [" + ",".join(map(str, facts["index"])) + "]" if facts["index"] else ""
    what = f"{facts['what']} " if facts.get("what") else ""
    line = f"{what}{show_number(got)}{place}, wanted "
    if allowed == 0:
        return f"{line}exactly {show_number(wanted)}"
    off = f" ({facts['ratio']:.1e} error budgets off)" if np.isfinite(facts["ratio"]) else ""
    return f"{line}{show_number(wanted)} ± {allowed:.1e}{off}"


def expect_within(got: Any, bound: Bound, *, largest: float = np.inf, what: str = "") -> None:
    """Every element of got lies within the bound of the reference."""
    if np.shape(got) != np.shape(bound.value):
        raise Broken("shape", f"shape {np.shape(got)}, wanted {np.shape(bound.value)}")
    expect_close(got, bound.value, bound.allowed, largest=largest, bound=bound, what=what)


def expect_same(got: Any, wanted: Any, *, what: str = "") -> None:
    """The same numbers, bit for bit (zeros of either sign are the same)."""
    if np.shape(got) != np.shape(wanted):
        raise Broken("shape", f"shape {np.shape(got)}, wanted {np.shape(wanted)}")
    expect_close(got, wanted, np.zeros(np.shape(wanted)), what=what)


def expect_different(got: Any, other: Any, *, what: str) -> None:
    """Every element differs from its counterpart: what must have influence has it."""
    got, other = np.broadcast_arrays(np.asarray(got, float), np.asarray(other, float))
    current().judged += got.size
    same = got == other
    if not current().note(got, other) and same.any():
        index = place_of(int(np.argmax(same)), got.shape)
        value = float(got[tuple(index)])
        raise Broken(
            "no influence",
            f"{show_number(value)} at [{','.join(map(str, index))}] both times, wanted a change: {what}",
            index=index,
            got=value,
            other=float(other[tuple(index)]),
            what=what,
            comparison=len(current().compared) - 1,
        )


def expect_finite(got: Any, *, what: str = "") -> None:
    """No NaN and no infinity."""
    got = np.asarray(got, float)
    current().judged += got.size
    wrong = ~np.isfinite(got)
    if not current().note(got) and wrong.any():
        index = place_of(int(np.argmax(wrong)), got.shape)
        value = float(got[tuple(index)])
        lead = f"{what} " if what else ""
        raise Broken(
            "not finite",
            f"{lead}{show_number(value)} at [{','.join(map(str, index))}], wanted a finite number",
            index=index,
            got=value,
            what=what,
            comparison=len(current().compared) - 1,
        )


def expect_between(got: Any, low: Any, high: Any, allowed: Any, *, what: str = "") -> None:
    """low <= got <= high, each with its budget."""
    got = np.asarray(got, float)
    # NaN is in no interval; it must not be compared with itself.
    expect_close(got, np.where(np.isnan(got), low, np.clip(got, low, high)), allowed, what=what)


def expect(condition: bool, kind: str, message: str, **facts: Any) -> None:
    """A claim about the call itself rather than about numbers: its type, its side effects."""
    current().judged += 1
    if not current().lenient and not condition:
        raise Broken(kind, message, **facts)


def listed(names: Sequence[str]) -> str:
    """'a, b and c'."""
    names = list(names)
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
