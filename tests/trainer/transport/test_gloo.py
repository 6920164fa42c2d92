"""Waiting: what completes while nobody looks is complete, and what is called off touches no memory any more."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from meshes import mesh
from torch import Tensor

from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol import messages as m
from virtualflow.reduction.exchanger import Exchanger
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.reduction.summation import CanonicalSummation
from virtualflow.transport import gloo
from virtualflow.transport.checksum import checksum
from virtualflow.transport.gloo import Communicator
from virtualflow.transport.interface import Message
from virtualflow.transport.pending import Landing, Letter
from virtualflow.transport.settings import CommunicatorSettings

PLAN = m.Plan(
    m.Generation(1, 1),
    "planned",
    (m.Member("worker-0", "a", "127.0.0.1", 0, 1), m.Member("worker-1", "b", "127.0.0.1", 1, 2)),
    (),
    "start",
    "start",
)


class Work:
    """A collective that completes after so many slices, right when the slice has timed out."""

    def __init__(self, slices: int, error: str | None = None) -> None:
        self.slices, self.error = slices, error

    def is_completed(self) -> bool:
        return self.slices <= 0

    def wait(self, _: timedelta) -> None:
        if self.slices > 0:
            self.slices -= 1
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)


class Group:
    def __init__(self, work: Work) -> None:
        self.work = work

    def _allgather_base(self, out: Tensor, block: Tensor, _: Any) -> Work:
        out.view(2, -1).copy_(block)
        return self.work


def communicator(work: Work) -> Communicator:
    return Communicator(PLAN, 0, Group(work), lambda: None, CommunicatorSettings())


@pytest.mark.parametrize("slices", [0, 1, 2, 7])
def test_a_collective_that_completes_as_its_slice_ends_is_complete(slices: int) -> None:
    communicator(Work(slices)).all_gather(torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_a_collective_that_fails_breaks_the_communicator_with_its_own_words(slices: int) -> None:
    with pytest.raises(CommunicatorBroken, match="Connection closed by peer"):
        communicator(Work(slices, "Connection closed by peer")).all_gather(torch.zeros(4, dtype=torch.uint8))


# --- over connections -------------------------------------------------------------------------------------------------


def in_a_thread(exchanger: Exchanger, task: Callable[[], None]) -> Future[None]:
    outcome: Future[None] = Future()

    def carry_out() -> None:
        try:
            outcome.set_result(task())
        except CommunicatorBroken as error:
            outcome.set_exception(error)

    exchanger.submit(carry_out)
    return outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8], ids=str)
def test_messages_of_any_type_arrive_in_the_order_of_sending(dtype: torch.dtype) -> None:
    members = mesh(3)
    values = [torch.arange(12).view(3, 4).to(dtype) + rank for rank in range(3)]
    found = [[torch.zeros(4, dtype=dtype) for _ in range(6)] for _ in range(3)]

    def exchange(rank: int) -> None:
        peers = [peer for peer in range(3) if peer != rank]
        incoming = [Message(peer, found[rank][2 * peer + turn], incoming=True) for turn in range(2) for peer in peers]
        outgoing = [Message(peer, values[rank][turn], incoming=False) for turn in range(2) for peer in peers]
        members[rank].start_messages(incoming + outgoing).wait()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(exchange, range(3)))
    for rank in range(3):
        for peer in range(3):
            for turn in range(2):
                wanted = values[peer][turn] if peer != rank else torch.zeros(4, dtype=dtype)
                assert torch.equal(found[rank][2 * peer + turn], wanted)
        members[rank].close()


def test_what_goes_to_several_members_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    members, own = mesh(4), [torch.full((5,), float(rank)) for rank in range(4)]
    hashed: list[float] = []

    def count(stretch: Tensor) -> Tensor:
        hashed.append(float(stretch[0]))
        return checksum(stretch)

    monkeypatch.setattr(gloo, "checksum", count)

    def exchange(member: Communicator) -> list[Tensor]:
        peers = [peer for peer in range(4) if peer != member.rank]
        arrived = [torch.empty(5) for _ in peers]
        incoming = [Message(peer, to, incoming=True) for peer, to in zip(peers, arrived, strict=True)]
        member.start_messages(incoming + [Message(peer, own[member.rank], incoming=False) for peer in peers]).wait()
        return arrived

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(exchange, members))
    assert sorted(hashed) == [0.0, 1.0, 2.0, 3.0]
    for rank, arrived in enumerate(found):
        assert [float(one[4]) for one in arrived] == [float(peer) for peer in range(4) if peer != rank]
        members[rank].close()


def test_messages_that_are_called_off_touch_no_memory_any_more() -> None:
    news: list[str] = []
    giver, taker = mesh(2, {1: lambda: news[0] if news else None})
    memory, exchanger = torch.zeros(10_000_000, dtype=torch.uint8), Exchanger()
    started = taker.start_messages([Message(0, memory, incoming=True)])
    waiting = in_a_thread(exchanger, started.wait)
    news.append("generation 2 takes over")
    with pytest.raises(CommunicatorBroken, match="takes over"):
        taker.settle(waiting)
    # The incoming one first, as everywhere: gloo may never tell that a message could not be sent.
    answer, sent = torch.zeros(1), torch.ones(10_000_000, dtype=torch.uint8)
    with pytest.raises(CommunicatorBroken):
        giver.start_messages([Message(1, answer, incoming=True), Message(1, sent, incoming=False)]).wait()
    assert isinstance(waiting.exception(timeout=60), CommunicatorBroken), "its thread has come back"
    assert not memory.any()
    exchanger.close(20.0)
    giver.close()
    taker.close()


def test_a_small_message_that_has_arrived_before_all_was_called_off_touches_no_memory_any_more() -> None:
    memory, arrived, landing = torch.zeros(100), torch.ones(400, dtype=torch.uint8), Landing()
    letter = Letter(Message(0, memory, incoming=True), arrived, checksum(arrived), (), "worker-0", landing)
    landing.end()
    with pytest.raises(CommunicatorBroken, match="cut"):
        letter.wait(timedelta(seconds=1))
    assert not memory.any()


def test_a_message_whose_connection_closes_half_way_is_waited_for_no_longer() -> None:
    """gloo itself does not wake who waits for it."""
    giver, taker = mesh(2)
    # So large that it cannot be through before the connection closes.
    given, taken = (torch.empty(2 << 30, dtype=torch.uint8) for _ in range(2))
    given[0] = given[-1] = 1
    taken[0] = taken[-1] = 2
    exchanger = Exchanger()
    waiting = in_a_thread(exchanger, taker.start_messages([Message(0, taken, incoming=True)]).wait)
    sent = giver.start_messages([Message(1, given, incoming=False)])
    while taken[0] == 2:
        time.sleep(0.001)
    giver.cut()
    with pytest.raises(CommunicatorBroken):
        taker.settle(waiting)
    assert taken[-1] == 2
    assert isinstance(waiting.exception(timeout=60), CommunicatorBroken), "its thread has come back"
    del sent
    exchanger.close(20.0)
    giver.close()
    taker.close()


def test_waiting_long_and_often_for_slow_peers_leaves_little_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look after the connections leaves memory in gloo for ever."""
    slice_ = 0.002
    members = mesh(2, settings=CommunicatorSettings(wait_slice=slice_))
    looks: list[float] = []
    look, longest = members[0]._look, 0.0
    monkeypatch.setattr(members[0], "_look", lambda: (looks.append(time.monotonic()), look())[1])
    for _ in range(30):
        outcome: Future[None] = Future()
        threading.Timer(0.03, outcome.set_result, [None]).start()
        begin = time.monotonic()
        members[0].settle(outcome)
        longest = max(longest, time.monotonic() - begin)
    assert 1 <= len(looks) <= math.log(1.25 * longest / slice_, 1.25)
    for member in members:
        member.close()


