"""What passes between the coordinator and those who signal or watch it: typed calls, their answer, and the status.

HTTP requests and the watch stream, made by the operator, the local runner and the command line. What workers and the
coordinator say to each other is in ``messages``; decoding is the same here.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from virtualflow.protocol.messages import (
    Base,
    Change,
    CheckpointState,
    Count,
    Generation,
    Name,
    NonFinite,
    NoteKind,
    RunNumber,
    RunResult,
    Seconds,
    Sentence,
    Traceback,
    Usage,
    Version,
    Word,
)
from virtualflow.protocol.settings import (
    MAX_CHANGES,
    MAX_LISTED,
    MAX_NAME,
    MAX_PROCESSES,
    MAX_RUNS,
    MAX_WORKERS,
    Reproducibility,
)
from virtualflow.protocol.wording import Metrics

Text = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""A name or an address as the status shows it."""


class DrainCall(Base, frozen=True, tag=False):
    """``POST /v1/drain``: these workers will be taken away in ``deadline`` seconds."""

    workers: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=MAX_WORKERS)]
    deadline: Seconds | None = None
    reason: Sentence = "asked to"


class GoneCall(Base, frozen=True, tag=False):
    """``POST /v1/gone``: that worker's process has ended, or whoever runs it has decided that it is to have ended.

    It is the word of the authority that the others may go on without it, also where they are no majority.
    """

    worker: Name
    incarnation: Name | None = None
    """The process meant; without it, whichever bears the name now."""
    reason: Sentence = "reported gone"


class ScaleCall(Base, frozen=True, tag=False):
    """``POST /v1/scale``: how many workers whoever starts them is to provide."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
    minimum: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] | None = None
    """With fewer ready workers than this nothing begins; ``None`` leaves it as it is."""
    reason: Sentence = ""
    """Why so many: what a queue has decided, for people to read; empty: somebody wants it so."""


class HoldCall(Base, frozen=True, tag=False):
    """``POST /v1/hold``: no step after ``step`` may start, counted over all runs of the script; ``null`` lets go."""

    step: Count | None


class StopCall(Base, frozen=True, tag=False):
    """``POST /v1/stop``: all workers leave at the same step, after a checkpoint where there is a place for one."""

    reason: Sentence = "asked to stop"


class FailCall(Base, frozen=True, tag=False):
    """``POST /v1/fail``: the party that starts the workers says that the job has failed."""

    reason: Sentence


class LivingWorker(Base, frozen=True, tag=False):
    """A worker process that has not ended, as whoever runs it tells it from others."""

    worker: Name
    address: Text = ""
    """The one that it tells its peers; empty: any, as nobody else bears the name."""


class BeginCall(Base, frozen=True, tag=False):
    """``POST /v1/begin``: who may be in a generation that this coordinator does not know.

    It is the word of the authority without which a coordinator with a ``start_ticket`` makes no generation that has no
    predecessor. Whoever is not named has ended, or has never been in a generation.
    """

    ticket: Count
    """``Status.start_ticket`` of the process that is meant: one that takes its place does not take its word."""
    others: Annotated[tuple[LivingWorker, ...], msgspec.Meta(max_length=2 * MAX_WORKERS)] = ()
    """The coordinator waits until all of them are connected to it at one moment, or a later call leaves out who is
    not."""


Call = DrainCall | GoneCall | ScaleCall | HoldCall | StopCall | FailCall | BeginCall

PATHS: dict[type[Call], str] = {
    DrainCall: "/v1/drain",
    GoneCall: "/v1/gone",
    ScaleCall: "/v1/scale",
    HoldCall: "/v1/hold",
    StopCall: "/v1/stop",
    FailCall: "/v1/fail",
    BeginCall: "/v1/begin",
}
"""Where each is posted to."""


class Answer(Base, frozen=True, tag=False):
    """The answer to a call: one sentence."""

    message: Annotated[str, msgspec.Meta(max_length=MAX_NAME * MAX_WORKERS)]


WorkerState = Literal["starting", "ready", "training", "draining", "silent", "done"]


class ProcessStatus(Base, frozen=True, tag=False, omit_defaults=True):
    """One of the processes of a worker."""

    local_rank: Count
    pid: Count
    first: Count = 0
    last: Count = 0
    """The half-open range of virtual nodes that it is assigned; empty for one that has none."""


class WorkerStatus(Base, frozen=True, tag=False, omit_defaults=True):
    """A worker as the status shows it."""

    worker: Text
    incarnation: Text
    """Of its process, or of all of its processes together."""
    address: Text
    pid: Count
    """Of its first process."""
    state: WorkerState
    """Of all its processes: it trains when all do."""
    first: Count
    last: Count
    """The half-open range of virtual nodes that it is assigned; empty for one that has none. Of one of several
    processes, from the first to the last of them all: its processes have parts of it, and others what is between."""
    pace_ms: float | None = None
    """How long it computes for a virtual node, as measured or else by a profile; not in a brief status. Of several
    processes, the slowest."""
    crashed: bool = False
    """It has said that its script failed."""
    slowness: float | None = None
    """How many times the usual pace it takes, if it is clearly slower than the others; not in a brief status."""
    usage: Usage | None = None
    """What it takes and makes, as it said last; not in a brief status."""
    processes: Annotated[tuple[ProcessStatus, ...], msgspec.Meta(max_length=MAX_PROCESSES)] = ()
    """Those that are there, by their local ranks; empty: it is one process."""

    @property
    def assigned(self) -> bool:
        return self.first < self.last

    @property
    def ranges(self) -> tuple[range, ...]:
        """The virtual nodes that it is assigned, ascending."""
        each: tuple[WorkerStatus | ProcessStatus, ...] = self.processes or (self,)
        return tuple(sorted((range(x.first, x.last) for x in each if x.first < x.last), key=lambda part: part.start))


class LostWorker(Base, frozen=True, tag=False):
    """A process that this coordinator has declared lost: it is refused for ever, and may still hang somewhere."""

    worker: Text
    incarnation: Text
    address: Text
    """Empty where it is not known."""
    reason: Sentence
    ended: bool = False
    """Its end is confirmed; until it is, others may have to wait (``GoneCall`` confirms it)."""
    hung: bool = False
    """Its training thread made no progress in a process that lives: its own doing, most likely, not the machine's."""
    convicted: bool = False
    """It came to wrong gradients, or to a wrong state, as others have found: its machine is in doubt."""
    does_not_fit: bool = False
    """Nothing fits into its budget of memory, as it has said itself before it ended; ``reason`` says what would."""
    machine_fault: bool = False
    """A one-off fault of its machine has ended it, as it has said itself: ``reason``."""


