"""The collectives of one generation, over a connection to each member.

A communicator is built in a background thread while its predecessor serves the training. Its rendezvous (one address a
member) goes through the coordinator, so no member hosts a store whose death would matter. Every block goes from each
member straight to each other one, by the thread that waits for it: with workers that keep all processors busy, each hop
to a thread of a library's and back takes longer than the wire. All that is sent bears a checksum or is sealed
(``channel``), and is looked at before anybody uses it.

All of them are CPU tensors; those of an accelerator are staged by the caller (``reduction``).
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol import messages as m
from virtualflow.transport.activity import Activity
from virtualflow.transport.answers import Answers
from virtualflow.transport.channel import Channel, FrameExchange, Lane, checksum
from virtualflow.transport.interface import DONE, Message, Pending
from virtualflow.transport.key_agreement import Introduction, Signer
from virtualflow.transport.link import Link
from virtualflow.transport.mesh import ASKING_LANES, LANES, build_mesh, close_all
from virtualflow.transport.settings import CommunicatorSettings

T = TypeVar("T")


class LinkRendezvous:
    """The rendezvous of one generation, through the coordinator's relay."""

    def __init__(self, link: Link, generation: m.Generation, superseded: Callable[[], bool]) -> None:
        self._link = link
        self._generation = generation
        self._superseded = superseded

    def publish(self, key: str, value: bytes) -> None:
        self._link.publish(self._generation, key, value)

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        def found() -> list[bytes]:
            values = [self._link.lookup(self._generation, key) for key in keys]
            return [value for value in values if value is not None]

        self._link.wait(lambda: self._superseded() or len(found()) == len(keys), timeout)
        values = found()
        if len(values) != len(keys):
            raise CommunicatorBroken(
                f"generation {self._generation} was superseded, or its members did not all say where they are"
            )
        return values


class Further(Protocol):
    """What moves messages among the same members by another way."""

    def cut(self) -> None:
        """See :meth:`Communicator.cut`."""

    def close(self) -> None:
        """End it, and what it does in threads of its own."""


