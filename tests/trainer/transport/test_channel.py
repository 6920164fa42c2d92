"""Frames over one connection: all arrive whole and in order, or it is said what is wrong."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import mesh

from tiers import examples
from virtualflow.errors import CommunicatorBroken, Damaged, VirtualFlowError
from virtualflow.transport.channel import CLOSED, Channel, FrameExchange, SealedChannel, checksum

HEAD = 24


Connecting = Callable[[], tuple[Channel, Channel]]


def pair() -> tuple[Channel, Channel]:
    """Both ends of a connection."""
    accepted, connecting = connections()
    return Channel(accepted, "worker-0"), Channel(connecting, "worker-1")


def sealed_pair() -> tuple[Channel, Channel]:
    accepted, connecting = connections()
    one, other = os.urandom(32), os.urandom(32)
    return SealedChannel(accepted, "worker-0", one, other), SealedChannel(connecting, "worker-1", other, one)


def connections() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connecting = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    return accepted, connecting


plain_and_sealed = pytest.mark.parametrize("connect", [pair, sealed_pair], ids=["plain", "sealed"])


def send(channel: Channel, *contents: bytes) -> FrameExchange:
    exchange = FrameExchange()
    for content in contents:
        channel.send(memoryview(content), checksum(content), exchange)
    return exchange


def expect(channel: Channel, *sizes: int) -> tuple[list[bytearray], FrameExchange]:
    exchange, found = FrameExchange(), [bytearray(size) for size in sizes]
    for content in found:
        channel.expect(memoryview(content), exchange)
    return found, exchange


def carry(*channels: Channel, until: Callable[[], bool]) -> None:
    """Let them move what they can until something holds."""
    looking = select.poll()
    while not until():
        for channel in channels:
            looking.register(channel.number, channel.interest)
        looking.poll(1_000)
        for channel in channels:
            channel.advance()


@plain_and_sealed
@given(first=st.lists(st.binary(max_size=3_000), max_size=8), second=st.lists(st.binary(max_size=3_000), max_size=8))
@settings(max_examples=examples(100), deadline=None)
def test_frames_arrive_in_their_order_in_both_directions(
    connect: Connecting, first: list[bytes], second: list[bytes]
) -> None:
    left, right = connect()
    here, arrives_here = expect(left, *map(len, second))
    there, arrives_there = expect(right, *map(len, first))
    leaves = send(left, *first), send(right, *second)
    carry(left, right, until=lambda: not any(one.left for one in (arrives_here, arrives_there, *leaves)))
    assert [bytes(content) for content in here] == second
    assert [bytes(content) for content in there] == first
    left.close()
    right.close()


@plain_and_sealed
def test_large_frames_in_both_directions_do_not_wait_for_each_other(connect: Connecting) -> None:
    left, right = connect()
    size = 20_000_000  # more than the kernel keeps
    here, arrives_here = expect(left, size)
    there, arrives_there = expect(right, size)
    send(left, b"l" * size)
    send(right, b"r" * size)
    carry(left, right, until=lambda: not (arrives_here.left or arrives_there.left))
    assert bytes(here[0]) == b"r" * size
    assert bytes(there[0]) == b"l" * size
    left.close()
    right.close()


@plain_and_sealed
def test_what_comes_before_it_is_expected_waits_for_that(connect: Connecting) -> None:
    left, right = connect()
    send(left, b"early", b"later")
    left.advance()
    assert not right.advance()
    (first,), arrives = expect(right, 5)
    carry(right, until=lambda: not arrives.left)
    assert first == b"early"
    (second,), arrives = expect(right, 5)
    carry(right, until=lambda: not arrives.left)
    assert second == b"later"
    left.close()
    right.close()


@plain_and_sealed
def test_another_length_than_expected_is_told_in_a_sentence(connect: Connecting) -> None:
    left, right = connect()
    send(left, b"12345")
    left.advance()
    expect(right, 4)
    with pytest.raises(VirtualFlowError, match=r"worker-1 has sent 5 bytes where 4 were expected, .* different places"):
        carry(right, until=lambda: False)
    left.close()
    right.close()


def test_each_bit_that_flips_is_noticed() -> None:
    for bit in range(8 * (HEAD + 3)):
        left, right = pair()
        send(left, b"abc")
        raw = bytearray(b"".join(left._outgoing[0].views))
        raw[bit // 8] ^= 1 << bit % 8
        left._connection.sendall(raw)
        expect(right, 3)
        with pytest.raises(Damaged, match="from worker-1 arrived damaged"):
            carry(right, until=lambda: False)
        left.close()
        right.close()


@pytest.mark.parametrize("order", [(1,), (0, 0), (1, 0)], ids=["one is lost", "one comes twice", "in another order"])
def test_a_frame_in_another_place_than_its_own_is_noticed(order: tuple[int, ...]) -> None:
    left, right = pair()
    send(left, b"abc", b"abc")
    frames = [b"".join(departure.views) for departure in left._outgoing]
    left._connection.sendall(b"".join(frames[number] for number in order))
    _, arrives = expect(right, 3, 3)
    with pytest.raises(Damaged):
        carry(right, until=lambda: not arrives.left)
    left.close()
    right.close()


@pytest.mark.parametrize("sent", [0, 10, HEAD, HEAD + 2])
def test_a_connection_that_closes_before_a_frame_is_whole_is_broken(sent: int) -> None:
    left, right = pair()
    send(left, b"abc")
    left._connection.sendall(b"".join(left._outgoing[0].views)[:sent])
    left.close()
    expect(right, 3)
    with pytest.raises(CommunicatorBroken, match="worker-1 has closed its connection"):
        carry(right, until=lambda: False)
    right.close()


@plain_and_sealed
def test_what_had_left_before_its_sender_closed_arrives(connect: Connecting) -> None:
    left, right = connect()
    send(left, b"abc")
    left.advance()
    left.close()
    (content,), arrives = expect(right, 3)
    carry(right, until=lambda: not arrives.left)
    assert content == b"abc"
    right.close()


def test_a_peer_that_is_gone_shows_where_nothing_is_expected_of_it() -> None:
    left, right = pair()
    left.close()
    looking = select.poll()
    looking.register(right.number, right.interest)
    ((_, events),) = looking.poll(10_000)
    assert events & CLOSED
    right.close()


@plain_and_sealed
def test_no_memory_changes_behind_a_cut_though_all_has_arrived(connect: Connecting) -> None:
    left, right = connect()
    (content,), _ = expect(right, 3)
    send(left, b"abc")
    left.advance()
    assert select.select([right.number], [], [], 10.0)[0]
    right.cut()
    with pytest.raises(CommunicatorBroken, match="cut"):
        right.advance()
    assert content == bytes(3)
    left.close()
    right.close()


def test_a_cut_wakes_who_waits() -> None:
    left, right = pair()
    expect(right, 3)
    looking = select.poll()
    looking.register(right.number, right.interest)
    cutter = threading.Timer(0.05, right.cut)
    cutter.start()
    assert looking.poll(60_000)
    cutter.join()
    left.close()
    right.close()


def test_a_forked_process_does_not_keep_a_connection_alive() -> None:
    left, right = mesh(2)
    over, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(over, 1)
        os._exit(0)
    for connection in (channel._connection for lane in left._lanes for channel in lane.channels.values()):
        connection.close()  # as the end of the process does it: nobody shuts it down
    with pytest.raises(CommunicatorBroken, match="worker-0"):
        right.all_gather(torch.zeros(3, dtype=torch.uint8))
    os.write(told, b".")
    os.waitpid(child, 0)
    os.close(over)
    os.close(told)
    right.close()
