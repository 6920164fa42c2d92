"""Communicators among members that are all in this process, over real connections."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch._C import _distributed_c10d as c10d

from virtualflow.protocol import messages as m
from virtualflow.transport.gloo import Communicator
from virtualflow.transport.mesh import build_mesh
from virtualflow.transport.settings import CommunicatorSettings


def mesh(
    size: int,
    interrupted: dict[int, Callable[[], str | None]] | None = None,
    settings: CommunicatorSettings | None = None,
) -> list[Communicator]:
    """Communicators of ``size`` members in this process."""
    store = c10d.HashStore()
    members = tuple(m.Member(f"worker-{n}", f"i{n}", "127.0.0.1", n, n + 1) for n in range(size))
    plan = m.Plan(m.Generation(1, 1), "planned", members, (), "start", "start")

    def connect(rank: int) -> Communicator:
        news = (interrupted or {}).get(rank, lambda: None)
        return Communicator(
            plan, rank, build_mesh(store, rank, size, "127.0.0.1", 20.0), news, settings or CommunicatorSettings()
        )

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(connect, range(size)))
