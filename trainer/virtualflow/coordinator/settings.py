"""Every default of the coordinator, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from virtualflow.protocol.settings import DRAIN_GRACE, HEARTBEAT_LIMIT, MAX_WORKERS

KEYS = 64
"""Keys that one member may publish for one generation's rendezvous; workers need one."""

MAX_BUNDLE = 1 << 19
"""Bytes of a rendezvous' keys that are relayed in one message; even what cannot be deflated fits into a message."""

KNOWN_GENERATIONS = 32
"""Latest generations that are remembered: by number, as withdrawn, and as reported broken."""

APART = 1 << 19
"""Two coordinators that were started in different milliseconds of such a stretch never give the same number."""

REMEMBERED = MAX_WORKERS
"""Latest processes that are over: should one come back, it is refused. All of a job may be lost at once, and a decision
waits for the confirmed end of each."""

MAX_LOST = 64
"""Latest processes declared lost that the status names, those first whose end is not confirmed."""

MAX_EVENTS = 200
"""Latest events in the status."""

BRIEF_CHANGES = 20

BRIEF_RUNS = 10
"""Latest membership changes and ended runs in a brief status."""

SERIES_POINTS = 400

SERIES_METRICS = 8

SERIES_BREAKS = 64
"""Points of a job's figures over its steps that are kept for the live page, metrics among them, and the longest times
in which no step was completed."""

SHOWN_WORKERS = 512

SHOWN_CHANGES = 100

SHOWN_EVENTS = 50

SHOWN_METRICS = 64
"""What the live page lists; of what is beyond, it knows how many there are."""

MAX_PROGRESS = 3_600.0
"""Longest time that a watcher may ask not to hear of mere progress."""

WATCH_HEARTBEAT = 10.0
"""Between two questions whether a watcher is still there."""

LEAST_HEARTBEAT_LIMIT = 0.5
"""Below this, an ordinary machine's hiccups look like deaths."""

LEAST_HANG_LIMIT = 1.0
"""Below this, an ordinary machine's hiccups look like hangs."""

HEARTBEATS = 5
"""Signs of life that fit into the heartbeat limit: one may be late, or four."""


@dataclass(frozen=True)
class MembershipSettings:
    """What the membership decision waits for, and how long."""

    heartbeat_limit: float = HEARTBEAT_LIMIT
    """A worker that was silent for this long is declared lost (``--heartbeat-limit``)."""
    silence_patience: float = 60.0
    """While no member of the running generation is heard of, it may be the coordinator that is cut off. Their silence
    has to last so many times that limit then, unless whoever runs the workers says that they have ended."""

    hang_limit: float | None = None
    """A training thread that makes no progress for so long while others wait for it hangs, and its worker is declared
    lost (``--hang-seconds``). ``None``: as the steps of the job say (see :mod:`virtualflow.coordinator.hangs`),"""
    hang_floor: float = 300.0
    """this at least,"""
    hang_steps: float = 5.0
    """and so many times the slowest of the latest steps."""
    hang_patience: float = 6.0
    """What is longer than a step by nature may take so many times the limit."""
    stacks_share: float = 0.5
    """When this share of the limit has passed, people are told, and where the worker's threads are."""

    reconnect_grace: float = 1.0
    """A worker whose connection is gone while a collective is broken: how long it may take to come back."""

    suspicion_grace: float = 0.25
    """A collective is broken and every member is connected: how long to wait for the news of who died before the
    communicator is rebuilt over the same members."""

    startup_grace: float = 120.0
    """At the initial start: how long, once the minimum of workers is ready, to wait for all that are wanted before
    starting with those that are there (``--startup-grace``)."""

    admission_window: float = 1.0
    """How long a joiner that is ready waits for others that are wanted too, so that they enter together."""

    drain_margin: float = 5.0
    """The last worker of a job drains this long before its deadline at the latest, replacement or not."""

    drain_grace: float = DRAIN_GRACE
    """The deadline of a drain that names none: what Kubernetes gives a pod."""

    build_limit: float = 30.0
    """When the members of a proposed generation are all connected, and have neither all built its communicator by then
    nor said that they cannot, it is proposed anew: the news is lost. Much longer than
    ``CommunicatorSettings.connect_timeout``."""

    rebuilds: int = 8
    """Communicators broken in a row, with nobody lost and no step done, before the job has failed."""

    restart_grace: float = 2.0
    """A new coordinator that nobody tells who may train starts no first generation for this long: workers of a running
    one may be on their way to it. More than the longest pause between two attempts to connect. One that did not run, or
    was cut off, gives its workers this long to come back."""

    join_patience: float = 2.0
    """How long the relief of a draining worker waits for joiners that were to enter with it."""

    join_attempts: int = 3
    """Generations in a row that could not be built and in which a worker was to arrive, or took no part, before it is
    declared lost."""

    rebalance_gain: float = 0.05
    """An uneven split must make a step shorter by this share of it to be worth having, and so must a change of the
    split while the training runs, even as the more cautious quartiles of the measurements say (``--rebalance-gain``).
    At 1 the split stays even. A change costs no more than a step; what this keeps off is noise."""

    rebalance_interval: float = 2.0
    """A split is kept for at least this long: measurements under it must come in first, and what is over in a moment is
    not worth two changes."""


