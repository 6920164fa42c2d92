"""What must hold for the steps of a job, whatever happened to it. Pure.

Each process writes down each step that it has committed. A step may be committed in two generations only where the
earlier one ends with it: it was the last of who was lost, and the others have repeated it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Number = tuple[int, int]
"""Of a generation: incarnation and counter."""


@dataclass(frozen=True)
class Commit:
    """A line of a process about one step."""

    process: str
    generation: Number
    step: int
    leader: bool = False
    digest: str = ""
    """Of the weights after it; empty where the line does not say."""


@dataclass
class Verdict:
    """What the lines of a job show."""

    steps: int = 0
    """The highest that was committed."""
    digests: int = 0
    """Lines whose weights were compared with the undisturbed run."""
    lineages: int = 0
    """Branches of which more than one step counts; 1 is right."""
    repeated: int = 0
    """Steps that were committed in two generations, as the last one of a branch that was lost."""
    faults: list[str] = field(default_factory=list)
    """What is wrong, in sentences."""


def check(
    audit: Iterable[Commit], log: Sequence[Commit], undisturbed: Sequence[str], anew: frozenset[Number] = frozenset()
) -> Verdict:
    """Judge a job.

    Args:
        audit: the attempts that counted, as the library says.
        log: each step that the script has seen, with leader and digest.
        undisturbed: digests of a run that nothing happened to, of step 1 and on.
        anew: generations that went back on purpose: nobody who had the state was left.
    """
    verdict = Verdict()
    _check_lineage(list(audit), anew, verdict)
    _check_leaders(log, verdict)
    for line in log:
        if line.step <= len(undisturbed):
            verdict.digests += 1
            if line.digest != undisturbed[line.step - 1]:
                verdict.faults.append(f"{line.process} has other weights after step {line.step}")
    return verdict


def _check_lineage(audit: list[Commit], anew: frozenset[Number], verdict: Verdict) -> None:
    steps: dict[Number, set[int]] = defaultdict(set)
    for line in audit:
        steps[line.generation].add(line.step)
    verdict.lineages = 1 if steps else 0
    highest: tuple[int, Number] | None = None
    for number in sorted(steps):
        first, last = min(steps[number]), max(steps[number])
        verdict.steps = max(verdict.steps, last)
        if len(steps[number]) != last - first + 1:
            verdict.faults.append(f"generation {_shown(number)} has left out a step between {first} and {last}")
        if highest is not None and number not in anew:
            if first < highest[0]:
                verdict.lineages += 1
                verdict.faults.append(
                    f"generation {_shown(number)} began with step {first}, and {_shown(highest[1])} came to "
                    f"{highest[0]}: two lineages"
                )
            elif first > highest[0] + 1:
                verdict.faults.append(f"nobody has committed the steps between {highest[0]} and {first}")
            verdict.repeated += first == highest[0]
        if highest is None or last >= highest[0] or number in anew:
            highest = last, number


def _check_leaders(log: Sequence[Commit], verdict: Verdict) -> None:
    leaders: dict[tuple[int, Number], set[str]] = defaultdict(set)
    for line in log:
        if line.leader:
            leaders[line.step, line.generation].add(line.process)
    for (step, number), names in sorted(leaders.items()):
        if len(names) > 1:
            verdict.faults.append(
                f"step {step} of generation {_shown(number)} has the leaders {', '.join(sorted(names))}"
            )


def _shown(number: Number) -> str:
    return str(number[1])
