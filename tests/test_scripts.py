"""Scripts of failures: they need nothing of ours, exit with 1 while the fault is there and with 0 once it is gone."""

from __future__ import annotations

import json
import runpy
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toys import SOFTMAX, implementation, run_python, softmax

from veriformer.catalogue import all_laws
from veriformer.checking import in_process
from veriformer.isolate import Remote
from veriformer.law import find_laws
from veriformer.report.kept import replay_record
from veriformer.report.script import save, script_of
from veriformer.running import Item, Row
from veriformer.subject import Implementation
from veriformer.targets import Options, load

LIBRARY = f"""
import ctypes, os, time
import numpy as np
from veriformer_free import *
{SOFTMAX}
BROKEN = True
BUFFER, CALLS = {{}}, []

def changed(make):
    def function(x, *, axis=-1):
        return make(x, axis) if BROKEN else softmax(x, axis=axis)
    return function

def mutates(x, axis):
    out = softmax(x, axis=axis)
    x += 1
    return out

def aliases(x, axis):
    x[...] = softmax(x, axis=axis)
    return x

def stale(x, axis):
    out = softmax(x, axis=axis)
    kept = BUFFER.setdefault((out.shape, out.dtype), np.empty_like(out))
    kept[...] = out
    return kept

def state(x, axis):
    np.random.random()
    return softmax(x, axis=axis)

def refuses(x, axis):
    raise ValueError("no")

def counts(x, axis):
    CALLS.append(1)
    return softmax(x, axis=axis) * (1 + len(CALLS) % 2)

def remembers(x, axis):
    CALLS.append(x.size)
    return softmax(x, axis=axis) * (1 + (len(CALLS) > 1 and CALLS[-2] != x.size))

def loop(x, axis):
    while True:
        pass

MADE = {{
    "value": lambda x, axis: softmax(2 * x, axis=axis),
    "nan": lambda x, axis: softmax(x, axis=axis) * np.nan,
    "raises": lambda x, axis: {{}}[0],
    "refuses": refuses,
    "type": lambda x, axis: None,
    "list": lambda x, axis: [softmax(x, axis=axis)],
    "shape": lambda x, axis: softmax(x, axis=axis)[..., :-1],
    "dtype": lambda x, axis: softmax(x, axis=axis).astype(np.float64),
    "mutates": mutates, "aliases": aliases, "stale": stale, "state": state, "counts": counts, "remembers": remembers,
    "shift": lambda x, axis: softmax(x, axis=axis) * (1 + x.mean(axis, keepdims=True)),
    "layout": lambda x, axis: softmax(x, axis=axis) * (1 if x.flags.c_contiguous else 2),
    "large": lambda x, axis: softmax(x, axis=axis) * (1 + (x.size > 64)),
    "large shape": lambda x, axis: softmax(x, axis=axis)[..., (x.size > 64):],
    "segfaults": lambda x, axis: ctypes.string_at(0), "leaves": lambda x, axis: os._exit(0),
    "exits": lambda x, axis: exit(0), "loops": loop, "interrupts": lambda x, axis: signal.raise_signal(2),
}}
VARIANTS = {{name: {{"softmax": changed(make)}} for name, make in MADE.items()}}

def attention(q, k, v):
    last = 1 if BROKEN and k.shape[2] > 1 else 0
    s = np.swapaxes(k, -1, -2)
    s = softmax(q @ s * q.shape[-1] ** -0.5) if not last else softmax((q @ s * q.shape[-1] ** -0.5)[..., :-last])
    return s @ v[:, :, : s.shape[-1]]

def attention_with_lse(q, k, v):
    s = q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
    top = s.max(-1, keepdims=True)
    lse = top[..., 0] + np.log(np.exp(s - top).sum(-1))
    return softmax(s) @ v, lse + BROKEN

VARIANTS["attention"] = {{"attention": attention, "attention_with_lse": attention_with_lse}}

def heads_last(q, k, v):
    q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    out = np.swapaxes(softmax(q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5) @ v, 1, 2)
    out[:, 2:, 1:] += BROKEN
    return out

VARIANTS["heads last"] = {{"attention": heads_last}}
def clip(grads, max_norm):
    norm = np.sqrt(sum(np.sum(g * g) for g in grads))
    return [g * np.float32(min(1.0, max_norm / norm if norm else 1.0)) for g in grads]

def clipping(change, factor=1):
    def clip_by_global_norm(grads, max_norm):
        return change(clip(grads, factor * max_norm)) if BROKEN else clip(grads, max_norm)
    return {{"clip_by_global_norm": clip_by_global_norm}}

VARIANTS["no list"] = clipping(lambda found: found[0])
VARIANTS["one too few"] = clipping(lambda found: found[1:])
VARIANTS["clips"] = clipping(list, 2)

def act(halting, states):
    total = np.cumsum(halting, -1)
    total[..., -1] = np.inf
    n = 1 + (total >= 0.99).argmax(-1)
    place = np.arange(1, halting.shape[-1] + 1)
    left = 1 - np.where(place < n[..., None], halting, 0).sum(-1)
    weights = np.where(place < n[..., None], halting, np.where(place == n[..., None], left[..., None], 0))
    return ((weights[..., None] * states).sum(-2), n, left)[: 2 if BROKEN else 3]

VARIANTS["two of three"] = {{"adaptive_computation_time": act}}

def rate(change):
    def noam(step, width, warmup):
        right = width**-0.5 * min(step**-0.5, step * warmup**-1.5) if step else 0.0
        return change(right) if BROKEN else right
    return noam

VARIANTS["no number"] = {{"noam_schedule": rate(str)}}
VARIANTS["number"] = {{"noam_schedule": rate(lambda right: 2 * right)}}
VARIANTS["number of another dtype"] = {{"noam_schedule": rate(np.float32)}}
VARIANTS["sums"] = {{"logsumexp": lambda x: np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1) + BROKEN}}
"""
FAILURES = {
    "value": ("softmax/equals-the-reference", "value"),
    "nan": ("softmax/finite-on-plain-data", "not finite"),
    "raises": ("softmax/returns-an-array", "raised"),
    "refuses": ("softmax/returns-an-array", "raised"),
    "type": ("softmax/returns-an-array", "type"),
    "list": ("softmax/returns-an-array", "type"),
    "shape": ("softmax/returns-an-array", "shape"),
    "dtype": ("softmax/keeps-the-dtype", "dtype"),
    "mutates": ("softmax/leaves-inputs-untouched", "input changed"),
    "aliases": ("softmax/returns-its-own-memory", "aliased"),
    "stale": ("softmax/returns-its-own-memory", "stale"),
    "state": ("softmax/keeps-global-state", "state changed"),
    "counts": ("softmax/repeats-itself", "value"),
    "remembers": ("softmax/history-changes-nothing", "value"),
    "shift": ("softmax/shift-changes-nothing", "value"),
    "layout": ("softmax/layout-changes-nothing", "value"),
    "large": ("softmax/equals-the-reference", "value"),
    "large shape": ("softmax/equals-the-reference", "shape"),
    "attention": ("attention/visible-keys-have-influence", "no influence"),
    "heads last": ("attention/equals-the-reference", "value"),
    "no list": ("clip_by_global_norm/returns-an-array", "type"),
    "one too few": ("clip_by_global_norm/returns-an-array", "type"),
    "clips": ("clip_by_global_norm/equals-the-reference", "value"),
    "two of three": ("adaptive_computation_time/returns-an-array", "type"),
    "no number": ("noam_schedule/returns-an-array", "type"),
    "number": ("noam_schedule/equals-the-reference", "value"),
    "number of another dtype": ("noam_schedule/keeps-the-dtype", "dtype"),
    "sums": ("logsumexp/equals-the-reference", "value"),
}
RUNNER = """
import json, runpy, sys
sys.modules["veriformer"] = None
codes = {}
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        codes[path.rpartition("/")[2]] = error.code
print("\\n" + json.dumps(codes))
"""


