"""What makes a case harder to grasp than its failure needs; the reducer brings in none of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.oracle import ATTENTIONS, allowed_keys

RANGES = {"halting": (0.0, 1.0), "step.halting": (0.0, 1.0), "uniform": (0.0, 1.0), "adamw_step.v": (0.0, math.inf)}
"""Arrays, of one operation or of any, whose numbers lie in a range."""


def surprises(arguments: tuple[Any, ...]) -> int:
    """Features that make a case harder to grasp than the failure needs: empty rows, nothing but ignored targets,
    numbers that the operation does not speak of."""
    case = arguments[0]
    return empty_rows(case) + out_of_range(case) if isinstance(case, Case) else 0


def out_of_range(case: Case) -> int:
    """How many numbers lie where no such number is, such as a halting probability of -1."""
    found = 0
    for name, array in case.arrays.items():
        low, high = RANGES.get(name) or RANGES.get(f"{case.operation}.{name}") or (-math.inf, math.inf)
        found += int(((array < low) | (array > high)).sum())
    return found


def empty_rows(case: Case) -> int:
    """Rows of which nothing is left: no key allowed, no logit but -inf, no target kept, no class to smooth towards."""
    if case.operation in ATTENTIONS:
        return int((~allowed_keys(case).any(-1)).any())
    if case.table.params:
        masks = [array for name, array in case.arrays.items() if name in case.table.options and array.dtype == bool]
        return int(any(not mask.any(-1).all() for mask in masks))
    if "axis" in case.table.keywords:
        return int((case["x"] == -np.inf).all(case["axis"]).any())
    if "targets" in case.arrays:
        ignored = bool((case["targets"] == case["ignore_index"]).all())
        alone = case.size("V") == 1 and bool(case["label_smoothing"])
        return int((case["logits"] == -np.inf).all(-1).any()) + int(ignored) + int(alone)
    return int((case["logits"] == -np.inf).all(-1).any()) if "logits" in case.arrays else 0
