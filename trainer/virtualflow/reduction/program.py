"""The exchange and the update of a bucket as a program, and rewrites of it that keep every bit.

After CoCoNet (Jangda et al., "Breaking the Computation and Communication Abstraction Barrier in Distributed Machine
Learning Workloads", ASPLOS 2022): communication and computation are stages of one program over values that have a
layout, and an exchange is made fast by rewriting that program. What is written (:func:`write`) says what is meant: sum
over all workers, scale, update. :func:`split`, :func:`reorder`, :func:`fuse` and :func:`overlap` turn it into what the
pipeline carries out (:func:`compile_route`). CoCoNet's programs agree up to rounding. Here every one gives the same
bits, since each element is added up in the shape of the tree, by whomever and wherever, and what is moved treats each
element for itself. A rewrite that would not keep that, or that the job does not allow, is refused with a sentence.

Pure: no tensors, no clock.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum

from virtualflow.errors import VirtualFlowError


class Illegal(VirtualFlowError):
    """A rewrite is refused; says why."""


class Layout(StrEnum):
    """Where the elements of a value are."""

    LOCAL = "local"
    """Each worker has its own sums of the whole bucket: of the maximal subtrees of its range."""
    SLICED = "sliced"
    """Each worker has its slice, of the sums of all."""
    REPLICATED = "replicated"
    """Each worker has all of it."""
    OWNED = "owned"
    """Each worker has the tensors of whose optimizer state it keeps any part."""


class Operation(StrEnum):
    """What a stage does."""

    REDUCE = "all-reduce"
    """Sum over all workers in the shape of the tree, to all: what is meant, and no stage that could be carried out."""
    SEND_SLICES = "slices out"
    GATHER_SUMS = "gather sums"
    """The sums of all workers, whole, to all."""
    ADD = "tree sum"
    GATHER = "slices back"
    DELIVER = "sums to owners"
    SCALE = "scale"
    UNSCALE = "gradient scaler"
    CLIP_VALUE = "clip by value"
    NORM = "norm"
    CLIP_NORM = "clip by norm"
    UPDATE = "update"
    GATHER_VALUES = "gather new values"


@dataclass(frozen=True)
class Stage:
    """A step of a program."""

    operation: Operation
    layout: Layout
    """Of its result."""
    fused: bool = False
    """It is one with the stage before it, and writes the message that sets out next."""

    def __str__(self) -> str:
        return f"{'+ ' if self.fused else ''}{self.operation} ({self.layout})"


@dataclass(frozen=True)
class Program:
    """The stages of a bucket's exchange and update, in their order."""

    stages: tuple[Stage, ...]
    overlapped: bool = False
    """It begins beside the backward pass, and not behind the step headers."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Of its stages."""
        return tuple(stage.operation for stage in self.stages)

    def position(self, operation: Operation) -> int | None:
        """Where the stage of that operation is, if there is one."""
        return self.operations.index(operation) if operation in self.operations else None

    def __str__(self) -> str:
        text = " -> ".join(map(str, self.stages)).replace(" -> + ", " + ")
        return f"{text}, beside the backward pass" if self.overlapped else text


@dataclass(frozen=True)
class UpdateRule:
    """What a job does with a sum, as far as it bears on what may be moved; the same on all workers."""

    elementwise: bool = True
    """The optimizer treats each element for itself."""
    sharded: bool = False
    """Each worker keeps the optimizer's state of its share only."""
    scaler: bool = False
    """A gradient scaler looks at the whole gradient."""
    clip_norm: bool = False
    clip_value: bool = False


@dataclass(frozen=True)
class Facts:
    """What all workers know alike when they choose the program of a bucket."""

    workers: int
    rule: UpdateRule = UpdateRule()
    scale_known: bool = True
    """Whether the factor of the sum is known before the step headers; not where only they tell how many samples there
    were."""
    final: bool = False
    """Whether a gradient is known to be final as soon as autograd has made it."""


class Split(StrEnum):
    """How an all-reduce is made of what can be carried out."""

    SLICES = "reduce-scatter"
    """Slices to their workers, each adds up its own, slices back to all (or to the owners)."""
    WHOLE = "gather"
    """All sums to all, and every worker adds up everything."""


def write(rule: UpdateRule) -> Program:
    """The program as it is meant, before any rewrite.

    Raises:
        Illegal: the update cannot be made of shares.
    """
    if rule.sharded and rule.scaler:
        raise Illegal("a gradient scaler looks at the whole gradient, which no worker has of a sharded optimizer")
    if rule.sharded and not rule.elementwise:
        raise Illegal("the optimizer does not treat each element for itself, so it cannot be sharded")
    where = Layout.OWNED if rule.sharded else Layout.REPLICATED
    stages = [Stage(Operation.REDUCE, Layout.REPLICATED), Stage(Operation.SCALE, Layout.REPLICATED)]
    if rule.scaler:
        stages.append(Stage(Operation.UNSCALE, where))
    if rule.clip_value:
        stages.append(Stage(Operation.CLIP_VALUE, where))
    if rule.clip_norm:
        stages += [Stage(Operation.NORM, where), Stage(Operation.CLIP_NORM, where)]
    stages.append(Stage(Operation.UPDATE, where))
    if rule.sharded:
        stages.append(Stage(Operation.GATHER_VALUES, Layout.REPLICATED))
    return Program(tuple(stages))