class Refusal(Base, frozen=True, tag=False):
    """A process that was not admitted."""

    worker: Text
    reason: Sentence
    """One sentence."""


EventKind = (
    NoteKind
    | Literal["worker", "refused", "generation", "restored", "change", "drain", "left", "lost", "scale"]
    | Literal["stop", "done", "run", "failed"]
)


class Event(Base, frozen=True, tag=False, omit_defaults=True):
    """Something that a person would want to know, numbered upward within one coordinator's life."""

    number: Count
    time: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    """Unix time."""
    kind: Word
    """One of ``EventKind``, or of those of a newer version."""
    text: Sentence
    refusal: Refusal | None = None
    """Of kind ``refused``: who, and why."""


class MemoryReport(Base, frozen=True, tag=False):
    """What becomes of activations in the members of the generation that have a budget of memory."""

    budgets: Count
    """How many have one."""
    planned: Count
    """How many of these have a plan."""
    offloading: Count
    """How many of these swap or recompute."""
    worker: Text = ""
    """The first of them,"""
    plan: Sentence = ""
    """and its plan in words."""


class WorkerSeconds(Base, frozen=True, tag=False):
    """Seconds of all workers together, since this coordinator took over the job; both only grow."""

    paid: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    """From a worker's first connection until it is over."""
    committed: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    """Of these, in steps that count. The quotient of two increases is the goodput of the time between."""

    @property
    def share(self) -> float | None:
        """Between 0 and 1; ``None``: there were no workers yet."""
        return min(1.0, self.committed / self.paid) if self.paid > 0 else None


Phase = Literal["waiting", "training", "evaluating", "done", "stopped", "failed"]

ENDED: frozenset[Phase] = frozenset({"done", "stopped", "failed"})
"""Nothing follows upon these."""


