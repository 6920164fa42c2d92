"""Measures what messages take between the members of a generation, by a few of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from virtualflow.reduction.cost import NETWORK_SIZE, Network, combine
from virtualflow.reduction.exchanger import Exchanger
from virtualflow.reduction.settings import ProbeSettings
from virtualflow.transport import Collectives, Message

T = TypeVar("T")

_PASSES = 4
"""So often each byte passes through memory at least: to the kernel and from it, and under a checksum at either end."""

Send = Callable[[Collectives, int], None]


def agree_on_network(
    collectives: Collectives, exchanger: Exchanger, probe: ProbeSettings, known: Network | None
) -> Network:
    """What messages take, as all members have it from a generation before, or else measured now; the same for all.

    So a generation that nobody joins waits for nothing but this question.

    Args:
        collectives: of at least two members, which all call this at the same place.
        exchanger: waits for the messages, as it does in exchanges.
        probe: how much is sent, and how often.
        known: the numbers that this member has.

    Raises:
        CommunicatorBroken: a member is lost.
    """
    told = _tell(collectives, bytes(NETWORK_SIZE) if known is None else known.to_bytes())
    if known is not None and len(set(told)) == 1:
        return known
    # Twice: the first time the thread may be about to start.
    handoff = min(_time(lambda: _in_thread(collectives, exchanger, lambda: None)) for _ in range(2))
    mine = _in_thread(collectives, exchanger, lambda: _measure(collectives, probe, handoff))
    return combine([Network.from_bytes(raw) for raw in _tell(collectives, mine.to_bytes())])


def _tell(collectives: Collectives, raw: bytes) -> list[bytes]:
    """What every member tells, as long as this."""
    block = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return [row.numpy().tobytes() for row in collectives.all_gather(block)]


def _in_thread(collectives: Collectives, exchanger: Exchanger, act: Callable[[], T]) -> T:
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            outcome.set_exception(error)

    exchanger.submit(run)
    return collectives.settle(outcome)


def _measure(collectives: Collectives, probe: ProbeSettings, handoff: float) -> Network:
    kinds: tuple[Send, ...] = (_gather, _exchange)
    tried = [(send, size) for send in kinds for size in (probe.small, probe.large)]
    took = dict.fromkeys(tried, math.inf)
    # In turns, so that what else the machine does for a moment disturbs all of them alike.
    for send, size in tried * probe.rounds:
        took[send, size] = min(took[send, size], _time(partial(send, collectives, size)))
    left, right = (torch.ones(probe.added // 4) for _ in range(2))
    add_byte = min(_time(lambda: left.add_(right)) for _ in range(probe.rounds)) / probe.added
    least, most = (min(took[send, size] for send in kinds) for size in (probe.small, probe.large))
    byte = max(_PASSES * add_byte, (most - least) / (probe.large - probe.small))
    return Network(took[_gather, probe.small], took[_exchange, probe.small], byte, add_byte, handoff)


def _gather(collectives: Collectives, size: int) -> None:
    """Everybody receives so many bytes in all."""
    block = torch.zeros(max(1, size // (collectives.size - 1)), dtype=torch.uint8)
    collectives.start_all_gather(torch.empty(collectives.size * len(block), dtype=torch.uint8), block).wait()


def _exchange(collectives: Collectives, size: int) -> None:
    """Likewise, by messages between pairs."""
    each = max(1, size // (collectives.size - 1))
    peers = [peer for peer in range(collectives.size) if peer != collectives.rank]
    mine = torch.zeros(each, dtype=torch.uint8)
    theirs: dict[int, Tensor] = {peer: torch.empty(each, dtype=torch.uint8) for peer in peers}
    incoming = [Message(peer, stretch, incoming=True) for peer, stretch in theirs.items()]
    collectives.start_messages([*incoming, *(Message(peer, mine, incoming=False) for peer in peers)]).wait()


def _time(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
