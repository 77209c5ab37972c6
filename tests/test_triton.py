"""The Triton kernels in Triton's interpreter: laws through the command line, and what the interpreter hides.

Each test runs processes of its own, as the interpreter is chosen for a whole process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toys import ROOT, run_python

pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed (pip install veriformer[triton])")

INTERPRETED = {"TRITON_INTERPRET": "1"}
LAWS = {
    "kernels": (
        "softmax/equals-the-reference", "softmax/gradient-equals-the-reference", "softmax/sums-to-one",
        "layer_norm/equals-the-reference", "layer_norm/gradient-equals-the-reference",
        "layer_norm/width-one-gives-the-bias",
    ),
    "attention": (
        "attention/equals-the-reference", "attention/gradient-equals-the-reference",
        "attention/future-has-no-influence", "attention/empty-row-is-as-declared",
        "attention/grouped-heads-add-up",
    ),
    "cached": (
        "cached_attention/equals-the-reference", "cached_attention/new-rows-are-stored",
        "cached_attention/nan-beyond-stays-there", "cached_attention/writes-the-caches-it-was-given",
    ),
}  # fmt: skip
"""A part of the laws: `TRITON_INTERPRET=1 veriformer check triton` takes minutes for all of them."""


@pytest.mark.parametrize("variant", LAWS)
def test_laws_hold_in_the_interpreter(variant: str, tmp_path: Path) -> None:
    laws = [word for law in LAWS[variant] for word in ("--law", law)]
    words = ("--effort", "look", "--dtype", "float32,float16", "--json", str(tmp_path / "all.json"), "--in-process")
    target = f"{ROOT}/tests/triton_quick.py:{variant}"
    done = run_python("-m", "veriformer", "check", target, *words, *laws, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert {(row["law"], row["dtype"]) for row in rows} == {
        (law, dtype) for law in LAWS[variant] for dtype in ("float32", "float16")
    }
    assert {row["verdict"] for row in rows} == {"pass"}


def test_the_registered_name_is_judged_in_workers_that_interpret(tmp_path: Path) -> None:
    words = ("check", "triton", "--law", "sums-to-one", "--effort", "look")
    done = run_python("-m", "veriformer", *words, folder=tmp_path, env=INTERPRETED)
    assert done.returncode == 0 and "triton:attention" in done.stdout, done.stdout + done.stderr


def test_without_a_device_and_the_interpreter_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_python("-m", "veriformer", "check", "triton", folder=tmp_path, env={"TRITON_INTERPRET": "0"})
    assert (done.returncode, done.stderr) == (2, "veriformer: triton works on cuda, not on cpu: add --device cuda\n")


REFUSED = """
import torch
from veriformer.impls import triton_attention, triton_cached, triton_kernels
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    x = torch.ones(1, 1, 2, 4, dtype=dtype)
    for call in (lambda: triton_kernels.softmax(x), lambda: triton_attention.attention(x, x, x),
                 lambda: triton_cached.cached_attention(x, x, x, x, x, torch.zeros(1, dtype=torch.int64))):
        try:
            call()
        except ValueError as error:
            print(error)