def library(folder: Path, text: str = LIBRARY) -> Path:
    (folder / "veriformer_free.py").write_text("import signal\n")
    (folder / "lib.py").write_text(text)
    return folder / "lib.py"


def failing(one: Implementation, law: str, dtype: str = "float32") -> Row:
    return Item(find_laws(all_laws(), [law])[0], one, dtype, "smoke").run()


def write_script(row: Row, one: Implementation, path: Path) -> str:
    save(script_of(row, one), path)
    json.dumps(replay_record(row, one), allow_nan=False)
    return str(path)


def codes(scripts: list[str], folder: Path) -> dict[str, int]:
    done = run_python("-c", RUNNER, *scripts, folder=folder)
    assert done.returncode == 0, done.stderr
    return {name.removesuffix(".py"): code for name, code in json.loads(done.stdout.splitlines()[-1]).items()}


def repair(path: Path) -> None:
    path.write_text(path.read_text().replace("BROKEN = True", "BROKEN = False"))


def test_every_kind_of_failure_has_a_script_that_tells_broken_from_fixed(tmp_path: Path) -> None:
    path = library(tmp_path)
    loaded = {one.description.name.partition(":")[2]: one for one in load(str(path), Options())}
    scripts, kinds = [], {}
    for name, (law, _) in FAILURES.items():
        declare = {"layout": "BTHD", "grouped_heads": "false"} if name == "heads last" else {}
        one = in_process(load(f"{path}:{name}", Options(declare=declare))[0] if declare else loaded[name])
        row = failing(one, law, one.main_dtype(law.partition("/")[0]))
        assert row.failure is not None, f"{name}: {row.verdict} {row.reason}"
        kinds[name] = (law, row.failure.kind)
        scripts.append(write_script(row, one, tmp_path / f"{name}.py"))
    assert kinds == FAILURES
    assert codes(scripts, tmp_path) == dict.fromkeys(FAILURES, 1)
    repair(path)
    assert codes(scripts, tmp_path) == dict.fromkeys(FAILURES, 0)


