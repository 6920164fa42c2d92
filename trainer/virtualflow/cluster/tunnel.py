"""A way from this machine to the live page of a job: ``kubectl port-forward``, for as long as somebody looks.

It needs the rights to read the job's Secret, and for ``pods/portforward``; no right is added to anybody.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Sequence

from virtualflow.cluster.job import Coordinator, Job
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.launcher.supervisor import die_with
from virtualflow.protocol.live_view import page_address

AGAIN = 1.0
"""Seconds between two attempts to reach a coordinator, which may be another one meanwhile."""
LOOK = 5.0
"""Seconds of silence after which it is looked whether the job has that coordinator still: kubectl goes on forwarding to
a pod that is gone until somebody connects."""
STOP = 2.0
OPENING = 45.0
"""Seconds until a way must be open."""
_FORWARDS = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")


def kubectl(*, kubeconfig: str | None, context: str | None) -> list[str]:
    """The beginning of a command to the same cluster."""
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigurationError("the way to the page is kubectl port-forward, and there is no kubectl on the PATH")
    options = {"--kubeconfig": kubeconfig, "--context": context}
    return [program, *(f"{option}={value}" for option, value in options.items() if value is not None)]


def show_page(
    job: Job, command: Sequence[str], port: int, opened: Callable[[str], None], tell: Callable[[str], None]
) -> None:
    """Keep a way open until the job is over; a coordinator that is replaced is found again, at the same port.

    Args:
        job: whose page.
        command: the beginning of a kubectl command.
        port: of this machine; 0: any that is free.
        opened: told the address of the page, as soon as somebody can look at it.
        tell: told what happens to the way later.

    Raises:
        ConfigurationError: there is no coordinator, or it is out of this user's reach.
    """
    place, told, trouble = job.coordinator(), "", ""
    if place is None:
        raise ConfigurationError(
            f"no coordinator of {job.name} runs: the job is {job.phase}; kubectl vf why {job.name} says why"
        )
    while True:
        if place is not None:
            forwarded, said = False, "kubectl has ended"
            with contextlib.closing(_lines([*command, f"--namespace={job.namespace}"], place, port)) as lines:
                for line in lines:
                    if line is None:
                        now = job.refresh().coordinator()
                        if job.finished or now is None or now.pod != place.pod:
                            break
                        continue
                    if match := _FORWARDS.match(line):
                        forwarded, port = True, int(match[1])
                        address = page_address(f"http://127.0.0.1:{port}", place.token, f"{job.namespace}/{job.name}")
                        if address != told:
                            told = address
                            opened(address)
                    said = line.strip() or said
            if not told:
                raise VirtualFlowError(f"{place.pod} cannot be reached: {said}")
            if not forwarded and said != trouble:
                trouble = said
                tell(f"{place.pod} cannot be reached: {said}; trying again")
        if job.refresh().finished:
            tell(f"{job.name} is {job.phase}.")
            return
        time.sleep(AGAIN)
        place = job.coordinator()


class PortForward:
    """A way to a job's live page, kept open by a thread until the job or this process is over.

    Args:
        job: whose page.
        command: makes the beginning of a kubectl command.
    """

    def __init__(self, job: Job, command: Callable[[], list[str]]) -> None:
        self._job, self._command = job, command
        self._told = threading.Event()
        self._address = ""
        self._error = VirtualFlowError(f"the way to the page of {job.name} does not open")
        self.thread = threading.Thread(target=self._keep, name=f"way to {job.name}", daemon=True)
        self.thread.start()

    def address(self) -> str:
        """Where the page is, once it can be opened."""
        self._told.wait(OPENING)
        if not self._address:
            raise self._error
        return self._address

    def _keep(self) -> None:
        try:
            show_page(self._job.refresh(), self._command(), 0, self._found, lambda line: None)
        except VirtualFlowError as error:
            self._error = error
        self._told.set()

    def _found(self, address: str) -> None:
        self._address = address
        self._told.set()


def _lines(command: Sequence[str], place: Coordinator, port: int) -> Generator[str | None, None, None]:
    """What kubectl says while it forwards, and ``None`` when it is silent for long; it ends with whoever reads."""
    forward = ["port-forward", "--address=127.0.0.1", f"pod/{place.pod}", f"{port or ''}:{place.port}"]
    child = subprocess.Popen(
        [*command, *forward],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 - it only calls prctl, and that thread lasts as long
    )
    assert child.stdout is not None
    try:
        rest = b""
        while True:
            if not select.select([child.stdout], [], [], LOOK)[0]:
                yield None
                continue
            read = os.read(child.stdout.fileno(), 4_096)
            *lines, rest = (rest + read).split(b"\n")
            yield from (line.decode(errors="replace") for line in (lines if read else [rest]))
            if not read:
                return
    finally:
        child.terminate()
        try:
            child.wait(STOP)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