class Status(Base, frozen=True, tag=False):
    """``GET /v1/status`` and each message of ``GET /v1/watch``."""

    phase: Phase
    incarnation: Count
    generation: Count
    virtual_nodes: Count | None
    wanted: Count
    minimum: Count
    """With fewer ready workers than this nothing begins."""
    workers: Annotated[tuple[WorkerStatus, ...], msgspec.Meta(max_length=2 * MAX_WORKERS)]
    lost: Annotated[tuple[LostWorker, ...], msgspec.Meta(max_length=MAX_LISTED)]
    """The latest processes that were declared lost, the newest last; not those that left or saw the end."""
    proposed: Count | None
    """The counter of a generation that is being prepared."""
    proposed_workers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_WORKERS)]
    """Incarnations of the members of the generation being prepared; none in a brief status."""
    prepared: bool
    """All members of the proposed generation have its communicator."""
    reason: Sentence
    """The membership decision in force, in words; of a job that is over, how it has ended, if there is no ``error``."""
    step: Count
    total_steps: Count | None
    epoch: Count
    metrics: Metrics
    steps_per_second: float
    step_ms: float | None
    """How long a step takes: the median of the latest ones, and of all once the training is complete."""
    hold: Count | None
    """No step after this one starts, counted over all runs of the script."""
    last_change: Change | None
    changes: Annotated[tuple[Change, ...], msgspec.Meta(max_length=MAX_CHANGES)]
    """The latest."""
    changes_total: Count
    """How many there were, also those that are not in ``changes`` any more."""
    repeated_steps: Count
    """Of all of them."""
    events: Annotated[tuple[Event, ...], msgspec.Meta(max_length=MAX_LISTED)]
    digest: Text | None
    optimizer_digest: Text | None
    error: Sentence | None
    traceback: Traceback | None
    reproducibility: Reproducibility | None = None
    """Which of the two the job is; ``None`` before anybody has said."""
    predicted_step_ms: float | None = None
    """How long a step should take by the workers' paces and assignments; ``None`` until all are measured."""
    computing_ms: float | None = None
    """For how much of it the slowest worker computes."""
    protocol: Count | None = None
    """The newest that the coordinator speaks (``versions``)."""
    oldest_protocol: Count | None = None
    """The oldest that it speaks; ``None``: only ``protocol``."""
    version: Version = ""
    """Of its library, for people to read."""
    non_finite: NonFinite | None = None
    """The first metric that was not finite; ``metrics`` says whether one still is."""
    checkpoint: CheckpointState | None = None
    """``None``: nobody has written or restored one."""
    fingerprint: Sentence = ""
    """What is equal on all workers: torch, numerics, threads; not in a brief status."""
    devices: Annotated[tuple[Sentence, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    """The kinds of the workers' devices; not in a brief status."""
    memory_copy: MemoryCopyState | None = None
    """The copy of the state in the coordinator's memory; ``None``: there is none."""
    start_ticket: Count | None = None
    """A number of this process, by which ``BeginCall`` tells it whom it does not hear; ``None``: it needs no (further)
    word to begin."""
    memory: MemoryReport | None = None
    """``None``: there is no generation, or not all of its members have come to this coordinator yet."""
    does_not_fit: bool = False
    """The job has failed because nothing fits into a worker's budget of memory; ``error`` says what would."""
    wanted_reason: Sentence | None = None
    """``ScaleCall.reason`` of the latest call; ``None``: the coordinator does not know of reasons."""
    worker_seconds: WorkerSeconds | None = None
    """``None``: the coordinator does not count them."""
    goodput: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """The share of the workers' time that went into steps that count, also under coordinators before this one."""
    run: RunNumber = 1
    """The run of the script that all of this is about."""
    runs: Annotated[tuple[RunResult, ...], msgspec.Meta(max_length=MAX_RUNS)] = ()
    """Those before it, the latest."""
    earlier_steps: Count = 0
    """Steps of all runs before it."""
    stopped_early: bool = False
    """The script has left the loop before the last step."""
    began: float | None = None
    """Unix time at which the training began; ``None``: not known."""
    plaintext: bool = False
    """Nothing that the job's processes say is encrypted; ``False`` also from a coordinator that does not tell."""

    @property
    def job_step(self) -> int:
        return self.earlier_steps + self.step

    @property
    def job_total(self) -> int | None:
        """Steps of all runs up to the end of this one; ``None``: not known."""
        return None if self.total_steps is None else self.earlier_steps + self.total_steps


# How a copy of a training's state travels to the coordinator's memory and back: one HTTP resource, and its header.
#
# A body is the packed state, then its manifest: what a checkpoint on disk consists of, as one row of bytes. The
# coordinator does not look into it. Whoever holds a copy knows by the header whose it is and whether it is whole.

COPY_PATH = "/v1/memory-copy"
"""``PUT`` a copy; ``GET`` or ``HEAD`` the newest."""
COPY_HEADER = "VirtualFlow-Copy"
"""The HTTP header that holds a :class:`CopyHeader` as JSON."""


class CopyHeader(Base, frozen=True, tag=False):
    """What a copy is, in front of its bytes."""

    generation: Generation
    """Of the worker that made it."""
    incarnation: Name
    """That worker."""
    step: Count
    """Completed steps."""
    state: Count
    """Bytes of the packed state. The rest of the body is the manifest."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """Of the whole body."""


class MemoryCopyState(Base, frozen=True, tag=False):
    """What the status tells of the newest copy that is complete."""

    step: Count
    at: float
    """When it was complete: Unix time of the coordinator."""
    size: Count
    """Bytes."""
