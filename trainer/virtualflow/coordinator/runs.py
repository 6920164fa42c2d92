"""The runs of a script: one job, several trainings that follow one another in the same processes.

A script may train more than once (pretrain, then finetune; folds; a sweep). The members of a run reach its end together
and go on to the next one by themselves, so a worker that says Hello from a later run brings the job there. One that
begins anew begins with the script's first run, and hears that it is over. Functions of the state and a Hello each.
"""

from __future__ import annotations

from dataclasses import replace

from virtualflow.coordinator.state import JobState
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_RUNS


def follow(state: JobState, hello: m.Hello, now: float) -> None:
    """Go on to the run that a worker is in, if the one before it is over or nobody here knows of any."""
    if hello.run <= state.run or state.failed:
        return
    unknown = state.running is None and not state.trained
    if state.phase == "done" or unknown or hello.plan is not None:
        _begin(state, hello, now)


def over(state: JobState, hello: m.Hello) -> m.RunOver | None:
    """What to tell a worker whose run is over; ``None``: it is in the job's run, or ahead of it."""
    if hello.run >= state.run:
        return None
    return m.RunOver(state.run, next((result for result in state.runs if result.run == hello.run), None))


def describe(over: m.RunOver) -> str:
    """The same in words, for a worker that knows of one run only."""
    return f"this run of the script is over, and the job is in run {over.current}"


def ahead(state: JobState, hello: m.Hello) -> str | None:
    """Why a worker cannot be in a later run than the job, in one sentence; ``None``: it is not."""
    if hello.run <= state.run or state.failed:
        return None
    return (
        f"{hello.worker} is in run {hello.run} of its script, and the job still in run {state.run}: all workers must "
        "go through the same with vf.elastic(...) blocks, in the same order"
    )


def _begin(state: JobState, hello: m.Hello, now: float) -> None:
    """Forget all that was about the run before, but for what it has ended with."""
    history, result = state.history, state.history.result
    known = {run.run: run for run in hello.runs} | {run.run: run for run in state.runs}
    if result is not None:
        known[state.run] = m.RunResult(
            state.run, result.step, history.total_steps, result.digest, result.metrics, result.stopped_early
        )
    known = {number: run for number, run in known.items() if number < hello.run}
    state.runs = tuple(known[number] for number in sorted(known))[-MAX_RUNS:]
    # Of runs that nobody remembers any more, the steps were counted while they were.
    state.earlier_steps = max(state.earlier_steps + (result.step if result is not None else 0), _steps(state))
    state.run = hello.run
    state.virtual_nodes = state.reproducibility = None
    state.classes = ()
    state.running = state.proposed = None
    state.prepared = set()
    state.plans.clear()
    state.withdrawn.clear()
    state.broken, state.contested = {}, {}
    state.settled = state.failures_counted = m.NO_GENERATION
    state.rebuilds, state.waiting_since = 0, now
    state.trained = state.told_done = False
    state.memory_copy = None
    history.begin_run()
    for incarnation, worker in list(state.roster.workers.items()):
        if worker.connected and not worker.done and incarnation != hello.incarnation:
            # It waits to join a run that is over.
            state.send(incarnation, m.RunOver(state.run, None))
        if worker.done or worker.connected:
            del state.roster.workers[incarnation], state.roster.contacts[incarnation]
        else:
            state.roster.workers[incarnation] = replace(worker, entered=None, stranded=False, ready_at=None)
    before = next((run for run in state.runs if run.run == state.run - 1), None)
    ended = f"; run {before.run} ended after {before.step} steps, digest {before.digest}" if before is not None else ""
    state.tell("run", f"run {state.run} of the script begins{ended}")


def _steps(state: JobState) -> int:
    return sum(run.step for run in state.runs)
