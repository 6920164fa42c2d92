"""Builds gloo's full mesh, and closes the port behind it.

gloo accepts whoever connects to a member's port, for as long as the mesh lives, keeps the connection, and ends the
process when no descriptor is left for the next one: 1,100 connections of a stranger did. But once the mesh stands, no
member connects any more. So then nobody listens any more either: gloo's socket is taken out of its event loop, and one
that nobody can reach is put in its place, since gloo still holds its number and closes it in the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from virtualflow.protocol.descriptors import raise_descriptor_limit

logger = logging.getLogger("virtualflow.worker")

_FDINFO = Path("/proc/self/fdinfo")
_making = threading.Lock()
"""Held while a device is made: what then listens anew is its own."""


def build_mesh(store: c10d.Store, rank: int, size: int, address: str, timeout: float) -> c10d.ProcessGroup:
    """Connect to the other members; blocks until the mesh stands.

    Args:
        store: the rendezvous.
        rank: this member's.
        size: how many members there are.
        address: where this member listens meanwhile, on a port of the system's choice.
        timeout: seconds.

    Raises:
        RuntimeError: the members could not all be reached in time.
    """
    raise_descriptor_limit()  # until the mesh stands, strangers are accepted
    gloo: Any = c10d.ProcessGroupGloo  # its options are not in torch's type stubs
    options = gloo._Options()
    with _making:
        before = _listening()
        options._devices = [gloo.create_device(hostname=address)]
        fresh = _listening() - before
    options._timeout = timedelta(seconds=timeout)
    group: c10d.ProcessGroup = gloo(store, rank, size, options)
    if len(fresh) == 1:
        _stop_listening(*fresh.pop())
    else:
        logger.debug("%d sockets listen since gloo's device was made; which is gloo's is not known", len(fresh))
    return group


def _listening() -> set[tuple[int, int]]:
    """Number and inode of this process's listening TCP sockets; none where the system does not tell."""
    found = set()
    for entry in _FDINFO.iterdir() if _FDINFO.is_dir() else ():
        number = int(entry.name)
        with contextlib.suppress(OSError):  # it was closed meanwhile
            about = os.fstat(number)
            if not stat.S_ISSOCK(about.st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as copy:
                internet = copy.family in (socket.AF_INET, socket.AF_INET6)
                if internet and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add((number, about.st_ino))
    return found


def _stop_listening(number: int, inode: int) -> None:
    """Close the port of gloo's listening socket, without gloo noticing."""
    loops = _event_loops_of(number)
    if not loops or os.fstat(number).st_ino != inode:
        return
    with (
        socket.socket(fileno=os.dup(number)) as listener,
        socket.socket(socket.AF_UNIX) as nowhere,
    ):
        # gloo may be about to accept: from one that listens and that nobody reaches it gets nobody, not an error.
        nowhere.setblocking(False)
        nowhere.bind("")  # a name of the system's choice
        nowhere.listen(0)
        for loop in loops:
            with select.epoll.fromfd(os.dup(loop)) as events, contextlib.suppress(FileNotFoundError):
                events.unregister(number)
        os.dup2(nowhere.fileno(), number, inheritable=False)
        listener.shutdown(socket.SHUT_RDWR)  # a process that was forked meanwhile may hold it, too


def _event_loops_of(number: int) -> list[int]:
    """Descriptors of the epoll instances that watch a descriptor."""
    loops = []
    for entry in _FDINFO.iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            watched = [line.split()[1] for line in entry.read_text().splitlines() if line.startswith("tfd:")]
            if str(number) in watched:
                loops.append(int(entry.name))
    return loops
