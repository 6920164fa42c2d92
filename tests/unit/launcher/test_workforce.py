"""Whose ends count as those of a worker that cannot take part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from virtualflow.launcher.job_control import JobControl
from virtualflow.launcher.settings import LauncherSettings
from virtualflow.launcher.supervisor import Process
from virtualflow.launcher.worker_table import Worker, WorkerTable
from virtualflow.launcher.workforce import Workforce
from virtualflow.protocol.settings import BACKOFF_LIMIT

LEFT, KILLED = 0, -9


class Scene:
    """A job of one lasting worker and of others that come and end, before anybody has seen them make a step."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.scaled: list[int] = []
        lasting = Worker("worker-0", 0, 0, cast("Process", SimpleNamespace(alive=True)), 1, "a", assigned=True)
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
            settings=LauncherSettings(),
        )

    def end(self, code: int) -> None:
        process = SimpleNamespace(alive=False, code=code)
        one = Worker("worker-1", 1, len(self.table.workers), cast("Process", process), 1, "b")
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
