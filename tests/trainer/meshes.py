"""Communicators among members that are all in this process, over real connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from signers import NamedSigner

from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol import messages as m
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.key_agreement import Introduction, Signer
from virtualflow.transport.mesh import ASKING_LANES, LANES, build_mesh
from virtualflow.transport.settings import CommunicatorSettings


class Board:
    """A rendezvous among threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def publish(self, key: str, value: bytes) -> None:
        """Leave a value for the others."""
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def wait(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The values of these keys."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self.values for key in keys), timeout):
                raise CommunicatorBroken("they have not all come")
            return [self.values[key] for key in keys]


def plan_of(size: int) -> m.Plan:
    """A generation of so many members on this machine."""
    members = tuple(m.Member(f"worker-{n}", f"i{n}", "127.0.0.1", n, n + 1) for n in range(size))
    return m.Plan(m.Generation(1, 1), "planned", members, (), "start", "start")


def mesh(
    size: int,
    interrupted: dict[int, Callable[[], str | None]] | None = None,
    settings: CommunicatorSettings | None = None,
    *,
    sealed: bool = False,
    signers: Mapping[int, Signer | None] | None = None,
    board: Board | None = None,
    asks: bool = False,
) -> list[Communicator]:
    """Communicators of ``size`` members in this process.

    Args:
        signers: of those members that have others than ``sealed`` says.
        asks: whether members ask one another.
    """
    board, plan = board or Board(), plan_of(size)

    def connect(rank: int) -> Communicator:
        news = (interrupted or {}).get(rank, lambda: None)
        own = NamedSigner(f"worker-{rank}") if sealed else None
        signer = (signers or {}).get(rank, own)
        introduction = None if signer is None else Introduction(signer, plan, rank)
        count = LANES + ASKING_LANES if asks else LANES
        lanes = build_mesh(board, rank, size, "127.0.0.1", 20.0, introduction=introduction, count=count)
        how = settings or CommunicatorSettings()
        return Communicator(plan, rank, lanes, news, how, introduction=introduction)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(connect, range(size)))
