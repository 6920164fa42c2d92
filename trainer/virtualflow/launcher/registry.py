"""Where a running ``virtualflow run`` can be found from another terminal: one small file a job, readable by
its user only.

A file holds the address of the job's coordinator and its token, and beside it is a folder with the identities of its
processes, so directories have mode 0700 and files 0600. They outlive their runner only if that was killed; whoever
reads next removes them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Container
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from virtualflow.atomic_file import PRIVATE, create_whole, read_regular, write_whole
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.certificates import Authority, Party, Role, make_key
from virtualflow.protocol.identity import OWN, PAGE_TOKEN, Credential, Identity, write_identity
from virtualflow.protocol.live_view import PageFrame, page_address
from virtualflow.protocol.settings import ENV_IDENTITY, ENV_TOKEN

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
    """Opens everything in plaintext; of a job with identities, the live page alone (``page_address``)."""
    pid: int
    """The runner."""
    born: int
    """When the runner's process began, in clock ticks since boot: a pid alone may be somebody else's by now."""
    identity: str = ""
    """The folder of the identity by which this user's commands control the job; empty: it is in plaintext."""

    @property
    def credential(self) -> Credential:
        """By what its coordinator is asked.

        Raises:
            ConfigurationError: the job has ended since it was looked up, or its certificate is not valid.
        """
        if not self.identity:
            return self.token
        try:
            return Identity(Path(self.identity))
        except ConfigurationError:
            if (Path(self.identity) / OWN).exists():
                raise
            raise ConfigurationError(f"{self.name} has just ended") from None


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
            _remove(path)
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
        _remove(path)


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


# --- who may take part in a job of this machine -----------------------------------------------------------------------


class JobAccess:
    """How the processes of a job of this runner know each other.

    That is by certificates of an authority that lives and dies in this process; in a job in plaintext, by a token in
    the environment of each.

    Args:
        lifetime: seconds that a certificate is valid for; ``None``: the job is in plaintext.
    """

    def __init__(self, job: RunningJob, lifetime: float | None) -> None:
        self.token = secrets.token_urlsafe(32)
        self.credential: Credential = self.token
        self.control = ""
        """The folder of the identity of this runner, and of the commands of its user."""
        self._uid, self._lifetime = secrets.token_hex(16), lifetime
        self._folder = _identities(_path(job.name))
        self._issued: dict[Path, Party] = {}
        if lifetime is not None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._authority = Authority.make(job.name, time.time())
            self.control = self._issue("control", "control", "")
            self.credential = Identity(Path(self.control))

    def environment(self, role: Role, name: str, uid: str = "") -> dict[str, str]:
        """What a process that is about to start is told of who it is."""
        if self._lifetime is None:
            return {ENV_TOKEN: self.token}
        folder = self._issue(role, name, uid)
        if role == "coordinator":
            write_whole(Path(folder) / PAGE_TOKEN, self.token.encode(), PRIVATE)
        return {ENV_IDENTITY: folder}

    def renew(self, ended: Container[str]) -> None:
        """Issue all certificates anew, but for workers of these uids."""
        for folder, party in [*self._issued.items()]:
            if party.role == "worker" and party.uid in ended:
                del self._issued[folder]
            else:
                self._issue(party.role, party.name, party.uid)

    def _issue(self, role: Role, name: str, uid: str) -> str:
        assert self._lifetime is not None
        folder, key = self._folder / f"{name}.{uid}".rstrip("."), make_key()
        party = self._issued[folder] = Party(self._uid, role, name, uid)
        certificate = self._authority.issue(key.public_key(), party, time.time(), self._lifetime)
        write_identity(folder, key, certificate, [self._authority.certificate])
        return str(folder)


def _reachable(job: RunningJob) -> RunningJob:
    if not job.url:
        raise ConfigurationError(f"{job.name} is only just starting; ask again in a moment")
    return job


def _path(name: str) -> Path:
    return directory() / f"{name}.json"


def _identities(path: Path) -> Path:
    """The folder of a job's identities, beside its file."""
    return path.with_suffix(".identity")


def _remove(path: Path) -> None:
    shutil.rmtree(_identities(path), ignore_errors=True)
    path.unlink(missing_ok=True)


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
            _remove(path)
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
