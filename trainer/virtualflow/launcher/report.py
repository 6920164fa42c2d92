"""What a job leaves behind: the report and the audit, made from what workers and coordinators told while it ran."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from virtualflow._version import __version__
from virtualflow.atomic_file import write_whole
from virtualflow.coordinator.series import Series
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.http_api import ENDED, Event, Status
from virtualflow.protocol.job_view import ChangeEntry, describe_new_beginning
from virtualflow.protocol.live_view import ViewSeries
from virtualflow.protocol.messages import Change, Generation, RunResult
from virtualflow.protocol.wording import Metric, counted

_GIT_PATIENCE = 5.0
"""Seconds that git has to tell of a commit: a large tree takes its time."""


@dataclass
class JobHistory:
    """What has happened in a job, across all the coordinators that it had."""

    changes: dict[Generation, Change] = field(default_factory=dict)
    pids: dict[str, list[int]] = field(default_factory=dict)
    """Processes of each worker name, in the order in which they were started."""
    last_checkpoint: Event | None = None
    """The latest event about a checkpoint, good or bad."""
    predicted_step_ms: float | None = None
    """How long a step should take, as last predicted."""
    began: float | None = None
    """When the first generation began (Unix time)."""
    ended: float | None = None
    """When the training did."""
    resumed: str | None = None
    """What was said of the checkpoint that the training began from."""
    paces: dict[str, float] = field(default_factory=dict)
    """Milliseconds per virtual node of each worker that some were assigned to last."""
    fingerprint: str = ""
    """What is equal on all workers."""
    devices: set[str] = field(default_factory=set)
    """Kinds of their devices, of all that there were."""
    warnings: list[str] = field(default_factory=list)
    """What workers have warned of, each sentence once."""
    series: Series = field(default_factory=Series)
    """The figures over the steps of the latest run of the script."""
    _seen: set[tuple[float, str, str]] = field(default_factory=set)
    _reached: tuple[int, int, int] = (1, 0, 0)
    """The latest run of the script, and the generation and step of its training."""
    _told: tuple[int, int, int, int] | None = None
    """Run, generation, step and members of the latest figures."""

    def began_again(self, status: Status) -> str | None:
        """A sentence if a training has begun anew that no worker and no coordinator remembers.

        A coordinator that remembers the former one tells of a change, and its generations go on from there. One that
        learns of it from a worker may hear of the step before the latest first.
        """
        if not status.generation or status.phase in ("waiting", "stopped", "failed"):
            return None
        run, generation, step = self._reached
        self._reached = status.run, status.generation, status.step
        if status.run != run or status.step >= step - 1 or status.generation > generation:
            return None
        saved = status.checkpoint.step if status.checkpoint is not None else None
        return describe_new_beginning(step, status.step, saved)

    def take(self, status: Status, now: float = 0.0) -> tuple[list[Change], list[Event]]:
        """Remember what ``status`` tells; the changes and events that were not known before."""
        heard = status.metrics or status.steps_per_second  # a new coordinator knows a step before its figures
        if heard and status.phase not in ENDED:
            self._take_figures(status, now)
        self.fingerprint = status.fingerprint or self.fingerprint
        self.devices.update(status.devices)
        assigned = [worker for worker in status.workers if worker.assigned]
        if assigned and all(worker.pace_ms is not None for worker in assigned):
            self.predicted_step_ms = status.predicted_step_ms
            self.paces = {worker.worker: worker.pace_ms for worker in assigned if worker.pace_ms is not None}
        fresh_changes = []
        for change in (*status.changes, *((status.last_change,) if status.last_change else ())):
            if change.generation not in self.changes:
                fresh_changes.append(change)
            self.changes[change.generation] = change
        fresh_events = []
        for event in status.events:
            key = (event.time, event.kind, event.text)
            if key in self._seen:
                continue
            self._seen.add(key)
            fresh_events.append(event)
            if event.kind == "warning" and event.text not in self.warnings:
                self.warnings.append(event.text)
            elif event.kind == "generation":
                self.began = event.time if self.began is None else self.began
            elif event.kind == "restored" and self.ended is None:
                self.resumed = self.resumed or event.text
            elif event.kind == "done":
                self.ended = event.time
            if event.kind.startswith("checkpoint"):
                self.last_checkpoint = event
        return fresh_changes, fresh_events

    def _take_figures(self, status: Status, now: float) -> None:
        members = sum(1 for worker in status.workers if worker.first < worker.last)
        told = (status.run, status.generation, status.step, members)
        if self._told is not None and self._told[0] != status.run:
            self.series = Series()
        if told != self._told:
            self._told = told
            self.series.add(status.step, status.steps_per_second, members, status.metrics, now)

    def add_process(self, worker: str, pid: int) -> None:
        """A process was started under that name."""
        self.pids.setdefault(worker, []).append(pid)

    @property
    def training_seconds(self) -> float | None:
        """How long the training took, without the start of its processes and their end; ``None``: it has not ended."""
        return None if self.began is None or self.ended is None else max(0.0, self.ended - self.began)

    def ordered_changes(self) -> list[Change]:
        """All changes in the order in which they took effect."""
        return [self.changes[generation] for generation in sorted(self.changes)]


MAX_REPORT = 256 << 20
"""Bytes of a file that could be a report."""


class Report(msgspec.Struct, frozen=True):
    """What a page shows of a report; what else is in it is left out."""

    job: str
    phase: str
    steps: int
    seconds: float
    training_seconds: float | None = None
    digest: str | None = None
    total_steps: int | None = None
    stopped_early: bool = False
    virtual_nodes: int | None = None
    reproducibility: str | None = None
    changes: list[ChangeEntry] = []
    repeated_steps: int = 0
    repeated_virtual_nodes: int = 0
    step_ms: float | None = None
    predicted_step_ms: float | None = None
    pace_ms: dict[str, float] = {}
    metrics: dict[str, Metric | None] = {}
    error: str | None = None
    origin: dict[str, str] = {}
    series: ViewSeries | None = None


def read_report(content: bytes, name: str) -> Report:
    """What ``virtualflow run --report`` wrote.

    Args:
        content: of the file.
        name: what it is called in a complaint.
    """
    try:
        return msgspec.json.decode(content, type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{name} is no report of virtualflow run --report: {error}") from None


def origin_of(command: Sequence[str]) -> dict[str, str]:
    """What the bits of a job may depend on, as far as this process knows it: its script and this machine."""
    script = next((Path(word) for word in command if word.endswith(".py") and Path(word).is_file()), None)
    origin = {"command": shlex.join(command), "virtualflow": __version__, "python": platform.python_version()}
    if script is not None:
        origin |= {"script": str(script), "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest()}
    commit = _commit_of(Path.cwd() if script is None else script.absolute().parent)
    if commit:
        origin["git_commit"] = commit
    return {**origin, "cpu": _processor()}


def _commit_of(directory: Path) -> str:
    """The commit that a directory is at, with ``-dirty`` behind it if something has changed since; empty: of none."""
    git = ("git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        told = subprocess.run(git, capture_output=True, text=True, timeout=_GIT_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""


def _processor() -> str:
    """The model of this machine's CPU, and how many of them this process may use."""
    name = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1] if found else name}, {counted(os.cpu_count() or 1, 'processor')}"


