"""Messages over groups of torch's, among members that are threads of this process: gloo, over real connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meshes import mesh
from torch import Tensor

from virtualflow.errors import CommunicatorBroken, ConfigurationError
from virtualflow.transport import GroupCollectives, Message, find_obstacle, open_groups, process_groups
from virtualflow.transport.settings import CommunicatorSettings

CPU = torch.device("cpu")
PATIENCE = 60.0


@contextmanager
def groups(
    size: int,
    interrupted: dict[int, Callable[[], str | None]] | None = None,
    settings: CommunicatorSettings | None = None,
) -> Iterator[list[GroupCollectives]]:
    members = mesh(size, interrupted, settings)
    with ThreadPoolExecutor(size) as threads:
        opened = list(threads.map(lambda member: open_groups(member, "gloo", CPU), members))
    try:
        yield opened
    finally:
        for member in members:
            member.close()


def together(members: Sequence[GroupCollectives], work: Callable[[GroupCollectives], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(work, members))


def circulate(member: GroupCollectives, rounds: int = 5) -> list[Tensor]:
    """Some messages of different types and sizes to each other one, all of them under way at once; what has come."""
    peers = [peer for peer in range(member.size) if peer != member.rank]
    started, come = [], []
    for number in range(rounds):
        dtype = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.int64)[number]
        sent = torch.full((10**number,), 10 * member.rank + number).to(dtype)
        rooms = [torch.empty(10**number, dtype=dtype) for _ in peers]
        messages = [Message(peer, room, incoming=True) for peer, room in zip(peers, rooms, strict=True)]
        started.append(member.start_messages(messages + [Message(peer, sent, incoming=False) for peer in peers]))
        come += rooms
    for pending in started:
        pending.wait()
        assert 0 < pending.ended <= time.perf_counter_ns()
        assert pending.sent == pending.received
    return come


@pytest.mark.parametrize("size", [2, 3])
def test_messages_arrive_in_their_order_whoever_of_the_two_threads_sends_them(size: int) -> None:
    with groups(size) as members:
        for thread in (members, [member.beside for member in members]):
            for member, come in zip(members, together(thread, circulate), strict=True):
                peers = [peer for peer in range(size) if peer != member.rank]
                expected = [10 * peer + number for number in range(5) for peer in peers]
                assert [room.unique().tolist() for room in come] == [[value] for value in expected]


def test_all_but_messages_stays_on_the_connections_and_all_is_counted() -> None:
    with groups(2) as members:
        before = [member._communicator.traffic for member in members]
        blocks = together(members, lambda member: member.all_gather(torch.tensor([member.rank], dtype=torch.uint8)))
        assert [block.tolist() for block in blocks] == [[[0], [1]]] * 2
        together(members, circulate)
        size = 4 * 1 + 2 * 10 + 100 + 8 * 1_000 + 8 * 10_000
        for member, (sent, received) in zip(members, before, strict=True):
            assert member._communicator.traffic == (sent + 1 + size, received + 1 + size)


def test_a_peer_that_breaks_off_is_noticed_by_all_who_wait_for_it() -> None:
    with groups(3) as members:
        waiting = [
            member.start_messages(
                [Message(2, torch.empty(8), incoming=True), Message(2, torch.ones(8), incoming=False)]
            )
            for member in members[:2]
        ]
        members[2].cut()
        for pending in waiting:
            with pytest.raises(CommunicatorBroken, match="gloo: "):
                pending.wait()
        for member in members[:2]:
            with pytest.raises(CommunicatorBroken):
                member.all_gather(torch.zeros(1, dtype=torch.uint8))
            with pytest.raises(CommunicatorBroken):
                member.beside.start_messages([Message(2, torch.ones(8), incoming=False)]).wait()


def test_whoever_waits_for_a_silent_peer_is_woken_where_another_one_has_broken_off() -> None:
    for broken, silent in ((1, 2), (2, 1)):
        with groups(3) as members:
            waits = members[0].beside.start_messages([Message(silent, torch.zeros(8), incoming=True)])
            notices = members[0].start_messages([Message(broken, torch.zeros(8), incoming=True)])
            members[broken].cut()
            with pytest.raises(CommunicatorBroken, match="gloo: "):
                notices.wait()
            with pytest.raises(CommunicatorBroken, match="gloo: "):
                waits.wait()


def test_a_silent_peer_is_left_when_the_coordinator_says_so_and_nothing_is_written_any_more() -> None:
    news = {0: lambda: "generation 2 takes over" if said.is_set() else None}
    said = threading.Event()
    with groups(2, news) as members:
        room = torch.zeros(1 << 20)
        pending = members[0].start_messages([Message(1, room, incoming=True)])
        said.set()
        with pytest.raises(CommunicatorBroken, match="generation 2 takes over"):
            pending.wait()
        with pytest.raises(CommunicatorBroken, match="gloo: "):  # its own thread is awake
            pending.ended  # noqa: B018
        with pytest.raises(CommunicatorBroken):
            members[1].start_messages([Message(0, torch.ones(1 << 20), incoming=False)]).wait()
        assert not room.any()


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        pytest.param(RuntimeError(""), CommunicatorBroken, "gloo: RuntimeError", id="without a text"),
        pytest.param(RuntimeError("closed\nby a peer"), CommunicatorBroken, "gloo: closed$", id="of several lines"),
        pytest.param(TimeoutError("late"), TimeoutError, "late", id="which is no sign that nothing has come yet"),
    ],
)
def test_what_a_groups_thread_raises_comes_to_whoever_waits(error: Exception, kind: type[Exception], says: str) -> None:
    def task() -> None:
        raise error

    (member,) = mesh(1)
    thread = process_groups._Thread("gloo", PATIENCE)
    try:
        with pytest.raises(kind, match=says):
            member.watch(thread.submit(task))
    finally:
        thread.close()
        member.close()


def test_the_threads_of_groups_end_with_them() -> None:
    before = set(threading.enumerate())
    with groups(2) as members:
        together(members, circulate)
        pending = members[0].start_messages([Message(1, torch.zeros(4), incoming=True)])
        members[0].cut()
        with pytest.raises(CommunicatorBroken):
            pending.wait()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread


def test_a_member_that_does_not_come_ends_the_opening() -> None:
    settings = CommunicatorSettings(connect_timeout=0.2)
    members = mesh(2, settings=settings)
    try:
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(members[1].all_gather, torch.zeros(8, dtype=torch.uint8))  # and comes no further
            with pytest.raises(CommunicatorBroken, match="gloo: "):
                open_groups(members[0], "gloo", CPU)
            other.result(PATIENCE)
    finally:
        for member in members:
            member.close()


class Together:
    """A group as NCCL's, which starts messages together. It is gloo that moves them."""

    def __init__(self, group: Any) -> None:
        self._group, self._works = group, list[Any]()
        self.told: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.told.append(f"begins on {device}")

    def send(self, *arguments: Any) -> None:
        self._works.append(self._group.send(*arguments))

    def recv(self, *arguments: Any) -> None:
        self._works.append(self._group.recv(*arguments))

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._works = self._works, []

        def wait(limit: timedelta) -> None:
            for work in works:
                work.wait(limit)
            self.told.append(f"has waited for {len(works)}")

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.told.append("is aborted")


