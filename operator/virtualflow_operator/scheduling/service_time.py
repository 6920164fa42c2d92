"""How much service a job will need, from what jobs like it have needed. Pure.

Most jobs of a cluster come again: the same user trains the same model with other numbers. So the service of those that
have ended says much of the next one's (quasi-shortest-service-first: Hu et al., "Characterization and Prediction of
Deep Learning Workloads in Large-Scale GPU Datacenters", SC 2021). Jobs are alike that have the same namespace and the
same name but for its numbers: they are of one *kind*.

Service is counted as ``shortest_first`` does: unit-seconds at the job's minimum. It spreads over orders of magnitude,
so means and errors are those of its logarithm: an error is the *factor* by which expected and needed service differ.

Jobs that have ended are the short ones first, above all under a policy that prefers these. So those that have not ended
count as well, as observations that are *censored* at the service that they have had (:func:`censored_mean`). And a kind
of which few have ended leans on what is usual in its namespace and in the queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import erfc, exp, fsum, hypot, log, pi, sqrt
from statistics import NormalDist

from virtualflow_operator.settings import SchedulingSettings

_GENERATED = re.compile("[bcdfghjklmnpqrstvwxz2456789]{5}")
"""What Kubernetes appends to a ``generateName``: letters that make no words."""
_WITHIN, _BETWEEN = 1.0, 1.5
"""Standard deviations of the logarithm of service, among jobs of one kind and among kinds, before any are known: jobs
of a kind differ by 2.7 times, kinds by 4.5. Each counts as much as one observation."""
_LEAST = 0.1
"""Jobs of a kind never differ by less: a measured speed is no more exact."""
_TAIL = 30.0
"""Beyond so many standard deviations the normal distribution's tail is its first terms."""
_MOST = 1e18
"""Unit-seconds; a job tells its own steps and speeds, and no more than this is believed."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class AlikeJobs:
    namespace: str
    pattern: str
    jobs: int
    """How many have ended."""
    service: float
    """What they needed: the logarithm of unit-seconds, the latest counting most."""
    error: float = 0.0
    """By how much that of the next one differed, on average, the latest counting most."""


@dataclass(frozen=True)
class Past:
    """What is remembered of the jobs that have ended: a bounded number of kinds, the latest first."""

    kinds: tuple[AlikeJobs, ...] = ()

    @cached_property
    def _by_kind(self) -> dict[tuple[str, str], AlikeJobs]:
        return {(kind.namespace, kind.pattern): kind for kind in self.kinds}

    @cached_property
    def _groups(self) -> dict[tuple[str, str], list[float]]:
        """What kinds needed, by namespace and pattern without digits; an empty one stands for all."""
        groups: dict[tuple[str, str], list[float]] = {}
        for kind in self.kinds:
            for place in ((kind.namespace, _without_digits(kind.pattern)), (kind.namespace, ""), ("", "")):
                groups.setdefault(place, []).append(kind.service)
        return groups

    @cached_property
    def within(self) -> float:
        """The standard deviation among jobs of one kind, from the errors of all."""
        known = [(kind.jobs - 1, kind.error * kind.error * pi / 2) for kind in self.kinds if kind.jobs > 1]
        total = _WITHIN**2 + fsum(jobs * squared for jobs, squared in known)
        return max(_LEAST, sqrt(total / (1 + sum(jobs for jobs, _ in known))))

    @cached_property
    def between(self) -> float:
        """The standard deviation among kinds."""
        known = self._groups[("", "")]
        mean = fsum(known) / len(known)
        return sqrt((_BETWEEN**2 + fsum((service - mean) ** 2 for service in known)) / len(known))

    def usual(self, namespace: str, like: str) -> float:
        """The mean logarithm among kinds that are most like this one. A wider group counts as one kind of a closer."""
        known = self._groups[("", "")]
        mean = fsum(known) / len(known)
        for place in ((namespace, ""), (namespace, _without_digits(like))):
            closer = self._groups.get(place, [])
            mean = (fsum(closer) + mean) / (len(closer) + 1)
        return mean

    def kind(self, namespace: str, like: str) -> AlikeJobs | None:
        return self._by_kind.get((namespace, like))

    def after(self, namespace: str, name: str, service: float, settings: SchedulingSettings) -> Past:
        """What is remembered once that job has ended, which needed ``service`` unit-seconds."""
        like, needed = pattern(name), log(min(max(service, 1.0), _MOST))
        before = self.kind(namespace, like)
        if before is None:
            kind = AlikeJobs(namespace, like, 1, needed)
        else:
            part = max(1 / (before.jobs + 1), settings.latest)
            off = needed - before.service
            kind = replace(
                before,
                jobs=before.jobs + 1,
                service=before.service + part * off,
                error=before.error + max(1 / before.jobs, settings.latest) * (abs(off) - before.error),
            )
        others = (other for other in self.kinds if other is not before)
        return Past((kind, *others)[: settings.remembered])


class Forecast:
    """What jobs are expected to need, by those that have ended and by those that have not.

    Args:
        served: namespace, name and unit-seconds so far of every job that has not ended, in any order.
    """

    def __init__(self, past: Past, served: Iterable[tuple[str, str, float]], settings: SchedulingSettings) -> None:
        self._past = past
        self._most = 2 / settings.latest - 1  # of a mean in which the latest has that part (Kish's effective size)
        self._censored: dict[tuple[str, str], list[float]] = {}
        self._kinds: dict[tuple[str, str], tuple[float, float]] = {}
        for namespace, name, so_far in served if past.kinds else ():
            if so_far > 1.0:
                self._censored.setdefault((namespace, pattern(name)), []).append(log(min(so_far, _MOST)))

    def expects(self, namespace: str, name: str, served: float = 0.0) -> float | None:
        """Unit-seconds from start to end: the median among jobs like it that need more than ``served``.

        ``None``: nobody has ended yet.
        """
        if not self._past.kinds:
            return None
        place = namespace, pattern(name)
        if place not in self._kinds:
            self._kinds[place] = self._judge(*place)
        return median_above(served, *self._kinds[place])

    def left(self, namespace: str, name: str, served: float) -> float | None:
        """Unit-seconds that a job still needs which has had ``served``, at least 1; ``None``: nobody has ended yet."""
        served = min(served, _MOST)
        expected = self.expects(namespace, name, served)
        return None if expected is None else max(expected - served, 1.0)

    def _judge(self, namespace: str, like: str) -> tuple[float, float]:
        """The mean and the standard deviation of the logarithm of what the next job of a kind needs."""
        past, kind = self._past, self._past.kind(namespace, like)
        prior, within = (past.usual(namespace, like), past.between), past.within
        ended = (kind.service, min(kind.jobs, self._most)) if kind is not None else (0.0, 0.0)
        mean = censored_mean(prior, within, ended, self._censored.get((namespace, like), ()))
        return mean, hypot(within, (1 / past.between**2 + ended[1] / within**2) ** -0.5)


def censored_mean(
    prior: tuple[float, float], within: float, ended: tuple[float, float], censored: Sequence[float]
) -> float:
    """The most likely mean of normal observations, some of which are only known to be above a value.

    The maximum of the posterior density, whose censored terms are those of Tobin ("Estimation of Relationships for
    Limited Dependent Variables", Econometrica 26, 1958). It grows with each censored value, and with their number; one
    far below the mean says nothing.

    Args:
        prior: mean and standard deviation of the mean.
        within: the standard deviation of an observation.
        ended: the mean and the number of those that are known.
        censored: what the others are above.
    """
    weight, known = 1 / prior[1] ** 2, ended[1] / within**2
    mean = (weight * prior[0] + known * ended[0]) / (weight + known)
    for _ in range(100):  # Newton's method, from below: the slope is convex and falls, so it never passes the root
        places = [(value - mean) / within for value in censored]
        hazards = [_hazard(place) for place in places]
        slope = weight * (prior[0] - mean) + known * (ended[0] - mean) + fsum(hazards) / within
        bend = fsum(hazard * (hazard - place) for hazard, place in zip(hazards, places, strict=True))
        step = slope / (weight + known + bend / within**2)
        mean += step
        if step < 1e-6:
            break
    return mean


def median_above(served: float, mean: float, deviation: float) -> float:
    """The median of a log-normal service, given that it is above ``served`` (in the same unit, not a logarithm)."""
    place = (log(served) - mean) / deviation if served > 0 else -_TAIL
    half = place + log(2) / place if place > _TAIL else -_NORMAL.inv_cdf(erfc(place / sqrt(2)) / 4)
    return max(served, exp(min(mean + deviation * half, 700.0)))  # beyond, no float has room


def _hazard(place: float) -> float:
    """The normal density over its upper tail."""
    if place > _TAIL:
        return place + 1 / place
    return sqrt(2 / pi) * exp(-place * place / 2) / erfc(place / sqrt(2))


@lru_cache(maxsize=4_096)  # asked for every job at every decision
def pattern(name: str) -> str:
    """A job's name without what tells it from the next one: numbers, and what Kubernetes appends."""
    words = name.split("-")
    if len(words) > 1 and _GENERATED.fullmatch(words[-1]):
        words.pop()
    return "-".join(word for word in words if word and not word.isdigit()) or "-"


def _without_digits(like: str) -> str:
    return re.sub(r"\d+", "", like) or "-"
