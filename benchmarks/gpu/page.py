"""What was judged and timed on a GPU, as a page."""

from __future__ import annotations

from typing import Any

HEAD = [
    "# On a GPU",
    "",
    "Made by `python benchmarks/gpu/run.py --write`.",
]
NOT_RUN = "\n".join([
    *HEAD, "",
    "Not run: there was no CUDA device. Nothing is said here of speed or of results on a GPU. The Triton kernels are",
    "judged in Triton's interpreter on the CPU (`tests/test_triton.py`), `impls/torch_cuda.py` is judged nowhere.",
]) + "\n"  # fmt: skip


def markdown(record: dict[str, Any]) -> str:
    """The page: verdicts, then times."""
    said = ", ".join(f"{key} {value}" for key, value in record["facts"].items())
    lines = [*HEAD, "", f"With {said}; {record['seconds']} s of {record['budget']:g} s.", ""]
    return "\n".join([*lines, *verdict_lines(record["verdicts"]), "", *timing_lines(record)]) + "\n"


def verdict_lines(verdicts: list[dict[str, Any]]) -> list[str]:
    """Laws that hold, do not, and could not be judged."""
    lines = [
        "## Verdicts",
        "",
        "`veriformer check --effort look`: a part of the pinned cases of every law. Worst: the largest error by its",
        "budget.",
        "",
        "| implementation | operation | dtype | laws | worst |",
        "|---|---|---|---|---|",
    ]
    wrong, silent = [], []
    for one in verdicts:
        if "said" in one:
            silent.append(f"- {one['target']}: not judged: {one['said']}")
            continue
        counts = ", ".join(f"{count} {verdict.replace('_', ' ')}" for verdict, count in one["counts"].items())
        name = one["implementation"]
        lines.append(f"| {name} | {one['operation']} | {one['dtype']} | {counts} | {one['ratio']:.2g} |")
        wrong += [f"- **{name} {one['dtype']} {bad['law']}**: {bad['said']}" for bad in one["wrong"]]
    return [*lines, *([""] if wrong or silent else []), *wrong, *silent]


def timing_lines(record: dict[str, Any]) -> list[str]:
    """A table for each work and dtype, the fastest first."""
    lines = ["## Times", "", *explained(record)]
    places: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in record["timings"]:
        places.setdefault((row["work"], row["sizes"], row["dtype"]), []).append(row)
    for (work, sizes, dtype), found in places.items():
        timed = sorted((row for row in found if row["calls"]), key=lambda row: row["seconds"])
        lines += ["", f"### {work} {dtype}", "", f"{sizes}."]
        if timed:
            lines += ["", "| implementation | time | ratio | TFLOP/s | GB/s | worst error by its budget |"]
            lines += ["|---|---|---|---|---|---|", *(timed_line(row, timed[0]["seconds"]) for row in timed)]
        lines += ["", *(f"- {row['implementation']}: {row['said']}" for row in found if row["said"])]
    return lines


def explained(record: dict[str, Any]) -> list[str]:
    """How times were taken."""
    if not record["facts"]["device"].startswith("cuda"):
        return ["A dry run: CPU time in Triton's interpreter at tiny sizes, which says nothing of speed."]
    l2 = record["facts"]["l2_bytes"] / 2**20
    return [
        "Medians of at least 100 calls by CUDA events, launches included; inputs rotate through copies that together",
        f"are twice the L2 of {l2:.0f} MiB, as far as 16 copies reach. Judged before, in memory that held NaN.",
    ]


def timed_line(row: dict[str, Any], best: float) -> str:
    """One implementation."""
    seconds = max(row["seconds"], 1e-12)
    rate = f"{row['flops'] / seconds / 1e12:.3g}" if row["flops"] else ""
    return (
        f"| {row['implementation']} | {seconds * 1e6:.4g} µs | {seconds / max(best, 1e-12):.2f} | {rate} "
        f"| {row['bytes'] / seconds / 1e9:.3g} | {row['ratio']:.2g} |"
    )
