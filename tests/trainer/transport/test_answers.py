"""Members that ask one another, each when it likes: values, what is taken without an answer, and what has to wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from meshes import mesh
from torch import Tensor

from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.transport import Communicator, Give, Message, Take

SIZE = 3
GET, PUT, SOON = b"get", b"put", b"yet"


class Shelf:
    """What one member keeps for the others."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.taken: list[tuple[int, list[int]]] = []
        self.ready = False
        self.ended, self.came = threading.Event(), threading.Semaphore(0)
        assert communicator.answers is not None
        communicator.answers.begin(len(GET), self.handle, self.ended.set)

    def handle(self, peer: int, request: bytes) -> Give | Take | None:
        """A number of the member's own, a room of four bytes, or nothing before it is ready."""
        if request == PUT:
            room = torch.empty(4, dtype=torch.uint8)

            def taken() -> None:
                self.taken.append((peer, room.tolist()))
                self.came.release()

            return Take(room.numpy().data, taken)
        if request == SOON and not self.ready:
            self.came.release()
            return None
        return Give(torch.full((5,), self.communicator.rank, dtype=torch.uint8).numpy().data)

    def ask(self, peer: int, request: bytes = GET) -> list[int]:
        """Ask, and wait for the answer."""
        room = torch.empty(5, dtype=torch.uint8)
        messages = [Message(peer, bytes_of(request), incoming=False), Message(peer, room, incoming=True)]
        self.communicator.asking.start_messages(messages).wait()
        return room.tolist()

    def put(self, peer: int, content: list[int]) -> None:
        """Send something that nobody answers."""
        told = [bytes_of(PUT), torch.tensor(content, dtype=torch.uint8)]
        self.communicator.asking.start_messages([Message(peer, each, incoming=False) for each in told]).wait()


def bytes_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@contextmanager
def shelves(sealed: bool = False) -> Iterator[list[Shelf]]:
    communicators = mesh(SIZE, sealed=sealed, asks=True)
    try:
        yield [Shelf(each) for each in communicators]
    finally:
        for each in communicators:
            each.close()


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_each_asks_each_while_nobody_else_does_anything(sealed: bool) -> None:
    with shelves(sealed) as members:
        for asker in members:
            for peer in range(SIZE):
                if peer != asker.communicator.rank:
                    assert asker.ask(peer) == [peer] * 5
                    asker.put(peer, [asker.communicator.rank, 2, 3, peer])
        for member in members:
            rank = member.communicator.rank
            for _ in range(SIZE - 1):
                assert member.came.acquire(timeout=20.0)
            assert sorted(member.taken) == [(peer, [peer, 2, 3, rank]) for peer in range(SIZE) if peer != rank]


def test_all_ask_all_at_once() -> None:
    with shelves() as members:
        wrong: list[object] = []

        def work(asker: Shelf) -> None:
            for number in range(200):
                peer = (asker.communicator.rank + 1 + number % (SIZE - 1)) % SIZE
                asker.put(peer, [number % 256] * 4)
                if asker.ask(peer) != [peer] * 5:
                    wrong.append((asker, peer))

        threads = [threading.Thread(target=work, args=(member,)) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        assert not wrong
        for member in members:  # what one has put there before it asked is there
            assert len(member.taken) == 200
            sent, received = member.communicator.traffic
            assert sent == received


def test_what_cannot_be_answered_yet_is_answered_when_it_can_be() -> None:
    with shelves() as members:
        found: list[list[int]] = []
        waiting = threading.Thread(target=lambda: found.append(members[0].ask(1, SOON)))
        waiting.start()
        assert members[1].came.acquire(timeout=20.0)
        assert members[2].ask(1) == [1] * 5, "others are served meanwhile"
        members[1].ready = True
        assert members[1].communicator.answers is not None
        members[1].communicator.answers.stir()
        waiting.join(20.0)
        assert found == [[1] * 5]


def test_a_member_that_is_gone_is_noticed_by_who_asks_and_by_who_serves() -> None:
    with shelves() as members:
        members[2].communicator.close()
        assert members[0].ended.wait(20.0)
        assert members[0].communicator.answers is not None
        assert isinstance(members[0].communicator.answers.broken, CommunicatorBroken)
        with pytest.raises(CommunicatorBroken):
            members[1].ask(2)


def test_a_member_that_serves_nobody_says_so() -> None:
    communicators = mesh(2, asks=True)
    try:
        ended = threading.Event()
        answers = communicators[1].answers
        assert answers is not None

        def refuse(peer: int, request: bytes) -> Give | Take | None:
            raise VirtualFlowError(f"member {peer} is not served")

        answers.begin(len(GET), refuse, ended.set)
        communicators[0].asking.start_messages([Message(1, bytes_of(GET), incoming=False)]).wait()
        assert ended.wait(20.0)
        assert str(answers.broken) == "member 0 is not served"
    finally:
        for each in communicators:
            each.close()
