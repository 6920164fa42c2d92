"""Which program each bucket of an exchange takes, and why: the one place where that is decided.

Pure, and a function of what all workers of a step know alike: the plan of the generation, the numbers that were agreed
on when it began, the first worker's wish, what the step headers have said. So all decide the same without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from virtualflow.reduction.program import (
    Facts,
    Illegal,
    Network,
    Program,
    Route,
    Shape,
    Split,
    compile_route,
    fuse,
    overlap,
    predict,
    refusals,
    reorder,
    split,
    write,
)
from virtualflow.reduction.settings import Exchange, ReductionSettings


@dataclass(frozen=True)
class Terms:
    """What the members of a generation have agreed on."""

    exchange: Exchange
    network: Network
    measured: bool = False
    """Whether the numbers of the network are this job's own."""


@dataclass(frozen=True)
class Choice:
    """The program of a bucket."""

    program: Program
    seconds: float
    """That it is predicted to take."""
    reason: str
    predicted: tuple[tuple[str, float], ...] = ()
    """For each way that was weighed: the seconds."""
    refused: tuple[tuple[str, str], ...] = ()
    """For each rewrite that was not applied: why."""

    @cached_property
    def route(self) -> Route:
        """The way that carries the program out."""
        return compile_route(self.program)


Choose = Callable[[Sequence[Shape], Facts, Terms, ReductionSettings], list[Choice]]
"""Chooses the programs of the buckets of an exchange."""


def improve(program: Program, facts: Facts) -> Program:
    """Reorder and fuse as far as is legal: both save work and cost nothing."""
    for rewrite in (reorder, reorder, fuse):
        try:
            program = rewrite(program, facts)
        except Illegal:
            continue
    return program


def choose_programs(shapes: Sequence[Shape], facts: Facts, terms: Terms, settings: ReductionSettings) -> list[Choice]:
    """The program of each bucket, in their order.

    Args:
        shapes: what each bucket has to carry.
        facts: of the job and the step.
        terms: what was agreed on.
        settings: what must be saved for it to be worth to begin early.
    """
    choices = [_choose_way(shape, facts, terms, settings) for shape in shapes]
    beside = terms.network.beside()
    saved = math.fsum(predict(one.program, shape, beside) for one, shape in zip(choices, shapes, strict=True))
    why_not = _why_not_early(saved, terms.exchange, settings)
    return [_begin_early(choice, facts, why_not) for choice in choices]


def _choose_way(shape: Shape, facts: Facts, terms: Terms, settings: ReductionSettings) -> Choice:
    written = write(facts.rule)
    found = {way: improve(split(written, facts, way), facts) for way in Split}
    seconds = {way: predict(program, shape, terms.network) for way, program in found.items()}
    predicted = tuple((str(way), took) for way, took in seconds.items())
    wanted = terms.exchange.algorithm
    gathered = max(shape.rows) * shape.workers * shape.size
    if wanted == "auto" and gathered > settings.most_gathered:
        best = Split.SLICES
        reason = f"gathered, the sums of all workers would take {gathered / 2**20:.0f} MiB of memory at each of them"
    elif wanted == "auto":
        # The fewest trips where both take as long.
        best = min(Split, key=lambda way: (seconds[way], way is Split.SLICES))
        source = "measured" if terms.measured else "assumed"
        reason = f"predicted to be the fastest, by the {source} latency and bandwidth"
    else:
        best, reason = Split(wanted), f"asked for: vf.Exchange(algorithm={wanted!r})"
    return Choice(found[best], seconds[best], reason, predicted)


def _why_not_early(saved: float, exchange: Exchange, settings: ReductionSettings) -> str | None:
    """Why an exchange is not to begin early though it may, if that saves so many seconds; ``None``: it is."""
    if exchange.overlap is None and saved < settings.overlap_from:
        return (
            f"all buckets together are predicted to save {1e3 * saved:.2f} ms beside the backward pass, and to begin "
            f"early costs about {1e3 * settings.overlap_from:.2f} ms"
        )
    return "not wanted: vf.Exchange(overlap=False)" if exchange.overlap is False else None


def _begin_early(choice: Choice, facts: Facts, why_not: str | None) -> Choice:
    program = choice.program
    if why_not is None:
        try:
            program = overlap(program, facts)
        except Illegal as illegal:
            why_not = str(illegal)
    refused = refusals(program, facts)
    if why_not is not None:
        refused["overlap"] = why_not
    return replace(choice, program=program, refused=tuple(refused.items()))
