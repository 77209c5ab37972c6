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
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from veriformer import offline
from veriformer.boundary import Outcome, Request, describe_error
from veriformer.calling import UsageError
from veriformer.channel import Channel
from veriformer.jax_arrays import started
from veriformer.processes import (
    ONE_THREAD,
    adopt,
    die_with_parent,
    end,
    end_children,
    exit_words,
    fill_memory,
    give_up_first,
    lead,
)
from veriformer.targets import Description, Loaded, Options, load

IMPORT_PATIENCE = 300.0
CALL_PATIENCE = 20.0
"""Seconds a call may take before the first hang; after one, 20 times the slowest good call."""
DESCRIBED = 86
"""Exit code of a child that has said what the target is."""
MARK = "VERIFORMER_WORKER"
"""Set in a worker, so that a target that starts a run when imported does not start workers without end."""


class WorkerLost(Exception):
    """The process that holds the target ended while it was being imported."""


class Remote:
    """The judging side's handle on a worker: describes the target and makes calls.

    Raises UsageError from the target, and WorkerLost where importing it ended the process.
    """

    def __init__(
        self,
        target: str,
        options: Options,
        patience: float = CALL_PATIENCE,
        import_patience: float | None = None,
        offline: bool = False,
    ) -> None:
        """patience, import_patience: seconds for a call and for an import. offline: without a network."""
        if MARK in os.environ:
            raise UsageError(
                "a run was started while a target was being imported for another; "
                "put that call under `if __name__ == '__main__':`"
            )
        self.target, self.options, self.offline = target, options, offline
        self.patience, self.hung, self.slowest = patience, False, 0.0
        self.import_patience = IMPORT_PATIENCE if import_patience is None else import_patience
        self.notes, self.told = tempfile.TemporaryFile("a+b", buffering=0), 0
        self._begin()

    def _begin(self) -> None:
        """Start the process that imports the target."""
        self.imports = False
        ours, theirs = socket.socketpair()
        environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1"), MARK: "1"}
        if self.options.device == "cpu":
            environment.setdefault("JAX_PLATFORMS", "cpu")  # or JAX takes most of a GPU's memory, for nothing
        if self.offline:
            environment[offline.VARIABLE] = str(self.notes.fileno())
        # -c rather than -m: the folder that python puts on the path is then the caller's own
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from veriformer.isolate import main; main()", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), self.notes.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # there may be any amount of it
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a group to end, without a terminal to ask anything on
            env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        theirs.close()
        self.control = Connection(ours.detach())
        self.control.send((self.target, self.options, os.getcwd()))
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
            if not self.control.poll(self.import_patience):
                said = f"importing {self.target} took more than {self.import_patience:.3g} s"
                raise WorkerLost(said + self._noted())
            answer = self.control.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            said = f"importing {self.target} ended the process ({exit_words(code)})"
            raise WorkerLost(said + self._noted()) from None
        if isinstance(answer, UsageError):
            raise answer
        self.told = self._written()
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
        with contextlib.suppress(OSError, EOFError):  # the process is gone; fetching the outcome says how
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
            return Outcome("timeout", f"no answer within {limit:.3g} s{self._noted()}")
        except (EOFError, OSError, pickle.UnpicklingError):
            return Outcome("crash", f"the process ended: {self._reap()}{self._noted()}")
        if self.offline:
            self.told = self._written()  # what a call got over is no part of a later one's trouble
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
            child.receive(self.import_patience)
        except TimeoutError:
            end(self.pid)
        except (EOFError, OSError):
            pass

    def _kill(self) -> None:
        end(self.pid)
        self._reap()

    def _reap(self) -> str:
        """How the child ended; where it took the process along that had imported the target, that is begun anew."""
        if self.child is not None:
            self.child.close()
            self.child = None
        try:
            self.control.send(("reap", self.pid))
            return exit_words(int(self.control.recv()))
        except (EOFError, OSError):
            code = self._close()
            try:
                self._begin()
            except WorkerLost as error:
                raise UsageError(str(error)) from None
            return f"{exit_words(code)}, with the one that had imported the target"

    def _noted(self) -> str:
        """What a target that was judged offline tried to reach, as far as it was not said yet."""
        # never truncated: a file that is, while others append to it, may be left with a hole
        lines = os.pread(self.notes.fileno(), 1000, self.told).decode(errors="replace").splitlines()
        self.told = self._written()
        return f"; it {lines[0]}" if lines else ""

    def _written(self) -> int:
        return os.fstat(self.notes.fileno()).st_size

    def close(self) -> None:
        """End the worker."""
        self._close()
        self.notes.close()

    def _close(self) -> int:
        if self.child is not None:
            self.child.close()
            self.child = None
        self.control.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def main() -> None:
    """The worker: import the target, say what it is, then fork a child for each request to."""
    # Ctrl-C reaches the whole process group; the judging side alone decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    adopt()
    give_up_first()
    control = Connection(int(sys.argv[1]))
    target, options, folder = control.recv()
    sys.path[:] = [p for p in sys.path if p]
    offline.enter()
    try:
        _work(control, target, options, folder)
    finally:
        end_children()


def _work(control: Connection, target: str, options: Options, folder: str) -> None:
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
    except BaseException as error:
        said = str(error) if isinstance(error, UsageError) else f"importing {target} failed: {describe_error(error)}"
        tried = offline.noted()
        control.send(UsageError(said if tried in said else f"{said}; it {tried}"))
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
                end(child)
            return
        if message == "fork":
            with socket.socket(fileno=os.dup(control.fileno())) as carrier:
                _, (handle,), _, _ = socket.recv_fds(carrier, 1, 1)
            child = begun(handle)
            os.close(handle)
            control.send(child)
        else:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            end(child)  # what it leaves behind in its group
            _, status = os.waitpid(child, 0)
            child = 0
            control.send(os.waitstatus_to_exitcode(status))


def _forked(control: Connection, loaded: Callable[[], dict[str, Loaded]], ready: bool, handle: int) -> int:
    """A child that is a fork of this process. ready: it says when it can be called."""
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            _answer(handle, loaded, ready)
        finally:
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
    offline.enter()
    target, options, folder = pickle.loads(bytes.fromhex(sys.argv[2]))
    _answer(int(sys.argv[1]), lambda: _loaded(target, options, folder), True)
    os._exit(0)


def _answer(handle: int, loaded: Callable[[], dict[str, Loaded]], ready: bool) -> None:
    lead()
    channel = Channel(socket.socket(fileno=handle))
    os.register_at_fork(after_in_child=channel.close)  # or nobody sees this process end while a fork of it lives
    named = loaded()
    offline.noted()  # what importing got over, here or before a fork, is no part of a call's trouble
    if ready:
        channel.send("ready")
    fill_memory()
    serve(channel, named)


def serve(channel: Channel, loaded: dict[str, Loaded]) -> None:
    """Answer calls until the other side hangs up."""
    while True:
        try:
            name, operation, request = channel.receive()
        except (EOFError, OSError):
            return
        boundary = loaded[name].boundaries[operation]
        outcome, trouble = offline.explained(boundary.cross(request)), boundary.framework.trouble()
        channel.send(Outcome("crash", trouble) if trouble else outcome)