def build_report(
    history: JobHistory, status: Status | None, name: str, seconds: float, origin: Mapping[str, str] = {}
) -> dict[str, object]:
    """The content of ``--report``; fields that only a finished job has are ``None`` before.

    Args:
        history: of the whole job.
        status: the last one that was seen.
        name: of the job.
        seconds: how long it took by the clock on the wall.
        origin: what it was made of (:func:`origin_of`).
    """
    changes = history.ordered_changes()
    return {
        "job": name,
        "phase": status.phase if status else "waiting",
        "digest": status.digest if status else None,
        "optimizer_digest": status.optimizer_digest if status else None,
        "steps": status.step if status else 0,
        "run": status.run if status else 1,
        "runs": [_run_entry(run) for run in status.runs] if status else [],
        "total_steps": status.total_steps if status else None,
        "stopped_early": status.stopped_early if status else False,
        "virtual_nodes": status.virtual_nodes if status else None,
        "reproducibility": status.reproducibility if status else None,
        "changes": [_change_entry(change) for change in changes],
        "repeated_steps": sum(change.repeated_steps for change in changes),
        "repeated_virtual_nodes": sum(change.repeated_virtual_nodes for change in changes),
        "step_ms": status.step_ms if status else None,
        "predicted_step_ms": history.predicted_step_ms,
        "pace_ms": history.paces,
        "metrics": dict(status.metrics) if status else {},
        "pids": history.pids,
        "warnings": history.warnings,
        "seconds": round(seconds, 3),
        "training_seconds": None if history.training_seconds is None else round(history.training_seconds, 3),
        "error": status.error if status else None,
        "origin": {**origin, "workers": history.fingerprint, "devices": "; ".join(sorted(history.devices))},
        "series": msgspec.to_builtins(
            msgspec.structs.replace(
                history.series.columns(whole=True), non_finite=status.non_finite if status is not None else None
            )
        ),
    }


