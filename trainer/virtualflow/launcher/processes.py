"""``virtualflow processes``: a worker of several processes, one for each of its devices.

A pod has one container for the training, and ``virtualflow run`` starts one process for a worker; where a worker is
several processes, that is this one. It starts them, passes signals on, and ends with them: the first that ends badly
takes the others with it, as none of them can go on alone, and what it ended with is what this process ends with. One
that ends well while the training goes on has not trained, which is as bad.

It knows nothing of the training and has no torch. It may be process 1 of a container.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from virtualflow._start import from_start
from virtualflow.launcher.supervisor import describe_exit, die_with
from virtualflow.launcher.usage import complain
from virtualflow.protocol.environment import LocalPlace
from virtualflow.protocol.settings import (
    ENV_LAUNCH,
    ENV_LOCAL_RANK,
    ENV_LOCAL_WORLD_SIZE,
    ENV_TERMINATION_LOG,
    ENV_WORKER,
)
from virtualflow.protocol.termination_message import decode_termination_message
from virtualflow.protocol.wording import printable

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
_LINE = re.compile(r"\[(\d{1,2})\] ")
"""What each line begins with that a process prints."""


@dataclass
class _Process:
    local_rank: int
    popen: subprocess.Popen[bytes]
    message: IO[bytes]
    """What it leaves behind when it ends."""
    code: int | None = None
    readers: list[threading.Thread] = field(default_factory=list)

    def send(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.popen.pid, number)

    @property
    def said(self) -> bytes:
        self.message.seek(0)
        return self.message.read()

    @property
    def ended_badly(self) -> bool:
        """Whether the others cannot go on: also one that ends well must have seen the end, or have been let go."""
        return self.code != 0 or decode_termination_message(self.said) is None


def run_processes(count: int, command: Sequence[str]) -> int:
    """Run ``command`` as so many processes of one worker, to their end.

    Returns:
        What the first one that ended badly ended with, as shells say it, or 0.

    Raises:
        OSError: the command cannot be executed.
    """
    processes: list[_Process] = []
    asked: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for process in processes:
            process.send(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    launch, lock = uuid.uuid4().hex, threading.Lock()
    try:
        for local_rank in range(count):
            processes.append(_start(command, local_rank, count, launch))
        for process in processes:  # threads only now: a process is not forked beside them
            process.readers = _relay(process, lock)
        for early in [*asked]:
            pass_on(early, None)
        first = _await_ends(processes)
    except BaseException:
        for process in processes:
            process.send(signal.SIGKILL)
        raise
    for process in processes:
        for reader in process.readers:
            reader.join(1.0)  # a pipe that somebody keeps open is not waited for long
    shown = processes[0] if first is None else first
    _leave_message(shown.said)
    code = shown.code or 0
    if code < 0:
        _die_alike(-code)
        return 128 - code
    return code


def split_line(text: str) -> tuple[int | None, str]:
    """A line of such a worker's output: which of its processes it is of, and what it says; ``None``: of all."""
    found = _LINE.match(text)
    return (None, text) if found is None else (int(found[1]), text[found.end() :])


def process_environment(
    environment: Mapping[str, str], local_rank: int, count: int, launch: str, devices: int
) -> dict[str, str]:
    """What one process of a worker is told of its place, and which accelerator it sees.

    Each sees one, as ``cuda:0``: scripts that say "cuda" need not know of the others.

    Args:
        environment: of the worker.
        devices: how many accelerators the machine, or the pod, has.
    """
    told = {
        **environment,
        ENV_LAUNCH: str(LocalPlace(launch, local_rank, count)),
        ENV_LOCAL_RANK: str(local_rank),
        ENV_LOCAL_WORLD_SIZE: str(count),
    }
    listed = environment.get(_CUDA_DEVICES)
    visible = [str(number) for number in range(devices)] if listed is None else [x for x in listed.split(",") if x]
    if visible:
        told[_CUDA_DEVICES] = visible[local_rank % len(visible)]
    return told


def _start(command: Sequence[str], local_rank: int, count: int, launch: str) -> _Process:
    # Without a directory: the file system of a container may be read-only. In memory where the system has that.
    message: IO[bytes] = (
        open(os.memfd_create("termination-message"), "r+b", buffering=0)  # noqa: SIM115 - as long as this process
        if hasattr(os, "memfd_create")
        else tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    )
    environment = process_environment(os.environ, local_rank, count, launch, _count_devices())
    environment[ENV_TERMINATION_LOG] = f"/dev/fd/{message.fileno()}"
    popen = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(message.fileno(),),
        preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - there is one thread
    )
    return _Process(local_rank, popen, message)


def _count_devices() -> int:
    """Accelerators of NVIDIA's that this machine, or this container, has."""
    with contextlib.suppress(OSError):
        return sum(1 for path in Path("/dev").iterdir() if path.name.removeprefix("nvidia").isdecimal())
    return 0


def _relay(process: _Process, lock: threading.Lock) -> list[threading.Thread]:
    """Pass on what a process prints, each line behind its local rank."""
    prefix = f"[{process.local_rank}] ".encode()

    def read(pipe: IO[bytes], out: IO[bytes]) -> None:
        for line in pipe:
            with lock, contextlib.suppress(OSError):  # nobody may be reading any more
                out.write(prefix + line + (b"" if line.endswith(b"\n") else b"\n"))
                out.flush()

    assert process.popen.stdout is not None
    assert process.popen.stderr is not None
    pipes = ((process.popen.stdout, sys.stdout.buffer), (process.popen.stderr, sys.stderr.buffer))
    readers = [threading.Thread(target=read, args=each, daemon=True) for each in pipes]
    for reader in readers:
        reader.start()
    return readers


def _await_ends(processes: Sequence[_Process]) -> _Process | None:
    """Wait until all have ended; the first that ended badly, after which the others were killed."""
    by_pid, first = {process.popen.pid: process for process in processes}, None
    for pid, code in _ends():
        process = by_pid.get(pid)
        if process is None:
            continue  # what a process left behind: process 1 of a container inherits it
        process.code = process.popen.returncode = code
        if first is None and process.ended_badly:
            first = process
            others = [other for other in processes if other.code is None]
            for other in others:
                other.send(signal.SIGKILL)
            if others:
                _tell(process)
        if all(each.code is not None for each in processes):
            return first
    return first


def _ends() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, 0)
            yield pid, os.waitstatus_to_exitcode(status)


def _tell(process: _Process) -> None:
    how = describe_exit(process.code or 0)
    if process.code == 0:
        how += " before the training was complete"
    name = os.environ.get(ENV_WORKER, "this worker")
    complain(f"process {process.local_rank} of {name} ended ({how}); its other processes cannot go on alone")


def _leave_message(content: bytes) -> None:
    """Say what that process has said, where this worker was told to."""
    target = os.environ.get(ENV_TERMINATION_LOG, "").strip()
    if target and content:
        try:
            from_start(target).write_bytes(content)  # in place: Kubernetes mounts this very file
        except OSError as error:
            complain(f"the termination message cannot be written to {printable(target)}: {error.strerror}")


def _die_alike(number: int) -> None:
    """End by the same signal, so that whoever started this process sees what ended the other; process 1 cannot."""
    with contextlib.suppress(OSError, ValueError):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        sys.stdout.flush()
        os.kill(os.getpid(), number)
