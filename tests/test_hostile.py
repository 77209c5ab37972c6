"""Hostile libraries neither stop a run nor fool it: each ends in one outcome or one line, soon, and leaves nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_isolate import gone
from toys import SOFTMAX, run_python

from veriformer.boundary import Outcome, Request
from veriformer.calling import UsageError
from veriformer.checking import Settings
from veriformer.isolate import Remote, WorkerLost
from veriformer.processes import exit_words
from veriformer.targets import Options

CALLS = f"""
import ctypes, http.client, os, signal, socket, subprocess, sys, threading, time, urllib.request
{SOFTMAX}

def fork(leave):
    pid = os.fork()
    if pid == 0:
        leave()
        time.sleep(600)
    print(pid, file=open("pids", "a"))

def flood():
    for _ in range(64):
        print("x" * 2**24)
        os.write(1, b"x" * 2**24)
        os.write(2, b"x" * 2**24)

def elsewhere():
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def dirty(x):
    right, shape, dtype = softmax(x), x.shape, x.dtype
    del right
    return np.empty(shape, dtype)

def every_other(x):
    every_other.calls = getattr(every_other, "calls", 0) + 1
    return softmax(x) if every_other.calls % 2 else np.empty_like(x)

def quietly(act):
    try:
        act()
    except Exception:
        pass

ask = lambda: urllib.request.urlopen("https://huggingface.co/gpt2", timeout=60)
def loudly():
    try:
        ask()
    except Exception as error:
        raise RuntimeError("We could not get the weights") from error

def again():
    while True:
        quietly(ask)

def locally():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), 5).close()
        socket.create_connection(("localhost", server.getsockname()[1]), 5).close()
    socket.socketpair()[0].close()

ACTS = {{
    "fine": lambda: None, "segfaults": lambda: ctypes.string_at(0), "exits": lambda: sys.exit(0),
    "holds the lock": lambda: ctypes.PyDLL(None).sleep(600),
    "ends its parent": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(5)),
    "ends its group": lambda: os.kill(0, 9),
    "closes everything": lambda: os.closerange(3, 256), "recurses": lambda: ACTS["recurses"](),
    "floods": flood, "leaks threads": lambda: threading.Thread(target=time.sleep, args=[600]).start(),
    "elsewhere": elsewhere, "forks": lambda: fork(lambda: None), "forks away": lambda: fork(os.setsid),
    "downloads": ask, "downloads for weights": loudly, "downloads in vain": lambda: quietly(ask),
    "insists": again, "resolves": lambda: socket.getaddrinfo("example.org", 443),
    "sends": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)), "stays": locally,
    "asks by C": lambda: subprocess.run(
        [sys.executable, "-c", "import socket; socket.create_connection(('1.1.1.1', 53), 60)"], check=True
    ),
}}

def make(act):
    def hostile(x):
        act()
        return softmax(x)
    return hostile

VARIANTS = {{name: {{"softmax": make(act)}} for name, act in ACTS.items()}}
VARIANTS |= {{"dirty": {{"softmax": dirty}}, "every other": {{"softmax": every_other}},
              "unwritten": {{"softmax": lambda x: np.empty_like(x)}}}}
"""
REQUEST = Request({"x": np.array([0.0, 0.0])}, {}, "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the hostile module in it."""
    path = tmp_path_factory.mktemp("hostile")
    (path / "hostile.py").write_text(CALLS)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(path)
        yield path


def opened(folder: Path, **rest: bool) -> Iterator[Remote]:
    one = Remote(str(folder / "hostile.py"), Options(), **rest)  # type: ignore[arg-type]
    yield one
    one.close()


@pytest.fixture(scope="module")
def remote(folder: Path) -> Iterator[Remote]:
    yield from opened(folder)


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[Remote]:
    yield from opened(folder, offline=True)


def call(remote: Remote, variant: str, request: Request = REQUEST, patience: float = 20.0) -> Outcome:
    remote.hung, remote.patience = False, patience
    return remote.call(f"{remote.target}:{variant}", "softmax", request)


