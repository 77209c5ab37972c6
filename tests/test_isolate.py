"""The worker: a call that dies or hangs costs one outcome, an import that does costs one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toys import SOFTMAX, run_python

from veriformer import isolate
from veriformer.boundary import Outcome, Request
from veriformer.calling import UsageError
from veriformer.isolate import Remote, WorkerLost
from veriformer.targets import Options

HOSTILE = f"""
import ctypes, os, signal, sys, time
{SOFTMAX}

def make(act):
    def hostile(x):
        act()
        return softmax(x)
    return hostile

def loop():
    while True:
        pass

ACTS = {{
    "fine": lambda: None, "segfaults": lambda: ctypes.string_at(0), "aborts": os.abort, "leaves": lambda: os._exit(0),
    "exits": lambda: sys.exit(0), "killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "loops": loop,
    "sleeps": lambda: time.sleep(600), "ignores": lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), loop()),
    "writes": lambda: os.write(1, b"raw" * 100000), "closes": lambda: os.closerange(0, 3),
    "prints": lambda: print("x" * 1000000, file=sys.stderr),
}}
VARIANTS = {{name: {{"softmax": make(act)}} for name, act in ACTS.items()}}
"""
REQUEST = Request({"x": np.array([0.0, 0.0])}, {}, "float32")


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    path = tmp_path_factory.mktemp("worker") / "hostile.py"
    path.write_text(HOSTILE)
    one = Remote(str(path), Options())
    yield one
    one.close()


def call(remote: Remote, variant: str) -> Outcome:
    return remote.call(f"{remote.target}:{variant}", "softmax", REQUEST)


def gone(pid: int, seconds: float = 5) -> bool:
    """Whether a process ends within that time (a zombie has ended)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("variant", "kind", "words"),
    [
        ("fine", "ok", ""),
        ("segfaults", "crash", "the process ended: SIGSEGV"),
        ("aborts", "crash", "the process ended: SIGABRT"),
        ("killed", "crash", "the process ended: SIGKILL"),
        ("leaves", "crash", "the process ended: exit code 0"),
        ("exits", "raised", "SystemExit: 0"),
        ("loops", "timeout", "no answer within"),
        ("sleeps", "timeout", "no answer within"),
        ("ignores", "timeout", "no answer within"),
        ("writes", "ok", ""),
        ("prints", "ok", ""),
        ("closes", "ok", ""),
    ],
)
def test_a_hostile_call_is_one_outcome_and_the_next_call_is_answered(
    remote: Remote, variant: str, kind: str, words: str
) -> None:
    remote.hung, remote.patience = False, 0.3 if kind == "timeout" else 20.0
    outcome = call(remote, variant)
    assert (outcome.kind, outcome.message[: len(words)]) == (kind, words)
    remote.hung, remote.patience = False, 20.0
    assert call(remote, "fine").results[0].tolist() == [0.5, 0.5]


def test_patience_is_shorter_after_the_first_hang(remote: Remote) -> None:
    remote.hung, remote.patience, remote.slowest = False, 0.3, 1e-4
    assert call(remote, "sleeps").kind == "timeout"
    remote.patience, start = 20.0, time.monotonic()
    assert call(remote, "sleeps").kind == "timeout" and time.monotonic() - start < 5
    remote.hung = False


def test_the_parent_holds_nothing_of_the_target(remote: Remote) -> None:
    state = np.random.get_state()[1].tobytes()
    call(remote, "fine")
    path = remote.target.partition(":")[0]
    assert path not in {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    assert str(Path(remote.target).parent) not in sys.path
    assert np.random.get_state()[1].tobytes() == state


def import_of(text: str, folder: Path) -> Remote:
    (folder / "target.py").write_text(text)
    return Remote("softmax=target.py:softmax", Options())


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("import no_such_module_here", UsageError, "importing target.py failed: ModuleNotFoundError: No module named"),
        ("def softmax(:", UsageError, "importing target.py failed: SyntaxError"),
        ("import sys; sys.exit(0)", UsageError, "importing target.py failed: SystemExit: 0"),
        ("raise KeyboardInterrupt", UsageError, "failed: KeyboardInterrupt"),
        ("import os; os._exit(3)", WorkerLost, r"ended the process \(exit code 3\)"),
        ("import os; os.abort()", WorkerLost, r"ended the process \(SIGABRT\)"),
    ],
)
def test_an_import_that_fails_is_one_line(
    text: str, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words) as caught:
        import_of(text, tmp_path)
    assert "\n" not in str(caught.value)