class Communicator:
    """The collectives among the members of ``plan``, as its member number ``rank``.

    Args:
        lanes: connections to the others, for the thread that trains and for one beside it, and perhaps for what the
            member of the lower rank asks and what the other one does; none for one that is alone.
        interrupted: asked while something is waited for; a sentence ends that.
        introduction: of a member that seals what it sends, and has met all others; ``None``: all of it is plaintext.
    """

    def __init__(
        self,
        plan: m.Plan,
        rank: int,
        lanes: Sequence[Mapping[int, socket.socket]],
        interrupted: Callable[[], str | None],
        settings: CommunicatorSettings,
        activity: Activity | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.size = len(plan.members)
        self._activity = activity or Activity()
        self._interrupted = interrupted
        self.settings = settings
        self._hashes = introduction is None
        """Whether what is sent bears a checksum; what is sealed bears a tag."""

        def channel(connection: socket.socket, peer: int, number: int) -> Channel:
            if introduction is not None:
                return introduction.open_channel(connection, peer, number)
            return Channel(connection, plan.members[peer].worker)

        opened = [
            {peer: channel(connection, peer, number) for peer, connection in sorted(lane.items())}
            for number, lane in enumerate(lanes)
        ]
        check = partial(_refuse, interrupted)
        self._lanes = [Lane(channels, check, settings) for channels in opened[:LANES]]
        self.answers: Answers | None = None
        """Answers what the others ask; ``None``: nobody asks anything."""
        if len(opened) > LANES:
            lower, higher = opened[LANES:]
            asked = {peer: (higher if rank < peer else lower)[peer] for peer in lower}
            self._lanes.append(
                Lane({peer: (lower if rank < peer else higher)[peer] for peer in lower}, check, settings)
            )
            self.answers = Answers(asked, check, settings, hashes=self._hashes)
        self._further: list[Further] = []
        """What moves messages beside these connections, and breaks and ends with them."""
        self._lane = self._lanes[0] if self._lanes else None
        self._others: tuple[Communicator, ...] = ()
        # No circle of references: what has not arrived in a communicator that is left is to be freed with it.
        others = [copy.copy(self) for _ in self._lanes[1:]]
        for other, lane in zip(others, self._lanes[1:], strict=True):
            other._lane = lane
        self._others = tuple(others)

    @classmethod
    def open(
        cls,
        plan: m.Plan,
        rank: int,
        link: Link,
        superseded: Callable[[], bool],
        interrupted: Callable[[], str | None],
        settings: CommunicatorSettings,
        signer: Signer | None = None,
        *,
        asks: bool = False,
    ) -> Communicator:
        """Connect to the other members of a plan.

        Args:
            asks: whether members ask one another (``asking``, ``answers``); the same on all of them.
        """
        lanes: list[dict[int, socket.socket]] = []
        introduction = None if signer is None else Introduction(signer, plan, rank)
        if len(plan.members) > 1:
            rendezvous = LinkRendezvous(link, plan.generation, superseded)
            address, limit = plan.members[rank].address, settings.connect_timeout
            count = LANES + ASKING_LANES if asks else LANES
            lanes = build_mesh(rendezvous, rank, len(plan.members), address, limit, superseded, introduction, count)
        try:
            return cls(plan, rank, lanes, interrupted, settings, link.activity, introduction)
        except OSError as error:
            close_all(lanes)
            raise CommunicatorBroken(f"a connection broke at once: {error.strerror or error}") from error

    @property
    def beside(self) -> Communicator:
        """The same for a thread beside the one that trains: what one of the two starts is nothing to the other."""
        return self._others[0] if self._others else self

    @property
    def asking(self) -> Communicator:
        """Likewise for a thread that asks others for something: what it gets is what they answer (``answers``)."""
        return self._others[1]

    def all_gather(self, block: Tensor) -> Tensor:
        """Gather equal blocks: ``block`` is uint8 ``[n]``, the result uint8 ``[size, n]`` in the order of the ranks."""
        if self._lane is None:
            return block.unsqueeze(0)
        gathered = torch.empty(self.size * block.numel(), dtype=torch.uint8)
        self.start_all_gather(gathered, block).wait()
        return gathered.view(self.size, block.numel())

    def start_all_gather(self, out: Tensor, block: Tensor) -> Pending:
        """Gather ``block`` (``[n]``) of every member into ``out`` (``[size * n]``), both contiguous, of one dtype."""
        if self._lane is None:
            out.copy_(block)
            return DONE
        rows = out.view(self.size, block.numel())
        pending = self._start(
            [
                message
                for peer in self._lane.channels
                for message in (Message(peer, rows[peer], incoming=True), Message(peer, block, incoming=False))
            ]
        )
        rows[self.rank].copy_(block)
        return pending

    def start_messages(self, messages: Sequence[Message]) -> Pending:
        return self._start(messages)

    def _start(self, messages: Sequence[Message]) -> _Waiting:
        """Begin to send and receive these messages: what goes without waiting is under way behind this."""
        lane = self._lane
        assert lane is not None
        checks = dict[int, int]()
        sent = received = 0
        try:
            _refuse(self._interrupted)
            contents = [_memory_of(message.stretch) for message in messages]
            exchange = FrameExchange()
            for message, content in zip(messages, contents, strict=True):
                if message.incoming:
                    received += len(content)
                    lane.expect(message.peer, content, exchange)
                    continue
                sent += len(content)
                known = id(message.stretch)  # what goes to several members is hashed once
                if self._hashes and known not in checks:
                    checks[known] = checksum(content)
                lane.send(message.peer, content, checks.get(known, 0), exchange)
        except BaseException:
            self.cut()  # whatever is raised, perhaps by a signal, leaves frames half way: nothing more is exchanged
            raise
        self.count(sent, received)
        return _Waiting(self, exchange, sent, received)

    @property
    def sealed(self) -> bool:
        """Whether what is sent is sealed, and nobody takes part who is not known."""
        return not self._hashes

    def attach(self, further: Further) -> None:
        """Let it break and end with these connections."""
        self._further.append(further)

    def count(self, sent: int, received: int) -> None:
        """Count bytes among the traffic of this thread that another way than these connections has taken."""
        assert self._lane is not None
        self._lane.sent += sent
        self._lane.received += received

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that were sent to others, and received from them, by any thread; without heads and tags."""
        sent, received = sum(lane.sent for lane in self._lanes), sum(lane.received for lane in self._lanes)
        if self.answers is not None:
            sent, received = sent + self.answers.sent, received + self.answers.received
        return sent, received

    def check(self) -> None:
        """Raise CommunicatorBroken if nothing is to be waited for any longer."""
        _refuse(self._interrupted)

    def flush(self) -> None:
        """Wait until all that was started has left, for a thread that turns to something else than waiting."""
        lane = self._lane
        if lane is not None:
            self.wait_until(lambda: not lane.leaves)

    def wait_until(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait for what was started, until it is ``done``.

        Raises:
            CommunicatorBroken: a peer is lost, or the coordinator says that the generation is: then the connections are
                cut.
            VirtualFlowError: a member has sent something else than what is expected.
        """
        lane = self._lane
        assert lane is not None
        seconds = self.settings.operation_timeout if timeout is None else timeout
        self._activity.renew(waits=True)
        try:
            lane.wait(done, seconds)
        except BaseException:
            self.cut()
            raise
        finally:
            self._activity.renew(waits=False)

    def watch(self, outcome: Future[T]) -> T:
        """Wait for what comes by another way than these connections, which are cut if it does not.

        Raises:
            CommunicatorBroken: the coordinator says that the generation is over, or the outcome is that.
        """
        self._activity.renew(waits=True)
        try:
            while True:
                try:
                    return outcome.result(self.settings.wait_slice)
                except TimeoutError:
                    if outcome.done():  # it came just now, or is that error
                        return outcome.result()
                    self.check()
        except BaseException:
            self.cut()
            raise
        finally:
            self._activity.renew(waits=False)

    def settle(self, outcome: Future[T]) -> T:
        """Wait for what another thread makes of this communicator."""
        if not outcome.done():
            with self._activity.waiting:
                return outcome.result()
        return outcome.result()

    def cut(self) -> None:
        """Close all connections: nothing that is under way reads or writes memory any more."""
        for lane in self._lanes:
            lane.cut()
        if self.answers is not None:
            self.answers.cut()
        for further in self._further:
            further.cut()

    def move(self, windows: Iterator[Sequence[Message]], *, timeout: float) -> None:
        """Send and receive messages between pairs of members: all of a window at once, one window after the other.

        What one member sends to another arrives in the order of sending. The memory of a message belongs to the
        transfer until this returns or raises; afterwards nothing is read from it or written to it any more, whatever a
        stopped peer does when it wakes up.

        Args:
            timeout: seconds in which nothing moves: the last resort.
        """
        try:
            for window in windows:
                self._start(window).wait(timeout)
        except BaseException:
            self.cut()  # also where a window cannot be made
            raise

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        if self.answers is not None:
            self.answers.close()
        for further in self._further:
            further.close()


class _Waiting:
    def __init__(self, communicator: Communicator, exchange: FrameExchange, sent: int, received: int) -> None:
        self._communicator, self._exchange = communicator, exchange
        self.sent, self.received = sent, received

    @property
    def ended(self) -> int:
        return self._exchange.ended

    def wait(self, timeout: float | None = None) -> None:
        exchange = self._exchange
        self._communicator.wait_until(lambda: not exchange.left, timeout)


def _refuse(interrupted: Callable[[], str | None]) -> None:
    reason = interrupted()
    if reason is not None:
        raise CommunicatorBroken(reason)


def _memory_of(stretch: Tensor) -> memoryview:
    plain = stretch.detach().view(-1)
    memory: memoryview = (plain if plain.dtype is torch.uint8 else plain.view(torch.uint8)).numpy().data
    return memory
