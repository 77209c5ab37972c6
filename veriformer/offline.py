"""A worker without a network: what an implementation tries to reach is named, and nothing waits for an answer.

Python's sockets are watched by an audit hook, which raises; a network namespace of its own, where the system allows
one, keeps what no hook sees, such as C code, from any but local sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from veriformer.boundary import Outcome

VARIABLE = "VERIFORMER_OFFLINE"
"""Set in a worker that is to be offline: the number of the open file to which attempts are written."""
TOLD = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Variables by which libraries are told that there is no network, before they are imported."""
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
"""The kernel's words for namespaces of users and of network devices."""
_ADDRESSED = ("socket.connect", "socket.sendto", "socket.sendmsg")
_NAMED = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo")
attempts: list[str] = []
"""What was tried since it was last explained."""
MANY = 20
"""Attempts of a call that are noted; one that insists would fill the memory and the disk."""


class Unreachable(ConnectionError):
    """The network was asked for by what is judged without one."""


def enter() -> None:
    """Take this process, and all that it starts, off the network, if it was asked to be."""
    if VARIABLE not in os.environ:
        return
    os.environ.update(dict.fromkeys(TOLD, "1"))
    _leave_network()
    sys.addaudithook(_watching(int(os.environ[VARIABLE])))


def explained(outcome: Outcome) -> Outcome:
    """An outcome that an attempt to reach something explains is an error that says so, and never a refusal."""
    said, tried = outcome.message, noted()
    if outcome.kind not in ("refused", "raised") or not tried:
        return outcome
    return Outcome("raised", said if tried in said else f"{tried} ({said})")


def noted() -> str:
    """What was tried first, in words, and forgotten then; empty for nothing."""
    first = attempts[0] if attempts else ""
    attempts.clear()
    return first


def _watching(file: int) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, about: tuple[Any, ...]) -> None:
        if not event.startswith("socket."):
            return
        if event in _ADDRESSED:
            address = about[1]
            host = address[0] if isinstance(address, tuple) and address else None
        elif event in _NAMED:
            host = about[0][0] if isinstance(about[0], tuple) else about[0]
        else:
            return
        if not local(host):
            name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
            tried = f"tried to reach {name} while judged offline"
            if len(attempts) < MANY:
                attempts.append(tried)
                with contextlib.suppress(OSError):
                    os.write(file, (tried + "\n").encode())
            raise Unreachable(tried)

    return hook


def local(host: Any) -> bool:
    """Whether a host is this machine: no host at all (as of a local socket), or one of its own names."""
    name = host.decode(errors="replace") if isinstance(host, bytes) else host
    if not isinstance(name, str):
        return True
    return name in ("", "localhost", "::1", "::", "0.0.0.0", socket.gethostname()) or name.startswith("127.")


def _leave_network() -> None:
    """A network namespace with nothing in it but the loopback device, where it can be had whole."""
    if sys.platform != "linux":
        return
    tried = os.fork()  # half of it were worse than none: without the loopback device
    if tried == 0:
        done = False
        with contextlib.suppress(BaseException):
            done = _separate()
        os._exit(0 if done else 1)
    if os.waitpid(tried, 0)[1] == 0:
        _separate()


def _separate() -> bool:
    library, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if library.unshare(NEW_NETWORK) != 0:
        if library.unshare(NEW_USER | NEW_NETWORK) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up and running
    return True
