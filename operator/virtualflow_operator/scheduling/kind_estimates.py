"""How fast a job would be on a kind of device that it has not run on: assumed, from what is known, and said so.

What is known comes first: other jobs that were measured on both kinds, the median of how much faster the one was. Where
there are none, the ratings that the kinds were given. A job that may move takes them for a little more: so it tries the
kind, and then it is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from virtualflow_operator.scheduling.curve import ScalingCurve
from virtualflow_operator.scheduling.device_kinds import DeviceKind, KindDemand

_OPTIMISM = 1.25
"""More than a job has to gain before it moves (``SchedulingSettings.margin``)."""


@dataclass(frozen=True)
class KnownCurves:
    """How fast a job is on each kind of the queue that it may use."""

    bases: Mapping[str, tuple[ScalingCurve, float, str]]
    """A measured curve, by what it is to be multiplied, and of which kind it is; without points where the job was
    measured nowhere."""
    weights: Mapping[str, float]
    """How fast a worker is on each kind, the fastest 1."""
    measured: bool
    """Whether its speeds are steps per second; otherwise only ``weights`` says something."""

    def speed(self, kind: str, workers: int) -> float:
        """Steps per second; relative ones where nothing was measured."""
        curve, factor, _ = self.bases[kind]
        return curve.speed(workers) * (factor if curve.points else self.weights[kind])

    def curve(self, kind: str) -> ScalingCurve:
        """The whole of it, for the policy of that kind."""
        curve, factor, basis = self.bases[kind]
        if basis == kind:
            return curve
        return ScalingCurve.of((workers, speed * factor) for workers, speed in curve.points)

    def told(self, kind: str) -> str:
        """What is assumed of a kind, for a reason; empty if it is measured."""
        curve, factor, basis = self.bases[kind]
        if basis != kind:
            return f"; its speed on {kind} is assumed, {factor:.2g} times that on {basis}"
        return "" if curve.points else "; its speed is not measured yet"


def know(demands: Iterable[KindDemand], kinds: Mapping[str, DeviceKind]) -> dict[str, KnownCurves]:
    """What is known of each job, by name."""
    demands = list(demands)
    sober, guessed = _ratings(demands, kinds)
    hopeful = {kind: rating * (_OPTIMISM if kind in guessed else 1.0) for kind, rating in sober.items()}
    return {d.job.name: _curves(d, kinds, sober if d.mobility == "stays" else hopeful) for d in demands}


def _ratings(demands: Iterable[KindDemand], kinds: Mapping[str, DeviceKind]) -> tuple[dict[str, float], set[str]]:
    """How fast each kind is, beside the one on which most jobs were measured, and for which of them that is a guess."""
    measured = [
        {kind: curve.speed(1) for kind, curve in demand.curves.items() if kind in kinds and curve.points}
        for demand in demands
    ]
    count = {kind: sum(kind in speeds for speeds in measured) for kind in kinds}
    common = min(kinds, key=lambda kind: (-count[kind], kind))
    found: dict[str, float] = {}
    guessed: set[str] = set()
    for kind in sorted(kinds):
        ratios = [speeds[kind] / speeds[common] for speeds in measured if kind in speeds and common in speeds]
        found[kind] = median(ratios) if ratios else kinds[kind].rating / kinds[common].rating
        if not ratios and kind != common:
            guessed.add(kind)
    return found, guessed


def _curves(demand: KindDemand, kinds: Mapping[str, DeviceKind], ratings: Mapping[str, float]) -> KnownCurves:
    allowed = sorted(kind for kind in demand.curves if kind in kinds)
    known = [kind for kind in allowed if demand.curves[kind].points]
    like = min(known, key=lambda kind: (-len(demand.curves[kind].points), kind), default="")
    bases: dict[str, tuple[ScalingCurve, float, str]] = {}
    speeds: dict[str, float] = {}
    for kind in allowed:
        curve = demand.curves[kind]
        if curve.points or not known:
            bases[kind] = curve, 1.0, kind
            speeds[kind] = curve.speed(1) if known else ratings[kind]
        else:
            factor = ratings[kind] / ratings[like]
            bases[kind] = demand.curves[like], factor, like
            speeds[kind] = demand.curves[like].speed(1) * factor
    fastest = max(speeds.values(), default=1.0)
    return KnownCurves(bases, {kind: speed / fastest for kind, speed in speeds.items()}, bool(known))