def test_what_nccl_wants_to_have_started_together_is() -> None:
    with groups(2) as members:
        seats = [Together(member._lane._group) for member in members]
        lanes = [[process_groups._Lane(seat, "nccl", CPU, timedelta(seconds=PATIENCE))] for seat in seats]
        theirs = [GroupCollectives(one._communicator, lane) for one, lane in zip(members, lanes, strict=True)]
        come = together(theirs, circulate)
        assert [room.unique().tolist() for room in come[0]] == [[10], [11], [12], [13], [14]]
        for lane in lanes:
            lane[0].close()
    assert sorted(seats[0].told) == [*["begins on cpu"] * 5, *["has waited for 2"] * 5, "is aborted"]


@pytest.mark.parametrize(
    ("backend", "sealed", "says"),
    [
        pytest.param("gloo", True, "start the job in plaintext", id="a job that seals"),
        pytest.param("nccl", False, "leave backend out", id="a build or a model that NCCL does nothing for"),
    ],
)
def test_what_a_worker_cannot_do_is_refused_in_a_sentence(backend: str, sealed: bool, says: str) -> None:
    obstacle = find_obstacle(backend, CPU, sealed=sealed)
    assert obstacle is not None
    assert says in obstacle
    assert obstacle.startswith(f'vf.Exchange(backend="{backend}")')
    (alone,) = mesh(1)
    with pytest.raises(ConfigurationError, match="backend"):
        open_groups(alone, "nccl", CPU)


def test_gloo_is_there_for_workers_in_plaintext() -> None:
    assert find_obstacle("gloo", CPU, sealed=False) is None
