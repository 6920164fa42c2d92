"""A job as people see it: what the status text, the terminal, the page, the report and ``kubectl vf`` show. Pure.

Words and states are made here once, so that all say the same; who shows them adds only places and colours. What is over
has states of its own: in a job that has ended nobody trains, and a worker that has a successor is not missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from virtualflow.protocol.http_api import ENDED, Event, Phase, Status, WorkerStatus
from virtualflow.protocol.messages import Base, Change, CheckpointState, Usage
from virtualflow.protocol.wording import (
    PLAINTEXT,
    counted,
    describe_end,
    describe_steps,
    duration,
    figure,
    format_bytes,
    milliseconds,
    show_metric,
    table,
)

_KINDS = {"join": "join", "drain": "drain", "lost": "loss", "broken": "loss", "restart": "loss", "rebalance": "moved"}
_LOST, _SLOW, _RUNS = 10, 10, 10
"""Latest lost workers, slowest workers and latest ended runs that are named."""


# --- membership changes -----------------------------------------------------------------------------------------------

CHANGE_COLUMNS = ("step", "workers", "cause", "why", "pause", "steps repeated", "virtual nodes again", "state sent")


class ChangeEntry(msgspec.Struct, frozen=True):
    """A membership change as a report or a ``VirtualFlowJob`` has it; fields are those of ``messages.Change``."""

    step: int
    to: int
    from_: int = msgspec.field(name="from")
    cause: str = ""
    reason: str = ""
    pause_ms: float | None = None
    repeated_steps: int = 0
    repeated_virtual_nodes: int = 0
    state_bytes: int | None = None
    state_ms: float | None = None
    state_donors: int | None = None
    run: int = 1


class ChangeView(Base, frozen=True, tag=False):
    """A membership change as a row of a table."""

    step: int
    kind: str
    """What kind of cause it has: ``join``, ``drain``, ``loss``, ``moved`` or ``other``."""
    row: tuple[str, ...]
    """A cell for each of ``CHANGE_COLUMNS``."""
    to: int
    """Workers after it."""
    said: str
    """The same in one line."""


def view_change(change: Change | ChangeEntry) -> ChangeView:
    size = str(change.to) if change.from_ == change.to else f"{change.from_} → {change.to}"
    sent = format_bytes(change.state_bytes) if change.state_bytes else ""
    what = (str(change.step), size, change.cause, change.reason)
    cost = (_pause(change), str(change.repeated_steps), str(change.repeated_virtual_nodes), sent)
    return ChangeView(change.step, _KINDS.get(change.cause, "other"), what + cost, change.to, describe_change(change))


def describe_change(change: Change | ChangeEntry) -> str:
    """A membership change in one line."""
    size = f"{counted(change.from_, 'worker')} → {counted(change.to, 'worker')}"
    if change.cause == "rebalance":
        size = "virtual nodes moved"
    of_run = f" of run {change.run}" if change.run > 1 else ""
    costs = [_pause(change) if change.pause_ms is None else f"pause {_pause(change)}"]
    costs.append(_repeated(change))
    if change.repeated_virtual_nodes:
        costs.append(f"{counted(change.repeated_virtual_nodes, 'virtual node')} computed again")
    if change.state_bytes is not None and change.state_ms is not None and change.state_donors:
        took, donors = milliseconds(change.state_ms), counted(change.state_donors, "donor")
        costs.append(f"{format_bytes(change.state_bytes)} of state in {took} from {donors}")
    return f"{size} at step {change.step}{of_run} ({change.reason}): {', '.join(filter(None, costs))}"


def describe_new_beginning(lost: int, step: int, saved: int | None) -> str:
    """How a training began again that nobody remembers.

    Args:
        lost: the step that it had reached.
        step: where it is now.
        saved: the step of its newest checkpoint, if there is one.
    """
    nobody = f"no worker and no coordinator is left that had step {lost}"
    if saved is None:
        again = counted(lost, "step")
        return f"began anew from the first step: {nobody}, and there is no checkpoint; {again} repeated"
    if saved > step:
        return f"started again from a checkpoint before that of step {saved}, which cannot be used: {nobody}"
    return f"started again from step {saved}: {nobody}; {counted(lost - saved, 'step')} repeated"


def _pause(change: Change | ChangeEntry) -> str:
    if change.pause_ms is None:
        return "no survivor" if change.from_ else ""
    return milliseconds(round(change.pause_ms))


# --- the job ----------------------------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """Something known of a job: its name, its value, and what else is to be said of it."""

    name: str
    value: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name[0].lower()}{self.name[1:]}: {self.said}"

    @property
    def said(self) -> str:
        return f"{self.value} ({self.note})" if self.note else self.value


USAGE_COLUMNS = ("samples/s", "CPU", "memory", "GPU memory", "GPU")


class WorkerView(Base, frozen=True, tag=False):
    """A worker as a row of a table, in words but for what is drawn."""

    worker: str
    state: str
    first: int
    count: int
    """Virtual nodes that it is assigned; from that one on, where ``nodes`` is one range."""
    nodes: str
    pace: str
    """Milliseconds per virtual node."""
    pid: int
    usage: tuple[str, ...]
    """A cell for each of ``USAGE_COLUMNS``; empty: nobody knows."""
    slow: bool
    """It is clearly slower than the others, as ``state`` says, too."""


class ViewNow(Base, frozen=True, tag=False):
    """What changes with every step."""

    time: float
    """Unix time."""
    phase: Phase
    over: bool
    place: str
    """Where the training is, or how it ended, in words."""
    times: str
    """How long it took so far, and will; empty: nobody knows."""
    began: float | None
    """Unix time at which the training began."""
    step: int
    total_steps: int | None
    training: int
    """Workers at it."""
    steps_per_second: float
    metrics: dict[str, str]
    facts: tuple[Fact, ...]
    step_time: float | None = None
    """Unix time at which ``step`` was first told."""

    @property
    def progress(self) -> str:
        return ", ".join(filter(None, (self.place, self.times)))


class ViewJob(Base, frozen=True, tag=False):
    """Who computes what, and how it stands otherwise."""

    reason: str
    decided: str
    """Why so many workers are wanted; empty: somebody wants it so."""
    error: str
    traceback: str
    workers: tuple[WorkerView, ...]
    """By what they are assigned."""
    notes: tuple[str, ...]
    """Sentences on workers that are not among them."""
    virtual_nodes: int | None
    facts: tuple[Fact, ...]
    version: str


class ViewLog(Base, frozen=True, tag=False):
    """What has happened; the oldest first."""

    changes: tuple[ChangeView, ...]
    changes_total: int
    counted: str
    """The same in words, and what they repeated."""
    latest: str
    """The latest one in one line."""
    events: tuple[Event, ...]


@dataclass(frozen=True)
class JobView:
    """A job as people see it, in three parts that change at their own pace."""

    now: ViewNow
    job: ViewJob
    log: ViewLog


def view_job(status: Status, now: float, *, most: int | None = None) -> JobView:
    """See a job by its coordinator's status.

    Args:
        status: also of an older coordinator, which does not tell all of it.
        most: so many workers are listed; ``None``: all.
    """
    over = status.phase in ENDED
    workers = [_worker(worker, status.phase) for worker in sorted(status.workers, key=_by_range)[:most]]
    speed = 0.0 if over else status.steps_per_second
    shown = ViewNow(
        time=now,
        phase=status.phase,
        over=over,
        place=_place(status),
        times=_times(status, now, speed),
        began=status.began,
        step=status.step,
        total_steps=status.total_steps,
        training=0 if over else sum(worker.assigned for worker in status.workers),
        steps_per_second=speed,
        metrics={name: show_metric(status.metrics[name]) for name in sorted(status.metrics, key=_loss_first)},
        facts=_facts_now(status, now, speed),
    )
    job = ViewJob(
        reason=status.reason,
        decided=status.wanted_reason or "",
        error=status.error or "",
        traceback=status.traceback or "",
        workers=tuple(workers),
        notes=_notes(status, len(status.workers) - len(workers)),
        virtual_nodes=status.virtual_nodes,
        facts=_facts(status, shown.training),
        version=status.version,
    )
    log = ViewLog(
        changes=tuple(map(view_change, status.changes)),
        changes_total=status.changes_total,
        counted=f"{counted(status.changes_total, 'change')}, {_repeated(status)}",
        latest="" if status.last_change is None else describe_change(status.last_change),
        events=status.events,
    )
    return JobView(shown, job, log)


def describe_step(step: int, total: int | None) -> str:
    """Where a training is: ``step 40 of 100``."""
    return f"step {step}" if total is None else f"step {step} of {total}"


def describe_rest(step: int, total: int | None, speed: float) -> list[str]:
    """How long a training will take at its present speed in steps a second, if that can be told."""
    left = 0 if total is None else total - step
    return [f"about {duration(round(left / speed))} left"] if left > 0 and speed > 0 else []


def step_time(measured: float | None, predicted: float | None) -> list[Fact]:
    """How long a step takes and should take, as far as that is known; in milliseconds."""
    should = "" if predicted is None else f"{milliseconds(predicted)} predicted"
    return [] if measured is None else [Fact("Median step", f"{milliseconds(measured)} a step", should)]


def nodes_fact(virtual_nodes: int | None, reproducibility: str | None) -> list[Fact]:
    return [] if virtual_nodes is None else [Fact("Virtual nodes", str(virtual_nodes), reproducibility or "")]


def describe_nodes(ranges: Iterable[range]) -> str:
    """Virtual nodes, as in ``3``, ``0-3`` or ``0-1, 4-5``."""
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in ranges)


def describe_share(share: float) -> str:
    """A goodput or the like, as in ``96.4 %``."""
    return f"{100 * share:.1f} %"


def describe_wanted(training: int, wanted: int) -> str:
    """How many workers train, of how many."""
    return f"{training} of {wanted} wanted"


def describe_pace(now: ViewNow) -> list[str]:
    pace = [fact.said for fact in now.facts if fact.name in ("Speed", "Median step")]
    return pace + [f"{name} {value}" for name, value in now.metrics.items()]


def describe_status(name: str, view: JobView) -> str:
    now, job = view.now, view.job
    lines = [f"{name}: {now.phase}, {now.progress}", job.reason, f"decided: {job.decided}" * bool(job.decided)]
    lines += [f"error: {job.error}" * bool(job.error), *(f"{name}: {value}" for name, value in now.metrics.items())]
    lines += [str(fact) for fact in (*now.facts, *job.facts)]
    if job.workers:
        rows = [("worker", "virtual nodes", "ms each", "state", "pid")]
        rows += [(one.worker, one.nodes, one.pace, one.state, str(one.pid)) for one in job.workers]
        lines += table(rows).splitlines()
    lines += [*job.notes, f"last change: {view.log.latest}" * bool(view.log.latest)]
    return "\n  ".join(filter(None, lines))


def _facts_now(status: Status, now: float, speed: float) -> tuple[Fact, ...]:
    facts = []
    if (found := status.non_finite) is not None:
        facts.append(Fact("Not finite", found.metric, f"{found.value} in step {found.step}"))
    if speed:
        facts.append(Fact("Speed", f"{figure(speed)} steps/s"))
    facts += step_time(status.step_ms, status.predicted_step_ms)
    if (spent := status.worker_seconds) is not None and (share := spent.share) is not None:
        facts.append(Fact("Goodput", describe_share(share), f"of {duration(spent.paid)} of workers' time"))
    changes = f"{_repeated(status)}, generation {status.generation}"
    facts.append(Fact("Membership changes", str(status.changes_total), changes))
    facts += _checkpoint(status, now)
    if (copy := status.memory_copy) is not None:
        facts.append(Fact("Copy in the coordinator's memory", f"step {copy.step}", format_bytes(copy.size)))
    return tuple(facts)


def _facts(status: Status, training: int) -> tuple[Fact, ...]:
    facts, memory = [], status.memory
    if status.phase not in ENDED:
        facts.append(Fact("Workers", describe_wanted(training, status.wanted), _describe_workers(status, training)))
    facts += nodes_fact(status.virtual_nodes, status.reproducibility)
    if memory is not None and memory.budgets:
        facts.append(Fact("Memory plans", f"{memory.planned} of {memory.budgets}", memory.plan))
    if status.plaintext:
        facts.append(Fact("Connections", "plaintext", PLAINTEXT))
    if status.hold is not None:
        facts.append(Fact("Held", f"after step {status.hold}"))
    if status.digest is not None:
        facts.append(Fact("Digest", status.digest))
    for run in status.runs[-_RUNS:]:
        early = "stopped early by the script, " * run.stopped_early
        steps = describe_steps(run.step, run.total_steps, run.stopped_early)
        facts.append(Fact(f"Run {run.run}", f"{early}{steps}, digest {run.digest}"))
    return tuple(facts)


def _checkpoint(status: Status, now: float) -> list[Fact]:
    """The newest checkpoint; of a job that has failed, also what a restart costs."""
    saved, notes = status.checkpoint or CheckpointState(now), []
    if saved.failure:
        notes.append(saved.failure)
    elif saved.step is not None and saved.written is not None:
        notes.append(f"{duration(round(max(0.0, now - saved.written)))} ago")
    if status.phase == "failed":
        notes.append(f"a restart repeats {counted(max(0, status.step - (saved.step or 0)), 'step')}")
    known = status.checkpoint is not None or status.phase == "failed"
    newest = "none" if saved.step is None else f"step {saved.step}"
    return [Fact("Checkpoint", newest, "; ".join(notes))] if known else []


def _describe_workers(status: Status, training: int) -> str:
    """Which workers are missed, come, or hold up the others."""
    notes, change = [], status.last_change
    if change is not None and _KINDS.get(change.cause) == "loss" and training <= change.to < change.from_:
        notes.append(f"{change.from_ - change.to} fewer since step {change.step}: {change.reason}")
    coming = [one.worker for one in status.workers if not one.assigned and one.state in ("starting", "ready")]
    if coming and training < status.wanted:
        notes.append(f"{_first_of(coming)} starting")
    if status.proposed is not None:
        notes.append(f"generation {status.proposed} is being prepared")
    if slow := _slowest(status):
        notes.append(f"{_first_of([one.worker for one in slow])} slow: {_slowness(slow[0])}")
    return "; ".join(notes)


def _first_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _repeated(changed: Status | Change | ChangeEntry) -> str:
    return f"{counted(changed.repeated_steps, 'step')} repeated"


def _place(status: Status) -> str:
    step, total = status.step, status.total_steps
    made = describe_end(step, total, status.stopped_early) if status.phase == "done" else describe_step(step, total)
    return ", ".join([*([f"run {status.run}"] if status.run > 1 else []), made, f"epoch {status.epoch}"])


def _times(status: Status, now: float, speed: float) -> str:
    over, parts = status.phase in ENDED, []
    if status.began is not None:
        ends = (event.time for event in reversed(status.events) if event.kind in ("done", "failed", "stop"))
        passed = duration(round(max(0.0, (next(ends, now) if over else now) - status.began)))
        parts.append(f"after {passed}" if over else f"{passed} so far")
    rest = describe_rest(status.step, status.total_steps, speed) if status.phase == "training" else []
    return ", ".join([*parts, *rest])


def _notes(status: Status, unlisted: int) -> tuple[str, ...]:
    notes, present = [], {worker.worker for worker in status.workers}
    if not status.workers and status.phase not in ENDED:
        notes.append("No worker is there yet.")
    if unlisted:
        notes.append(f"Not listed: {counted(unlisted, 'more worker')}.")
    missed = [f"{lost.worker} ({lost.reason})" for lost in status.lost[-_LOST:] if lost.worker not in present]
    if missed:
        notes.append(f"Lost: {'; '.join(missed)}.")
    if slow := _slowest(status):
        named = [f"{one.worker} ({_slowness(one)})" for one in slow[:_SLOW]]
        notes.append(f"Slow, by what is usual for a virtual node: {', '.join(named)}.")
    return tuple(notes)


def _worker(worker: WorkerStatus, phase: Phase) -> WorkerView:
    state: str = worker.state if phase not in ENDED or worker.state == "done" else "ended"
    count, nodes = sum(map(len, worker.ranges)), describe_nodes(worker.ranges) or "-"
    pace = "-" if worker.pace_ms is None else figure(worker.pace_ms)
    usage = _usage(worker.usage if phase not in ENDED else None)
    slow = _is_slow(worker, phase)
    state = "crashed" if worker.crashed else f"{state}, slow" if slow else state
    return WorkerView(worker.worker, state, worker.first, count, nodes, pace, worker.pid, usage, slow)


def _slowest(status: Status) -> list[WorkerStatus]:
    """The workers that are slow, the slowest first."""
    slow = [one for one in status.workers if _is_slow(one, status.phase)]
    return sorted(slow, key=lambda one: -(one.slowness or 0))


def _slowness(worker: WorkerStatus) -> str:
    return f"{figure(worker.slowness or 0)} times as long"


def _is_slow(worker: WorkerStatus, phase: Phase) -> bool:
    return worker.slowness is not None and not worker.crashed and phase not in ENDED


def _usage(usage: Usage | None) -> tuple[str, ...]:
    if usage is None:
        return ("",) * len(USAGE_COLUMNS)
    return (
        "" if usage.samples is None else figure(usage.samples),
        f"{usage.processors:.2f} cores",
        *("" if size is None else format_bytes(size) for size in (usage.memory, usage.device_memory)),
        "" if usage.device_share is None else f"{100 * usage.device_share:.0f} %",
    )


def _loss_first(metric: str) -> tuple[bool, str]:
    return metric != "loss", metric


def _by_range(worker: WorkerStatus) -> tuple[bool, int, int, str]:
    return not worker.assigned, worker.first, len(worker.worker), worker.worker
