"""Which way each bucket of an exchange takes, and why: the one place where that is decided.

A bucket travels in slices, of which each worker adds up its own and returns it to all (or, of a sharded optimizer, to
the owners of its state), or whole, and every worker adds up everything. It sets out beside the backward pass, or behind
the step headers. Every way gives the same bits, since each element is added up in the shape of the tree, by whomever
and wherever.

Pure, and a function of what all workers of a step know alike: the plan of the generation, the numbers that were agreed
on when it began, the first worker's wish, what the step headers have said. So all decide the same without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from virtualflow.reduction.settings import Exchange, Network, ReductionSettings


class Way(StrEnum):
    """How a bucket travels between workers."""

    SLICES = "reduce-scatter"
    WHOLE = "gather"


@dataclass(frozen=True)
class Terms:
    """What the members of a generation have agreed on."""

    exchange: Exchange
    network: Network
    measured: bool = False
    """Whether the numbers of the network are this job's own."""


@dataclass(frozen=True)
class Shape:
    """What a bucket has to carry."""

    size: int
    """Bytes of one sum of the whole bucket."""
    rows: tuple[int, ...]
    """Of how many sums each worker contributes."""
    delivered: int | None = None
    """Bytes of the sums that come to whoever gets most of them from others, where they do not come to all."""
    pieces: tuple[int, ...] = ()
    """Bytes of one sum that each worker adds up, where backward passes end early; empty: all about as many."""

    @property
    def shares(self) -> Sequence[float]:
        """Bytes of one sum that each worker adds up."""
        return self.pieces or (self.size / len(self.rows),) * len(self.rows)

    def sent(self, way: Way) -> float:
        """Bytes that all workers together send where the whole sum comes to each of them."""
        workers, rows = len(self.rows), sum(self.rows)
        if way is Way.WHOLE:
            return float(self.size * rows * (workers - 1))
        out = math.fsum(own * (self.size - share) for own, share in zip(self.rows, self.shares, strict=True))
        return out + self.size * (workers - 1)


@dataclass(frozen=True)
class Choice:
    """How a bucket travels."""

    way: Way
    seconds: float
    reason: str
    predicted: tuple[tuple[str, float], ...] = ()
    """For each way that was weighed: the seconds."""
    overlapped: bool = False
    """It begins beside the backward pass, and not behind the step headers."""
    refused: tuple[tuple[str, str], ...] = ()
    """What would make it faster and is not done, each with the reason."""


Choose = Callable[[Sequence[Shape], bool, Terms, ReductionSettings], list[Choice]]
"""Chooses the ways of the buckets of an exchange."""


def choose_ways(shapes: Sequence[Shape], final: bool, terms: Terms, settings: ReductionSettings) -> list[Choice]:
    """The way of each bucket, in their order."""
    choices = [_choose_way(shape, terms, settings) for shape in shapes]
    beside = terms.network.beside()
    saved = math.fsum(predict(one.way, shape, beside) for one, shape in zip(choices, shapes, strict=True))
    why_not = _why_not_early(saved, final, terms.exchange, settings)
    return [
        replace(choice, overlapped=not why_not, refused=_refused(choice, shape, why_not))
        for choice, shape in zip(choices, shapes, strict=True)
    ]


def _choose_way(shape: Shape, terms: Terms, settings: ReductionSettings) -> Choice:
    seconds = {way: predict(way, shape, terms.network) for way in Way}
    wanted = terms.exchange.algorithm
    gathered = sum(shape.rows) * shape.size
    if wanted == "auto" and gathered > settings.most_gathered:
        best = Way.SLICES
        reason = f"gathered, the sums of all workers would take {gathered / 2**20:.0f} MiB of memory at each of them"
    elif wanted == "auto" and _saves_by_slices(shape):
        best = Way.SLICES
        reason = "backward passes end early to send less, and sums that are gathered send more"
    elif wanted == "auto":
        # The fewest trips where both take as long.
        best = min(Way, key=lambda way: (seconds[way], way is Way.SLICES))
        source = "measured" if terms.measured else "assumed"
        reason = f"predicted to be the fastest, by the {source} latency and bandwidth"
    else:
        best, reason = Way(wanted), f"asked for: vf.Exchange(algorithm={wanted!r})"
    return Choice(best, seconds[best], reason, tuple((str(way), took) for way, took in seconds.items()))


