"""Outcomes of contests as records and as a page."""

from __future__ import annotations

from typing import Any

from contest import Outcome

from veriformer.benchmarks.limits import Limits


def record(outcome: Outcome, machine: Limits, facts: dict[str, Any]) -> dict[str, Any]:
    """A contest's outcome in plain words and numbers: entrants, the fastest first, and every limit with its ratio."""
    contest, rival = outcome.contest, outcome.best(own=False)
    entrants = [
        {
            "name": one.name,
            "ours": one.own,
            "seconds": one.median,
            "ratio": 1.0 if rival is None else outcome.ratio(one.name, rival.name),
        }
        for one in sorted(outcome.entrants, key=lambda one: one.median)
    ]
    return {
        "what": contest.what,
        "entrants": entrants,
        "absent": outcome.absent,
        "wrong": outcome.wrong,
        "limits": judged(outcome),
        "unjudged": unjudged(outcome),
        "floor": floor(outcome, machine),
        "rounds": contest.rounds,
        "note": contest.note,
        "facts": facts,
    }


def judged(outcome: Outcome) -> list[dict[str, Any]]:
    """Every limit of a contest whose two sides were timed, with the ratio that came."""
    return [
        {"name": name, "rival": other, "ratio": outcome.ratio(name, other), "limit": limit}
        | dict(zip(("low", "high"), outcome.quartiles(name, other), strict=True))
        for name, other, limit in pairs(outcome)
        if {name, other} <= {one.name for one in outcome.entrants}
    ]


def verdict(one: dict[str, Any]) -> str:
    """Of a limit: kept, missed, or level, where the limit lies above the lower quartile and below the median."""
    if one["ratio"] <= one["limit"]:
        return "kept"
    return "level" if one["low"] <= one["limit"] else "missed"


def unjudged(outcome: Outcome) -> list[str]:
    """Every limit of a contest of which a side was not timed, in words."""
    timed = {one.name for one in outcome.entrants}
    return [
        f"{name} / {other}, limit {limit:g}: " + ", ".join(sorted({name, other} - timed)) + " not timed"
        for name, other, limit in pairs(outcome)
        if not {name, other} <= timed
    ]


def pairs(outcome: Outcome) -> list[tuple[str, str, float]]:
    """Who is held against whom, and the limit; the fastest where the contest names nobody."""
    contest = outcome.contest
    mine, rival = outcome.best(own=True), outcome.best(own=False)
    name, other = mine.name if mine else "the best of ours", rival.name if rival else "the best of the others"
    first = [(name, contest.against or other, contest.limit)] if contest.others else []
    return first + [(name, other, limit) for name, (limit, other) in contest.limits.items()]


def floor(outcome: Outcome, machine: Limits) -> float:
    """Seconds that the work takes at least on this machine: arithmetic at the peak, or bytes at their bandwidth."""
    contest = outcome.contest
    traffic = contest.bytes / machine.bandwidth_at(contest.bytes) if contest.bytes else 0.0
    return max(contest.flops / machine.peak["float32"], traffic)


def markdown(records: dict[str, Any]) -> str:
    """The page of all contests."""
    lines = [
        "# Speed beside what a user would pick instead",
        "",
        "Made by `python benchmarks/contests/run.py --write`. CPU time of one process on one thread, in turn, the",
        "median over rounds of the ratio to the fastest of the others; every entrant's results were held against the",
        "first one's before it was timed. Ours are in bold. Limit: what the fastest of ours may take of the rival that",
        "is named; with the quartiles of the ratio, and level where the lower one keeps the limit and the median does",
        "not: two calls of the same kernel come out like that. Floor: the least time that the machine's measured",
        "arithmetic and bandwidth allow, where it was worked out. Compare times only within a table.",
        "",
        "| contest | ours | rival | ratio | limit | |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in records.items():
        for one in rows["limits"]:
            word = {"missed": "**missed**"}.get(verdict(one), verdict(one))
            ratio = f"{one['ratio']:.3f} ({one['low']:.2f} to {one['high']:.2f})"
            lines.append(f"| {name} | {one['name']} | {one['rival']} | {ratio} | {one['limit']:.3g} | {word} |")
        lines += [f"| {name} | {words} | | | | not judged |" for words in rows["unjudged"]]
    for name, rows in records.items():
        lines += ["", *section(name, rows)]
    return "\n".join(lines) + "\n"


def section(name: str, rows: dict[str, Any]) -> list[str]:
    """A contest's own table."""
    least = f" Floor {_time(rows['floor'])}." if rows["floor"] else ""
    said = ", ".join(f"{key} {value}" for key, value in rows["facts"].items() if value != "")
    lines = [f"## {name}", "", f"{rows['what']}. {rows['rounds']} rounds.{least}"]
    if rows["note"]:
        lines += ["", rows["note"]]
    lines += ["", "| implementation | time | ratio |", "|---|---|---|"]
    for one in rows["entrants"]:
        shown = f"**{one['name']}**" if one["ours"] else one["name"]
        lines.append(f"| {shown} | {_time(one['seconds'])} | {one['ratio']:.3f} |")
    if left := {**rows["absent"], **rows["wrong"]}:
        lines += ["", "Not timed: " + "; ".join(f"{who}: {why}" for who, why in left.items()) + "."]
    return [*lines, "", f"Taken with {said}."]


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