def test_an_import_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(isolate, "IMPORT_PATIENCE", 1.25)
    text = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(WorkerLost, match=r"importing softmax=target.py:softmax took more than 1.25 s"):
        import_of(text, tmp_path)
    pid = tmp_path / "pid"
    assert not pid.exists() or gone(int(pid.read_text()))


def test_an_import_that_prints_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = import_of("print('hello ' * 50000, flush=True)" + SOFTMAX, tmp_path)
    assert one.call("target.py:softmax", "softmax", REQUEST).kind == "ok"
    one.close()
    assert one.process.returncode == 0 and capfd.readouterr() == ("", "")


def test_closing_ends_the_worker_and_its_hanging_child(tmp_path: Path) -> None:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE)
    one = Remote(str(path), Options())
    assert call(one, "fine").kind == "ok"
    child = one.pid
    assert one.child is not None
    one.child.send((f"{path}:loops", "softmax", REQUEST))
    one.close()
    assert one.process.poll() is not None and gone(child)


LONELY = """
import os, signal, sys
from veriformer.boundary import Request
from veriformer.isolate import Remote
from veriformer.targets import Options
import numpy as np
one = Remote("hostile.py", Options())
request = Request({"x": np.zeros(2)}, {}, "float32")
one.call("hostile.py:fine", "softmax", request)
one.child.send(("hostile.py:loops", "softmax", request))
print(one.process.pid, one.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_parent_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    done = run_python("-c", LONELY, folder=tmp_path)
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and all(map(gone, pids))


SCRIPT = """
if __name__ != "__main__":
    raise SystemExit("the script was imported")
import veriformer
report = veriformer.check("softmax=mine.py:softmax", laws=["sums-to-one"], effort="smoke", dtypes=["float32"])
print(report.counts())
"""


@pytest.mark.parametrize("way", ["file", "standard input"])
def test_check_isolates_from_an_unguarded_script(way: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOFTMAX)
    (tmp_path / "script.py").write_text(SCRIPT)
    more = {"input": SCRIPT} if way == "standard input" else {}
    done = run_python("-" if more else "script.py", folder=tmp_path, **more)
    assert (done.stdout, done.stderr, done.returncode) == ("{'pass': 1}\n", "", 0)


def test_one_thread_is_what_the_target_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    one = import_of(f"import os\nassert os.environ['OMP_NUM_THREADS'] == '1'{SOFTMAX}", tmp_path)
    one.close()
    assert os.environ["OMP_NUM_THREADS"] == "7" and isinstance(one.process, subprocess.Popen)


ONE_PROCESS = """
import os
FRAMEWORK = "torch"
PID = os.getpid()

def softmax(x):
    if os.getpid() != PID:
        raise AssertionError("this is a fork")
    return x.softmax(-1)

def crash(x):
    os._exit(3)

def spoil(x):
    from veriformer.frameworks import Torch
    Torch.trouble = lambda self: "AcceleratorError: CUDA error: an illegal memory access was encountered"
    raise RuntimeError("CUDA error")  # taken by itself, it were a case that is refused

VARIANTS = {name: {"softmax": f} for name, f in {"softmax": softmax, "crash": crash, "spoil": spoil}.items()}
"""


def test_what_has_used_a_device_is_not_forked(tmp_path: Path) -> None:
    """A GPU's driver refuses all work in a fork of a process that has used it."""
    pytest.importorskip("torch")
    path = tmp_path / "one.py"
    path.write_text(ONE_PROCESS)
    for device, kind in (("cpu", "refused"), ("cpu:0", "ok")):
        one = Remote(str(path), Options(device=device))
        try:
            assert call(one, "softmax").kind == kind
            assert call(one, "crash").kind == "crash"
            assert call(one, "softmax").kind == kind
            spoiled = call(one, "spoil")
            assert spoiled.kind == "crash" and "illegal memory access" in spoiled.message
            assert call(one, "softmax").kind == kind
        finally:
            one.close()


@pytest.mark.parametrize(
    ("line", "said"), [("os._exit(0)", "exit code 0"), ("os.abort()", "SIGABRT"), ("time.sleep(60)", "more than 1 s")]
)
def test_an_import_that_ends_or_hangs_on_a_device_is_one_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(isolate, "IMPORT_PATIENCE", 1.0 if "sleep" in line else 60.0)
    pids = tmp_path / "pid"
    path = tmp_path / "ends.py"
    path.write_text(f"import os, time\nopen({str(pids)!r}, 'w').write(str(os.getpid()))\n{line}\n")
    with pytest.raises(WorkerLost, match=said):
        Remote(str(path), Options(device="cpu:0"))
    if pids.exists():
        assert gone(int(pids.read_text()))
