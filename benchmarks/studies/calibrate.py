"""How much of their perturbation budget correct implementations use: `python benchmarks/studies/calibrate.py`.

Each implementation runs forward and backward on adversarial data in every dtype, under the Precision it
should declare. A line of the table is one quantity of one implementation in one dtype:

    cases       how many were judged
    median, p99, max        of the largest ratio error / budget of each case; above 1 a correct kernel is accused
    factor      the smallest factor (`veriformer.budgets.perturbation`) that would have let all cases pass
    open        share of elements with an infinite budget
    *           known to be wrong: torch sums the gradients of layer_norm's weight and bias over the rows in the
                storage dtype, so that in bfloat16 4096 equal terms of 0.1 make 32
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from subjects import LOW, SUBJECTS, Arrays, Subject, cotangent, draw

from veriformer.budgets import Bound, Precision, error_ratio
from veriformer.budgets.perturbation import FACTOR, FACTOR_LOW, perturbed
from veriformer.declarations import DTYPES


def measured(
    subject: Subject, dtype: str, seed: int, **changes: Any
) -> Iterator[tuple[str, np.ndarray, Bound, Precision]]:
    """Each quantity of one case: its name, what the kernel gave, its bound and precision."""
    rng = np.random.default_rng([seed, *subject.name.encode()])
    arrays, options = draw(subject, rng, dtype)
    precision = Precision(dtype, **{**subject.declared(dtype), **changes})
    wrt = tuple(arrays) if subject.backward else ()
    given, y, found = (run_numpy if subject.numpy else run_torch)(subject, arrays, options, rng, dtype)
    (bound,), gradients = perturbed(
        lambda t: subject.reference(t, **options), arrays, precision, cotangents=[given], wrt=wrt
    )
    yield "out", y, bound, precision
    if dtype == "float16" and not np.isfinite(y).all():
        return  # a forward that overflowed says nothing of the backward
    for name, gradient in zip(wrt, found, strict=True):
        yield f"d {name.rpartition('.')[2]}", gradient, gradients[name], precision


def run_torch(subject: Subject, arrays: Arrays, options: Any, rng: np.random.Generator, dtype: str) -> Any:
    """A cotangent, the kernel's result and its gradients."""
    native = {
        name: torch.from_numpy(array).to(getattr(torch, dtype)).requires_grad_(subject.backward)
        for name, array in arrays.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = subject.kernel(native, **options)
    given, found = cotangent(rng, tuple(y.shape), dtype), ()
    if subject.backward:
        found = torch.autograd.grad(y, list(native.values()), torch.from_numpy(given).to(y.dtype))
    return given, plain(y), tuple(map(plain, found))


def run_numpy(subject: Subject, arrays: Arrays, options: Any, rng: np.random.Generator, dtype: str) -> Any:
    """The same of a NumPy kernel."""
    shape = arrays["v"].shape if "v" in arrays else arrays["x"].shape
    shape = (*shape[:2], arrays["q"].shape[2], shape[3]) if "q" in arrays else shape
    given = cotangent(rng, shape, dtype)
    with np.errstate(all="ignore"):
        y, found = subject.kernel(*(a.astype(dtype) for a in (given, *arrays.values())), **options)
    return given, y.astype(np.float64), tuple(gradient.astype(np.float64) for gradient in found if gradient is not None)


def plain(t: torch.Tensor) -> np.ndarray:
    return t.detach().to(torch.float64).numpy()


def factor_needed(computed: np.ndarray, bound: Bound, factor: float) -> float:
    """The factor at which the worst element would have passed; factor: the one of the bound."""
    with np.errstate(all="ignore"):
        excess = np.abs(computed - bound.value) - bound.terms["output"]
        needed = np.where(excess > 0, excess * factor / bound.terms["roundings"], 0.0)
    judged = np.isfinite(bound.allowed) & np.isfinite(bound.value) & np.isfinite(computed)
    return float(np.where(judged, needed, 0.0).max(initial=0.0))


HEAD = f"{'':24}{'':9} {'':10}{'cases':>7}{'median':>9}{'p99':>9}{'max':>9}{'factor':>9}{'open':>8}"


def table(seeds: range, only: str, dtypes: tuple[str, ...], **changes: Any) -> Iterator[str]:
    """The lines of the table."""
    for subject in SUBJECTS:
        for dtype in dtypes if only in subject.name else ():
            if subject.numpy and dtype in LOW:
                continue
            found: dict[str, list[tuple[float, float, float]]] = {}
            for seed in seeds:
                for name, computed, bound, p in measured(subject, dtype, seed, **changes):
                    ratio = error_ratio(computed, bound.value, bound.allowed, p.largest).max(initial=0.0)
                    factor = FACTOR_LOW if dtype in LOW and name != "out" else FACTOR
                    share = float(np.isposinf(bound.allowed).mean()) if bound.allowed.size else 0.0
                    found.setdefault(name, []).append((float(ratio), factor_needed(computed, bound, factor), share))
            for name, values in found.items():
                known = "*" if dtype in LOW and name in subject.known else ""
                yield line(f"{subject.name:24}{dtype:9} {name + known:10}", np.array(values))


def line(title: str, values: np.ndarray) -> str:
    """One line: values[case, (ratio, factor, share)]."""
    ratios, factors, shares = values.T
    return (
        f"{title}{len(ratios):7}{np.median(ratios):9.3f}{np.quantile(ratios, 0.99, method='higher'):9.3g}"
        f"{ratios.max():9.3g}{factors.max():9.3g}{shares.mean():8.3f}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", metavar="FILE", help="write the table here too")
    parser.add_argument("--seeds", type=int, default=40, help="cases of each implementation and dtype")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", metavar="NAME", help="implementations whose name contains this")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [HEAD]
    print(HEAD)
    for text in table(range(given.first, given.first + given.seeds), given.only, tuple(given.dtypes.split(","))):
        print(text, flush=True)
        lines.append(text)
    if given.table:
        about = "\n".join(line.removeprefix("    ") for line in __doc__.splitlines()[2:])
        said = f"`python benchmarks/studies/calibrate.py --seeds {given.seeds} --first {given.first} --table FILE`"
        head = f"# How much of their perturbation budgets correct implementations use\n\nWritten by {said}.\n{about}"
        Path(given.table).write_text("\n".join([head, "```", *lines, "```", ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
