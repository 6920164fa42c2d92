"""Whose ends count as those of a worker that cannot take part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from virtualflow.launcher.job_control import JobControl
from virtualflow.launcher.supervisor import Process
from virtualflow.launcher.worker_table import WorkerProcess, WorkerTable
from virtualflow.launcher.workforce import AbsentEnds, Workforce
from virtualflow.protocol.settings import BACKOFF_LIMIT

LEFT, KILLED = 0, -9


class Scene:
    """A job of one lasting worker and of others that come and end, before anybody has seen them make a step."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.scaled: list[int] = []
        lasting = WorkerProcess("worker-0", 0, 0, cast("Process", SimpleNamespace(alive=True)), 1, "a", assigned=True)
        self.table = WorkerTable(1.0, [lasting])
        state = SimpleNamespace(status=None, shutdown=None, wanted=2)
        control = SimpleNamespace(table=self.table, state=state, tell=self.said.append, scale=self.scaled.append)
        unused: Any = None
        self.workforce = Workforce(
            cast("JobControl", control),
            job="job",
            command=unused,
            supervisor=unused,
            history=unused,
        )

    def end(self, code: int) -> None:
        process = SimpleNamespace(alive=False, code=code, tail=())
        one = WorkerProcess("worker-1", 1, len(self.table.workers), cast("Process", process), 1, "b")
        one.draining = code == LEFT
        self.table.workers.append(one)
        self.workforce.take(0.0)


@pytest.mark.parametrize(
    ("ends", "given_up"),
    [
        pytest.param([KILLED] * BACKOFF_LIMIT, False, id="killed again and again"),
        pytest.param([KILLED] * (BACKOFF_LIMIT + 1), True, id="once too often"),
        pytest.param([KILLED, LEFT] * (BACKOFF_LIMIT + 1), False, id="others leave in between, in order"),
    ],
)
def test_a_worker_that_never_takes_part_is_done_without(ends: list[int], given_up: bool) -> None:
    scene = Scene()
    for code in ends:
        scene.end(code)
    assert scene.scaled == ([1] if given_up else [])
    assert any("without taking part in a step" in said for said in scene.said) == given_up


def test_a_step_begins_the_counts_of_those_anew_who_made_it() -> None:
    ends = AbsentEnds()
    assert [ends.note_end(1) for _ in range(3)] == [1, 2, 3]
    assert ends.note_end(2) == 1
    ends.advance(1, [1, 2])
    assert ends.note_end(1) == 1
    ends.advance(1, [1, 2])
    assert ends.note_end(1) == 2
    ends.advance(2, [2])
    assert ends.note_end(1) == 3, "it has made no step of it"


class Alone(Scene):
    """A job of which nobody has made a step yet."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.table.workers.clear()
        self.failed: list[str] = []
        self.workforce._control.fail = lambda reason, _: self.failed.append(reason)  # type: ignore[method-assign]
        self.workforce._backoff_limit = limit

    def crash(self, begun: float, now: float) -> None:
        process = SimpleNamespace(alive=False, code=KILLED, tail=())
        ordinal = len(self.table.workers)
        one = WorkerProcess(f"worker-{ordinal}", ordinal, ordinal, cast("Process", process), 1, "b", begun=begun)
        self.table.workers.append(one)
        self.workforce.take(now)


def test_workers_of_one_round_that_crash_are_one_failure_as_in_a_cluster() -> None:
    scene = Alone(limit=1)
    for now in (1.0, 1.2, 1.4):
        scene.crash(begun=0.0, now=now)
    assert scene.failed == []
    scene.crash(begun=2.0, now=3.0)
    (said,) = scene.failed
    assert said == "workers ended 2 times in a row without a step of progress, at last worker-3: killed by SIGKILL"
