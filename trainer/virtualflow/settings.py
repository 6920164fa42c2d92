"""Every default of the system, once: limits, time-outs, names of environment variables.

Durations are seconds and sizes are bytes unless a name says otherwise. A process reads its settings at start and keeps
them; what a user may change has a flag of the command line or an environment variable, named beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ENV_COORDINATOR = "VIRTUALFLOW_COORDINATOR"
ENV_TOKEN = "VIRTUALFLOW_TOKEN"
ENV_WORKER = "VIRTUALFLOW_WORKER"
ENV_ADDRESS = "VIRTUALFLOW_ADDRESS"
ENV_VIRTUAL_NODES = "VIRTUALFLOW_VIRTUAL_NODES"
ENV_CHECKPOINT_DIR = "VIRTUALFLOW_CHECKPOINT_DIR"
ENV_CHECKPOINT_STEPS = "VIRTUALFLOW_CHECKPOINT_STEPS"
ENV_CHECKPOINT_SECONDS = "VIRTUALFLOW_CHECKPOINT_SECONDS"
ENV_CHECKPOINT_KEEP = "VIRTUALFLOW_CHECKPOINT_KEEP"
ENV_AUDIT_DIR = "VIRTUALFLOW_AUDIT_DIR"
ENV_THREADS = "VIRTUALFLOW_THREADS"
ENV_REPRODUCIBILITY = "VIRTUALFLOW_REPRODUCIBILITY"
ENV_MAX_FUSED = "VIRTUALFLOW_MAX_FUSED"
ENV_PROFILE = "VIRTUALFLOW_PROFILE"
ENV_PROFILE_OUT = "VIRTUALFLOW_PROFILE_OUT"
ENV_PROFILE_SIZES = "VIRTUALFLOW_PROFILE_SIZES"
ENV_TERMINATION_LOG = "VIRTUALFLOW_TERMINATION_LOG"

VIRTUAL_NODES = 8
"""Virtual nodes of a job that names no number."""

WORKERS = 2
"""Workers of ``virtualflow run`` without ``--workers``: the fewest that survive the loss of one."""

MAX_VIRTUAL_NODES = 65_536
MAX_WORKERS = 4_096
MAX_NAME = 253
"""A worker's name is a pod's name: at most 253 characters."""

MAX_MESSAGE = 1 << 20
"""The largest message or request body that the coordinator reads; a larger one is refused."""

MAX_UNPACKED = 8 << 20
"""What a message may hold once it is inflated: a generation of ``MAX_WORKERS`` takes a quarter of it."""

DEFLATED = 4_096
"""Messages above this size travel deflated: a generation's members shrink to a quarter, keys of a rendezvous more."""

MAX_BUNDLE = 1 << 19
"""Bytes of a rendezvous' keys that are relayed in one message; even what cannot be deflated fits into a message."""

MAX_KEY = 65_536
"""Bytes of one value of a generation's rendezvous."""
MAX_TRACEBACK = 16_384
"""Characters of a traceback that travel to the status; the end of it is what counts."""

MAX_CHANGES = 1_000
"""Membership changes that a job remembers in its status and state; the oldest go first."""

MAX_LOST = 64
"""Latest processes given up that the status names."""

BRIEF_CHANGES = 20
BRIEF_EVENTS = 50
"""Latest membership changes and events in a brief status."""

MAX_PROGRESS = 3_600.0
"""Longest time that a watcher may ask not to hear of mere progress."""

MAX_LAST_WORD = 4_096
"""Bytes of what a worker writes when it ends: what Kubernetes shows of a termination log."""

MAX_LAST_METRICS = 16
"""Metrics that a last word carries."""

MAX_STEP_TIMES = 4_096
"""Latest step durations that a worker keeps for the median."""


LEAST_HEARTBEAT_LIMIT = 0.5
"""Below this, an ordinary machine's hiccups look like deaths."""

HEARTBEATS = 5
"""Signs of life that fit into the heartbeat limit: one may be late, or four."""