def test_scripts_for_lse_and_for_bfloat16(tmp_path: Path) -> None:
    path = library(tmp_path)
    both = in_process(load(f"{path}:attention", Options())[0])
    low = in_process(load(f"{path}:value", Options(declare={"dtypes": "bfloat16"}))[0])
    lse = failing(both, "attention_with_lse/equals-the-reference")
    value = failing(low, "softmax/equals-the-reference", "bfloat16")
    scripts = [write_script(lse, both, tmp_path / "lse.py"), write_script(value, low, tmp_path / "low.py")]
    assert "results1[1]" in Path(scripts[0]).read_text() and "ml_dtypes.bfloat16" in Path(scripts[1]).read_text()
    assert codes(scripts, tmp_path) == {"lse": 1, "low": 1}
    repair(path)
    assert codes(scripts, tmp_path) == {"lse": 0, "low": 0}


def test_large_inputs_are_beside_the_script(tmp_path: Path) -> None:
    one = in_process(load(f"{library(tmp_path)}:large", Options())[0])
    path = Path(write_script(failing(one, "softmax/equals-the-reference"), one, tmp_path / "large.py"))
    assert path.with_suffix(".npz").is_file() and "data['x1']" in path.read_text() and path.stat().st_size < 3000


@pytest.mark.parametrize("variant", ["segfaults", "leaves", "exits", "loops"])
def test_a_script_for_a_call_that_ends_or_hangs_the_process(variant: str, tmp_path: Path) -> None:
    path = library(tmp_path)
    remote = Remote(f"{path}:{variant}", Options(), patience=0.3 if variant == "loops" else 20.0)
    one = Implementation(remote.descriptions[0], remote.call, f"{path}:{variant}")
    row = failing(one, "softmax/returns-an-array")
    remote.close()
    assert row.verdict == {"exits": "error", "loops": "timeout"}.get(variant, "crash")
    script = Path(write_script(row, one, tmp_path / "script.py"))
    script.write_text(script.read_text().replace("alarm(30)", "alarm(1)"))
    done = run_python(str(script), folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    repair(path)
    assert run_python(str(script), folder=tmp_path).returncode == 0


TORCH = """
import torch
BROKEN = True
def softmax(x):
    return torch.softmax(2 * x if BROKEN else x, -1)
def cut(x):
    return torch.softmax(x.detach() if BROKEN else x, -1)
def log_softmax(x):
    p = torch.softmax(x, -1)
    return torch.log(p) if BROKEN else torch.log_softmax(x, -1)
def attention(q, k, v, mask=None):
    s = (q @ k.mT) * q.shape[-1] ** -0.5
    hidden = torch.zeros_like(s, dtype=torch.bool) if mask is None else ~mask.expand(s.shape)
    e = torch.softmax(s.masked_fill(hidden, -1e30), -1)
    free = torch.softmax(s, -1)
    e = (e - free).detach() + free if BROKEN else e
    return torch.where(hidden.all(-1, keepdim=True), 0, e) @ v
VARIANTS = {"value": {"softmax": softmax}, "cut": {"softmax": cut}, "nan": {"log_softmax": log_softmax},
            "leak": {"attention": attention}}
"""
GRADIENTS = {
    "value": ("softmax/equals-the-reference", "bfloat16"),
    "cut": ("softmax/gradient-exists", "float32"),
    "nan": ("log_softmax/gradient-is-finite", "float32"),
    "leak": ("attention/gradient-of-hidden-keys-is-zero", "float32"),
}


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Runs a script in this process, where torch is loaded already, and gives its exit code."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "target", sys)

    def run(path: str) -> Any:
        with monkeypatch.context() as inside, pytest.raises(SystemExit) as left:
            inside.setitem(sys.modules, "veriformer", None)
            runpy.run_path(path, run_name="__main__")
        return left.value.code

    yield run
    signal.alarm(0)


def test_scripts_in_torch_take_gradients(tmp_path: Path, run_here: Callable[[str], Any]) -> None:
    pytest.importorskip("torch")
    path, scripts = library(tmp_path, TORCH), []
    options = Options(declare={"grouped_heads": "false"})
    for loaded in load(str(path), options):
        one, name = in_process(loaded), loaded.description.name.partition(":")[2]
        row = failing(one, *GRADIENTS[name])
        assert row.failure is not None, f"{name}: {row.verdict} {row.reason}"
        scripts.append(write_script(row, one, tmp_path / f"{name}.py"))
    assert [run_here(script) for script in scripts] == [1] * len(GRADIENTS)
    repair(path)
    assert [run_here(script) for script in scripts] == [0] * len(GRADIENTS)


def test_a_script_holds_its_inputs_and_no_word_of_ours(tmp_path: Path) -> None:
    one = in_process(load(f"{library(tmp_path)}:value", Options())[0])
    text = Path(write_script(failing(one, "softmax/equals-the-reference"), one, tmp_path / "value.py")).read_text()
    assert "import veriformer" not in text and "from veriformer" not in text
    assert "x1 = np.array([0.0, " in text and "wanted = 0." in text
    assert max(map(len, text.splitlines())) <= 120 + len(str(tmp_path))


def test_a_function_in_memory_leaves_a_place_to_put_it(tmp_path: Path) -> None:
    one = implementation(softmax=lambda x: softmax(2 * x))
    text = Path(write_script(failing(one, "softmax/equals-the-reference"), one, tmp_path / "value.py")).read_text()
    assert "softmax = None  # a function in memory: put it here" in text
    assert textwrap.dedent(text) == text
