"""Messages over torch's process groups: gloo's and NCCL's, for whoever wants another transport than own connections.

A group moves bytes from member to member and adds nothing up, so no bit depends on it. All else of a generation stays
on the connections of its communicator, as does the question whether a message is still to be waited for. Groups are
made directly, so that the script's own default group is left alone. Their addresses go through a store at the first
member: that takes no coordinator, and a generation is over with any of its members. What travels bears no checksum and
is not encrypted, and who connects to a group or its store is not asked who he is.

No library can be asked whether a message has arrived: a wait of gloo's that times out closes all its connections. So a
thread of each group waits, and is woken by just that if the others are not worth it any more.

NCCL has never been run here. What is for it alone is marked by its name; tests have gloo do all the rest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor

from virtualflow.errors import CommunicatorBroken, ConfigurationError
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.exchanger import Exchanger
from virtualflow.transport.interface import Message, Pending
from virtualflow.transport.mesh import LANES, listen

T = TypeVar("T")

c10d: Any = torch.distributed
"""Its types say little of what is used here."""

_MESSAGE, _NEVER = 0, 1
"""Tags: of messages, and of what nobody sends."""
_CLOSING = 10.0
"""Seconds that the end of a group may take; gloo takes tens of milliseconds."""
_AT_ONCE = timedelta(milliseconds=1)


def find_obstacle(backend: str, device: torch.device, *, sealed: bool) -> str | None:
    """Why messages of this worker cannot travel by ``backend``, and what to do; ``None``: they can.

    Args:
        device: of the model.
        sealed: whether workers of this job seal what they send.
    """
    wish = f'vf.Exchange(backend="{backend}")'
    if sealed:
        return (
            f"{wish} sends gradients without encryption, and workers of this job seal what they send; leave backend "
            "out, or start the job in plaintext (--insecure-plaintext, in a cluster spec.security.plaintext)"
        )
    if not (c10d.is_available() and (c10d.is_gloo_available() if backend == "gloo" else c10d.is_nccl_available())):
        return f"{wish}: this build of torch ({torch.__version__}) has no {backend}; leave backend out"
    if backend == "nccl" and device.type != "cuda":
        return (
            f'{wish}: the model is on {device}, and NCCL sends from CUDA devices only; leave backend out, or use "gloo"'
        )
    return None


def open_groups(communicator: Communicator, backend: str, device: torch.device) -> GroupCollectives:
    """The collectives of ``communicator`` whose messages go over groups; all members call this together.

    Args:
        device: of the model, on which NCCL sends and receives.

    Raises:
        ConfigurationError: it cannot be done here.
        CommunicatorBroken: the generation is over.
    """
    obstacle = find_obstacle(backend, device, sealed=communicator.sealed)
    if obstacle is not None:
        raise ConfigurationError(obstacle)
    rank, settings = communicator.rank, communicator.settings
    addresses = [member.address for member in communicator.plan.members]
    connecting, moving = timedelta(seconds=settings.connect_timeout), timedelta(seconds=settings.operation_timeout)
    with ExitStack() as held:
        # The first member listens where its peers dial, and not everywhere, as a store would by itself.
        try:
            listener = held.enter_context(listen(addresses[0], LANES * len(addresses))) if rank == 0 else None
        except OSError as error:
            communicator.cut()
            raise CommunicatorBroken(f"{backend}: {error.strerror or error}") from error
        own = torch.tensor([0 if listener is None else listener.getsockname()[1]])
        port = int(communicator.all_gather(own.view(torch.uint8))[0].clone().view(torch.int64))
        serving = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}

    def build() -> list[Any]:
        store = c10d.TCPStore(addresses[0], port, timeout=connecting, wait_for_workers=False, **serving)
        stores = [c10d.PrefixStore(str(lane), store) for lane in range(LANES)]
        if backend == "gloo":
            return [_make_gloo(each, rank, len(addresses), addresses[rank], connecting) for each in stores]
        return [_make_nccl(each, rank, len(addresses), device, moving) for each in stores]

    builder = _Thread(backend, settings.connect_timeout)
    communicator.attach(builder)
    on = torch.device("cpu") if backend == "gloo" else device
    lanes = [_Lane(group, backend, on, moving) for group in communicator.watch(builder.submit(build))]
    for lane in lanes:
        communicator.attach(lane)
    return GroupCollectives(communicator, lanes)


def _make_gloo(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    options: Any = c10d.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 1
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    # By default, torch ends the processes of those who have lost a peer.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = c10d.ProcessGroupNCCL(store, rank, size, options)
    made.eager_connect_single_device(device)
    group = c10d.ProcessGroup(store, rank, size)  # starts several messages together, as what it is made of does not
    group._register_backend(device, c10d.ProcessGroup.BackendType.NCCL, made)
    return group


class GroupCollectives:
    """The collectives of a communicator, of which messages alone go over groups: one for each of its threads."""

    def __init__(self, communicator: Communicator, lanes: Sequence[_Lane], which: int = 0) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator, self._lanes, self._lane = communicator, lanes, lanes[which]
        self.all_gather, self.start_all_gather = communicator.all_gather, communicator.start_all_gather
        self.flush, self.settle, self.cut = communicator.flush, communicator.settle, communicator.cut

    @property
    def beside(self) -> GroupCollectives:
        """See :attr:`Communicator.beside`."""
        return GroupCollectives(self._communicator.beside, self._lanes, 1)

    def start_messages(self, messages: Sequence[Message]) -> Pending:
        moves = [self._lane.place(message) for message in messages]
        try:
            self._communicator.check()
            outcome = self._lane.start(moves)
        except BaseException as error:
            self.cut()
            if isinstance(error, RuntimeError):
                raise _broken(self._lane.backend, error) from error
            raise
        sent, received = (sum(m.stretch.nbytes for m in messages if m.incoming is way) for way in (False, True))
        self._communicator.count(sent, received)
        return _Moving(self._communicator, outcome, sent, received)


class _Moving:
    def __init__(self, communicator: Communicator, outcome: Future[int], sent: int, received: int) -> None:
        self._communicator, self._outcome = communicator, outcome
        self.sent, self.received = sent, received

    @property
    def ended(self) -> int:
        return self._outcome.result()

    def wait(self) -> None:
        self._communicator.watch(self._outcome)


class _Move(NamedTuple):
    message: Message
    own: Tensor
    """Its memory, as bytes,"""
    placed: Tensor
    """and where they are for the group: the same, or a copy of what leaves, or room for what comes."""


class _Thread:
    """A thread in which a backend does one thing after the other, and may be stuck.

    Args:
        patience: seconds for which its end is waited for: while the interpreter ends, no thread must be in torch.
    """

    def __init__(self, backend: str, patience: float) -> None:
        self.backend, self._patience = backend, patience
        self._exchanger = Exchanger()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(task())
            except RuntimeError as error:
                outcome.set_exception(_broken(self.backend, error))
            except BaseException as error:  # noqa: BLE001 - it is raised where the outcome is asked for
                outcome.set_exception(error)

        self._exchanger.submit(run)
        return outcome

    def cut(self) -> None:
        """It comes to an end by itself."""

    def close(self) -> None:
        self._exchanger.close(self._patience)


class _Lane(_Thread):
    """A group, and the thread that waits for what it moves, in the order in which that was started.

    Args:
        device: where messages are to be for it; those that are elsewhere are copied.
    """

    def __init__(self, group: Any, backend: str, device: torch.device, limit: timedelta) -> None:
        super().__init__(backend, _CLOSING)
        self._group, self._device, self._limit = group, device, limit

    def place(self, message: Message) -> _Move:
        own = message.stretch.view(-1).view(torch.uint8)
        if own.device == self._device:
            return _Move(message, own, own)
        room = torch.empty_like(own, device=self._device)
        return _Move(message, own, room if message.incoming else room.copy_(own))

    def start(self, moves: Sequence[_Move]) -> Future[int]:
        """Send and receive; the outcome is when that has ended, by ``time.perf_counter_ns``."""
        group = self._group
        if group is None:
            raise RuntimeError("the group is closed")
        together = self.backend == "nccl"  # whose messages wait for each other where they are not started together
        if together:
            group._start_coalescing(self._device)
        works = [
            (group.recv if message.incoming else group.send)([placed], message.peer, _MESSAGE)
            for message, _, placed in moves
        ]
        if together:
            works = [group._end_coalescing(self._device)]

        def finish() -> int:
            for work in works:
                work.wait(self._limit)
            for message, own, placed in moves:
                if message.incoming and placed is not own:
                    own.copy_(placed)
            if self._device.type == "cuda":  # NCCL's wait makes the stream wait, not this thread
                torch.cuda.current_stream(self._device).synchronize()
            return time.perf_counter_ns()

        return self.submit(finish)

    def cut(self) -> None:
        """Break off what moves: whoever waits is woken, and no memory is read or written behind this."""
        group = self._group
        if group is None:
            return
        if self.backend == "nccl":
            group.abort()
            return
        for peer in range(group.size()):
            # It raises at once where the connection is closed already, and else when it has closed all of them.
            with suppress(RuntimeError):
                if peer != group.rank():
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER).wait(_AT_ONCE)

    def close(self) -> None:
        self.cut()
        self._exchanger.submit(self._let_go)
        super().close()

    def _let_go(self) -> None:
        self._group = None


def _broken(backend: str, error: RuntimeError) -> CommunicatorBroken:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CommunicatorBroken(f"{backend}: {lines[0]}")
