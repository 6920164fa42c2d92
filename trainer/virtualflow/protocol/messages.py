"""What goes over the wire between workers and the coordinator: typed, bounded JSON.

Workers hold one WebSocket to the coordinator (``/v1/worker``). What the operator and the command line ask it, and what
it answers, is in ``http_api``, which stands on the same ground; how messages travel is in ``framing``. An unknown field
is ignored, because the other side may be newer (``versions``). Apart from that decoding is strict (msgspec): an unknown
tag, a wrong type or a number out of bounds is refused as a whole and changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from virtualflow.protocol import settings as limits
from virtualflow.protocol.settings import HEARTBEAT_LIMIT, PassClass, Reproducibility
from virtualflow.protocol.wording import Metrics, NotFinite

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_NAME, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_NAME)]
Sentence = Annotated[str, msgspec.Meta(max_length=limits.MAX_SENTENCE)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_WORD)]
"""One of a set that is shown to people and may grow: a reader takes those that it does not know as well."""
Traceback = Annotated[str, msgspec.Meta(max_length=limits.MAX_TRACEBACK)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0 * 366)]
PaceSeconds = Annotated[float, msgspec.Meta(ge=1e-9, le=86_400.0)]
Version = Annotated[str, msgspec.Meta(max_length=limits.MAX_WORD)]
RunNumber = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
"""Which ``with vf.elastic(...)`` block of the script, from 1."""
NoteKind = Literal["info", "warning", "checkpoint", "checkpoint-failed"]
Cause = Literal["start", "join", "drain", "resize", "lost", "broken", "restart", "rebalance", "stop"]


class Base(msgspec.Struct, frozen=True, tag_field="type", rename="camel"):
    """Common ground of all messages: immutable, camelCase on the wire; a field that is added later has a default."""


class Generation(Base, frozen=True, order=True, tag=False):
    """The number of a membership: (incarnation of the coordinator that made it, counter); compared in that order. The
    counter goes on upward across coordinators, so people may call a generation by it; the incarnation makes sure that
    two coordinators never make the same number.
    """

    incarnation: Count
    counter: Count

    def __str__(self) -> str:
        return str(self.counter)


NO_GENERATION = Generation(0, 0)
"""The one before the first, and the offer of a worker that has none to enter."""


class Member(Base, frozen=True, tag=False, omit_defaults=True):
    """A process of a worker in a generation, and the half-open range of virtual nodes that it is assigned."""

    worker: Name
    incarnation: Name
    """Names the process: a replacement may have the same ``worker`` name."""
    address: Address
    first: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_VIRTUAL_NODES)]
    last: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_VIRTUAL_NODES)]
    launch: Annotated[str, msgspec.Meta(max_length=limits.MAX_NAME)] = ""
    """As in :class:`Hello`."""

    @property
    def virtual_nodes(self) -> range:
        return range(self.first, self.last)

    @property
    def launch_id(self) -> str:
        """Names the start of its worker: its own process, or ``launch``."""
        return self.launch or self.incarnation


class Plan(Base, frozen=True, tag="plan"):
    """A generation, proposed to all who are in it or leave by it; a member's rank is its place in ``members``.

    ``mode`` says what the workers of the running generation do: ``planned``, go on training, build the communicator
    beside it and switch after the step in which all have shown that they are ready; ``recovery``, the running
    communicator is lost: leave the attempt and enter at once. A planned generation without members ends the training of
    all its predecessors at the same step.
    """

    generation: Generation
    mode: Literal["planned", "recovery"]
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=limits.MAX_WORKERS)]
    joiners: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.MAX_WORKERS)]
    cause: Cause
    reason: Sentence
    ended: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.MAX_WORKERS)] = ()
    """Members of earlier generations, by incarnation, whose end is confirmed (see ``lineage``)."""

    @property
    def workers(self) -> int:
        """How many workers are in it; of each, all processes are."""
        return len({member.launch_id for member in self.members})

    def includes(self, incarnation: str) -> bool:
        return any(member.incarnation == incarnation for member in self.members)

    def rank_of(self, worker: str, incarnation: str) -> int | None:
        who = worker, incarnation
        return next((rank for rank, each in enumerate(self.members) if (each.worker, each.incarnation) == who), None)


class Change(Base, frozen=True, tag=False):
    """A membership change that has happened, as a survivor measured it."""

    generation: Generation
    step: Count
    """The first step completed after it."""
    from_: Count = msgspec.field(name="from")
    to: Count
    cause: Word
    """One of ``Cause``, or of those of a newer version."""
    reason: Sentence
    pause_ms: Annotated[float, msgspec.Meta(ge=0)] | None
    """The longest time at a survivor between the last step before it and the first after it; ``None``: no survivor."""
    repeated_steps: Count
    state_bytes: Count | None = None
    """Bytes of the state that was given to each worker that lacked it; ``None``: all had it."""
    state_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """How long that took, a part of the pause."""
    state_donors: Count | None = None
    repeated_virtual_nodes: Count = 0
    """Virtual nodes that were computed again for it, at most: the others of a repeated step were kept."""
    run: RunNumber = 1


class CheckpointState(Base, frozen=True, tag=False):
    """How it stands with a job's checkpoints; times are Unix seconds of the worker that writes them."""

    at: float
    step: Count | None = None
    """Of the newest complete one, which is on the disk as a whole."""
    written: float | None = None
    failure: Sentence | None = None
    """Why the latest one could not be written, and what to do; ``None``: it was."""
    directory: Sentence = ""
    """Where whoever tells of it writes them; empty: an earlier version does not say."""


