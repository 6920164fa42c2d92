"""Every default of the transport, once.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from virtualflow.protocol.settings import HEARTBEAT_LIMIT


@dataclass(frozen=True)
class LinkSettings:
    """A worker's connection to the coordinator."""

    heartbeat: float = 1.0
    """A sign of life in this interval, until the coordinator has said which one it wants."""
    progress: float = 0.2
    """The leader reports its step at most this often."""
    connect_timeout: float = 3.0
    """One attempt at connecting to the coordinator."""
    retry_first: float = 0.05
    """The first wait between two attempts."""
    retry_most: float = 1.0
    """The longest such wait."""
    lease: float = HEARTBEAT_LIMIT
    """So long after an exchange a worker takes its place for granted, until the coordinator has said how long."""
    lease_wait: float = 15.0
    """Later, ``run.leader`` waits this long for the coordinator's word. It may just be starting again."""
    orphan_limit: float = 600.0
    """A worker that can neither train nor reach a coordinator for this long ends itself."""
    deaf_limit: float = 10.0
    """A training thread that was refused, or whose job has failed, and makes no progress for this long does not hear of
    it any more: its process is ended."""
    goodbye: float = 30.0
    """How long a worker that is through waits for the coordinator to take its result."""


@dataclass(frozen=True)
class CopySettings:
    """A copy of the state on its way to the coordinator's memory, or from there."""

    connect_timeout: float = 3.0
    """Connecting to send or read a copy."""
    idle: float = 10.0
    """A transfer in which nothing moves for this long is ended."""
    piece: int = 8 << 20
    """Bytes that are sent or read at once, without the interpreter."""


@dataclass(frozen=True)
class CommunicatorSettings:
    """The collectives between workers."""

    connect_timeout: float = 10.0
    """Building the communicator of a generation: the full mesh must stand by then."""
    operation_timeout: float = 1_800.0
    """The last resort where nothing moves. A dead peer is noticed by its sockets and a hung one by the
    coordinator, both much earlier."""
    wait_slice: float = 0.05
    """How long a collective is waited for before the coordinator's news are looked at."""
    lost_wait: float = 5.0
    """A peer that has sent all that is waited for may close its connections and be right. If nothing comes from the
    others for this long behind that, the generation is over, whatever the coordinator has to say."""


@dataclass(frozen=True)
class TurnSettings:
    """Turns on a device that several jobs share."""

    answer: float = 3.0
    """A turn server that is late by this is taken to hang, and there are no turns."""
    retry: float = 2.0
    """Where there are none, one is looked for again after this long."""
    wait_slice: float = 0.05
    """How long a turn is waited for before the coordinator's news are looked at."""