@dataclass(frozen=True)
class MembershipSettings:
    """What the membership decision waits for, and how long."""

    heartbeat_limit: float = 5.0
    """A worker that was silent for this long is given up (``--heartbeat-limit``)."""

    reconnect_grace: float = 1.0
    """A worker whose connection is gone while a collective is broken: how long it may take to come back."""

    suspicion_grace: float = 0.25
    """A collective is broken and every member is connected: how long to wait for the news of who died before the
    communicator is rebuilt over the same members."""

    startup_grace: float = 120.0
    """Founding: how long, once the minimum of workers is ready, to wait for all that are wanted before starting with
    those that are there (``--startup-grace``)."""

    admission_window: float = 1.0
    """How long a joiner that is ready waits for others that are wanted too, so that they enter together."""

    drain_margin: float = 5.0
    """The last worker of a job drains this long before its deadline at the latest, replacement or not."""

    drain_grace: float = 30.0
    """The deadline of a drain that names none: what Kubernetes gives a pod."""

    rebuilds: int = 8
    """Communicators broken in a row, with nobody lost and no step done, before the job is given up."""

    restart_grace: float = 2.0
    """A new coordinator founds no generation for this long: workers of a running one may be on their way to it. More
    than the longest pause between two attempts to connect."""

    join_patience: float = 2.0
    """How long the relief of a draining worker waits for joiners that were to enter with it."""

    join_attempts: int = 3
    """Generations in a row that could not be built and in which a worker was to arrive, or took no part, before it is
    given up."""

    rebalance_gain: float = 0.1
    """An uneven split must make a step shorter by this share of it to be worth having, and so must a change of the
    split while the training runs, even as the more cautious quartiles of the measurements say (``--rebalance-gain``).
    At 1 the split stays even. A change costs no more than a step; what this keeps off is noise."""

    rebalance_interval: float = 2.0
    """A split is kept for at least this long: measurements under it must come in first, and what is over in a moment is
    not worth two changes."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """The coordinator process."""

    membership: MembershipSettings = field(default_factory=MembershipSettings)
    watch_interval: float = 0.05
    """A watcher of the status gets at most one message in this time."""
    first_message: float = 10.0
    """A new connection has this long to say Hello."""
    backlog: int = 1_000
    """Messages that may wait for one worker that does not read before its connection is closed; it may come back."""
    goodbye: float = 0.3
    """How long the connections may take to close when the coordinator ends."""
    stop_grace: float = MembershipSettings.drain_grace
    """Told to end (SIGTERM) while its job stops, the coordinator stays this long at most: workers that complete their
    step and write the last checkpoint wait for it to let them go. Without it they wait for ``LinkSettings.goodbye``."""
    rest: float = 50e-6
    """Decisions lie at least this long apart for each connected worker: what a thousand workers say about one event is
    decided on, and relayed to all, together."""
    weighing: float = 0.1
    """Measurements of workers' speeds lead to a decision this often at most; all else that they say does at once."""
    stall: float = 0.5
    """When the coordinator itself did not run for longer than this, nobody's silence in that time counts."""


@dataclass(frozen=True)
class LinkSettings:
    """A worker's connection to the coordinator."""

    heartbeat: float = 1.0
    """A sign of life in this interval, until the coordinator has said which one it wants."""
    progress: float = 0.2
    """The leader reports its step at most this often."""
    connect_timeout: float = 3.0
    retry_first: float = 0.05
    retry_most: float = 1.0
    orphan_limit: float = 600.0
    """A worker that can neither train nor reach a coordinator for this long ends itself."""
    goodbye: float = 30.0
    """How long a worker that is through waits for the coordinator to take its result."""


@dataclass(frozen=True)
class PaceSettings:
    """How a worker measures its own computing time per virtual node, and when it tells of it."""

    sample: float = 0.05
    """A sample covers at least this long: shorter steps are put together. The interruptions of a slowed process (a CPU
    quota is granted by the tenth of a second) must average out within few samples."""
    window: int = 10
    """Latest samples that the estimate is made of."""
    fewest: int = 5
    """Samples before there is an estimate."""
    skipped: int = 2
    """First steps after an entry that are left out: loaders and caches warm up again."""
    change: float = 0.05
    """The coordinator is told when the estimate has changed by this share."""
    interval: float = 0.25
    """And at most this often,"""
    interval_per_member: float = 0.004
    """or this often times the members, so that all of them together tell at most 250 times a second."""


@dataclass(frozen=True)
class CommunicatorSettings:
    """The collectives between workers."""

    connect_timeout: float = 10.0
    """Building the communicator of a generation: the full mesh must stand by then."""
    operation_timeout: float = 1_800.0
    """The last resort of a collective or message. A dead peer is noticed by its sockets and a hung one by the
    coordinator, both much earlier."""
    wait_slice: float = 0.05
    """How long a collective is waited for before the coordinator's news are looked at."""
    alignment: int = 16
    """Every segment of a message starts at a multiple of this many bytes."""
    bucket: int = 8 << 20
    """Gradients travel in messages of at most so many bytes."""
    one_by_one: int = 1 << 16
    """Gradients of at least so many bytes on average are taken one by one while the backward pass still runs. A call
    for each smaller one costs more than it saves."""
    small_exchange: int = 1 << 20
    """Gradients that make at most so many bytes at each worker are gathered whole: there and not back again."""
    stripe: int = 1 << 16
    """A tensor of a state with at least so many bytes travels by itself, striped over all donors; smaller ones go in
    one block, since each message has a cost of its own."""
    piece: int = 32 << 20
    """The most bytes of a state in one message."""
    message_timeout: float = 120.0
    """The last resort for one such message, counted from the one before it."""
    staged: int = 4
    """Pieces of a state that pass through host memory at a time where its tensors are on an accelerator."""
    reserve_wait: float = 2.5
    """How long a joiner holds its next generation back to make memory for the state that will come. Well below
    ``connect_timeout``: the others are waiting for its connections, though training."""


