"""Measures what messages take between the members of a generation, by a few of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch

from virtualflow.reduction.cost import NETWORK_SIZE, Network, combine
from virtualflow.reduction.settings import ProbeSettings
from virtualflow.transport import Collectives

_PASSES = 4
"""So often each byte passes through memory at least: to the kernel and from it, and under a checksum at either end."""


def agree_on_network(collectives: Collectives, probe: ProbeSettings, known: Network | None, *, spare: bool) -> Network:
    """What messages take, as all members have it from a generation before, or else measured now; the same for all.

    So a generation that nobody joins waits for nothing but this question.

    Args:
        collectives: of at least two members, which all call this at the same place.
        probe: how much is sent, and how often.
        known: the numbers that this member has.
        spare: whether a thread that exchanges takes nothing from those that compute here.

    Raises:
        CommunicatorBroken: a member is lost.
    """
    told = _tell(collectives, bytes(NETWORK_SIZE) if known is None else known.to_bytes())
    if known is not None and len(set(told)) == 1:
        return known
    mine = _measure(collectives, probe, spare=spare)
    return combine([Network.from_bytes(raw) for raw in _tell(collectives, mine.to_bytes())])


def _tell(collectives: Collectives, raw: bytes) -> list[bytes]:
    """What every member tells, as long as this."""
    block = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return [row.numpy().tobytes() for row in collectives.all_gather(block)]


def _measure(collectives: Collectives, probe: ProbeSettings, *, spare: bool) -> Network:
    took = dict.fromkeys((probe.small, probe.large), (math.inf, 0.0))
    # In turns, so that what else the machine does for a moment disturbs both alike.
    for size in [*took] * probe.rounds:
        took[size] = min(took[size], _time(partial(_gather, collectives, size)))
    left, right = (torch.ones(probe.added // 4) for _ in range(2))
    add_byte = min(_time(lambda: left.add_(right))[0] for _ in range(probe.rounds)) / probe.added
    (small, _), (large, busy) = took.values()
    byte = max(_PASSES * add_byte, (large - small) / (probe.large - probe.small))
    return Network(small, byte, add_byte, hidden=1.0 if spare else max(0.0, 1.0 - busy / large))


def _gather(collectives: Collectives, size: int) -> None:
    """Everybody receives so many bytes in all."""
    collectives.all_gather(torch.zeros(max(1, size // (collectives.size - 1)), dtype=torch.uint8))


def _time(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds that it takes, and those in which this thread's processor is busy with it."""
    busy, began = time.thread_time(), time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    return seconds, time.thread_time() - busy