class NonFinite(Base, frozen=True, tag=False):
    """A metric that became NaN or infinite, and the first step of it."""

    metric: Annotated[str, msgspec.Meta(max_length=limits.MAX_NAME)]
    value: NotFinite
    step: Count

    def __str__(self) -> str:
        return f"{self.metric} became {self.value} in step {self.step}"


class MemoryPlan(Base, frozen=True, tag=False):
    """What becomes of activations in a worker that has a budget of memory."""

    kept: Count = 0
    """Blocks whose activations stay on the device."""
    swapped: Count = 0
    recomputed: Count = 0
    reason: Sentence = ""
    """In words; empty: it still measures its blocks, and has no plan yet."""


class RunResult(Base, frozen=True, tag=False):
    """What a run of the script has ended with, while the script goes on."""

    run: RunNumber
    step: Count
    total_steps: Count | None
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    metrics: Metrics
    stopped_early: bool = False
    """The script has left the loop before the last step."""


# --- worker to coordinator --------------------------------------------------------------------------------------------


class Hello(Base, frozen=True, tag="hello"):
    """The first message of a connection: who this is and all that it knows, for a coordinator that may know nothing."""

    protocol: Count
    worker: Name
    incarnation: Name
    address: Address
    pid: Count
    virtual_nodes: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_VIRTUAL_NODES)]
    fingerprint: Sentence
    """What must be equal on all devices: torch and, for equal bits, threads."""
    ready: bool
    """It has built its model and could enter a generation now."""
    draining: bool
    drain_deadline: Seconds | None
    """Seconds from now."""
    plan: Plan | None
    step: Count
    total_steps: Count | None
    done: bool
    changes: Annotated[tuple[Change, ...], msgspec.Meta(max_length=limits.MAX_CHANGES)]
    pace: PaceSeconds | None = None
    """A first guess of its computing time per virtual node with a whole pass, from a profile of its device."""
    reproducibility: Reproducibility = "bitwise"
    device: Sentence = ""
    self_test: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The digest of what its device computes (``probe_bits``); empty where bits need not be equal, or it has none."""
    oldest_protocol: Count | None = None
    """The oldest that it speaks; ``None``: only ``protocol``."""
    version: Version = ""
    heard: Generation = NO_GENERATION
    """The newest that it was told of, entered or not: it listens to none before that one."""
    floor: Generation = NO_GENERATION
    """The newest generation that it knows of, by a checkpoint or from a plan: a first one is numbered above it."""
    failing: bool = False
    """It has failed before it could take part, and before its self-test: it comes only to say why."""
    memory: MemoryPlan | None = None
    """``None``: it has no budget of memory to plan within."""
    classes: Annotated[tuple[PassClass, ...], msgspec.Meta(max_length=limits.MAX_CLASSES)] = ()
    """Of equally large parts of all virtual nodes, how far their backward passes go; none: all are whole."""
    capacity: Count | None = None
    """Bytes of its device's memory for the training; ``None``: nobody says."""
    run: RunNumber = 1
    runs: Annotated[tuple[RunResult, ...], msgspec.Meta(max_length=limits.MAX_RUNS)] = ()
    draws_early: bool = False
    """The script draws random numbers before the micro-batches of a step: a joiner joins before it does."""
    launch: Annotated[str, msgspec.Meta(max_length=limits.MAX_NAME)] = ""
    """Names the start of a worker of several processes, which come, drain and end together; they have this name and
    the worker's in common. Empty: this process is the worker."""
    local_rank: Annotated[int, msgspec.Meta(ge=0, lt=limits.MAX_PROCESSES)] = 0
    """Which of them it is."""
    local_world_size: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_PROCESSES)] = 1
    """How many there are."""


