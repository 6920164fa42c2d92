"""Memory for a state that will arrive, made before anybody waits for it.

Receiving into fresh memory takes longer than sending: the kernel makes a page at each first touch. So a member that has
the state tells joiners through the generation's rendezvous how large its tensors are, and a joiner makes and touches
that memory before it connects, while the others still train.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_KEY
from virtualflow.state.striping import size_of
from virtualflow.transport import Link

_ROOM = "room"
"""The key of a generation's rendezvous: pairs of a size in bytes and how many tensors have it."""


def elder(plan: m.Plan) -> m.Member | None:
    """The member of a planned generation that tells its joiners how much will come; ``None``: nobody need."""
    if plan.mode != "planned" or not plan.joiners:
        return None
    return next((member for member in plan.members if member.worker not in plan.joiners), None)


def tell_room(link: Link, plan: m.Plan, sizes: Sequence[int]) -> None:
    """Tell the joiners of ``plan`` the sizes in bytes of the tensors that they will have to make memory for."""
    value = msgspec.json.encode(sorted(Counter(sizes).items()))
    link.publish(plan.generation, _ROOM, value if len(value) <= MAX_KEY else b"[]")


def make_room(link: Link, plan: m.Plan, reserve: Reserve, superseded: Callable[[], bool], seconds: float) -> None:
    """Make the memory that the elder of ``plan`` tells of; returns after ``seconds`` even if it takes longer."""
    limit = time.monotonic() + seconds
    link.wait(lambda: superseded() or link.lookup(plan.generation, _ROOM) is not None, seconds)
    counted = msgspec.json.decode(link.lookup(plan.generation, _ROOM) or b"[]", type=list[tuple[int, int]])
    sizes = [size for size, count in counted for _ in range(count)]
    filling = threading.Thread(target=reserve.fill, args=(sizes,), name="virtualflow-reserve", daemon=True)
    filling.start()
    filling.join(max(0.0, limit - time.monotonic()))


class Reserve:
    """Memory on the host for tensors that will arrive, its pages touched while the others still train."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, list[Tensor]] = {}
        self._filled = self._over = False

    def fill(self, sizes: Sequence[int]) -> None:
        """Make memory of these sizes in bytes, the first time that there are any; in a thread of its own."""
        with self._lock:
            if self._filled or not sizes:
                return
            self._filled = True
        for size in sizes:
            memory = torch.empty(size, dtype=torch.uint8).fill_(0)
            with self._lock:
                if self._over:
                    return
                self._ready.setdefault(size, []).append(memory)

    @property
    def held(self) -> int:
        """Bytes that are ready."""
        with self._lock:
            return sum(size * len(ready) for size, ready in self._ready.items())

    def take(self, like: Tensor) -> Tensor:
        """A dense tensor on the host of this shape and dtype, with any content."""
        with self._lock:
            ready = self._ready.get(size_of(like))
            memory = ready.pop() if ready else None
        if memory is None:
            return torch.empty(like.shape, dtype=like.dtype)
        return memory.view(like.dtype).view(like.shape)

    def release(self) -> None:
        """Give back what was not needed; nothing will be."""
        with self._lock:
            self._over = True
            self._ready.clear()
