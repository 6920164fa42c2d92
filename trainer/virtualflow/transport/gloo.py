"""The collectives of one generation: a gloo process group that needs no default group and may be left behind.

A communicator is built in a background thread while its predecessor serves the training. Its rendezvous (one address a
member) goes through the coordinator, so no member hosts a store whose death would matter. Waiting is done in slices: a
peer whose process dies closes its sockets and the collective raises within milliseconds, but one that is stopped, or
whose machine lost its power, does not, and then the coordinator's word ends the wait. Messages between pairs have no
hop to a thread of gloo's and cost less, but a wait for one that is broken off closes all connections: a thread of its
own waits for them to their end, and the one that listens to the coordinator cuts the connections. Nor does gloo always
wake who waits for a message as its connection closes (not if a part of it is on the wire), so that thread looks after
the connections, too. All that is sent bears a checksum (``checksum``), and is looked at before anybody uses it.

All of them are CPU tensors; those of an accelerator are staged by the caller (``reduction``).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol import messages as m
from virtualflow.transport.activity import Activity
from virtualflow.transport.checksum import SIZE as CHECKSUM
from virtualflow.transport.checksum import checksum
from virtualflow.transport.interface import DONE, Message, Pending
from virtualflow.transport.link import Link
from virtualflow.transport.mesh import build_mesh
from virtualflow.transport.pending import Gather, Landing, Letter, Letters, Operation, brief
from virtualflow.transport.settings import CommunicatorSettings

logger = logging.getLogger("virtualflow.worker")

T = TypeVar("T")

_LONGER = 1.25
"""Connections are looked after when a wait is so many times as long as the longest before, or as at the last look."""
_LONGEST_LOOK = 10.0
"""Seconds between two looks, and before the first, at the most."""
_SMALL_GATHER = 1 << 20
"""Up to so many bytes a block and its checksum are gathered as one: a copy costs less than a second collective."""
_SMALL_MESSAGE = 1 << 17
"""Likewise a message between a pair: up to so many bytes a copy costs less than eight bytes on their own."""
_NEVER_SENT = 0
"""The tag of a message that nobody sends; others count from 1."""


class RelayStore(c10d.Store):
    """The rendezvous of one generation, through the coordinator's relay."""

    def __init__(self, link: Link, generation: m.Generation, timeout: float, superseded: Callable[[], bool]) -> None:
        super().__init__()
        self._link = link
        self._generation = generation
        self._timeout = timeout
        self._superseded = superseded

    def set(self, key: str, value: str | bytes | bytearray) -> None:
        """Publish a key."""
        self._link.publish(self._generation, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, waiting for it."""
        found = self._await([key], self._timeout)
        return found[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._await(list(keys), self._timeout if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._link.lookup(self._generation, key) is not None for key in keys)

    def _await(self, keys: list[str], timeout: float) -> list[bytes]:
        self._link.wait(lambda: self._superseded() or self.check(keys), timeout)
        found = [self._link.lookup(self._generation, key) for key in keys]
        values = [value for value in found if value is not None]
        if len(values) != len(keys):
            raise RuntimeError(f"generation {self._generation} was superseded or its members did not all come")
        return values


class Communicator:
    """The collectives among the members of ``plan``, as its member number ``rank``."""

    def __init__(
        self,
        plan: m.Plan,
        rank: int,
        group: c10d.ProcessGroup | None,
        interrupted: Callable[[], str | None],
        settings: CommunicatorSettings,
        activity: Activity | None = None,
    ) -> None:
        self.plan = plan
        self._activity = activity or Activity()
        self.rank = rank
        self.size = len(plan.members)
        self._peers = [peer for peer in range(self.size) if peer != rank]
        self._group = group
        self._interrupted = interrupted
        self._settings = settings
        self._pending: list[c10d.Work] = []
        self._timeout = timedelta(seconds=settings.operation_timeout)
        self._tags: dict[tuple[int, bool], int] = {}
        self._landing = Landing()
        self._patience = settings.wait_slice
        """How many seconds a wait may take before connections are looked after."""

    @classmethod
    def open(
        cls,
        plan: m.Plan,
        rank: int,
        link: Link,
        superseded: Callable[[], bool],
        interrupted: Callable[[], str | None],
        settings: CommunicatorSettings,
    ) -> Communicator:
        """Connect to the other members; blocks until the mesh stands.

        Args:
            superseded: whether a newer plan makes this one pointless; ends the wait.
            interrupted: asked while a collective is waited for; a sentence abandons it.

        Raises:
            CommunicatorBroken: the members could not all be reached in time.
        """
        group: c10d.ProcessGroup | None = None
        if len(plan.members) > 1:
            try:
                store = RelayStore(link, plan.generation, settings.connect_timeout, superseded)
                address = plan.members[rank].address
                group = build_mesh(store, rank, len(plan.members), address, settings.connect_timeout)
            except RuntimeError as error:
                raise CommunicatorBroken(brief(error)) from error
        return cls(plan, rank, group, interrupted, settings, link.activity)

    def all_gather(self, block: Tensor) -> Tensor:
        """Gather equal blocks: ``block`` is uint8 ``[n]``, the result uint8 ``[size, n]`` in the order of the ranks."""
        if self._group is None:
            return block.unsqueeze(0)
        gathered = torch.empty(self.size * block.numel(), dtype=torch.uint8)
        self.start_all_gather(gathered, block).wait()
        return gathered.view(self.size, block.numel())

    def start_all_gather(self, out: Tensor, block: Tensor) -> Pending:
        """Gather ``block`` (``[n]``) of every member into ``out`` (``[size * n]``), both contiguous, of one dtype."""
        if self._group is None:
            out.copy_(block)
            return DONE
        check, raw = checksum(block), block.view(-1).view(torch.uint8)
        target = out.view(-1).view(torch.uint8)
        names = [member.worker for member in self.plan.members]
        length = raw.numel()
        if length <= _SMALL_GATHER:
            rows = torch.empty((self.size, length + CHECKSUM), dtype=torch.uint8)
            parts = [self._gather(rows.view(-1), torch.cat([raw, check]))]
            return Gather(target, rows[:, :length], rows[:, length:], names, parts)
        checks = torch.empty((self.size, CHECKSUM), dtype=torch.uint8)
        parts = [self._gather(target, raw), self._gather(checks.view(-1), check)]
        return Gather(target, target.view(self.size, length), checks, names, parts)

    def _gather(self, out: Tensor, block: Tensor) -> Pending:
        options = c10d.AllgatherOptions()
        options.timeout = self._timeout

        def gather(group: c10d.ProcessGroup) -> Pending:
            work = group._allgather_base(out, block, options)
            self._pending = [earlier for earlier in self._pending if not earlier.is_completed()]
            self._pending.append(work)
            return Operation(work, self._check, self._activity, self._settings)

        return self._start(gather)

    def start_messages(self, messages: Sequence[Message]) -> Pending:
        """See `Collectives.start_messages`: the first that is waited for should be an incoming one."""

        def post(group: c10d.ProcessGroup) -> Pending:
            letters: list[Letter] = []
            checks: dict[int, Tensor] = {}
            for message in messages:
                if message.incoming:
                    letters.append(self._post(group, message))
                    continue
                known = id(message.stretch)  # what goes to several members is hashed once
                letters.append(self._post(group, message, checks.get(known)))
                checks[known] = letters[-1].check
            return Letters(letters, self._timeout)

        return self._start(post)

    def settle(self, outcome: Future[T]) -> T:
        """Wait in slices for what another thread makes of this communicator, looking at the coordinator's news.

        Raises:
            CommunicatorBroken: a peer is lost, or the coordinator says that the generation is: then the connections
                are cut, and the other thread is left to itself.
        """
        if not outcome.done():
            with self._activity.waiting:
                self._wait_for(outcome)
        return outcome.result()

    def _wait_for(self, outcome: Future[T]) -> None:
        slice_, begin, look = self._settings.wait_slice, time.monotonic(), self._patience
        while not outcome.done() and not wait([outcome], slice_).done:
            try:
                self._check()
                waited = time.monotonic() - begin
                if waited >= look:
                    look = waited + min((_LONGER - 1) * waited, _LONGEST_LOOK)
                    self._look()
            except CommunicatorBroken:
                # A peer that is through may have closed its side before the other thread had its turn.
                if self._interrupted() is None and wait([outcome], slice_).done:
                    break
                self.cut()
                raise
        self._patience = min(max(self._patience, _LONGER * (time.monotonic() - begin)), _LONGEST_LOOK)

    def _look(self) -> None:
        """Raise if a connection is closed: then nothing more can be received from it.

        gloo never forgets what was to be received (some 100 bytes at either end), so this is done only when a wait is
        longer than any before, and on while a long one lasts: some 25 times where none takes more than ten seconds,
        however often members wait for each other.

        Raises:
            CommunicatorBroken: one is.
        """
        group = self._group
        if group is None:
            return
        try:
            for peer in self._peers:
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT)
        except RuntimeError as error:
            raise CommunicatorBroken(brief(error)) from error

    def cut(self) -> None:
        """Close all connections: nothing that is under way reads or writes memory any more.

        gloo does so when a message between a pair does not come in time.
        """
        group = self._group
        if group is None:
            return
        self._landing.end()
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in self._peers:
            try:
                group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue  # Closed by now, this one or all of them.

    def move(self, windows: Iterator[Sequence[Message]], *, timeout: float) -> None:
        """Send and receive messages between pairs of members: all of a window at once, one window after the other.

        What one member sends to another arrives in the order of sending. ``windows`` is iterated in a thread of its
        own, while this one looks at the coordinator's news. The memory of a message belongs to the transfer until this
        returns or raises; afterwards nothing is read from it or written to it any more, whatever a stopped peer does
        when it wakes up.

        Args:
            windows: see above.
            timeout: seconds for a message, counted from the one before it: the last resort.

        Raises:
            CommunicatorBroken: a peer is lost, or the coordinator says that the generation is.
        """
        group = self._group
        assert group is not None
        self._check()

        passed_on: Future[None] = Future()
        over = threading.Event()

        def transfer() -> None:
            try:
                for window in windows:
                    if over.is_set():
                        break
                    letters = [self._post(group, message) for message in window]
                    for letter in letters:
                        letter.wait(timedelta(seconds=timeout))
                passed_on.set_result(None)
            except BaseException as error:  # noqa: BLE001 - it is the other thread's to raise
                passed_on.set_exception(error)

        thread = threading.Thread(target=transfer, name=f"virtualflow-transfer-{self.plan.generation}", daemon=True)
        thread.start()
        complete = False
        try:
            self.settle(passed_on)
            complete = True
        except RuntimeError as error:
            raise CommunicatorBroken(brief(error)) from error
        finally:
            if not complete:
                over.set()
                self.cut()
                # gloo may never end the wait for a small message of which a part had come when its connection closed;
                # but with all connections closed that thread touches nothing any more.
                thread.join(self._settings.wait_slice)

    def _post(self, group: c10d.ProcessGroup, message: Message, check: Tensor | None = None) -> Letter:
        """Start a message; ``check`` is the checksum of one that is sent, if it is known."""
        key = message.peer, message.incoming
        tag = self._tags.get(key, _NEVER_SENT) + 1
        start = group.recv if message.incoming else group.send
        raw, sender = message.stretch.view(-1).view(torch.uint8), self.plan.members[message.peer].worker
        size = raw.numel()
        if check is None:
            check = torch.empty(CHECKSUM, dtype=torch.uint8) if message.incoming else checksum(message.stretch)
        if size <= _SMALL_MESSAGE:
            self._tags[key] = tag
            packed = torch.empty(size + CHECKSUM, dtype=torch.uint8) if message.incoming else torch.cat([raw, check])
            work = start([packed], message.peer, tag)
            return Letter(
                message, packed[:size], packed[size:] if message.incoming else check, (work,), sender, self._landing
            )
        self._tags[key] = tag + 1
        works = start([message.stretch], message.peer, tag), start([check], message.peer, tag + 1)
        return Letter(message, raw, check, works, sender, self._landing)

    def _start(self, start: Callable[[c10d.ProcessGroup], Pending]) -> Pending:
        assert self._group is not None
        self._check()
        try:
            return start(self._group)
        except RuntimeError as error:
            raise CommunicatorBroken(brief(error)) from error

    def _check(self) -> None:
        reason = self._interrupted()
        if reason is not None:
            raise CommunicatorBroken(reason)

    @property
    def idle(self) -> bool:
        """Whether no collective is under way, so that the group can be taken down without waiting for it."""
        return all(work.is_completed() for work in self._pending)

    def close(self) -> None:
        """Take the group down. The destructor waits for a collective under way, so an abandoned one is leaked first."""
        group, self._group = self._group, None
        if group is not None and not self.idle:
            for leaked in (group, *self._pending):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
