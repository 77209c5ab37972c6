"""Hold contests and write what came of them.

python benchmarks/contests/run.py [TOPIC[:WORDS] …] [--list] [--write]

TOPIC is a module beside this one, WORDS what the ids of the contests must contain; all by default. --write puts the
outcomes into reports/speed.json, beside those of other contests that are there (where all were held, in their place),
and makes reports/speed.md anew of it. Exit code 1 where a limit was missed or an entrant is wrong, 2 for a topic that
there is not.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

# before NumPy and torch are imported: their pools of threads are made then
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

from contest import Contest, Outcome, hold  # noqa: E402
from written import markdown, record, verdict  # noqa: E402

from veriformer.benchmarks import limits  # noqa: E402

TOPICS = ("kernels", "layers", "decoding", "universal", "training", "steps", "arrays")
REPORTS = Path(__file__).parents[2] / "reports"


def contests(topics: list[str]) -> list[Contest]:
    """The contests that topics name. Raises SystemExit(2), in one line, for one that there is not."""
    found: list[Contest] = []
    for topic in topics or list(TOPICS):
        name, _, words = topic.partition(":")
        if name not in TOPICS:
            print(f"no topic {name!r}; topics: {', '.join(TOPICS)}", file=sys.stderr)
            raise SystemExit(2)
        chosen = [one for one in importlib.import_module(name).CONTESTS if words in one.id]
        if not chosen:
            print(f"no contest of {name} has {words!r} in its id", file=sys.stderr)
            raise SystemExit(2)
        found += chosen
    return found


def shown(outcome: Outcome, rows: dict[str, Any]) -> None:
    """One contest on the terminal, 80 columns."""
    print(f"{outcome.contest.id}: {outcome.contest.what}")
    for one in rows["entrants"]:
        mark = "*" if one["ours"] else " "
        print(f"  {mark} {one['name'][:44]:44} {one['seconds'] * 1e3:10.4f} ms {one['ratio']:7.3f}")
    for name, reason in {**outcome.absent, **outcome.wrong}.items():
        print(f"    {name[:44]:44} {reason}")
    for judged in rows["limits"]:
        said = f"{judged['ratio']:.3f}, limit {judged['limit']:.3g}, {verdict(judged)}"
        print(f"    {judged['name']} / {judged['rival']}: {said}")
    for words in rows["unjudged"]:
        print(f"    not judged: {words}")


def facts() -> dict[str, Any]:
    """What the figures were taken with."""
    found = {"python": platform.python_version(), "cpu": _cpu(), "load": round(os.getloadavg()[0], 1)}
    for name in ("numpy", "torch", "transformers", "jax", "onnxruntime"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measured() -> limits.Limits:
    """The machine's limits, taken in another process: large arrays, once freed, change what an allocator does."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(limits.measured)


def _cpu() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def main() -> int:
    """Hold the contests that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topics", nargs="*", metavar="TOPIC[:WORDS]")
    parser.add_argument("--list", action="store_true", help="show the contests and stop")
    parser.add_argument("--write", action="store_true", help="write reports/speed.json and reports/speed.md")
    given = parser.parse_args()
    chosen = contests(given.topics)
    if given.list:
        print("\n".join(f"{one.id:36} {one.what}" for one in chosen))
        return 0
    import torch

    torch.set_num_threads(1)
    missed = wrong = 0
    machine = measured()
    for one in chosen:
        outcome = hold(one)
        rows = record(outcome, machine, facts())
        shown(outcome, rows)
        missed += sum(verdict(judged) == "missed" for judged in rows["limits"])
        wrong += len(outcome.wrong)
        if given.write:
            store({one.id: rows})
    if given.write and not given.topics:
        store({}, only={one.id for one in chosen})
    print(f"{len(chosen)} contests, {missed} limits missed, {wrong} entrants wrong")
    return 1 if missed or wrong else 0


def store(rows: dict[str, Any], only: Container[str] | None = None) -> None:
    """Put outcomes beside those of other contests, of `only` those if given, and make the page anew."""
    path = REPORTS / "speed.json"
    records = (json.loads(path.read_text()) if path.exists() else {}) | rows
    records = {name: one for name, one in sorted(records.items()) if only is None or name in only}
    path.write_text(json.dumps(records, indent=1) + "\n")
    (REPORTS / "speed.md").write_text(markdown(records))


if __name__ == "__main__":
    sys.exit(main())
