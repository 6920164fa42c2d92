"""What the buckets of an exchange move and how long they travel, by their schedule and as this worker has measured it.

Bytes are counted where messages are started (``transport``), and are those of their content. Times are whole
nanoseconds of ``time.perf_counter_ns``, so that spans of them can be united and intersected as those of a row are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from virtualflow.protocol.exchange_report import Traffic
from virtualflow.reduction.buckets import Bucket, share_bucket
from virtualflow.reduction.ownership import Portions, Span, Spans, intersection, union
from virtualflow.reduction.schedule import Way
from virtualflow.transport import Pending


class Passage(NamedTuple):
    """How one bucket has travelled."""

    sent: int
    received: int
    span: Span
    """From its setting out until its sums were there."""
    waited: Spans
    """Of that, while the thread that trains waited for the exchange, or carried it out itself."""


class ExchangeLog:
    """What is written down of some buckets while they travel, by whoever exchanges: a few numbers for each."""

    __slots__ = ("_began", "_ended", "_received", "_sent", "_waits")

    def __init__(self, buckets: int) -> None:
        self._began, self._ended = [0] * buckets, [0] * buckets
        self._sent, self._received = [0] * buckets, [0] * buckets
        self._waits: list[Span] = []

    def begin(self, index: int) -> None:
        """A bucket is about to set out."""
        self._began[index] = time.perf_counter_ns()

    def started(self, index: int, pending: Pending) -> None:
        """Messages of a bucket were started."""
        self._sent[index] += pending.sent
        self._received[index] += pending.received

    def added_up(self, index: int) -> None:
        """This worker has added up its part of a bucket."""
        self._ended[index] = time.perf_counter_ns()

    def complete(self, index: int, pending: Pending) -> None:
        """All sums of a bucket have come by its last messages, or were there when they had been added up."""
        self._ended[index] = max(self._ended[index], pending.ended)

    def waited(self, since: int) -> None:
        """By the thread that trains: it did nothing else since then."""
        self._waits.append((since, time.perf_counter_ns()))

    def passages(self) -> list[Passage]:
        """Of all buckets, when all of them are complete."""
        waits, spans = union(self._waits), zip(self._began, self._ended, strict=True)
        return [
            Passage(sent, received, span, intersection((span,), waits))
            for sent, received, span in zip(self._sent, self._received, spans, strict=True)
        ]


def planned_bytes(bucket: Bucket, way: Way, portions: Portions | None, rank: int) -> tuple[int, int]:
    """Bytes of a bucket that a member sends to the others, and receives from them, by its schedule.

    Args:
        portions: for each place who needs what of its sum; ``None``: all need all.
    """
    size, own, others = len(bucket.rows), bucket.counts[rank], len(bucket.rows) - 1
    rest = sum(bucket.counts) - own
    if way is Way.WHOLE:
        sent, received = own * others * bucket.total, rest * bucket.total
    elif portions is None:
        piece = bucket.pieces[rank]
        theirs = bucket.edges[-1] - piece
        sent, received = own * theirs + others * piece, rest * piece + theirs
    else:
        shared = share_bucket(bucket, portions, size)
        added = [sum(part.numel for part in parts) for parts in shared]
        sent, received = own * (sum(added) - added[rank]), rest * added[rank]
        for part in (part for parts in shared for part in parts):
            first, *keepers = part.keepers
            sent += part.numel * len(keepers) * (first == rank)
            received += part.numel * (rank in keepers)
    return sent * bucket.dtype.itemsize, received * bucket.dtype.itemsize


def summarize(planned: Sequence[tuple[int, int]], steps: Sequence[Sequence[Passage]]) -> Traffic:
    """What some buckets move in a step and how long: medians over ``steps``, each with the passages of all of them."""
    return Traffic(
        sent=statistics.median_low(sum(one.sent for one in step) for step in steps),
        received=statistics.median_low(sum(one.received for one in step) for step in steps),
        planned_sent=sum(sent for sent, _ in planned),
        planned_received=sum(received for _, received in planned),
        seconds=1e-9 * statistics.median(_length(union(one.span for one in step)) for step in steps),
        exposed=1e-9 * statistics.median(_length(union(*(one.waited for one in step))) for step in steps),
    )


def _length(spans: Spans) -> int:
    return sum(end - begin for begin, end in spans)
