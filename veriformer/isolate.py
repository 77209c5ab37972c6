"""A worker process that holds only the implementation, so that a crash or a hang is one failed call.

`python -m veriformer.isolate` imports the target once and then forks a child for the calls; when a
child dies, the next one is there in milliseconds. The judging process need not import the target's
framework, and nothing of the user's __main__ is imported. A GPU's driver does not live on in a fork:
for a device other than the CPU each child imports the target itself, and so does one that only
describes it. Nor do the threads of JAX: where importing the target has started them, each child is
a fresh process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from veriformer.boundary import Outcome, Request, describe_error
from veriformer.calling import UsageError
from veriformer.jax_arrays import started
from veriformer.targets import Description, Loaded, Options, load

IMPORT_PATIENCE = 300.0
CALL_PATIENCE = 20.0
"""Seconds a call may take before the first hang; after one, 20 times the slowest good call."""
DESCRIBED = 86
"""Exit code of a child that has said what the target is."""
MARK = "VERIFORMER_WORKER"
"""Set in a worker, so that a target that starts a run when imported does not start workers without end."""
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerLost(Exception):
    """The process that holds the target ended while it was being imported."""


class Channel:
    """Objects over a socket with as few system calls as can be: a call's cost is mostly these."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.limit = connection, -1.0

    def send(self, value: Any) -> None:
        """Send one object. Raises OSError where the other side is gone."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self.socket.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self, limit: float = 0.0) -> Any:
        """Wait for one object. Raises TimeoutError after limit seconds (0: never), EOFError at the end."""
        if limit != self.limit:
            # the kernel keeps the time, which saves a system call for each wait
            seconds, rest = divmod(limit, 1.0)
            self.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6))
            )
            self.limit = limit
        data = bytearray(self._some())
        while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
            data += self._some()
        return pickle.loads(memoryview(data)[8:])

    def _some(self) -> bytes:
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            raise TimeoutError from None
        if not data:
            raise EOFError
        return data

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


class Remote:
    """The judging side's handle on a worker: describes the target and makes calls.

    Raises UsageError from the target, and WorkerLost where importing it ended the process.
    """

    def __init__(self, target: str, options: Options, patience: float = CALL_PATIENCE) -> None:
        if MARK in os.environ:
            raise UsageError(
                "a run was started while a target was being imported for another; "
                "put that call under `if __name__ == '__main__':`"
            )
        self.target, self.patience, self.hung, self.slowest = target, patience, False, 0.0
        self.imports = False
        ours, theirs = socket.socketpair()
        self.output = tempfile.TemporaryFile()
        environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1"), MARK: "1"}
        if options.device == "cpu":
            environment.setdefault("JAX_PLATFORMS", "cpu")  # or JAX takes most of a GPU's memory, for nothing
        # -c rather than -m: the folder that python puts on the path is then the caller's own
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from veriformer.isolate import main; main()", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        theirs.close()
        self.control = Connection(ours.detach())
        self.control.send((target, options, os.getcwd()))
        self.child: Channel | None = None
        self.pid, self.waiting = 0, False
        self.descriptions: list[Description] = self._hello()

    def _hello(self) -> list[Description]:
        try:
            return self._greeting()
        except BaseException:
            self.close()
            raise

    def _greeting(self) -> list[Description]:
        try:
            if not self.control.poll(IMPORT_PATIENCE):
                raise WorkerLost(f"importing {self.target} took more than {IMPORT_PATIENCE:.3g} s")
            answer = self.control.recv()
        except EOFError:
            code = self.process.wait()
            raise WorkerLost(f"importing {self.target} ended the process ({exit_words(code)})") from None
        if isinstance(answer, UsageError):
            raise answer
        descriptions, self.imports = answer
        return descriptions  # type: ignore[no-any-return]

    def call(self, name: str, operation: str, request: Request) -> Outcome:
        """Make one call; a crash or a hang comes back as an outcome."""
        return self.start(name, operation, request)()

    def start(self, name: str, operation: str, request: Request) -> Callable[[], Outcome]:
        """Begin one call; the function that comes back waits for its outcome.

        Meanwhile the caller can work. One call at a time: an outcome that nobody fetched is dropped.
        """
        if self.waiting:
            self._finish()
        with contextlib.suppress(OSError):  # the process is gone; fetching the outcome says how
            self._channel().send((name, operation, request))
        self.waiting = True
        return self._finish

    def _finish(self) -> Outcome:
        self.waiting = False
        limit = max(0.1, 20 * self.slowest) if self.hung and self.slowest else self.patience
        try:
            outcome: Outcome = self._channel().receive(limit)
        except TimeoutError:
            self.hung = True
            self._kill()
            return Outcome("timeout", f"no answer within {limit:.3g} s")
        except (EOFError, OSError, pickle.UnpicklingError):
            return Outcome("crash", f"the process ended: {exit_words(self._reap())}")
        if outcome.kind == "crash":  # the device works no more for this process
            self._kill()
        self.slowest = max(self.slowest, outcome.seconds)
        return outcome

    def _channel(self) -> Channel:
        if self.child is None:
            ours, theirs = socket.socketpair()
            self.control.send("fork")
            with socket.socket(fileno=os.dup(self.control.fileno())) as carrier:
                socket.send_fds(carrier, [b"."], [theirs.fileno()])
            theirs.close()
            self.pid = self.control.recv()
            self.child = Channel(ours)
            if self.imports:
                self._await_import(self.child)
        return self.child

    def _await_import(self, child: Channel) -> None:
        """A child that imports the target says when it has; what else becomes of it, fetching the outcome says."""
        try:
            child.receive(IMPORT_PATIENCE)
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
        except (EOFError, OSError):
            pass

    def _kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> int:
        if self.child is not None:
            self.child.close()
            self.child = None
        self.control.send(("reap", self.pid))
        return int(self.control.recv())

    def close(self) -> None:
        """End the worker."""
        if self.child is not None:
            self.child.close()
            self.child = None
        self.control.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()


def exit_words(code: int) -> str:
    """An exit code as people say it, with the signal's name."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def main() -> None:
    """The worker: import the target, say what it is, then fork a child for each request to."""
    # Ctrl-C reaches the whole process group; the judging side alone decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Connection(int(sys.argv[1]))
    target, options, folder = control.recv()
    sys.path[:] = [p for p in sys.path if p]
    os.set_inheritable(control.fileno(), False)
    if options.device == "cpu":
        loaded = _described(control, target, options, folder)
        if loaded is not None:
            fresh = partial(_spawned, pickle.dumps((target, options, folder)).hex())
            _serve_forks(control, fresh if started() else partial(_forked, control, lambda: loaded, False))
        return
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  (no child has to, and it leaves the driver alone)
    child = os.fork()
    if child == 0:
        _described(control, target, options, folder)
        os._exit(DESCRIBED)
    code = _exit_code(control, child)
    if code < 0:
        os.kill(os.getpid(), -code)
    if code != DESCRIBED:
        sys.exit(code)
    _serve_forks(control, partial(_forked, control, lambda: _loaded(target, options, folder), True))