@dataclass(frozen=True)
class KeptCopySettings:
    """The copy of the state of a job's only worker in the coordinator's memory."""

    most: int = 64 << 30
    """Bytes of the largest one, where the memory of the machine or the pod allows that."""
    reserve: int = 64 << 20
    """Bytes of memory that are left to everything else; half of the rest bounds a copy, as a new one arrives beside
    the one before it."""
    idle: float = 10.0
    """A transfer in which nothing moves for this long is ended."""
    piece: int = 256 << 10
    """Bytes that are sent at once."""


@dataclass(frozen=True)
class LivePageSettings:
    """The live page in browsers: however many there are, training comes first."""

    interval: float = 1.0
    """A page gets an answer this often at most; at the coordinator's end, at once."""
    viewers: int = 64
    """Pages that wait for their answer; one more is told to come later."""
    share: float = 0.02
    """The share of the coordinator's time that may go into putting together what pages show."""
    record_interval: float = 5.0
    """The first few members fetch the record of the job this often, for a coordinator that takes this one's place."""
    logs: Path | None = None
    """Where each worker's output is, as ``NAME.log`` (``VIRTUALFLOW_LOG_DIR``); ``None``: not on this machine."""
    log_lines: int = 200
    """The last lines of one that are shown,"""
    log_bytes: int = 64 << 10
    """and of these the last bytes."""


@dataclass(frozen=True)
class CoordinatorSettings:
    """The coordinator process."""

    membership: MembershipSettings = field(default_factory=MembershipSettings)
    memory_copy: KeptCopySettings = field(default_factory=KeptCopySettings)
    live_page: LivePageSettings = field(default_factory=LivePageSettings)
    confirmed_start: bool = False
    """Begin nothing without the word of whoever runs the workers that nobody trains already
    (``VIRTUALFLOW_CONFIRMED_START``)."""
    watch_interval: float = 0.05
    """A watcher of the status gets at most one message in this time,"""
    watch_rate: float = float(1 << 19)
    """and of a brief status at most so many bytes a second: the operator watches many jobs."""
    paid_interval: float = 15.0
    """While nothing else happens, watchers hear this often how long workers have been there."""
    first_message: float = 10.0
    """A new connection has this long to say Hello."""
    handshake: float = 5.0
    """A connection that has not shown the job's token by then is closed."""
    strangers: int = 1_024
    """Connections that may not have shown it yet; one more, and the oldest is closed. Fewer where few may be open."""
    log_interval: float = 10.0
    """What such connections cause is logged this often at most, of each kind."""
    backlog: int = 1_000
    """Messages that may wait for one worker that does not read before its connection is closed; it may come back."""
    goodbye: float = 0.3
    """How long the connections may take to close when the coordinator ends."""
    stop_grace: float = DRAIN_GRACE
    """Told to end (SIGTERM) while its job stops, the coordinator stays this long at most: workers that complete their
    step and write the last checkpoint wait for it to let them go. Without it they wait for ``LinkSettings.goodbye``."""
    rest: float = 50e-6
    """Decisions lie at least this long apart for each connected worker: what a thousand workers say about one event is
    decided on, and relayed to all, together."""
    weighing: float = 0.1
    """Measurements of workers' speeds lead to a decision this often at most; all else that they say does at once."""
    stall: float = 0.5
    """When the coordinator itself did not run for longer than this, nobody's silence in that time counts."""
