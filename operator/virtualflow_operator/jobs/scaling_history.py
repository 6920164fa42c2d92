"""How fast a job was with how many workers, and how far it is worth growing. Pure.

What was measured is remembered in the job's status, because the coordinator only knows the present: one point for each
number of workers that the job has trained with, and for each kind of device where its queue tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from virtualflow.protocol.http_api import Status
from virtualflow_operator.api import ANY_KIND, Measured

MAX_MEASURED = 64
"""Numbers of workers that are remembered; the longest unused go first."""
_WORTH_WRITING = 0.1
"""By which part a speed must differ from the one known: steps vary, and each write costs the API server."""


def remember(known: Sequence[Measured], remote: Status | None, kinds: Mapping[str, str]) -> tuple[Measured, ...]:
    """What is known once the coordinator has said ``remote``; the latest measured number of workers stands first.

    Only a settled membership counts: the time of a step is then that of the latest ones with these very workers. Of
    workers on several kinds of device nothing is remembered, as it would be true of none.

    A job tells its own figures, so workers without a pod count for nothing, and a speed that differs from the one known
    moves that halfway, in ratio.

    Args:
        kinds: of the device of each worker that has a pod, by its name.
    """
    if remote is None or remote.phase != "training" or remote.proposed is not None or not remote.step_ms:
        return tuple(known)
    training = {worker.worker for worker in remote.workers if worker.last > worker.first}
    on = {kinds.get(name) for name in training}
    workers, kind = len(training), on.pop() if len(on) == 1 else None
    if not workers or kind is None:
        return tuple(known)
    speed = 1_000 / remote.step_ms
    before = next((point for point in known if (point.kind, point.workers) == (kind, workers)), None)
    computing = f"{remote.computing_ms:.4g}" if remote.computing_ms else ""
    if (
        before is not None
        and _alike(speed, speed_of(before))
        and _alike(remote.computing_ms or 0.0, computing_of(before))
    ):
        if known[0] is before:
            return tuple(known)
        point = before
    else:
        if before is not None and speed_of(before):
            speed = math.sqrt(speed * speed_of(before))
        point = Measured(workers, f"{speed:.4g}", kind, computing or (before.computing_milliseconds if before else ""))
    others = (other for other in known if (other.kind, other.workers) != (kind, workers))
    return (point, *others)[:MAX_MEASURED]


def _alike(measured: float, known: float) -> bool:
    """Whether it is not worth a write; so it is with what is not measured at present."""
    return not measured or abs(measured - known) <= _WORTH_WRITING * known


def speed_of(point: Measured) -> float:
    """Steps per second; 0: not measured."""
    return positive(point.steps_per_second)


def computing_of(point: Measured) -> float:
    """Milliseconds of a step in which the slowest worker computes; 0: not measured."""
    return positive(point.computing_milliseconds)


def positive(text: str) -> float:
    """The number above 0 that a text says; 0: it says none."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0


def no_further(percent: int) -> str:
    return f"a further worker brings, as measured, less than minEfficiency ({percent} %) of what one gave at first"


def efficient_limit(known: Sequence[Measured], percent: int, most: int, kind: str = ANY_KIND) -> int:
    """How many workers a job is to have at most so that each brings enough.

    A worker brings enough if, as measured, it adds at least ``percent`` of what one gave at the smallest number of
    workers that is known. Beyond the largest known number nothing is known, so nothing forbids to grow and measure.
    Where a growth by several workers was not worth it, the number halfway is tried, until the last worthwhile one is
    found: it costs a resize, which costs one step.

    Args:
        percent: ``spec.elasticity.minEfficiency``; 0: no limit.
    """
    points = sorted((point.workers, speed_of(point)) for point in known if point.kind == kind and speed_of(point) > 0)
    if not percent or len(points) < 2:
        return most
    least, enough = points[0][0], points[0][1] / points[0][0] * percent / 100
    good, good_speed = points[0]
    for workers, speed in points[1:]:
        if speed - good_speed >= enough * (workers - good):
            good, good_speed = workers, speed
        else:
            limit = good + (workers - good) // 2 if workers - good > 1 else good
            return max(least, min(limit, most))
    return most