class Doing(Base, frozen=True, tag=False):
    """What a worker's training thread does, as another thread of its process sees it."""

    stage: Word
    """In words for people; decisions know those of ``hangs`` and are patient with all others."""
    step: Count
    """The one under way; 0: none yet."""
    seconds: Seconds
    """For how long, as far as this process ran; while it waits, since that began."""
    waits: bool = False
    """It waits for other workers or the coordinator, and looks around while it does."""
    first: bool = False
    slowest: Seconds = 0.0


class Usage(Base, frozen=True, tag=False):
    """What a worker's process takes of its machine and device, and what it makes of it, since it last said so."""

    processors: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    """That compute for it, on average."""
    samples: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    """That it trains a second; ``None``: the steps went back meanwhile."""
    memory: Count | None = None
    """Resident bytes; ``None``: the machine does not tell."""
    device_memory: Count | None = None
    """Bytes that it holds on an accelerator; ``None``: it has none."""
    device_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Of the time the accelerator was busy; ``None``: it does not tell."""


class Heartbeat(Base, frozen=True, tag="heartbeat"):
    """A sign of life, and of what the training thread is about; ``None``: not told."""

    doing: Doing | None = None
    usage: Usage | None = None
    """Now and then, for people to read."""


class Stacks(Base, frozen=True, tag="stacks"):
    """Where all threads of this worker's process are: the answer to :class:`ShowStacks`."""

    place: Annotated[str, msgspec.Meta(max_length=limits.MAX_REASON)]
    text: Traceback


class Ready(Base, frozen=True, tag="ready"):
    """The model is built, and warm unless the script draws early: this worker can enter a generation."""


class Prepared(Base, frozen=True, tag="prepared"):
    """The communicator of that generation stands at this worker."""

    generation: Generation


class Entered(Base, frozen=True, tag="entered"):
    """This worker has left its former generation for this one, with the state of ``step`` completed steps: one that had
    no state says so only once it has received one.
    """

    plan: Plan
    step: Count
    restored: bool


class EnteredTold(Base, frozen=True, tag="entered-told"):
    """As :class:`Entered`, of a plan that came over this very connection: its members need not be told back, since a
    generation of a thousand workers would come back a thousand times.
    """

    generation: Generation
    step: Count
    restored: bool


class Pace(Base, frozen=True, tag="pace"):
    """How long this worker computes for a virtual node with a whole pass in ``generation``, from fetching its first
    micro-batch to the end of its last backward pass, without synchronizing gradients and without waiting for others;
    told again to a coordinator that is new.
    """

    generation: Generation
    median: PaceSeconds
    low: PaceSeconds
    """The lower quartile of the samples."""
    high: PaceSeconds
    rest: Seconds
    """The rest of a step at this worker: synchronizing, update, the user's code between steps, waiting."""
    samples: Count


class Progress(Base, frozen=True, tag="progress"):
    """Where the training is, from the leader (the member with rank 0) and from anyone whose phase changed."""

    generation: Generation
    step: Count
    epoch: Count
    total_steps: Count | None
    metrics: Metrics
    steps_per_second: float
    phase: Literal["training", "evaluating"]
    step_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    non_finite: NonFinite | None = None
    draws_early: bool = False
    """As in :class:`Hello`."""


class Resumed(Base, frozen=True, tag="resumed"):
    """The first step after a membership change is complete at this worker."""

    change: Change


class Broken(Base, frozen=True, tag="broken"):
    """A collective of that generation failed, or its communicator could not be built."""

    generation: Generation
    step: Count
    detail: Sentence
    contested: Plan | None = None
    """It does not count: it would have needed a majority of this one."""
    convicted: Name | None = None
    """The process of a member that came to wrong gradients, as ``detail`` says: the others go on without it."""


class DrainRequest(Base, frozen=True, tag="drain-request"):
    """This worker was told to leave (SIGTERM) and asks to be relieved."""

    reason: Sentence


class Left(Base, frozen=True, tag="left"):
    """This worker has handed over when the others entered ``generation``, in which it has no place, and ends."""

    generation: Generation
    step: Count


class Failed(Base, frozen=True, tag="failed"):
    """The user's code raised, or the job cannot go on for a reason that repeating would not mend."""

    step: Count
    error: Sentence
    """The last line: the exception and its message."""
    traceback: Traceback
    non_finite: NonFinite | None = None
    odd: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.MAX_WORKERS)] = ()
    """The processes of members whose state was another one than that of most: nobody else may trust their machines."""
    does_not_fit: bool = False
    """Nothing fits into its budget of memory, and ``error`` says what would."""
    machine_fault: bool = False
    """It is a one-off fault of its machine: others can do without it, and one in its place may be spared."""