def _run_entry(run: RunResult) -> dict[str, object]:
    return {("steps" if name == "step" else name): value for name, value in msgspec.structs.asdict(run).items()}


def _change_entry(change: Change) -> dict[str, object]:
    facts = {name.rstrip("_"): value for name, value in msgspec.structs.asdict(change).items()}
    return facts | {"generation": change.generation.counter}


def merge_audit(fragments: Iterable[Iterable[str]]) -> Iterator[dict[str, object]]:
    """Who processed what in the attempts that counted, ordered by run of the script, step and virtual node.

    Every worker wrote what it processed before it contributed it, what of that it kept for the next attempt when one
    was aborted, and which attempts it saw committed. A step that was attempted in several generations counts in the
    highest one in which anybody saw it committed. A line that is torn, because its writer was killed, is no statement:
    the writer had not contributed by then.

    Args:
        fragments: the lines of each worker process.
    """
    computed: dict[tuple[tuple[int, int], tuple[int, int]], dict[int, dict[str, object]]] = {}
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    for lines in fragments:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if not isinstance(entry, Mapping):
                continue
            if "computed" in entry or "kept" in entry:
                fact = entry["computed"] if "computed" in entry else entry["kept"]
                run = fact.get("run", 1)
                attempt = ((run, fact["step"]), _generation(fact["generation"]))
                row = {"run": run, **{key: fact[key] for key in ("epoch", "step", "virtual_node", "worker", "samples")}}
                computed.setdefault(attempt, {})[fact["virtual_node"]] = row
            elif "committed" in entry:
                fact = entry["committed"]
                step, generation = (fact.get("run", 1), fact["step"]), _generation(fact["generation"])
                counts[step] = max(generation, counts.get(step, generation))
    for step in sorted(counts):
        rows = computed.get((step, counts[step]), {})
        yield from (rows[virtual_node] for virtual_node in sorted(rows))


def _generation(numbers: Sequence[int]) -> tuple[int, int]:
    incarnation, counter = numbers
    return incarnation, counter


def write_audit(path: Path, directory: Path) -> int:
    """Merge the fragments in ``directory`` into ``path``; how many lines it has."""

    def fragments() -> Iterator[Iterator[str]]:
        for fragment in sorted(directory.glob("*.jsonl")):
            with fragment.open(encoding="utf-8", errors="replace") as file:
                yield iter(file)

    lines = [json.dumps(row, separators=(",", ":")) for row in merge_audit(fragments())]
    write_whole(path, "".join(line + "\n" for line in lines).encode())
    return len(lines)


def write_results(report: Mapping[str, object], target: Path | None, audit: Path | None, fragments: Path) -> str | None:
    """Write report and audit where they are asked for; a sentence on what cannot be written, if anything."""
    try:
        if audit is not None:
            write_audit(audit, fragments)
        if target is not None:
            write_whole(target, (json.dumps(report, indent=2) + "\n").encode())
    except OSError as error:
        what = error.filename or "its report"
        return f"the training is over, but {what} cannot be written: {error.strerror}"
    return None


def newest_checkpoint(directory: Path, run: int) -> int | None:
    """The step of the checkpoint of a run of the script that counts by its name; whoever reads it checks what is in it.

    Of the newest generation first, as ``state.checkpoint_order`` has it, which needs torch.
    """
    place = directory if run == 1 else directory / f"run-{run}"
    found = (re.fullmatch(r"step-(\d+)(?:\.(\d+)\.(\d+))?", path.name) for path in place.glob("step-*"))
    marks = [(int(name[2] or 0), int(name[3] or 0), int(name[1])) for name in found if name is not None]
    return max(marks)[-1] if marks else None
