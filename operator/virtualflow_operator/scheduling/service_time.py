"""How much service a job will need, from what jobs like it have needed. Pure.

Most jobs of a cluster come again: the same user trains the same model with other numbers. So the service of those that
have ended says much of the next one's (quasi-shortest-service-first: Hu et al., "Characterization and Prediction of
Deep Learning Workloads in Large-Scale GPU Datacenters", SC 2021). Jobs are alike that have the same namespace and the
same name but for its numbers; what is like none is expected to need what is usual in its namespace, or in the queue.

Service is counted as ``shortest_first`` does: unit-seconds at the job's minimum. It spreads over orders of magnitude,
so means and errors are those of its logarithm: an error is the *factor* by which expected and needed service differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import exp, fsum, log

from virtualflow_operator.settings import SchedulingSettings

_GENERATED = re.compile("[bcdfghjklmnpqrstvwxz2456789]{5}")
"""What Kubernetes appends to a ``generateName``: letters that make no words."""


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
    def _known(self) -> dict[tuple[str, str], float]:
        """What is usual, by namespace and pattern; an empty one stands for all."""
        groups: dict[tuple[str, str], list[AlikeJobs]] = {}
        for kind in self.kinds:
            for place in ((kind.namespace, _without_digits(kind.pattern)), (kind.namespace, ""), ("", "")):
                groups.setdefault(place, []).append(kind)
        usual = {place: exp(fsum(kind.service for kind in kinds) / len(kinds)) for place, kinds in groups.items()}
        return usual | {(kind.namespace, kind.pattern): exp(kind.service) for kind in self.kinds}

    def expects(self, namespace: str, name: str) -> float | None:
        """Unit-seconds that a job of that name needs from start to end; ``None``: nobody has ended yet."""
        like = pattern(name)
        for place in ((namespace, like), (namespace, _without_digits(like)), (namespace, ""), ("", "")):
            if (found := self._known.get(place)) is not None:
                return found
        return None

    def after(self, namespace: str, name: str, service: float, settings: SchedulingSettings) -> Past:
        """What is remembered once that job has ended, which needed ``service`` unit-seconds."""
        like, needed = pattern(name), log(max(service, 1.0))
        before = next((kind for kind in self.kinds if (kind.namespace, kind.pattern) == (namespace, like)), None)
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


@lru_cache(maxsize=4_096)  # asked for every job at every decision
def pattern(name: str) -> str:
    """A job's name without what tells it from the next one: numbers, and what Kubernetes appends."""
    words = name.split("-")
    if len(words) > 1 and _GENERATED.fullmatch(words[-1]):
        words.pop()
    return "-".join(word for word in words if word and not word.isdigit()) or "-"


def left(expected: float, served: float) -> float:
    """Unit-seconds that a job still needs which has had ``served``: one that needs more than expected counts as half
    done, as it would in a guess that is doubled again and again."""
    return expected - served if served < expected else max(served, 1.0)


def _without_digits(like: str) -> str:
    return re.sub(r"\d+", "", like) or "-"
