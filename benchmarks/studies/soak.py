"""Many seeds on the implementations that come with the package: `python benchmarks/studies/soak.py --seeds 1-20`.

Runs the searches of `--effort ci` (the pinned cases are the same for every seed) and prints accusations as they come,
each with its seed, then counts per verdict. What the time did not reach is counted as not run. Exit code 1 for any
accusation.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from veriformer.catalogue import all_laws
from veriformer.checking import RED, Settings, open_targets
from veriformer.declarations import DTYPES
from veriformer.law import Law, find_laws
from veriformer.running import Item, Row, items
from veriformer.subject import Implementation
from veriformer.targets import Options

ACCUSED = (*RED, "suite_error")


class Search(Item):
    """An item without its pinned cases."""

    def _pinned(self, row: Row, excluded: Any) -> None:
        return None


def searches(laws: list[Law], one: Implementation, seed: int, deadline: float, dtypes: list[str]) -> Iterator[Search]:
    """The items of one implementation and seed, as searches."""
    for item in items(laws, [one], "ci", seed, deadline, dtypes):
        if item.law.kind != "precision":  # these have pinned cases only
            yield Search(item.law, item.implementation, item.dtype, item.effort, item.seed, item.deadline)


def main() -> None:
    """Run the seeds one after the other and say what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="*", default=["numpy", "torch"])
    parser.add_argument("--seeds", default="1-20", help="FIRST-LAST")
    parser.add_argument("--laws", nargs="*", default=[], help="operations, ids or names of laws; all if absent")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--max-time", type=float, default=float("inf"), metavar="S")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split("-"))
    deadline = time.monotonic() + options.max_time
    laws = find_laws(all_laws(), options.laws) if options.laws else list(all_laws())
    counts: collections.Counter[str] = collections.Counter()
    with ExitStack() as stack:
        opened = list(open_targets(options.targets, Options(), Settings(isolate=False), stack))
        for seed in range(first, last + 1):
            for one in opened:
                for item in searches(laws, one, seed, deadline, options.dtypes):
                    row = item.run() if time.monotonic() < deadline else Row(item.law, one.name, item.dtype)
                    counts[row.verdict] += 1
                    if row.verdict in ACCUSED:
                        said = f"{row.failure.message}; {row.failure.case.describe()}" if row.failure else row.reason
                        print(f"seed {seed}: {row.verdict} {row.id}: {said}", flush=True)
            print(f"seed {seed}: {dict(counts)}", flush=True)
    sys.exit(1 if any(counts[verdict] for verdict in ACCUSED) else 0)


if __name__ == "__main__":
    main()