@pytest.mark.parametrize(
    ("variant", "kind", "words"),
    [
        ("segfaults", "crash", "the process ended: SIGSEGV"),
        ("exits", "raised", "SystemExit: 0"),
        ("holds the lock", "timeout", "no answer within"),
        ("ends its parent", "crash", "the process ended: SIGKILL, with the one that had imported the target"),
        ("ends its group", "crash", "the process ended: SIGKILL"),
        ("closes everything", "crash", "the process ended: exit code 0"),
        ("recurses", "refused", "RecursionError"),
        ("floods", "ok", ""),
        ("elsewhere", "ok", ""),
    ],
)
def test_a_call_is_one_outcome_and_the_next_is_answered(remote: Remote, variant: str, kind: str, words: str) -> None:
    here, path = os.getcwd(), list(sys.path)
    outcome = call(remote, variant, patience=1.0 if kind == "timeout" else 20.0)
    assert (outcome.kind, outcome.message[: len(words)]) == (kind, words)
    assert call(remote, "fine").results[0].tolist() == [0.5, 0.5]
    assert os.getcwd() == here and sys.path == path and "PATH" in os.environ


def test_leaked_threads_end_with_their_process(remote: Remote) -> None:
    assert [call(remote, "leaks threads").kind for _ in range(60)] == ["ok"] * 60
    pid = remote.pid
    call(remote, "segfaults")
    assert gone(pid) and call(remote, "fine").kind == "ok"


def test_forks_of_the_target_do_not_outlive_it(folder: Path) -> None:
    one = Remote(str(folder / "hostile.py"), Options())
    assert [call(one, name).kind for name in ("forks", "forks away", "segfaults")] == ["ok", "ok", "crash"]
    first, second = map(int, (folder / "pids").read_text().split())
    assert gone(first)
    one.close()
    assert gone(second) or sys.platform != "linux"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 255, 256, 300, 5000])
def test_memory_that_was_not_written_is_never_right(remote: Remote, length: int, dtype: str) -> None:
    request = Request({"x": np.zeros(length)}, {}, dtype)
    unwritten = call(remote, "unwritten", request).results[0]
    assert not np.isclose(unwritten, 1 / length).any()
    kept = [np.allclose(call(remote, "every other", request).results[0], 1 / length) for _ in range(6)]
    assert kept.count(True) == 3 and kept[0] is not kept[1]
    bytes_of_a_result = length * (4 if dtype == "float32" else 8)
    if bytes_of_a_result > 1032:  # smaller blocks are handed on within a call
        assert not np.allclose(call(remote, "dirty", request).results[0], 1 / length)


TORCH = """
import torch
FRAMEWORK = "torch"
def softmax(x):
    right = torch.softmax(x, -1)
    del right
    return torch.empty_like(x)
"""


def test_memory_of_torch_is_never_right_either(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "unwritten.py").write_text(TORCH)
    one = Remote(str(tmp_path / "unwritten.py"), Options())
    for length in (2, 100, 5000):
        request = Request({"x": np.zeros(length)}, {}, "float32")
        assert np.abs(one.call(one.target, "softmax", request).results[0] - 1 / length).min() > 0.1
    one.close()


@pytest.mark.parametrize(
    ("variant", "kind", "words"),
    [
        ("downloads", "raised", "URLError: <urlopen error tried to reach huggingface.co while judged offline"),
        ("downloads for weights", "raised", "tried to reach huggingface.co while judged offline (RuntimeError: We"),
        ("downloads in vain", "ok", ""),
        ("resolves", "raised", "Unreachable: tried to reach example.org while judged offline"),
        ("sends", "raised", "Unreachable: tried to reach 8.8.8.8 while judged offline"),
        ("insists", "timeout", "no answer within 2 s; it tried to reach huggingface.co while judged offline"),
        ("stays", "ok", ""),
    ],
)  # fmt: skip
def test_what_needs_a_network_is_named_when_judged_offline(
    offline: Remote, variant: str, kind: str, words: str
) -> None:
    outcome = call(offline, variant, patience=2.0 if kind == "timeout" else 20.0)
    assert (outcome.kind, outcome.message[: len(words)]) == (kind, words)
    assert call(offline, "fine").kind == "ok"


def test_what_no_hook_sees_has_no_network_either(offline: Remote) -> None:
    """Where the system allows a network namespace; elsewhere the call may reach what it wants."""
    start = time.monotonic()
    outcome = call(offline, "asks by C")
    separate = "import sys\nfrom veriformer.offline import _separate\nsys.exit(not _separate())"
    if sys.platform == "linux" and run_python("-c", separate, folder=Path()).returncode == 0:
        assert outcome.kind == "raised" and "CalledProcessError" in outcome.message and time.monotonic() - start < 15


