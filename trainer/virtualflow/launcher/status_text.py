"""A job's status in words: what ``virtualflow status`` prints, and the lines of the console."""

from __future__ import annotations

from collections.abc import Sequence

from virtualflow.protocol.http_api import Status, WorkerStatus
from virtualflow.protocol.messages import Change
from virtualflow.protocol.metrics import show_metric
from virtualflow.protocol.wording import counted

RUNS_SHOWN = 10
"""Of the runs before the present one, the latest."""


def describe_change(change: Change) -> str:
    """A membership change in one line."""
    pause = "no survivor" if change.pause_ms is None else f"pause {change.pause_ms:.0f} ms"
    repeated = f"{counted(change.repeated_steps, 'step')} repeated"
    if change.repeated_virtual_nodes:
        repeated += f", {counted(change.repeated_virtual_nodes, 'virtual node')} computed again"
    size = f"{counted(change.from_, 'worker')} → {counted(change.to, 'worker')}"
    if change.cause == "rebalance":
        size = "virtual nodes moved"
    of_run = f" of run {change.run}" if change.run > 1 else ""
    return f"{size} at step {change.step}{of_run} ({change.reason}): {pause}, {repeated}{describe_transfer(change)}"


def describe_transfer(change: Change) -> str:
    """How much state joiners were given, in which time and by how many, as a clause; empty if none needed it."""
    if change.state_bytes is None or change.state_ms is None or not change.state_donors:
        return ""
    donors = f"{counted(change.state_donors, 'donor')}"
    return f", {_megabytes(change.state_bytes)} of state in {change.state_ms / 1_000:.2g} s from {donors}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 10_000_000 else f"{size / 1e6:.2g} MB"


def describe_progress(status: Status) -> str:
    """Where the training is, in one line."""
    total = f"/{status.total_steps}" if status.total_steps is not None else ""
    members = sum(worker.first < worker.last for worker in status.workers)
    parts = [*describe_run(status), f"step {status.step}{total}", f"epoch {status.epoch}"]
    parts += [f"{name} {show_metric(value, 4)}" for name, value in sorted(status.metrics.items())]
    parts += [f"{status.steps_per_second:.1f} steps/s", *describe_step_times(status), counted(members, "worker")]
    return ", ".join(parts)


def describe_run(status: Status) -> list[str]:
    """Which run of the script it is, where there was one before."""
    return [f"run {status.run}"] if status.run > 1 else []


def describe_status(job: str, status: Status) -> str:
    """What ``virtualflow status`` prints."""
    facts = f"{status.wanted} wanted, generation {status.generation}"
    if status.reproducibility is not None:
        facts += f", {status.reproducibility}"
    phase = f"{status.phase}, stopped early by the script" if status.stopped_early else status.phase
    lines = [f"{job}: {phase}, {describe_progress(status)}, {facts}"]
    if status.reason:
        lines.append(f"  {status.reason}")
    if status.error:
        lines.append(f"  error: {status.error}")
    lines += [f"  run {run.run}: {counted(run.step, 'step')}, digest {run.digest}" for run in status.runs[-RUNS_SHOWN:]]
    if status.workers:
        width = max(len("worker"), *(len(worker.worker) for worker in status.workers))
        lines.append(f"  {'worker':<{width}}  {'virtual nodes':<13}  {'ms each':>7}  {'state':<8}  pid")
        lines += [
            f"  {one.worker:<{width}}  {describe_range(one):<13}  {describe_pace(one):>7}  {one.state:<8}  {one.pid}"
            for one in sorted(status.workers, key=by_range)
        ]
    if status.memory_copy is not None:
        size = _megabytes(status.memory_copy.size)
        lines.append(f"  copy of step {status.memory_copy.step} in the coordinator's memory: {size}")
    if status.last_change is not None:
        lines.append(f"  last change: {describe_change(status.last_change)}")
    return "\n".join(lines)


def describe_range(worker: WorkerStatus) -> str:
    """The virtual nodes of a worker as ``3-5``; a dash for none."""
    if worker.first >= worker.last:
        return "-"
    return str(worker.first) if worker.last - worker.first == 1 else f"{worker.first}-{worker.last - 1}"


def describe_step_times(status: Status) -> list[str]:
    """How long a step takes and should take, as far as that is known."""
    measured, predicted = status.step_ms, status.predicted_step_ms
    if measured is None:
        return []
    return [f"step {measured:.3g} ms" + ("" if predicted is None else f" (predicted {predicted:.3g})")]


def describe_pace(worker: WorkerStatus) -> str:
    """Milliseconds per virtual node; a dash as long as that is not known."""
    return "-" if worker.pace_ms is None else f"{worker.pace_ms:.3g}"


def by_range(worker: WorkerStatus) -> tuple[bool, int, Sequence[object]]:
    """The order in which workers are shown."""
    return worker.first >= worker.last, worker.first, (len(worker.worker), worker.worker)
