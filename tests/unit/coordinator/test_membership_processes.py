"""Who is in the next generation where workers are several processes: whole workers, whatever happens to one process."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import msgspec
import pytest
from coordinator_server import hello
from driven import Driven
from hypothesis import given
from hypothesis import strategies as st
from memberships import DRAINS, FIRST, NOW, SETTINGS, cluster, in_words, plan, processes, silent, training, worker

from virtualflow.coordinator.assignment import order_members
from virtualflow.coordinator.membership import decide, find_lost
from virtualflow.coordinator.roster import UnknownWorker
from virtualflow.coordinator.snapshot import Cluster, Worker
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m

IN = {"entered": FIRST}
BROKEN = {"broken": {FIRST: NOW - 1.0}}


def only(workers: list[Worker], rank: int, **facts: object) -> list[Worker]:
    """These, with one of them otherwise."""
    return [dataclasses.replace(x, **facts) if x.local_rank == rank else x for x in workers]  # type: ignore[arg-type]


A, B, C = processes("a", **IN), processes("b", **IN), processes("c")
TABLE = [
    # --- the initial start
    pytest.param(
        cluster(*processes("a"), *processes("b")),
        "recovery a0 b0 a1 b1 +a0 b0 a1 b1 start",
        "starting with 2 workers",
        id="workers start whole, the first processes of all before the second",
    ),
    pytest.param(
        cluster(*processes("a"), *only(processes("b"), 1, ready_at=None), minimum=2),
        None,
        "waiting for workers: 1 of 2 ready, at least 2 needed",
        id="one whose second process is not ready is not ready",
    ),
    pytest.param(
        cluster(*processes("a"), *processes("b")[:1], minimum=2),
        None,
        "waiting for workers: 1 of 2 ready, at least 2 needed",
        id="nor is one whose second process has not come",
    ),
    pytest.param(
        cluster(*processes("a", 3), *processes("b", 3), *processes("c", 3), wanted=3),
        "recovery a0 b0 a1 b1 a2 b2 +a0 b0 a1 b1 a2 b2 start",
        "starting with 2 workers",
        id="no more workers start than there are virtual nodes for all their processes",
    ),
    pytest.param(
        cluster(*processes("a", 4), virtual_nodes=2, wanted=1),
        "fail",
        "a worker has 4 processes and the job 2 virtual nodes, of which each process is assigned at least one; "
        "give the job more virtual nodes, or its workers fewer processes",
        id="a worker with more processes than virtual nodes cannot train",
    ),
    # --- losses
    pytest.param(
        training(*A, *only(B, 1, gone="killed"), ended=frozenset({"b0", "b1"}), **BROKEN),
        "recovery a0 a1 lost",
        "b lost: killed",
        id="with a process that is gone its worker is lost, and told once",
    ),
    pytest.param(
        training(*A, *B, *only(processes("c", **IN), 0, **silent(0.5)), **BROKEN),
        "recovery a0 a1 b0 b1 lost",
        "c lost: its connections closed",
        id="so with one whose connections closed, and the majority goes on",
    ),
    pytest.param(
        training(*A, *only(B, 1, gone="killed"), ended=frozenset(), **BROKEN),
        None,
        "b lost: killed; 1 worker left, which is no majority: waiting for the word of whoever runs b that it has ended",
        id="one of two workers is no majority, however many processes each has",
    ),
    # --- planned changes
    pytest.param(
        training(*A, *only(B, 0, **DRAINS)),
        "planned a0 a1 drain",
        "b drains",
        id="a worker drains whole, in one change",
    ),
    pytest.param(training(*A, *C), "planned a0 c0 a1 c1 +c0 c1 join", "c joins", id="a worker joins whole"),
    pytest.param(training(*A, *C[:1]), None, "1 worker training", id="half a worker does not join"),
    pytest.param(
        training(*only(A, 1, **DRAINS), *C),
        "planned a0 c0 a1 c1 +c0 c1 join",
        "c joins",
        id="the last worker stays, whole, until another one has the state",
    ),
    pytest.param(
        training(*processes("a", 4, **IN), *processes("b", 3, **IN), *C, wanted=3),
        None,
        "2 workers training",
        id="a worker for whose processes there are not enough virtual nodes waits",
    ),
    pytest.param(
        training(worker("a", **IN), *C, wanted=2),
        "planned a c0 c1 +c0 c1 join",
        "c joins",
        id="workers of one process and of two train together",
    ),
]


@pytest.mark.parametrize(("scene", "expected", "reason"), TABLE)
def test_decisions(scene: Cluster, expected: str | None, reason: str) -> None:
    decision = decide(NOW, scene, SETTINGS)
    assert (in_words(decision), decision.reason) == (expected, reason)


@pytest.mark.parametrize(
    ("worker_", "lost"),
    [
        pytest.param(only(B, 0, gone="killed"), ["b0", "b1"], id="gone"),
        pytest.param(only(B, 1, last_heard=NOW - 60.0), ["b0", "b1"], id="silent"),
        pytest.param(only(only(B, 0, gone="killed"), 1, done=True), ["b0"], id="but not who has seen the end"),
        pytest.param(only(only(B, 0, gone="killed"), 1, left=True), ["b0"], id="nor who has left"),
        pytest.param(only(B, 0, left=True, deserted=True), ["b1"], id="one has left by itself"),
        pytest.param(
            only(only(B, 0, left=True, deserted=True, **DRAINS), 1, **DRAINS), [], id="unless all are on their way"
        ),
        pytest.param(only(B, 0, left=True, **DRAINS), [], id="nor where one has left as agreed on"),
    ],
)
def test_with_a_process_its_siblings_are_lost(worker_: list[Worker], lost: list[str]) -> None:
    assert sorted(find_lost(NOW, training(*A, *worker_), SETTINGS)) == lost


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_members_are_whole_workers_and_neighbours_are_of_different_ones(sizes: list[int], data: st.DataObject) -> None:
    """However workers of one size come and go: who keeps a copy of what a member has is not lost with it."""
    count, there, order = sizes[0], {"a": sizes[0]}, ["a0", "a1", "a2"][: sizes[0]]
    for number in range(len(sizes)):
        leaving = data.draw(st.sets(st.sampled_from(sorted(there)), max_size=len(there) - 1))
        there = {name: count for name in there if name not in leaving} | {f"w{number}-": count}
        places = {f"{name}{rank}": (name, rank) for name in there for rank in range(count)}
        order = order_members({member: first for first, member in enumerate(order)}, places)
        assert sorted(order) == sorted(places)
        if len(there) > 1:
            assert all(places[one][0] != places[other][0] for one, other in pairwise([*order, order[0]]))


def test_a_plan_counts_workers_and_not_processes() -> None:
    generation = plan(FIRST, "a0 a1 b0 b1")
    members = tuple(msgspec.structs.replace(x, launch=x.incarnation[0]) for x in generation.members)
    assert generation.workers == 4
    assert msgspec.structs.replace(generation, members=members).workers == 2


def test_a_new_coordinator_learns_of_a_workers_processes_from_any_of_them() -> None:
    """It counts on both until one is silent for too long, and then on neither; one word confirms the end of both."""
    generation = m.Generation(900, 3)
    members = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    running = m.Plan(
        generation,
        "planned",
        tuple(m.Member(name, f"{name}{r}", "h", 2 * n, 2 * n + 2, name) for n, (name, r) in enumerate(members)),
        (),
        "start",
        "",
    )
    job = Driven(1_000, 2, SETTINGS)
    for name, rank in members[:3]:
        place = {"launch": name, "local_rank": rank, "local_world_size": 2}
        assert job.admit(hello(name, f"{name}{rank}", plan=running, ready=True, **place)) is None
    assert [worker.state for worker in job.status().workers] == ["training", "silent"]
    while job.now <= SETTINGS.heartbeat_limit:
        job.now += 1.0
        for name, rank in members[:3]:
            job.hear(f"{name}{rank}", m.Heartbeat())
        job.decide()
    assert [(lost.worker, lost.incarnation) for lost in job.status().lost] == [("b", "b")]
    assert job.state.proposed is None
    job.call(http_api.GoneCall("b", "b"))
    job.decide()
    assert job.state.proposed is not None
    assert [member.incarnation for member in job.state.proposed.members] == ["a0", "a1"]
    assert sorted(job.state.proposed.ended) == ["b0", "b1"]


def test_an_end_that_is_confirmed_before_its_processes_are_known_holds_for_all_of_them() -> None:
    job = Driven(1_000, 2, SETTINGS)
    with pytest.raises(UnknownWorker):
        job.call(http_api.GoneCall("b", "b"))
    place = {"launch": "b", "local_world_size": 2}
    assert job.admit(hello("b", "b0", **place)) is not None
    assert job.admit(hello("b", "b1", **place | {"local_rank": 1})) is not None