def test_a_worker_is_online_unless_it_is_asked_not_to_be(remote: Remote) -> None:
    assert call(remote, "stays").kind == "ok" and not os.environ.get("HF_HUB_OFFLINE")
    with pytest.raises(UsageError, match="leave out --in-process"):
        Settings(offline=True, isolate=False)


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", WorkerLost, r"ended the process \(SIGSEGV\)"),
        ("import os, signal; os.kill(os.getpid(), 64)", WorkerLost, r"ended the process \("),
        ("import urllib.request as r; r.urlopen('http://example.org')", UsageError, "tried to reach example.org while"),
        (
            "import socket\nwhile True:\n  try: socket.create_connection(('example.org', 80))\n  except OSError: pass",
            WorkerLost,
            r"took more than 10 s; it tried to reach example\.org",
        ),
        ("import ctypes; ctypes.PyDLL(None).sleep(600)", WorkerLost, "took more than 10 s"),
        ("raise ValueError('two\\nlines')", UsageError, "failed: ValueError: two$"),
    ],
)
def test_an_import_that_goes_wrong_offline_is_one_line(
    line: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    (tmp_path / "target.py").write_text(line + SOFTMAX)
    with pytest.raises(error, match=words) as caught:
        patience = 10.0 if "took more" in words else 120.0
        Remote(str(tmp_path / "target.py"), Options(), import_patience=patience, offline=True)
    assert isinstance(caught.value, (WorkerLost, UsageError)) and "\n" not in str(caught.value)


SWALLOWED = """
import socket
for _ in range({times}):
    try:
        socket.create_connection(("example.org", 80), 5)
    except OSError:
        pass

def softmax(x):
    {act}
"""


@pytest.mark.parametrize("times", [1, 50])
def test_what_an_import_got_over_is_no_part_of_a_calls_trouble(times: int, tmp_path: Path) -> None:
    (tmp_path / "refuses.py").write_text(SWALLOWED.format(times=times, act="raise ValueError('no')"))
    (tmp_path / "asks.py").write_text(
        SWALLOWED.format(times=times, act="socket.create_connection(('huggingface.co', 80), 5)")
    )
    for name, kind, words in (
        ("refuses", "refused", "no"),
        ("asks", "raised", "Unreachable: tried to reach huggingface.co while judged offline"),
    ):
        one = Remote(str(tmp_path / f"{name}.py"), Options(), offline=True)
        for _ in range(2):
            outcome = one.call(one.target, "softmax", REQUEST)
            assert outcome.kind == kind and words in outcome.message and "example.org" not in outcome.message
        one.close()


def test_a_helper_that_an_import_starts_ends_with_the_worker(tmp_path: Path) -> None:
    helper = "import subprocess, sys\nhelper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    (tmp_path / "helped.py").write_text(
        f"{helper}\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(helper.pid)){SOFTMAX}"
    )
    one = Remote(str(tmp_path / "helped.py"), Options())
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid, 0.05)
    one.close()
    assert gone(pid)


@pytest.mark.parametrize(
    ("variant", "code", "words"),
    [("segfaults", 1, "SIGSEGV"), ("ends its parent", 1, "with the one that had imported")],
)
def test_a_check_of_one_ends_soon_with_a_verdict(variant: str, code: int, words: str, folder: Path) -> None:
    words_of_check = ["-m", "veriformer", "check", f"hostile.py:{variant}", "--dtype", "float32", "--effort", "smoke"]
    done = run_python(*words_of_check, "--law", "softmax", "--json", f"{variant}.json", folder=folder)
    assert done.returncode == code and words in done.stdout, done.stdout + done.stderr
    assert done.stderr == "" and (folder / f"{variant}.json").is_file()


@pytest.mark.parametrize(
    ("line", "words"),
    [("import ctypes; ctypes.string_at(0)", "SIGSEGV"), ("import time; time.sleep(600)", "more than 10 s")],
)
def test_a_check_of_one_that_cannot_be_imported_is_a_line(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text(line + SOFTMAX)
    patience = "10" if "more" in words else "120"
    done = run_python(
        "-m", "veriformer", "check", "target.py", "--import-timeout", patience, "--offline", folder=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr and done.stderr.count("\n") == 1


def test_exit_codes_in_words() -> None:
    assert [exit_words(code) for code in (0, 3, -9, -40)] == ["exit code 0", "exit code 3", "SIGKILL", "signal 40"]