def split(program: Program, facts: Facts, way: Split) -> Program:
    """Replace the all-reduce by stages that can be carried out.

    Raises:
        Illegal: there is none, or nobody to exchange with.
    """
    at = program.position(Operation.REDUCE)
    if at is None:
        raise Illegal("the all-reduce is split already")
    if facts.workers < 2:
        raise Illegal("there is one worker, so nothing travels")
    made: tuple[Stage, ...]
    if way is Split.SLICES:
        made = (
            Stage(Operation.SEND_SLICES, Layout.SLICED),
            Stage(Operation.ADD, Layout.SLICED),
            Stage(Operation.GATHER, Layout.REPLICATED),
        )
    else:
        made = Stage(Operation.GATHER_SUMS, Layout.REPLICATED), Stage(Operation.ADD, Layout.REPLICATED)
    return replace(program, stages=(*program.stages[:at], *made, *program.stages[at + 1 :]))


def reorder(program: Program, facts: Facts) -> Program:
    """Move the stage behind the return of the slices in front of it: onto slices, or to the owners.

    Raises:
        Illegal: that stage needs more than a worker would have.
    """
    at = program.position(Operation.GATHER)
    if at is None:
        whole = "the sums are not cut into slices" if Operation.DELIVER not in program.operations else ""
        raise Illegal(whole or "all that follows the sums is with their owners already")
    moved = program.stages[at + 1]
    before, behind = program.stages[:at], program.stages[at + 2 :]
    if moved.operation is Operation.SCALE:
        if not facts.scale_known and behind and behind[0].layout is Layout.OWNED:
            delivered = Stage(Operation.DELIVER, Layout.OWNED)
            return replace(program, stages=(*before, delivered, replace(moved, layout=Layout.OWNED), *behind))
        if not facts.scale_known:
            raise Illegal("the factor of the sum is known from the step headers only, when slices may be back already")
        slices = replace(moved, layout=Layout.SLICED)
        return replace(program, stages=(*before, slices, program.stages[at], *behind))
    if moved.layout is Layout.OWNED:
        if not any(stage.operation is Operation.SCALE for stage in before):
            raise Illegal("the sums are scaled behind their return, so they return to all")
        delivered = Stage(Operation.DELIVER, Layout.OWNED)
        return replace(program, stages=(*before, delivered, moved, *behind))
    raise Illegal(_why_it_stays(moved.operation, facts.rule))


def _why_it_stays(operation: Operation, rule: UpdateRule) -> str:
    if operation is Operation.UNSCALE:
        return "a gradient scaler looks at the whole gradient before anything is stepped"
    if operation is Operation.CLIP_VALUE:
        return "values are clipped in front of the update, by whoever steps them: every worker, all of them"
    if operation is Operation.NORM:
        return "a norm needs the sums of all buckets, so what follows waits for the last of them"
    if not rule.elementwise:
        return "the optimizer does not treat each element for itself, so it cannot step slices"
    return "every worker keeps the whole state of the optimizer, so it steps whole gradients (shard_optimizer=False)"


def fuse(program: Program, facts: Facts) -> Program:
    """Let the scaling of a slice write the message that returns it, so that nothing is copied.

    Raises:
        Illegal: no message follows the scaling.
    """
    at = program.position(Operation.SCALE)
    assert at is not None
    stage = program.stages[at]
    if stage.fused:
        raise Illegal("sum and factor are one already")
    if stage.layout is not Layout.SLICED:
        raise Illegal("no message follows the scaling, since it is not done on slices")
    if program.stages[at + 1].operation is Operation.DELIVER:
        raise Illegal("what each owner gets is cut out of the slice, so it is copied in any case")
    return replace(program, stages=(*program.stages[:at], replace(stage, fused=True), *program.stages[at + 1 :]))


def overlap(program: Program, facts: Facts) -> Program:
    """Begin beside the backward pass, as soon as the bucket's gradients are there.

    Raises:
        Illegal: they may change afterwards, or nothing travels.
    """
    if program.overlapped:
        raise Illegal("it begins beside the backward pass already")
    if Operation.REDUCE in program.operations:
        raise Illegal("an all-reduce has to be split before it can begin")
    if not facts.final:
        raise Illegal(
            "gradients may still change behind the backward pass: no step of this generation has shown yet that they "
            "do not, or one of the last steps has changed some"
        )
    return replace(program, overlapped=True)


REWRITES: dict[str, Callable[[Program, Facts], Program]] = {
    "split into reduce-scatter and gather": lambda program, facts: split(program, facts, Split.SLICES),
    "split into a gather of all sums": lambda program, facts: split(program, facts, Split.WHOLE),
    "reorder": reorder,
    "fuse": fuse,
    "overlap": overlap,
}
"""All rewrites, by name."""


