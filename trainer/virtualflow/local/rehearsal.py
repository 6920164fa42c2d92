"""Carries out a schedule on the processes of a running job."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from virtualflow.calls import Status
from virtualflow.local.crew import Worker
from virtualflow.local.schedule import (
    Action,
    Fast,
    Group,
    Hang,
    Kill,
    KillAll,
    KillCoordinator,
    Resize,
    Slow,
    Term,
    hold_step,
    longest_serving,
    settled,
)

if TYPE_CHECKING:
    from virtualflow.local.runner import Runner


class Rehearsal:
    """How far a schedule has come."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._fired = 0
        self._in_effect = True

    @property
    def unreached(self) -> Sequence[Group]:
        """What has not fired."""
        return self._groups[self._fired :]

    def hold(self, status: Status | None) -> int | None:
        """How far the job may run now; ``None``: freely."""
        steps = [group.step for group in self._groups]
        total = status.total_steps if status is not None else None
        riding = status.step if status is not None and _change_rides(status) else None
        return hold_step(steps, self._fired, self._in_effect, total, riding)

    def advance(self, runner: Runner) -> None:
        """Notice that the last group is in effect, and fire the next one when its step is complete."""
        status = runner.status
        if not self._in_effect:
            self._in_effect = settled(status, runner.crew.staff(), runner.wanted)
        if not self._in_effect or not self.unreached or status is None or status.step < self.unreached[0].step:
            return
        if _change_rides(status):
            return  # what comes next might undo it before it was made
        group = self.unreached[0]
        self._fired += 1
        self._in_effect = False
        for action in group.actions:
            self._act(runner, action, group.step)

    def _act(self, runner: Runner, action: Action, step: int) -> None:
        serving = runner.crew.serving()
        oldest = longest_serving({name: worker.number for name, worker in serving.items()}, len(serving))
        match action:
            case Resize(workers):
                self._say(runner, step, f"{workers} worker{'s' * (workers != 1)} wanted")
                runner.scale(workers)
            case Kill(count):
                self._kill(runner, step, [serving[name] for name in oldest[:count]])
            case KillAll():
                self._kill(runner, step, runner.crew.living())
            case Term():
                for name in oldest[:1]:
                    self._say(runner, step, f"SIGTERM to {name}")
                    serving[name].draining = True
                    serving[name].process.send(signal.SIGTERM, serving[name].speaker)
                    if runner.wanted > 1:
                        runner.scale(runner.wanted - 1)
            case Hang():
                for name in oldest[:1]:
                    self._say(runner, step, f"SIGSTOP to {name}")
                    serving[name].stopped = True
                    serving[name].process.signal_group(signal.SIGSTOP)
            case Slow(factor):
                for name in oldest[:1]:
                    self._say(runner, step, f"{name} runs 1/{factor} of the time")
                    runner.slowing.slow(serving[name], factor)
            case Fast():
                self._say(runner, step, "all workers run all the time")
                runner.slowing.end()
            case KillCoordinator():
                self._say(runner, step, "SIGKILL to the coordinator")
                if runner.coordinator.process is not None:
                    runner.coordinator.process.signal_group(signal.SIGKILL)
                runner.forget_coordinator()

    def _kill(self, runner: Runner, step: int, victims: Sequence[Worker]) -> None:
        self._say(runner, step, f"SIGKILL to {', '.join(worker.name for worker in victims) or 'nobody'}")
        for worker in victims:
            worker.kill()

    def _say(self, runner: Runner, step: int, what: str) -> None:
        runner.view.event(f"schedule, step {step}: {what}")


def _change_rides(status: Status) -> bool:
    """Whether a change is ready everywhere and will be made by the next step."""
    return status.proposed is not None and status.prepared