def _saves_by_slices(shape: Shape) -> bool:
    """Whether backward passes end early, and a gather would send bytes that this saves."""
    return bool(shape.pieces) and shape.delivered is None and shape.sent(Way.WHOLE) > shape.sent(Way.SLICES)


def _why_not_early(saved: float, final: bool, exchange: Exchange, settings: ReductionSettings) -> str:
    """Why an exchange does not begin early that saves so many seconds if it does; empty: it does."""
    if exchange.overlap is False:
        return "not wanted: vf.Exchange(overlap=False)"
    if exchange.overlap is None and saved < settings.overlap_from:
        return (
            f"all buckets together are predicted to save {1e3 * saved:.2f} ms beside the backward pass, and to begin "
            f"early costs about {1e3 * settings.overlap_from:.2f} ms"
        )
    if not final:
        return (
            "gradients may still change behind the backward pass: no step of this generation has shown yet that they "
            "do not, or one of the last steps has changed some"
        )
    return ""


def _refused(choice: Choice, shape: Shape, why_not_early: str) -> tuple[tuple[str, str], ...]:
    refused = {}
    if shape.delivered is None and choice.way is Way.SLICES:
        refused["reorder"] = (
            "every worker keeps the whole state of the optimizer, so it steps whole gradients (shard_optimizer=False)"
        )
    if why_not_early:
        refused["overlap"] = why_not_early
    return tuple(refused.items())


def stages(choice: Choice, shape: Shape) -> str:
    """What is carried out of a bucket's exchange, one after the other, for people."""
    text = "gather sums -> tree sum" if choice.way is Way.WHOLE else f"slices out -> tree sum -> {_back(shape)}"
    return f"{text}, beside the backward pass" if choice.overlapped else text


def _back(shape: Shape) -> str:
    if shape.delivered is None:
        return "slices back"
    return "sums to second keepers" if shape.delivered else "sums stay"


# How long a way takes: a prediction from what was measured on the running job.
#
# Latency and bandwidth (the Hockney model: a + b * bytes) of the messages that an exchange is made of, as this job's
# own messages have them, checksums included; and the speed at which a worker adds.


def combine(measured: Sequence[Network]) -> Network:
    """What counts where each worker has measured.

    Of an exchange the shortest time: the others have waited for somebody who came later. Of what a worker does alone
    the longest, and of what it can do beside its work the least: a step waits for the slowest.
    """
    return Network(
        latency=min(one.latency for one in measured),
        byte=min(one.byte for one in measured),
        add_byte=max(one.add_byte for one in measured),
        hidden=min(one.hidden for one in measured),
    )


def predict(way: Way, shape: Shape, network: Network) -> float:
    """Seconds until the sums are where the update needs them; what follows is the same on all ways."""
    workers, size, rows = len(shape.rows), shape.size, sum(shape.rows)
    if way is Way.WHOLE:
        gathered = size * max(max(own * (workers - 1), rows - own) for own in shape.rows)
        return network.latency + network.byte * gathered + network.add_byte * size * rows
    pieces = shape.shares
    of_workers = list(zip(shape.rows, pieces, strict=True))
    out = max(max(own * (size - piece), (rows - own) * piece) for own, piece in of_workers)
    spread = max(max((workers - 1) * piece, size - piece) for piece in pieces)
    back = spread if shape.delivered is None else shape.delivered
    messages = (bool(out) + bool(back)) * network.latency + network.byte * (out + back)
    return messages + network.add_byte * max(pieces) * rows