"""


def test_what_is_not_supported_is_refused_in_one_line(tmp_path: Path) -> None:
    def said(interpret: str) -> list[str]:
        done = run_python("-c", REFUSED, folder=tmp_path, env={"TRITON_INTERPRET": interpret})
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    device = "device: got cpu, wanted cuda, or TRITON_INTERPRET=1 set before Python starts"
    double = "dtype: got float64, wanted float32 or bfloat16 or float16"
    assert said("0") == [device] * 6 + [double] * 3
    wanted = "wanted float32 or float16, as Triton's interpreter is wrong in bfloat16"
    assert said("1") == [f"dtype: got bfloat16, {wanted}"] * 3 + [f"dtype: got float64, {wanted}"] * 3


SMALL = """
import torch
from veriformer.impls import triton_attention as t
q = torch.ones(1, 1, 8, 16)
places = (*q.stride()[:3], *q.stride()[:3], *q.stride()[:3], *q.stride())
out, lse = torch.empty_like(q), torch.empty(1, 1, 8)
t.attention_kernel[(1, 1)](q, q, q, q, out, lse, *places, 1, 1, 8, 8, 16, 16, 1.0, False, False, 16, 16, 8, 16)
"""


def test_tiles_below_what_a_gpu_multiplies_are_refused(tmp_path: Path) -> None:
    """The interpreter multiplies tiles of any size."""
    done = run_python("-c", SMALL, folder=tmp_path, env=INTERPRETED)
    assert done.returncode == 1 and "tl.dot takes sizes from 16" in done.stderr


def test_kernels_keep_to_their_arrays_fill_them_and_need_no_order(tmp_path: Path) -> None:
    names = ("softmax", "layer_norm", "attention", "masked", "cached")
    calls = [(name, dtype) for name in names for dtype in ("float32", "float16")]
    found = findings([(ROOT / "impls", *call) for call in calls], tmp_path)
    assert dict(zip(calls, found, strict=True)) == dict.fromkeys(calls, set())


# what is wrong: (file, the line, what stands there instead, the call, what shows it)
FAULTS: dict[str, tuple[str, str, str, str, set[str]]] = {
    "values_loaded_beyond_the_end": (
        "triton_attention.py",
        "total = total * shrink + tl.sum(p, 1)\n        v = _tile(v_ptr, columns, v_t, keys, value_width, DV)",
        "total = total * shrink + tl.sum(p, 1)\n        v = _tile(v_ptr, columns, v_t, keys + N, value_width, DV)",
        "attention", {"tail"},
    ),
    "cache_loaded_beyond_the_end": (
        "triton_cached.py",
        "columns * v_t, columns < keys,",
        "columns * v_t, columns >= 0,",
        "cached", {"tail"},
    ),
    "blocks_that_see_nothing_are_not_written": (
        "triton_attention.py",
        "    _put(out_ptr +",
        "    if _last_key(block, queries, keys, M, CAUSAL) > 0:\n        _put(out_ptr +",
        "attention", {"memory"},
    ),
    "the_first_program_makes_the_sum_that_others_add_to": (
        "triton_kernels.py",
        "    tl.store(db_ptr + place, db, mask=columns < width)",
        "    later = (columns < width) & (columns * 0 + part > 0)\n"
        "    tl.store(db_ptr + place, db * 0, mask=later)\n"
        "    db += tl.load(db_ptr + columns, mask=later, other=0.0)\n"
        "    tl.store(db_ptr + columns, db, mask=columns < width)",
        "layer_norm", {"order", "shared"},
    ),
    "programs_add_to_one_sum": (
        "triton_kernels.py",
        "    tl.store(db_ptr + place, db, mask=columns < width)",
        "    db += tl.load(db_ptr + columns, mask=columns < width, other=0.0)\n"
        "    tl.store(db_ptr + columns, db, mask=columns < width)",
        "layer_norm", {"shared", "memory"},
    ),
}  # fmt: skip


def test_what_a_plain_run_hides_is_seen(tmp_path: Path) -> None:
    calls = []
    for fault, (file, line, instead, call, _) in FAULTS.items():
        text = (ROOT / "impls" / file).read_text()
        assert text.count(line) == 1, fault
        (tmp_path / fault).mkdir()
        (tmp_path / fault / file).write_text(text.replace(line, instead))
        calls.append((tmp_path / fault, call, "float32"))
    found = dict(zip(FAULTS, findings(calls, tmp_path), strict=True))
    assert found == {fault: shown for fault, (*_, shown) in FAULTS.items()}


def findings(calls: list[tuple[Path, str, str]], where: Path) -> list[set[str]]:
    """For each (folder, call, dtype), in what respects it differs from a plain run, which itself is right."""
    text = json.dumps([(str(folder), *rest) for folder, *rest in calls])
    done = run_python(str(ROOT / "tests" / "triton_guarded.py"), folder=where, input=text)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [call for call, row in zip(calls, rows, strict=True) if not row.pop("right")] == []
    return [{how for how, true in row.items() if true} for row in rows]
