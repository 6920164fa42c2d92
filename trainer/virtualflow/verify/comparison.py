"""The first difference between two traces: the step, the virtual node and the tensor. Pure functions of both.

Within a step things are compared in the order in which they cause each other: the state that it begins with, samples,
what the loader made of them, what each virtual node computed, the sum of all, the state after the update, and the state
after the code behind the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from virtualflow.errors import ConfigurationError
from virtualflow.verify.traces import Computed, Node, Process, Trace, Values

Stage = Literal["start", "behind", "samples", "data", "node", "sum", "update"]
"""Where in a training a difference appears first: before any step, in the user's code behind a step, in the samples of
a virtual node, in what was made of them, in what it computed, in the sum over all, in the update."""

ABSENT = "nothing"
"""In place of a value that one side does not have."""


class Incomparable(ConfigurationError):
    """Two traces are of different trainings."""


@dataclass(frozen=True)
class Difference:
    """Where two runs differ for the first time."""

    step: int
    stage: Stage
    name: str
    """Of the first tensor or number that differs."""
    values: tuple[str, str]
    workers: tuple[str, str]
    """Who has computed them."""
    virtual_node: int | None = None
    others: int = 0
    """How many more tensors and numbers differ at the same place."""
    kinds: frozenset[str] = frozenset()
    """What of a virtual node's results differs: gradients, buffers, metrics, random."""
    within: int | None = None
    """The run (0 or 1) whose own workers differ from each other; ``None``: the two runs do."""


def first_difference(one: Trace, two: Trace, last: int | None = None) -> Difference | None:
    """The first difference up to and with the step ``last``; ``None``: the steps that both have made are equal.

    Raises:
        Incomparable: the runs are of different trainings, or have no step in common.
    """
    _check(one, two)
    common = [step for step in one.steps if step in two.after and (last is None or step <= last)]
    if not common:
        raise Incomparable("the two runs have no committed step in common, so there is nothing to compare")
    found = chain.from_iterable(_differences(one, two, step, common[0]) for step in common)
    return next(found, None)


def _check(one: Trace, two: Trace) -> None:
    first, other = (next(iter(trace.opened.values())) for trace in (one, two))
    facts = {"virtual_nodes": "virtual nodes", "batch_size": "samples in a batch", "seed": "as its seed"}
    for fact, noun in facts.items():
        here, there = getattr(first, fact), getattr(other, fact)
        if here != there:
            raise Incomparable(f"one run has {here} {noun} and the other {there}: these are two different trainings")
    if "statistical" in (first.reproducibility, other.reproducibility):
        raise Incomparable(
            "a statistical run does not promise equal bits; record it with VIRTUALFLOW_REPRODUCIBILITY=Bitwise"
        )


def _differences(one: Trace, two: Trace, step: int, first: int) -> Iterator[Difference]:
    if step == first:
        yield from _of_states(step, "start", one.before.get(step, {}), two.before.get(step, {}))
    yield from _of_nodes(step, one.nodes.get(step, {}), two.nodes.get(step, {}))
    ours, theirs = one.after[step], two.after[step]
    metrics = [{process: committed.metrics for process, committed in of.items()} for of in (ours, theirs)]
    yield from _of_states(step, "sum", *metrics)
    states = [{process: committed.state for process, committed in of.items()} for of in (ours, theirs)]
    yield from _of_states(step, "update", *states)
    yield from _of_states(step, "behind", one.before.get(step + 1, {}), two.before.get(step + 1, {}))


def _of_states(
    step: int, stage: Stage, ours: Mapping[Process, Values], theirs: Mapping[Process, Values]
) -> Iterator[Difference]:
    """Of what should be the same in all workers: within the one run, then in the other beside it.

    Where some workers of the other run agree with the one, those that do not are compared with them.
    """
    if not ours or not theirs:
        return
    first, *rest = sorted(ours)
    for other in rest:
        yield from _of_pair(step, stage, (first, other), (ours[first], ours[other]), within=0)
    agreeing = next((process for process in sorted(theirs) if theirs[process] == ours[first]), None)
    for other in sorted(theirs):
        if agreeing is None:
            yield from _of_pair(step, stage, (first, other), (ours[first], theirs[other]), within=None)
        else:
            yield from _of_pair(step, stage, (agreeing, other), (theirs[agreeing], theirs[other]), within=1)


