"""Which worker processes are started, and what is known of those that are not admitted."""

from __future__ import annotations

from typing import cast

import pytest

from statuses import coordinator_status
from virtualflow.launcher.supervisor import Process
from virtualflow.launcher.worker_table import WorkerProcess, WorkerTable
from virtualflow.protocol.http_api import LostWorker, Refusal


class Running:
    """A process, as far as a table looks at it."""

    alive = True


def table(*names: str) -> WorkerTable:
    workers = [
        WorkerProcess(name, int(name.partition("-")[2]), number, cast("Process", Running()), 1)
        for number, name in enumerate(names)
    ]
    return WorkerTable(1.0, workers)


@pytest.mark.parametrize(
    ("names", "barred", "ordinal"),
    [
        pytest.param([], set(), 0, id="the first"),
        pytest.param(["worker-0", "worker-2"], set(), 1, id="a gap"),
        pytest.param(["worker-0"], {1}, 2, id="not one whose process was refused"),
        pytest.param([], {0, 1}, 2, id="nor several"),
    ],
)
def test_the_lowest_ordinal_is_free_that_nobody_has_or_would_be_refused_under(
    names: list[str], barred: set[int], ordinal: int
) -> None:
    found = table(*names)
    found.barred = barred
    assert found.free_ordinal() == ordinal


def test_who_may_be_in_a_generation_of_a_former_coordinator_lives_and_was_started_before_it_ended() -> None:
    found = table("worker-0", "worker-1", "worker-2", "worker-0")
    cast("Running", found.workers[0].process).alive = False
    assert [worker.number for worker in found.elders(3)] == [1, 2]
    assert found.elders(0) == [], "the first coordinator has no former one"


def test_nobody_takes_the_place_of_who_has_seen_the_end_of_the_training() -> None:
    found = table("worker-0", "worker-1", "worker-2", "worker-3")
    for worker in found.workers[:3]:
        cast("Running", worker.process).alive = False
    found.workers[0].state, found.workers[0].judged = "done", True
    found.workers[1].state, found.workers[1].judged = "training", True
    assert [worker.name for worker in found.staying()] == ["worker-0", "worker-2", "worker-3"]


def test_a_refusal_is_about_the_latest_process_of_that_name() -> None:
    found = table("worker-1", "worker-10", "worker-1")
    found.note_refusal(Refusal("worker-1", "it has other bits"))
    assert [worker.refused for worker in found.workers] == [None, None, "it has other bits"]


def test_one_that_was_admitted_before_was_declared_lost_and_may_come_again() -> None:
    found = table("worker-1")
    found.workers[0].incarnation = "abc"
    found.note_refusal(Refusal("worker-1", "no sign of life for 5 s"))
    assert found.workers[0].refused is None


def test_one_into_whose_memory_nothing_fits_is_done_without_and_not_killed() -> None:
    found = table("worker-0", "worker-1")
    for worker, incarnation in zip(found.workers, ("abc", "def"), strict=True):
        worker.incarnation, worker.listed, worker.listed_by = incarnation, True, 1
    lost = (LostWorker("worker-1", "def", "", "use 3 GiB", ended=True, does_not_fit=True),)
    found.take(coordinator_status("training", lost=lost), 1.0)
    assert [worker.declared_lost for worker in found.workers] == [True, False]
    assert [worker.refused for worker in found.workers] == [None, "use 3 GiB"]


def test_one_whose_machine_had_a_fault_ends_by_itself_and_is_replaced() -> None:
    found = table("worker-0", "worker-1")
    for worker, incarnation in zip(found.workers, ("abc", "def"), strict=True):
        worker.incarnation, worker.listed, worker.listed_by = incarnation, True, 1
    lost = (LostWorker("worker-1", "def", "", "Input/output error", ended=True, machine_fault=True),)
    found.take(coordinator_status("training", lost=lost), 7.0)
    found.take(coordinator_status("training", lost=lost), 9.0)
    assert [worker.declared_lost for worker in found.workers] == [True, False]
    assert [worker.fault for worker in found.workers] == [None, "Input/output error"]
    assert [worker.released_at for worker in found.workers] == [None, 7.0]


def test_the_longest_serving_are_those_that_began_first() -> None:
    found = table("worker-2", "worker-0", "worker-1", "worker-3")
    for worker in found.workers:
        worker.assigned = True
    found.workers[1].draining = True
    assert [worker.name for worker in found.serving()] == ["worker-2", "worker-1", "worker-3"]