def _loaded(target: str, options: Options, folder: str) -> dict[str, Loaded]:
    return {one.description.name: one for one in load(target, options, folder)}


def _described(control: Connection, target: str, options: Options, folder: str) -> dict[str, Loaded] | None:
    """Import the target and say what it is, or what went wrong."""
    try:
        loaded = _loaded(target, options, folder)
    except UsageError as error:
        control.send(error)
        return None
    except BaseException as error:
        control.send(UsageError(f"importing {target} failed: {describe_error(error)}"))
        return None
    imports = options.device != "cpu" or started()
    control.send(([one.description for one in loaded.values()], imports))
    return loaded


def _exit_code(control: Connection, child: int) -> int:
    """How a child ended, which is killed where nobody waits any more for what it says."""
    with socket.socket(fileno=os.dup(control.fileno())) as peeked:
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if control.poll(0.02) and not peeked.recv(1, socket.MSG_PEEK):
                os.kill(child, signal.SIGKILL)


def _serve_forks(control: Connection, begun: Callable[[int], int]) -> None:
    """Begin a child when asked to, until nobody is there to ask. begun: from the child's socket to its process id."""
    gc.freeze()  # or each collection in a child would copy every page that it shares with this process
    child = 0
    while True:
        try:
            message = control.recv()
        except (EOFError, OSError):
            # nobody will ask for the child's answer, and it may never come
            if child:
                os.kill(child, signal.SIGKILL)
            return
        if message == "fork":
            with socket.socket(fileno=os.dup(control.fileno())) as carrier:
                _, (handle,), _, _ = socket.recv_fds(carrier, 1, 1)
            child = begun(handle)
            os.close(handle)
            control.send(child)
        else:
            _, status = os.waitpid(message[1], 0)
            child = 0
            control.send(os.waitstatus_to_exitcode(status))


def _forked(control: Connection, loaded: Callable[[], dict[str, Loaded]], ready: bool, handle: int) -> int:
    """A child that is a fork of this process. ready: it says when it can be called."""
    pid = os.fork()
    if pid == 0:
        control.close()
        _answer(handle, loaded, ready)
        os._exit(0)
    return pid


def _spawned(said: str, handle: int) -> int:
    """A child that is a process of its own."""
    os.set_inheritable(handle, True)
    call = "from veriformer.isolate import main_of_child; main_of_child()"
    return os.posix_spawn(sys.executable, [sys.executable, "-c", call, str(handle), said], os.environ)


def main_of_child() -> None:
    """A child that is a process of its own: import the target, then answer calls."""
    sys.path[:] = [p for p in sys.path if p]
    target, options, folder = pickle.loads(bytes.fromhex(sys.argv[2]))
    _answer(int(sys.argv[1]), lambda: _loaded(target, options, folder), True)
    os._exit(0)


def _answer(handle: int, loaded: Callable[[], dict[str, Loaded]], ready: bool) -> None:
    channel, named = Channel(socket.socket(fileno=handle)), loaded()
    if ready:
        channel.send("ready")
    serve(channel, named)


def serve(channel: Channel, loaded: dict[str, Loaded]) -> None:
    """Answer calls until the other side hangs up."""
    while True:
        try:
            name, operation, request = channel.receive()
        except (EOFError, OSError):
            return
        boundary = loaded[name].boundaries[operation]
        outcome, trouble = boundary.cross(request), boundary.framework.trouble()
        channel.send(Outcome("crash", trouble) if trouble else outcome)
