"""A run that is to stop after a step is held before it until all know, and not before its faults are in effect."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from statuses import coordinator_status
from virtualflow.launcher.fault_injection import FaultInjector, Throttle
from virtualflow.launcher.fault_schedule import parse_schedule
from virtualflow.launcher.worker_table import WorkerProcess
from virtualflow.protocol.settings import STOP_GRACE


def injector(status: Any, schedule: str = "", stop_after: int | None = 6) -> FaultInjector:
    """Faults of a job with this status."""
    control: Any = SimpleNamespace(state=SimpleNamespace(status=status))
    faults = parse_schedule(schedule)
    return FaultInjector(faults, control, throttle=Throttle(0.01), kill_coordinator=lambda: None, stop_after=stop_after)


def test_a_worker_that_does_not_hear_sigterm_is_not_waited_for_for_ever() -> None:
    sent: list[int] = []
    told: list[str] = []
    scaled: list[int] = []
    process: Any = SimpleNamespace(send=lambda number, pid: sent.append(number), alive=True)
    worker = WorkerProcess("worker-0", 0, 0, process, 1, incarnation="a", listed=True, state="training", assigned=True)
    state = SimpleNamespace(status=coordinator_status(step=5), wanted=2)

    def scale(workers: int) -> None:
        state.wanted = workers
        scaled.append(workers)

    table = SimpleNamespace(serving=lambda: [worker], expected=lambda: ["a"] if worker.able else [])
    control: Any = SimpleNamespace(state=state, table=table, scale=scale, tell=told.append)
    faults = FaultInjector(
        parse_schedule("5:term"), control, throttle=Throttle(0.01), kill_coordinator=lambda: None, stop_after=None
    )
    faults.advance(100.0)
    assert (sent, worker.draining, scaled) == ([signal.SIGTERM], True, [1])
    faults.advance(100.0 + STOP_GRACE)
    assert worker.draining
    faults.advance(100.1 + STOP_GRACE)
    assert (worker.draining, scaled) == (False, [1, 2])
    assert told[-1].startswith("worker-0 has not drained within 30 s of SIGTERM: its script ignores the signal")


@pytest.mark.parametrize(
    ("status", "schedule", "stop_after", "hold"),
    [
        pytest.param(None, "", 6, 5, id="nothing is known yet"),
        pytest.param(coordinator_status(step=1), "", 6, 5, id="one step before"),
        pytest.param(coordinator_status(step=1), "2:=2", 6, 4, id="a fault needs two steps more"),
        pytest.param(coordinator_status(step=1, total_steps=6), "", 6, None, id="the training ends there by itself"),
        pytest.param(coordinator_status(step=1, total_steps=4), "", 6, None, id="the training ends before"),
        pytest.param(coordinator_status(step=1), "", None, None, id="nobody wants it to stop"),
    ],
)
def test_how_far_a_run_may_go(status: Any, schedule: str, stop_after: int | None, hold: int | None) -> None:
    assert injector(status, schedule, stop_after).hold() == hold


@pytest.mark.parametrize(
    ("status", "schedule", "stop_after", "stops"),
    [
        pytest.param(coordinator_status(step=5), "", 6, True, id="one step is left"),
        pytest.param(coordinator_status(step=4), "", 6, False, id="two are left"),
        pytest.param(coordinator_status(step=5), "5:=2", 6, False, id="a fault is still to come"),
        pytest.param(coordinator_status(step=5, proposed=3), "", 6, False, id="a change is under way"),
        pytest.param(coordinator_status("evaluating", step=5), "", 6, False, id="it evaluates"),
        pytest.param(coordinator_status("done", step=5), "", 6, False, id="it is over"),
        pytest.param(None, "", 6, False, id="nothing is known yet"),
        pytest.param(coordinator_status(step=5), "", None, False, id="nobody wants it to stop"),
    ],
)
def test_when_a_run_is_asked_to_stop(status: Any, schedule: str, stop_after: int | None, stops: bool) -> None:
    assert injector(status, schedule, stop_after).is_time_to_stop is stops
