"""Carries out a fault schedule on the processes of a running job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from virtualflow.launcher.fault_schedule import (
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
    in_effect,
)
from virtualflow.launcher.job_control import JobControl
from virtualflow.launcher.worker_table import WorkerProcess
from virtualflow.protocol.http_api import Status
from virtualflow.protocol.settings import STOP_GRACE
from virtualflow.protocol.wording import counted


class FaultInjector:
    """How far a schedule has come.

    Args:
        stop_after: the last step that the job is to make; ``None``: all of them.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        control: JobControl,
        *,
        throttle: Throttle,
        kill_coordinator: Callable[[], None],
        stop_after: int | None = None,
    ) -> None:
        self._groups, self._control, self._stop_after = groups, control, stop_after
        self._throttle, self._kill_coordinator = throttle, kill_coordinator
        self._fired = 0
        self._in_effect = True
        self._told: tuple[WorkerProcess, float] | None = None
        """Who was sent SIGTERM last, and when."""
        self._scaled = False
        """Whether one worker fewer is wanted since."""

    @property
    def unreached(self) -> Sequence[Group]:
        return self._groups[self._fired :]

    def hold(self) -> int | None:
        """How far the job may run now; ``None``: freely."""
        status = self._control.state.status
        steps = [group.step for group in self._groups]
        total = self._last_step(status)
        riding = status.job_step if status is not None and _change_rides(status) else None
        hold = hold_step(steps, self._fired, self._in_effect, total, riding)
        if self._stop_after is None or (status is not None and status.job_total == total):
            return hold
        before = self._stop_after - 1  # the agreement to stop rides on the last step
        return before if hold is None else min(hold, before)

    def _last_step(self, status: Status | None) -> int | None:
        ends = (self._stop_after, status.job_total if status is not None else None)
        return min((end for end in ends if end is not None), default=None)

    @property
    def is_time_to_stop(self) -> bool:
        """Whether only the last step is left of a job that ends before its training does."""
        status = self._control.state.status
        if self._stop_after is None or status is None or status.phase != "training" or status.proposed is not None:
            return False
        return status.job_step >= self._stop_after - 1 and self._in_effect and not self.unreached

    def advance(self, now: float) -> None:
        """Notice that the last group is in effect, and fire the next one when its step is complete."""
        status = self._control.state.status
        if not self._in_effect:
            self._give_up_waiting(now)
            self._in_effect = in_effect(status, self._control.table.expected(), self._control.state.wanted)
        if not self._in_effect or not self.unreached or status is None or status.job_step < self.unreached[0].step:
            return
        if _change_rides(status):
            return  # what comes next might undo it before it was made
        group = self.unreached[0]
        self._fired += 1
        self._in_effect = False
        for action in group.actions:
            self._control.tell(f"schedule, step {group.step}: {self._inject(action, now)}")

    def _give_up_waiting(self, now: float) -> None:
        """A script may ignore SIGTERM: nobody waits for ever for the drain that it asks for."""
        if self._told is None:
            return
        worker, told_at = self._told
        if not worker.alive or worker.state == "draining" or worker.surplus:
            self._told = None
        elif now - told_at > STOP_GRACE:
            self._told, worker.draining = None, False
            if self._scaled:
                self._control.scale(self._control.state.wanted + 1)
            self._control.tell(
                f"{worker.name} has not drained within {STOP_GRACE:g} s of SIGTERM: its script ignores the signal, or "
                "its main thread does not come to it; it goes on training"
            )

    def _inject(self, action: Action, now: float) -> str:
        control = self._control
        serving = control.table.serving()
        match action:
            case Resize(workers):
                control.scale(workers)
                return f"{counted(workers, 'worker')} wanted"
            case Kill(count):
                return _kill(serving[:count])
            case KillAll():
                return _kill(control.table.living())
            case Fast():
                self._throttle.end()
                return "all workers run all the time"
            case KillCoordinator():
                self._kill_coordinator()
                return "SIGKILL to the coordinator"
            case Term() | Hang() | Slow():
                return self._disturb(action, serving[0], now) if serving else "there is no member to act upon"

    def _disturb(self, action: Term | Hang | Slow, worker: WorkerProcess, now: float) -> str:
        match action:
            case Term():
                worker.draining = True
                worker.process.send(signal.SIGTERM, worker.speaker)
                self._told, self._scaled = (worker, now), self._control.state.wanted > 1
                if self._scaled:
                    self._control.scale(self._control.state.wanted - 1)
                return f"SIGTERM to {worker.name}"
            case Hang():
                worker.stopped = True
                worker.process.signal_group(signal.SIGSTOP)
                return f"SIGSTOP to {worker.name}"
            case Slow(factor):
                self._throttle.slow(worker, factor)
                return f"{worker.name} runs 1/{factor} of the time"


def _kill(victims: Sequence[WorkerProcess]) -> str:
    for worker in victims:
        worker.kill()
    return f"SIGKILL to {', '.join(worker.name for worker in victims) or 'nobody'}"


def _change_rides(status: Status) -> bool:
    """Whether a change is ready everywhere and will be made by the next step."""
    return status.proposed is not None and status.prepared


# Workers that are slow on purpose: stopped and continued many times a second, as a CPU quota does it.
#
# For fault schedules. Stops are short, so that nobody takes the worker for dead.


class Throttle:
    """Slows workers of one job down.

    Args:
        period: seconds; a slowed worker is stopped once in it.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By the number of the worker."""

    def slow(self, worker: WorkerProcess, factor: int) -> None:
        former = self._tasks.pop(worker.number, None)
        if former is not None:
            former.cancel()
        if factor > 1:
            self._tasks[worker.number] = asyncio.create_task(self._alternate(worker, factor))

    def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _alternate(self, worker: WorkerProcess, factor: int) -> None:
        loop = asyncio.get_running_loop()
        runs = self._period / factor
        turn = loop.time()
        try:
            # One that hangs is stopped for good; one that is killed or has ended needs no signals.
            while worker.alive and not worker.stopped and not worker.killed:
                worker.process.signal_group(signal.SIGCONT)
                turn += runs
                await asyncio.sleep(turn - loop.time())
                worker.process.signal_group(signal.SIGSTOP)
                turn += self._period - runs
                await asyncio.sleep(turn - loop.time())
                # A machine that was busy elsewhere has lost turns: they are not made up for.
                turn = max(turn, loop.time() - self._period)
        finally:
            if not worker.stopped:
                worker.process.signal_group(signal.SIGCONT)