def test_a_peer_that_is_lost_is_noticed_behind_one_that_is_slow() -> None:
    slow, lost, waiter = mesh(3)
    memory, exchanger = torch.zeros(2, 10, dtype=torch.uint8), Exchanger()
    messages = [Message(peer, memory[peer], incoming=True) for peer in (0, 1)]
    waiting = in_a_thread(exchanger, waiter.start_messages(messages).wait)
    lost.cut()
    with pytest.raises(CommunicatorBroken):
        waiter.settle(waiting)
    exchanger.close(0.0)
    for member in (slow, lost, waiter):
        member.close()


def test_a_reduction_that_is_called_off_is_followed_by_one_in_the_next_generation() -> None:
    """As when a peer is stopped, and wakes up when the others have gone on."""
    news: list[str] = []
    asleep, awake = mesh(2, {1: lambda: news[0] if news else None})
    reducers = [
        Reducer(CanonicalSummation(2), ReductionSettings(exchange=Exchange("reduce-scatter"), bucket=1 << 10))
        for _ in range(2)
    ]
    # The empty one makes a bucket of its own.
    ranges, templates = [range(1), range(1, 2)], [torch.zeros(30), torch.zeros(1000), torch.zeros(0)]

    def reduce(member: Communicator) -> list[Tensor | None]:
        own = [torch.full_like(template, 1.0 + member.rank) for template in templates]
        parts = [((member.rank, member.rank + 1), own)]
        return reducers[member.rank].reduce(member, ranges, parts, templates=templates, present=[True] * 3, scale=1.0)

    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(reduce, awake)
        news.append("generation 2 takes over")
        with pytest.raises(CommunicatorBroken, match="takes over"):
            waiting.result()
        with pytest.raises(CommunicatorBroken):
            reduce(asleep)
        for reducer in reducers:
            reducer.forget()
        for _ in range(2):
            for found in threads.map(reduce, members := mesh(2)):
                assert [tensor.unique().tolist() for tensor in found if tensor is not None] == [[3.0], [3.0], []]
            for reducer in reducers:
                reducer.forget()
            for member in members:
                member.close()
    asleep.close()
    awake.close()