@dataclass(frozen=True)
class FusingSettings:
    """How a worker of a statistical job finds out how many virtual nodes to run as one micro-batch."""

    warm_up: int = 1
    """Attempts with a new size whose time does not count: kernels are chosen and memory is taken in them. On a CPU
    memory is measured in the first one."""
    attempts: int = 3
    """Attempts whose median time counts: one bad one does not."""
    rounds: int = 3
    """How often every size is measured; its best time counts, since a machine's other work only makes it slower."""
    tolerance: float = 0.03
    """A smaller size that is slower than the fastest by no more than this share is as good: it needs less memory."""
    hopeless: float = 0.25
    """Beyond a size that is slower than the fastest by more than this share, larger ones are not tried."""
    device_memory: float = 0.85
    """The share of an accelerator's memory that may be used; optimizer and fragmentation need the rest."""
    machine_memory: float = 0.5
    """The share of the memory left on a machine that a worker may grow into: other workers grow, too."""


@dataclass(frozen=True)
class AllocationSettings:
    """Freed memory that a worker keeps while it trains (on the CPU, with the GNU C library)."""

    kept: int = 256 << 20
    """So many bytes: the gradients of a model of 10 M parameters on their way up a tree of 64 virtual nodes."""
    largest: int = 32 << 20
    """Blocks from so many bytes on are the kernel's at once; it is the most that the C library allows."""


@dataclass(frozen=True)
class LoadingSettings:
    """Loading without loader processes."""

    gathered: int = 1 << 20
    """Samples of a step that are rows of tensors are gathered at once up to so many bytes. Beyond, the calls that this
    saves no longer count beside the copying, and the memory does."""
    alignment: int = 64
    """Bytes at whose multiples PyTorch's allocator for the CPU begins a tensor."""


LOADER_GRACE = 5.0
"""How long a loader process may take to finish the batch in hand before it is killed."""

CHECKPOINT_KEEP = 3
CHECKPOINT_SECONDS = 60.0
"""With a checkpoint directory and no interval, a checkpoint is written this often."""

THREADS = 1
"""Threads of a worker's CPU kernels. Sums inside a kernel depend on it, so it is part of what makes bits equal."""

Reproducibility = Literal["bitwise", "statistical"]
"""Whether the result is the same to the bit on any number of workers, or in distribution."""

REPRODUCIBILITY: dict[str, Reproducibility] = {"Bitwise": "bitwise", "Statistical": "statistical"}
"""What a manifest and the environment may ask for, and what ``vf.elastic`` calls it."""

BACKOFF_LIMIT = 6
"""``virtualflow run``: replacements in a row without a step in between before the job is given up."""

STOP_GRACE = 30.0
"""``virtualflow run``: how long a drain of the whole job may take before it is killed."""


@dataclass(frozen=True)
class ProfilingSettings:
    """``virtualflow profile``: how much is measured for each size of micro-batches."""

    warm_up: int = 3
    """Micro-batches that do not count: kernels are chosen and memory is taken in them."""
    samples: int = 200
    """Micro-batches that are timed at the most: the median no longer moves much."""
    least: int = 5
    """That are timed in any case: with fewer, quartiles mean nothing."""
    seconds: float = 3.0
    """When this has passed and the least are timed, a size is done."""
    longest: float = 60.0
    """A size that would take longer, by what the last one took, is not begun."""
    memory: float = 0.8
    """The share of free memory up to which a size is tried: an estimate may be wrong, and others use memory, too."""


@dataclass(frozen=True)
class SignalSettings:
    """The client of the coordinator's HTTP API, for whoever signals or watches a job."""

    request_timeout: float = 5.0
    """One request, from connecting to its answer."""
    retry_first: float = 0.05
    retry_most: float = 0.5
    patience: float = 15.0
    """How long a request is repeated while no coordinator answers: it may be restarting."""
    max_status: int = 64 << 20
    """The largest status that is read."""


@dataclass(frozen=True)
class LocalSettings:
    """``virtualflow run``: what its supervision of processes waits for, and how long."""

    tick: float = 0.2
    """The runner looks at everything at least this often, whether or not news arrived."""
    coordinator_start: float = 30.0
    """A coordinator that does not listen by then has failed to start."""
    backoff_first: float = 0.1
    backoff_most: float = 5.0
    """Delays of the second and later restarts in a row of something that keeps dying."""
    verdict_grace: float = 2.0
    """A worker ended and the status does not say why: how long to wait for it before the exit itself is the reason."""
    failure_grace: float = 5.0
    """The job failed: how long workers may take to end by themselves."""
    listing_grace: float = 10.0
    """A worker that a restarted coordinator has not heard from, beyond the heartbeat limit, is taken for hung."""
    traceback_grace: float = 2.0
    """A traceback on a worker's standard error is withheld this long: if it ends the job it is shown at the end."""
    replay: float = 1.5
    """When another worker's output is relayed from now on: how far back its lines are caught up on."""
    slow_period: float = 0.01
    """A worker that a schedule slows down is stopped once in this time: seldom enough to be exact, often enough for
    its heartbeats."""
    progress_interval: float = 2.0
    """Without a terminal: the least time between two lines about the progress."""
    refresh: float = 8.0
    """On a terminal: frames per second."""
    events_shown: int = 6
    cells_shown: int = 64
    """A job of more virtual nodes than this shows them as ranges."""
    tail: int = 200
    """Last lines of a worker's standard error that are kept for the message of its failure."""
