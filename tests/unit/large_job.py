"""A job for the live page that is as large as one wants, in a coordinator's state: no worker of it is a process."""

from __future__ import annotations

import time

from virtualflow.coordinator.assignment import assign
from virtualflow.coordinator.roster import Contact
from virtualflow.coordinator.snapshot import Worker
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.worker_messages import handle
from virtualflow.protocol import messages as m

CAUSES = ("join", "drain", "lost", "rebalance", "broken", "restart")
REASONS = {
    "join": "worker-{0} joins",
    "drain": "worker-{0} drains: asked to",
    "lost": "worker-{0} lost: connection reset by peer",
    "rebalance": "worker-{0} needs 12.5 ms for each of its 16 virtual nodes and the others wait for it",
    "broken": "a collective broke, and nobody is lost",
    "restart": "all workers were lost; from the checkpoint",
}


def fill(state: JobState, workers: int, virtual_nodes: int, changes: int, total_steps: int = 100_000) -> None:
    """Let so many workers train, after so many membership changes."""
    now = time.monotonic()
    ranges = assign(virtual_nodes, [1.0] * workers)
    members = tuple(
        m.Member(f"worker-{n}", f"worker-{n}.0", "10.0.0.1", one.start, one.stop) for n, one in enumerate(ranges)
    )
    state.virtual_nodes, state.reproducibility, state.wanted = virtual_nodes, "bitwise", workers
    generation = m.Generation(state.incarnation, changes + 1)
    state.running = m.Plan(generation, "planned", members, (), "join", "all that are wanted are there")
    state.trained = True
    for number, member in enumerate(members):
        pace = m.Pace(generation, 0.010 + 0.00001 * number, 0.009, 0.02, 0.002, 50)
        worker = Worker(member.worker, member.incarnation, now + 1e6, entered=generation, ready_at=now, pace=pace)
        state.roster.add(worker, Contact(4_000 + number, member.address, "one machine"))
    for number in range(1, changes + 1):
        happen(state, number, 10 * number, workers)
    state.history.total_steps = total_steps


def happen(state: JobState, number: int, step: int, workers: int) -> None:
    """Let a membership change happen."""
    cause = CAUSES[number % len(CAUSES)]
    state.history.merge_change(
        m.Change(
            generation=m.Generation(state.incarnation, number),
            step=step,
            from_=workers - (cause == "join"),
            to=workers - (cause in ("lost", "drain")),
            cause=cause,
            reason=REASONS[cause].format(number % workers),
            pause_ms=None if cause == "restart" else 12.0 + number % 300,
            repeated_steps=int(cause in ("lost", "broken")),
            repeated_virtual_nodes=16 * (cause == "lost"),
            state_bytes=604_000_000 if cause == "join" else None,
        ),
        fresh=False,
    )


def train(state: JobState, step: int, total_steps: int = 100_000, metrics: int = 2) -> None:
    """Let the leader say that so many steps are complete."""
    assert state.running is not None
    figures: dict[str, m.Metric] = {"loss": 4.0 / (1 + step / 900) + 0.02 * (step * 7919 % 13)}
    if metrics > 1:
        figures["accuracy"] = 1 - 1 / (1 + step / 400)
    figures |= {f"metric {number}": float(step % (number + 2)) for number in range(2, metrics)}
    speed = 9.0 + 1.5 * ((step // 700) % 3)
    told = m.Progress(
        state.running.generation, step, step // 1_000, total_steps, figures, speed, "training", 1_000 / speed
    )
    first = state.running.members[0]
    handle(state, first.incarnation, told, time.monotonic())