def legal_programs(facts: Facts) -> list[Program]:
    """Every program that rewrites make of the written one and that can be carried out."""
    found: list[Program] = [write(facts.rule)]
    for program in found:  # grows as it is walked through
        for rewrite in REWRITES.values():
            try:
                made = rewrite(program, facts)
            except Illegal:
                continue
            if made not in found:
                found.append(made)
    return [program for program in found if Operation.REDUCE not in program.operations]


def refusals(program: Program, facts: Facts) -> dict[str, str]:
    """Why nothing more can be made of a program: the reason for each rewrite of a program that is split."""
    found = {}
    for name, rewrite in REWRITES.items():
        if not name.startswith("split"):
            try:
                rewrite(program, facts)
            except Illegal as illegal:
                found[name] = str(illegal)
    return found


@dataclass(frozen=True)
class Route:
    """What the pipeline has to know of a program: which way a bucket takes."""

    way: Split
    scales_slices: bool = True
    """Whether slices are scaled before they return; else whoever gets the sums scales them."""
    in_message: bool = True
    """Whether sums are written into the message that returns them."""
    to_owners: bool = False
    """Whether sums come to their owners only."""
    overlapped: bool = False


def compile_route(program: Program) -> Route:
    """The way that carries a program out; what follows the exchange (norm, clipping, update) is the step's.

    Raises:
        Illegal: it has an all-reduce, which only stands for what is meant.
    """
    if Operation.REDUCE in program.operations:
        raise Illegal("an all-reduce has to be split before it can be carried out")
    if Operation.GATHER_SUMS in program.operations:
        return Route(Split.WHOLE, overlapped=program.overlapped)
    at = program.position(Operation.SCALE)
    assert at is not None
    scale = program.stages[at]
    return Route(
        Split.SLICES,
        scales_slices=scale.layout is Layout.SLICED,
        in_message=scale.fused,
        to_owners=Operation.DELIVER in program.operations,
        overlapped=program.overlapped,
    )


# How long a program takes: a prediction from what was measured on the running job.
#
# Latency and bandwidth (the Hockney model: a + b * bytes) of the messages that an exchange is made of, as this job's
# own messages have them, checksums included; and the speed at which a worker adds. Pure.

_NUMBERS = struct.Struct("<4d")


@dataclass(frozen=True)
class Network:
    """What it takes to exchange and to add; seconds, and seconds a byte."""

    latency: float
    """Messages of nothing between all pairs."""
    byte: float
    """Each byte that a worker receives, its checksums included."""
    add_byte: float
    """Each byte that a worker adds."""
    hidden: float = 1.0
    """The share of the time of bytes in which an exchange beside a backward pass takes nothing from it."""

    def beside(self) -> Network:
        """What an exchange beside a backward pass saves, compared with one behind it.

        Latency is not among it: it is what the last bucket costs in any case, and the step headers with it. Nor are
        additions, where they take their time from the backward pass.
        """
        additions = self.add_byte if self.hidden == 1.0 else 0.0
        return replace(self, latency=0.0, byte=self.hidden * self.byte, add_byte=additions)

    def to_bytes(self) -> bytes:
        """32 bytes."""
        return _NUMBERS.pack(*astuple(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Network:
        """The inverse of :meth:`to_bytes`."""
        return cls(*_NUMBERS.unpack(raw))


NETWORK_SIZE = _NUMBERS.size
"""Bytes of a :class:`Network`."""


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


@dataclass(frozen=True)
class Shape:
    """What a bucket has to carry."""

    size: int
    """Bytes of one sum of the whole bucket."""
    rows: tuple[int, ...]
    """How many sums each worker contributes."""
    delivered: int = 0
    """Bytes of the sums that come to whoever needs most, where they come to their owners only."""

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.rows)


def predict(program: Program, shape: Shape, network: Network) -> float:
    """Seconds until the sums are where the update needs them; what follows is the same in all programs."""
    return math.fsum(_seconds(stage, shape, network) for stage in program.stages)  # alike in every version of Python


def _seconds(stage: Stage, shape: Shape, network: Network) -> float:
    workers, size = shape.workers, shape.size
    slice_ = size / workers
    here = slice_ if stage.layout is Layout.SLICED else size
    match stage.operation:
        case Operation.GATHER_SUMS:
            # Blocks are equal: all send as many rows as whoever has most.
            return network.latency + network.byte * max(shape.rows) * size * (workers - 1)
        case Operation.SEND_SLICES:
            every = sum(shape.rows)
            busiest = max(max(rows * (size - slice_), (every - rows) * slice_) for rows in shape.rows)
            return network.latency + network.byte * busiest
        case Operation.ADD:
            return network.add_byte * here * (sum(shape.rows) - 1)
        case Operation.SCALE:
            copied = stage.layout is Layout.SLICED and not stage.fused
            return network.add_byte * here * (2 if copied else 1)
        case Operation.GATHER:
            return network.latency + network.byte * (size - slice_)
        case Operation.DELIVER:
            # A tensor has two owners or more; what is sent is cut out of the slice.
            return network.latency + network.byte * shape.delivered + network.add_byte * slice_
        case _:
            return 0.0