class Done(Base, frozen=True, tag="done"):
    """This worker has seen the end of the training and of the ``with`` block."""

    step: Count
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    optimizer_digest: Annotated[str, msgspec.Meta(max_length=64)]
    metrics: Metrics
    step_ms: float | None
    timed_steps: Count
    non_finite: NonFinite | None = None
    stopped_early: bool = False


class Note(Base, frozen=True, tag="note"):
    """Something for the job's events: a checkpoint written or skipped, a warning."""

    kind: Word
    """One of ``NoteKind``, or of a newer version's."""
    text: Sentence
    memory: MemoryPlan | None = None
    """The plan that this is about, just made: no event then, but for a coordinator that does not know this field."""


class Checkpointed(Base, frozen=True, tag="checkpointed"):
    """A checkpoint is complete, or could not be written; told again to a coordinator that is new."""

    state: CheckpointState


MEMBER = "member-"


def member_key(rank: int) -> str:
    """The key of a generation's rendezvous under which the member of that rank, and no other, says where it is."""
    return f"{MEMBER}{rank}"


class Publish(Base, frozen=True, tag="publish"):
    """A key of a generation's rendezvous; the coordinator relays it to the generation's members (:class:`Keys`)."""

    generation: Generation
    key: Annotated[str, msgspec.Meta(max_length=256)]
    value: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_KEY)]


class RenewLease(Base, frozen=True, tag="renew-lease"):
    """Whether this worker still has its place in the job is to be said now: it cannot tell by itself (``Lease``)."""

    number: Count


_Presence = Hello | Heartbeat | Stacks | RenewLease
_Membership = Ready | Prepared | Entered | EnteredTold | Broken | DrainRequest | Left | Publish
FromWorker = _Presence | _Membership | Pace | Progress | Resumed | Failed | Done | Note | Checkpointed

# --- coordinator to worker --------------------------------------------------------------------------------------------


class Welcome(Base, frozen=True, tag="welcome"):
    """The answer to Hello. ``running``: others are training already, so a joiner warms up unless ``draws_early``."""

    running: bool
    step: Count
    hold: Count | None
    heartbeat: Seconds
    protocol: Count | None = None
    """The newest that both speak: what the two may say to each other."""
    lease: Seconds = HEARTBEAT_LIMIT
    """How long a worker that was heard from keeps its place."""
    memory_copy: Count = 0
    """Bytes of the largest copy of a state that the coordinator keeps in its memory; 0: it keeps none."""
    record: Seconds = 0.0
    """How often the first few members fetch the record of the job (``job_record``); 0: there is none."""
    draws_early: bool = False
    """As in :class:`Hello`, if anybody has told."""


class Lease(Base, frozen=True, tag="lease"):
    """The answer to :class:`RenewLease` of that number: this worker has its place. Who lost it is refused instead."""

    number: Count


class Keys(Base, frozen=True, tag="keys"):
    """Keys of a generation's rendezvous that its members have published since the last such message."""

    generation: Generation
    values: dict[str, bytes]


class Drain(Base, frozen=True, tag="drain"):
    """This worker is to leave; it remembers that, so that a restarted coordinator learns it from its Hello."""

    deadline: Seconds
    reason: Sentence


class Hold(Base, frozen=True, tag="hold"):
    """No step after ``step`` may start until further notice (``None``: none is held). For fault schedules."""

    step: Count | None


class ShowStacks(Base, frozen=True, tag="show-stacks"):
    """The training thread does not come on: where is it? Asked only of a worker that tells what it does."""


class Release(Base, frozen=True, tag="release"):
    """All is done that this worker was waiting for after Left or Done: it may end."""


class Refuse(Base, frozen=True, tag="refuse"):
    """This process is not admitted (again)."""

    reason: Sentence


class RunOver(Base, frozen=True, tag="run-over"):
    """Instead of Welcome: the run of the script that this worker is in is over, and the job is in a later one."""

    current: RunNumber
    result: RunResult | None
    """What the worker's run has ended with; ``None``: nobody remembers."""


class End(Base, frozen=True, tag="end"):
    """The job is over for everyone: with success while joiners were waiting, or failed."""

    failed: bool
    reason: Sentence


ToWorker = Welcome | Lease | Plan | Keys | Drain | Hold | ShowStacks | Release | Refuse | RunOver | End


def encode(message: msgspec.Struct) -> bytes:
    """JSON of a message."""
    return msgspec.json.encode(message)
