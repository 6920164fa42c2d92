"""A worker's name belongs to one process, not to all that inherit its environment.

Whoever starts a worker tells it its name in the environment, which its children get as well: loader processes, an
evaluation script, a second process beside the first. To the coordinator, the latest process of a name is a restarted
worker, so a child that came forward under its parent's would take its place. Hence a process claims its name on its
machine before it does: the kernel lets go of the claim when the process ends, however it does.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import socket
import struct
import sys

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.environment import WorkerEnvironment


class NameTaken(ConfigurationError):
    """This process is none that may speak for the worker, not even to say why it ends."""


_claims: dict[bytes, socket.socket] = {}
"""Of this process."""


def _let_go() -> None:
    for claim in _claims.values():
        claim.close()
    _claims.clear()


os.register_at_fork(after_in_child=_let_go)


def claim_name(environment: WorkerEnvironment) -> None:
    """See that this process is the one that may come forward under the worker's name.

    Raises:
        NameTaken: it only runs the script again to begin as a child, or another process has the name.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise NameTaken(
            f"this process (pid {os.getpid()}) is no worker but a child of process {os.getppid()}, and runs the script "
            'again to begin: put its training under if __name__ == "__main__":, as Python asks of scripts whose '
            "processes are spawned"
        )
    coordinator = environment.coordinator
    if coordinator is None or environment.profile_out is not None or sys.platform != "linux":
        return
    job = "\n".join((coordinator, environment.token, environment.worker))
    name = b"\0virtualflow-" + hashlib.sha256(job.encode()).hexdigest()[:40].encode()
    if name in _claims:
        return
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(name)
        claim.listen(1)
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise NameTaken(
            f"this process (pid {os.getpid()}) has inherited the name {environment.worker}, which process "
            f"{_holder(name)} trains under: only one process of a worker may use vf.elastic; to train here beside the "
            "job, start this script without it, by: env -u VIRTUALFLOW_COORDINATOR -u VIRTUALFLOW_CHECKPOINT_DIR ..."
        ) from None
    _claims[name] = claim


def _holder(name: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return "another"
    return str(struct.unpack("3i", credentials)[0])
