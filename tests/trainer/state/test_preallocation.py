"""Memory that a joiner makes before it enters: told by a member, used once, and kept for nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from virtualflow.protocol import messages as m
from virtualflow.state.transfer import Reserve, elder, make_room, tell_room


def test_reserved_memory_is_used_once_and_nothing_is_reserved_for_others() -> None:
    reserve = Reserve()
    reserve.fill([])
    reserve.fill([40, 40])
    reserve.fill([99])
    like = torch.empty(10, device="meta")
    first, second, third = reserve.take(like), reserve.take(like), reserve.take(like)
    assert len({tensor.data_ptr() for tensor in (first, second, third)}) == 3
    assert (first.shape, first.dtype) == (like.shape, like.dtype)
    assert reserve.take(torch.empty(99, dtype=torch.uint8)).numel() == 99
    reserve.release()
    assert reserve.take(like).shape == like.shape


def membership(joiners: tuple[str, ...], mode: Any = "planned") -> m.Plan:
    members = tuple(m.Member(f"worker-{n}", f"process-{n}", "127.0.0.1", n, n + 1) for n in range(3))
    return m.Plan(m.Generation(1, 2), mode, members, joiners, "join", "")


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        pytest.param(membership(("worker-2",)), "worker-0", id="the first who is no joiner tells"),
        pytest.param(membership(("worker-0", "worker-1")), "worker-2", id="whatever its rank"),
        pytest.param(membership(()), None, id="nobody joins"),
        pytest.param(membership(("worker-0", "worker-1", "worker-2")), None, id="nobody has a state"),
        pytest.param(membership(("worker-2",), "recovery"), None, id="a recovery waits for nothing"),
    ],
)
def test_who_tells_joiners_how_much_will_come(plan: m.Plan, wanted: str | None) -> None:
    told_by = elder(plan)
    assert (None if told_by is None else told_by.worker) == wanted


class Relay:
    """The part of a link that a rendezvous needs, within one process."""

    def __init__(self) -> None:
        self.keys: dict[tuple[m.Generation, str], bytes] = {}

    def publish(self, generation: m.Generation, key: str, value: bytes) -> None:
        self.keys[generation, key] = value

    def lookup(self, generation: m.Generation, key: str) -> bytes | None:
        return self.keys.get((generation, key))

    def wait(self, predicate: Callable[[], bool], timeout: float) -> bool:
        return predicate()


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        pytest.param((800, 800, 96), True, id="as told"),
        pytest.param(tuple(range(64, 20_000)), False, id="too many sizes for one message"),
        pytest.param((), False, id="nothing is large"),
    ],
)
def test_a_joiner_makes_the_memory_that_it_was_told_of(sizes: tuple[int, ...], kept: bool) -> None:
    relay: Any = Relay()
    plan, reserve = membership(("worker-2",)), Reserve()
    tell_room(relay, plan, sizes)
    make_room(relay, plan, reserve, lambda: False, 30.0)
    assert reserve.held == (sum(sizes) if kept else 0)
