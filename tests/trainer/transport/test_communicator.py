"""Collectives over real connections: whatever is called off ends, and touches no memory any more."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from meshes import mesh
from torch import Tensor

from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.reduction.accumulation import CanonicalSummation
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.transport import Exchanger, communicator
from virtualflow.transport.channel import checksum
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.interface import Message
from virtualflow.transport.settings import CommunicatorSettings


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

    def count(content: memoryview) -> int:
        hashed.append(content.cast("f")[0])
        return checksum(content)

    monkeypatch.setattr(communicator, "checksum", count)

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
    sent = torch.ones(10_000_000, dtype=torch.uint8)
    with pytest.raises(CommunicatorBroken):
        giver.start_messages([Message(1, sent, incoming=False)]).wait()
    assert isinstance(waiting.exception(timeout=60), CommunicatorBroken), "its thread has come back"
    assert not memory.any()
    exchanger.close(20.0)
    giver.close()
    taker.close()


def test_a_message_whose_connection_closes_half_way_is_waited_for_no_longer() -> None:
    giver, taker = mesh(2)
    # So large that it cannot be through before the connection closes.
    given, taken = (torch.empty(1 << 28, dtype=torch.uint8) for _ in range(2))
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


def test_a_peer_that_is_lost_is_noticed_behind_one_that_is_slow() -> None:
    slow, lost, waiter = mesh(3)
    memory = torch.zeros(2, 10, dtype=torch.uint8)
    lost.cut()
    with pytest.raises(CommunicatorBroken, match="worker-1 has closed"):
        waiter.start_messages([Message(peer, memory[peer], incoming=True) for peer in (0, 1)]).wait()
    for member in (slow, lost, waiter):
        member.close()


def test_a_peer_that_is_through_and_gone_does_not_break_what_others_still_bring() -> None:
    slow, through, waiter = mesh(3)
    found = torch.zeros(2, 4, dtype=torch.uint8)
    given = torch.full((4,), 7, dtype=torch.uint8)
    sent = through.start_messages([Message(2, given, incoming=False)])
    sent.wait()
    through.close()
    pending = waiter.start_messages([Message(peer, found[peer], incoming=True) for peer in (0, 1)])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pending.wait)
        while not any(channel.closed for channel in waiter._lanes[0].channels.values()):
            time.sleep(0.001)
        slow.start_messages([Message(2, given, incoming=False)]).wait()
        waiting.result()
    assert found.unique().tolist() == [7]
    for member in (slow, waiter):
        member.close()


def test_what_a_peer_does_not_read_any_more_is_given_up() -> None:
    """It has cut the connections, and still keeps their descriptors."""
    giver, taker = mesh(2)
    given = torch.ones(1 << 26, dtype=torch.uint8)  # more than the kernel keeps
    pending = giver.start_messages([Message(1, given, incoming=False)])
    taker.cut()
    with pytest.raises(CommunicatorBroken, match=r"worker-1 has closed|the connection to worker-1 is broken"):
        pending.wait()
    giver.close()
    taker.close()


def test_a_peer_that_is_gone_ends_the_wait_for_others_in_the_end() -> None:
    slow, gone, waiter = mesh(3, settings=CommunicatorSettings(lost_wait=0.1))
    gone.close()
    with pytest.raises(CommunicatorBroken, match="worker-1 closed the connection"):
        waiter.start_messages([Message(0, torch.zeros(4), incoming=True)]).wait()
    for member in (slow, waiter):
        member.close()


def test_what_had_not_arrived_is_freed_with_its_communicator() -> None:
    """Without waiting for Python's collector of circles, which does not know how much they hold."""
    members = mesh(2)
    memory = torch.zeros(1_000, dtype=torch.uint8)
    members[0].start_messages([Message(1, memory, incoming=True)])
    known = weakref.ref(members[0]), weakref.ref(members[0]._lanes[0])
    gc.disable()
    try:
        for member in members:
            member.close()
        del member
        members.clear()
        assert [one() for one in known] == [None, None]
    finally:
        gc.enable()


def test_an_interruption_by_a_signal_leaves_nothing_half_way() -> None:
    def interrupt() -> str | None:
        raise KeyboardInterrupt

    stopped, other = mesh(2, {0: interrupt})
    with pytest.raises(KeyboardInterrupt):
        stopped.all_gather(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(CommunicatorBroken):
        other.all_gather(torch.zeros(4, dtype=torch.uint8))
    stopped.close()
    other.close()


def test_members_at_different_places_say_so() -> None:
    members = mesh(2)

    def gather(member: Communicator) -> str:
        with pytest.raises(VirtualFlowError) as told:
            member.all_gather(torch.zeros(8 + member.rank, dtype=torch.uint8))
        return str(told.value)

    with ThreadPoolExecutor(2) as threads:
        sentences = list(threads.map(gather, members))
    assert any("at different places of the script" in sentence for sentence in sentences)
    for member in members:
        member.close()


def test_what_a_second_thread_exchanges_does_not_meet_what_the_first_one_does() -> None:
    """The two members begin them in different orders."""
    members = mesh(2)

    def both(member: Communicator) -> list[list[int]]:
        def gather(lane: Communicator) -> list[int]:
            value = member.rank + 10 * (lane is not member)
            found: list[int] = lane.all_gather(torch.tensor([value], dtype=torch.uint8)).view(-1).tolist()
            return found

        lanes = [member, member.beside][:: 1 - 2 * member.rank]
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(gather, lanes))[:: 1 - 2 * member.rank]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(both, members)) == [[[0, 1], [10, 11]]] * 2
    for member in members:
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
