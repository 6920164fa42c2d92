"""A worker that a schedule slows down is stopped and continued, and let go in the end."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, cast

import pytest

from virtualflow.launcher.fault_injection import Throttle
from virtualflow.launcher.worker_table import WorkerProcess

PERIOD = 0.003
STOP, CONTINUE = signal.SIGSTOP, signal.SIGCONT


class Target:
    """A process that notes its signals."""

    def __init__(self) -> None:
        self.alive = True
        self.signals: list[signal.Signals] = []
        self.arrived = asyncio.Event()

    def signal_group(self, number: signal.Signals) -> None:
        self.signals.append(number)
        self.arrived.set()

    async def gets(self, count: int) -> None:
        async with asyncio.timeout(30.0):
            while len(self.signals) < count:
                self.arrived.clear()
                await self.arrived.wait()


def worker() -> tuple[WorkerProcess, Target]:
    target = Target()
    return WorkerProcess("worker-0", 0, 0, cast(Any, target), 1), target


async def rest() -> None:
    """Let what was cancelled end."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_slowed_worker_is_stopped_and_continued_in_turn_until_all_run_freely() -> None:
    async def story() -> None:
        throttle, (one, target) = Throttle(PERIOD), worker()
        throttle.slow(one, 3)
        await target.gets(8)
        throttle.end()
        await rest()
        assert target.signals[:8] == [CONTINUE, STOP] * 4
        assert target.signals[-1] == CONTINUE
        count = len(target.signals)
        await asyncio.sleep(2 * PERIOD)
        assert len(target.signals) == count

    asyncio.run(story())


def test_a_factor_of_one_lets_it_run() -> None:
    async def story() -> None:
        throttle, (one, target) = Throttle(PERIOD), worker()
        throttle.slow(one, 3)
        await target.gets(2)
        throttle.slow(one, 1)
        await rest()
        assert target.signals[-1] == CONTINUE

    asyncio.run(story())


@pytest.mark.parametrize("fate", ["stopped", "killed"])
def test_a_worker_that_hangs_or_was_killed_gets_no_more_signals(fate: str) -> None:
    async def story() -> None:
        throttle, (one, target) = Throttle(PERIOD), worker()
        throttle.slow(one, 3)
        await target.gets(2)
        setattr(one, fate, True)
        target.signals.clear()
        async with asyncio.timeout(30.0):
            await asyncio.gather(*throttle._tasks.values())
        assert STOP not in target.signals[1:]
        if fate == "stopped":
            assert CONTINUE not in target.signals

    asyncio.run(story())
