"""Every default of the launcher, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol.settings import SignalSettings

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of workers, unless a user sets these; the trainer's image has the same. Without it the GNU C library
gives the memory of gradients back to the kernel after each virtual node: 27,000 page faults a step, a quarter of its
time, for a model of 6 M parameters. One arena, as each thread that exchanges would keep another one's worth: with 25 MB
of gradients a worker grew by 400 MB in 17 changes. Huge pages where the kernel has them on request (``madvise``): on a
CPU a step is 4 to 11 % shorter, as addresses are looked up less often."""


@dataclass(frozen=True)
class LauncherSettings:
    """The command line: above all what the supervision of a job's processes waits for, and how long."""

    membership: MembershipSettings = field(default_factory=MembershipSettings)
    """Of the coordinators that it starts."""
    signals: SignalSettings = field(default_factory=SignalSettings)
    """Of its calls to coordinators."""

    tick: float = 0.2
    """The runner looks at everything at least this often, whether or not news arrived."""
    certificate_lifetime: float = 12 * 3_600.0
    """A certificate of the processes of a job is valid for this long,"""
    certificate_renewal: float = 6 * 3_600.0
    """and a new one is there after this long."""
    coordinator_start: float = 30.0
    """A coordinator that does not listen by then has failed to start."""
    coordinator_starts: int = 10
    """Starts in a row that may fail of a coordinator that has listened before."""
    coordinator_stop: float = 1.0
    """How long it may take to end once nobody needs it."""
    backoff_first: float = 0.1
    """The delay of the second restart in a row of something that keeps dying; it doubles."""
    backoff_most: float = 5.0
    """The longest such delay."""
    backoff_reset: float = 10.0
    """Workers that crash further apart than this begin again with the first delay."""
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
    """A worker that a fault schedule slows down is stopped once in this time: seldom enough to be exact, often enough
    for its heartbeats."""
    progress_interval: float = 2.0
    """Without a terminal: the least time between two lines about the progress."""
    refresh: float = 8.0
    """On a terminal: frames per second."""
    events_shown: int = 6
    """The latest events of the live view."""
    cells_shown: int = 64
    """A job of more virtual nodes than this shows them as ranges."""
    explain_steps: int = 10
    """Steps whose exchanges ``virtualflow explain`` measures; in the first one nothing begins early."""
    check_steps: int = 6
    """Steps of each run of ``virtualflow check``: enough for a worker to join, and to show what has gone wrong."""
    check_workers: int = 8
    """The most workers of such a run: each is a process that holds the whole model."""
    check_limit: float = 600.0
    """How long such a run may take."""
    plan_rows: int = 4
    """Numbers of virtual nodes that ``virtualflow plan`` shows above the smallest that fits."""
    plan_width: int = 72
    """Columns of its picture of the time."""
    turn_limit: float = 30.0
    """``virtualflow turns``: how long a turn may take while others wait. It is far more than a step of a job that is
    worth packing, and what others lose by one that hangs."""
    tail: int = 200
    """Last lines of a worker's standard error that are kept for the message of its failure."""
