"""Workers that are slow on purpose: stopped and continued many times a second, as a CPU quota does it.

For fault schedules. Stops are short, so that nobody takes the worker for dead.
"""

from __future__ import annotations

import asyncio
import signal

from virtualflow.launcher.worker_table import WorkerProcess


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
        """Let ``worker`` run one ``factor``-th of the time from now on."""
        former = self._tasks.pop(worker.number, None)
        if former is not None:
            former.cancel()
        if factor > 1:
            self._tasks[worker.number] = asyncio.create_task(self._alternate(worker, factor))

    def end(self) -> None:
        """Let all workers run all the time."""
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
