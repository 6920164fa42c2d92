"""Where a running ``virtualflow run`` can be found from another terminal: one small file a job, readable by
its user only.

A file holds the address of the job's coordinator and its token, so the directory has mode 0700 and the files
0600. A file outlives its runner only if that was killed; whoever reads next removes it.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from virtualflow.atomic_file import PRIVATE, create_whole, read_regular, write_whole
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.live_view import PageFrame, page_address

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"

LOOK = 0.2
"""Seconds between two looks for a job that is awaited."""
_LARGEST = 64 << 10
"""Bytes of such a file."""


@dataclass(frozen=True)
class RunningJob:
    name: str
    url: str
    """Of the coordinator; empty while it starts."""
    token: str
    pid: int
    """The runner."""
    born: int
    """When the runner's process began, in clock ticks since boot: a pid alone may be somebody else's by now."""


def directory() -> Path:
    """The directory of this user's running jobs, made if it is missing.

    Raises:
        ConfigurationError: it cannot be made, or belongs to somebody else.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        path = Path(runtime) / "virtualflow"
    else:
        path = Path(tempfile.gettempdir()) / f"virtualflow-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise ConfigurationError(f"cannot keep track of running jobs in {path}: {error.strerror}") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ConfigurationError(
            f"{path} must be a directory that only you can enter; remove it or set XDG_RUNTIME_DIR"
        )
    return path


def running_jobs() -> list[RunningJob]:
    found = []
    for path in sorted(directory().glob("*.json")):
        job = _read(path)
        if job is not None and _lives(job):
            found.append(job)
        elif job is not None:
            path.unlink(missing_ok=True)
    return found


def claim(name: str | None, suggestion: str) -> RunningJob:
    """Take a name for a job of this process; it has no address yet.

    Args:
        suggestion: without a name: this one, or the first of ``suggestion-2``, ``suggestion-3``, … that is
            free.

    Raises:
        ConfigurationError: the name is malformed or taken.
    """
    if name is not None:
        if not re.fullmatch(NAME_PATTERN, name):
            raise ConfigurationError(
                f"a job cannot be called {name!r}; use letters, digits, dots, dashes and underscores"
            )
        job = _try_claim(name)
        if job is None:
            raise ConfigurationError(f"a job called {name!r} is running already; choose another --name or end that one")
        return job
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", suggestion).strip("._-")[:80] or "job"
    names = (base if number == 1 else f"{base}-{number}" for number in count(1))
    return next(filter(None, map(_try_claim, names)))


def publish(job: RunningJob) -> None:
    """Say where the job's coordinator is; replaces what was said before as a whole."""
    write_whole(_path(job.name), msgspec.json.encode(job), PRIVATE)


def release(job: RunningJob) -> None:
    """The job has ended: remove its file, if it is still this job's."""
    path = _path(job.name)
    present = _read(path)
    if present is not None and (present.pid, present.born) == (job.pid, job.born):
        path.unlink(missing_ok=True)


def find(name: str | None) -> RunningJob:
    """The running job called ``name``, or the only one.

    Raises:
        ConfigurationError: there is none of that name, none at all, or several to choose from, or it has no address
            yet.
    """
    jobs = running_jobs()
    names = ", ".join(job.name for job in jobs)
    if name is not None:
        for job in jobs:
            if job.name == name:
                return _reachable(job)
        there = f"running: {names}" if jobs else "none is running"
        raise ConfigurationError(f"no job called {name!r} is running on this machine ({there})")
    if not jobs:
        raise ConfigurationError("no job is running on this machine; start one with: virtualflow run SCRIPT")
    if len(jobs) > 1:
        raise ConfigurationError(f"several jobs are running ({names}); say which one")
    return _reachable(jobs[0])


def live_page(name: str | None = None, *, height: int = 700, wait: float = 30.0) -> PageFrame:
    """The live page of a job that ``virtualflow run`` runs on this machine, for a notebook: a cell's value shows it.

    The browser must be on this machine, too, or reach its ports.

    Args:
        name: of the job; by default the only one.
        height: in pixels.
        wait: for so many seconds at most, if the job is only just starting.

    Raises:
        ConfigurationError: there is no such job by then, or there are several to choose from.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            job = find(name)
        except ConfigurationError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOOK)
        else:
            return PageFrame(page_address(job.url, job.token, job.name), height)


def _reachable(job: RunningJob) -> RunningJob:
    if not job.url:
        raise ConfigurationError(f"{job.name} is only just starting; ask again in a moment")
    return job


def _path(name: str) -> Path:
    return directory() / f"{name}.json"


def _try_claim(name: str) -> RunningJob | None:
    _, born = _stat(os.getpid()) or ("", 0)
    job = RunningJob(name, "", "", os.getpid(), born)
    path = _path(name)
    for _ in range(2):
        try:
            create_whole(path, msgspec.json.encode(job), PRIVATE)
        except FileExistsError:
            present = _read(path)
            if present is not None and _lives(present):
                return None
            path.unlink(missing_ok=True)
        else:
            return job
    return None


def _read(path: Path) -> RunningJob | None:
    try:
        return msgspec.json.decode(read_regular(path, _LARGEST), type=RunningJob)
    except (OSError, ValueError, RecursionError):
        return None


def _lives(job: RunningJob) -> bool:
    try:
        os.kill(job.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False  # Nobody's, or somebody else's: the runner is ours.
    state, born = _stat(job.pid) or ("", job.born)
    return born == job.born and state not in ("Z", "X")


def _stat(pid: int) -> tuple[str, int] | None:
    """The state of a process and when it began, as the system tells; ``None`` where it does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
