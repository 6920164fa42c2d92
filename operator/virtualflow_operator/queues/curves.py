"""Scaling curves for policies, from what a job's status remembers of its speeds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from virtualflow_operator.api import ANY_KIND, Measured
from virtualflow_operator.jobs.scaling_history import computing_of, speed_of
from virtualflow_operator.scheduling import ScalingCurve


def curve_of(known: Sequence[Measured], kind: str = ANY_KIND) -> ScalingCurve:
    """The scaling curve through what was measured on a kind of device."""
    return ScalingCurve.of((point.workers, speed_of(point)) for point in known if point.kind == kind)


def phases_of(known: Sequence[Measured], kind: str = ANY_KIND) -> ScalingCurve:
    """The same, for what a step computes: beside the speeds with several workers, that of a lone one that computes as
    they do together, all the time. (``scheduling.Phases.at`` takes the difference for no computing.)
    """
    points = [point for point in known if point.kind == kind]
    alone = [1_000 / (computing_of(point) * point.workers) for point in points if computing_of(point)][:1]
    several = [(point.workers, speed_of(point)) for point in points if point.workers > 1 or not alone]
    return ScalingCurve.of([*several, *((1, speed) for speed in alone)])