def _of_pair(
    step: int, stage: Stage, processes: tuple[Process, Process], values: tuple[Values, Values], within: int | None
) -> Iterator[Difference]:
    differing = _differing(*values)
    if differing:
        name, *rest = differing
        there = values[0].get(name, ABSENT), values[1].get(name, ABSENT)
        yield Difference(step, stage, name, there, (processes[0][0], processes[1][0]), others=len(rest), within=within)


def _of_nodes(step: int, ours: Mapping[int, Node], theirs: Mapping[int, Node]) -> Iterator[Difference]:
    both = sorted(ours.keys() & theirs.keys())
    for kinds, stage in _PARTS:
        for number in both:
            (here, mine), (there, other) = ours[number], theirs[number]
            one, two = _values(mine, kinds), _values(other, kinds)
            differing = _differing(one, two)
            if differing:
                name, *rest = differing
                yield Difference(
                    step,
                    stage,
                    name,
                    (one.get(name, ABSENT), two.get(name, ABSENT)),
                    (here[0], there[0]),
                    virtual_node=number,
                    others=len(rest),
                    kinds=frozenset(kind for kind in kinds if getattr(mine, kind) != getattr(other, kind)),
                )


_PARTS: tuple[tuple[tuple[str, ...], Stage], ...] = (
    (("samples",), "samples"),
    (("data",), "data"),
    (("gradients", "buffers", "metrics", "random"), "node"),
)
"""What of a virtual node is compared, in this order: one after the other, each in all virtual nodes."""

_NOUNS = {"samples": "its samples", "data": "the data of its samples", "random": "the random numbers drawn"}
_PREFIXES = {"gradients": "gradient of", "buffers": "buffer", "metrics": "metric"}


def _values(computed: Computed, kinds: tuple[str, ...]) -> Values:
    found: Values = {}
    for kind in kinds:
        value = getattr(computed, kind)
        if kind in _NOUNS:
            found[_NOUNS[kind]] = value
        else:
            found |= {f"{_PREFIXES[kind]} {name}": of for name, of in value.items()}
    return found


def _differing(one: Values, other: Values) -> list[str]:
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if one.get(name) != other.get(name)]


def describe(difference: Difference, names: tuple[str, str]) -> str:
    """Where the two runs called ``names`` differ for the first time, what differs, and its two values."""
    if difference.within is None:
        sides = names
    else:
        first, other = difference.workers
        sides = first, f"{other} of {names[difference.within]}"
    more = f" and {difference.others} more" if difference.others else ""
    (here, there), (one, two) = difference.values, sides
    return f"{_place(difference)}: {difference.name}{more}: {here} in {one}, {there} in {two}"


def describe_shortly(difference: Difference) -> str:
    """The same for a table: where, and what."""
    return f"{_place(difference)}: {difference.name}"


def _place(difference: Difference) -> str:
    step = difference.step
    match difference.stage:
        case "start":
            return "before the first step" if step == 1 else f"before step {step}"
        case "behind":
            return f"step {step}, after the code behind it"
        case "sum":
            return f"step {step}, over all virtual nodes"
        case "update":
            return f"step {step}, after the update"
        case "samples" | "data" | "node":
            return f"step {step}, virtual node {difference.virtual_node}"


def other_surroundings(one: Trace, two: Trace) -> list[str]:
    """What besides the training was not the same in both runs, a sentence each."""
    found = []
    versions = [sorted({opened.torch for opened in trace.opened.values()}) for trace in (one, two)]
    if versions[0] != versions[1]:
        found.append(f"torch {' and '.join(versions[0])} here, torch {' and '.join(versions[1])} there")
    seeds = sorted({opened.hash_seed for trace in (one, two) for opened in trace.opened.values()})
    if "" in seeds:
        found.append("PYTHONHASHSEED was not set everywhere, so each process had its own order of sets of strings")
    elif len(seeds) > 1:
        found.append(f"PYTHONHASHSEED was {' and '.join(seeds)}")
    return found
