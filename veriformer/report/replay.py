"""Run one stored failing case again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from veriformer.calling import UsageError
from veriformer.case import Case
from veriformer.catalogue import all_laws
from veriformer.checking import Settings, open_targets
from veriformer.expect import Refused, recording
from veriformer.law import find_laws
from veriformer.report.terminal import console_for
from veriformer.subject import attempt
from veriformer.targets import Options


def replay(record: Mapping[str, Any], path: Path) -> int:
    """Print what the case gives now; 1 while the law is broken, 0 once it holds, 4 if it is refused.

    Raises UsageError where the implementation was in memory, or is no longer part of the target.
    """
    if not record["target"]:
        raise UsageError(
            f"{record['implementation']} was a function in memory; run the script {path.name.split('.')[0]}.py"
        )
    law = find_laws(all_laws(), [record["law"]])[0]
    said = record["options"]
    accepts = None if said["accepts"] is None else tuple(said["accepts"])
    options = Options(accepts, tuple(said["returns"]), said["framework"], said["declare"], said.get("device", "cpu"))
    data = path.with_name(path.name.removesuffix(".json") + ".npz")
    arrays = dict(np.load(data)) if data.is_file() else None
    arguments = (Case.from_json(record["case"], arrays), *(revived(value) for value in record["others"]))
    console = console_for()
    with ExitStack() as stack:
        found = {one.name: one for one in open_targets([record["target"]], options, Settings(), stack)}
        if record["implementation"] not in found:
            raise UsageError(f"{record['target']} no longer has {record['implementation']}")
        with recording():
            try:
                broken = attempt(law, found[record["implementation"]], record["dtype"], arguments)
            except Refused as refused:
                console.print(f"refused: {refused}", markup=False)
                return 4
    console.print(f"{law.id}  {record['implementation']}  {record['dtype']}", markup=False)
    console.print(f"  case  {arguments[0].describe()}", markup=False)
    console.print(f"  got   {broken.message}" if broken else "  the law holds for this case", markup=False)
    return 1 if broken else 0


def revived(value: Any) -> Any:
    """A further argument of a law: a case, or plain values."""
    return Case.from_json(value) if isinstance(value, dict) else tupled(value)


def tupled(value: Any) -> Any:
    """JSON lists as the tuples they were."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value
