"""The record of a job, which some workers keep for a coordinator to come: one HTTP resource, and what is in it.

A coordinator keeps nothing on a disk, and workers tell a new one what decisions need (``Hello``). The record is what
only people look at: the figures over the steps, goodput, the latest events. Workers do not look into it. ``GET`` gives
the record as it is now; ``PUT`` hands one back that another coordinator has written, with its age.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from virtualflow.protocol.http_api import Event
from virtualflow.protocol.messages import Base, Count, Generation, RunNumber
from virtualflow.protocol.settings import MAX_LISTED, MAX_WORD

PATH = "/v1/record"
AGE = "age"
"""The parameter of ``PUT`` that says how many seconds ago the record was fetched."""

MAX_POINTS = 4_096
"""Points over the steps in a record, at most; a coordinator keeps fewer."""

Total = tuple[float | None, Count]
"""A sum and how many figures it is of; ``None``: it is no number that JSON has."""
Column = Annotated[tuple[Total, ...], msgspec.Meta(max_length=MAX_POINTS)]


class Break(Base, frozen=True, tag=False):
    """A time in which nobody completed a step, or nobody heard of any."""

    before: Count
    """The last step before it."""
    step: Count
    """The first that was told after it."""
    since: float
    """Unix times of the two."""
    until: float
    unheard: bool
    """Steps may have been made: nobody told of them, as the coordinator was away."""


class SeriesRecord(Base, frozen=True, tag=False):
    """Figures over the steps, each a column as long as ``steps``."""

    width: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Steps that share a point."""
    steps: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_POINTS)]
    speed: Column
    workers: Column
    metrics: Annotated[dict[str, Column], msgspec.Meta(max_length=64)]
    times: Annotated[tuple[float | None, ...], msgspec.Meta(max_length=MAX_POINTS)] = ()
    """Unix time at which each of ``steps`` was told; empty: an earlier version does not say."""
    breaks: Annotated[tuple[Break, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    began: float | None = None
    """Unix time of the first figures."""


class GoodputRecord(Base, frozen=True, tag=False):
    """Worker-seconds so far, and from where to count on."""

    paid: Annotated[float, msgspec.Meta(ge=0)]
    used: Annotated[float, msgspec.Meta(ge=0)]
    step: Count | None
    """The highest that was counted."""
    present: Count
    """Workers that there were."""


class JobRecord(Base, frozen=True, tag=False):
    """What a coordinator would tell its successor."""

    writer: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_WORD)]
    """The coordinator, by a name that no other one has."""
    number: Count
    """How many records of this job were written: it goes on across coordinators, so the highest is the newest."""
    goodput: GoodputRecord
    series: SeriesRecord
    events: Annotated[tuple[Event, ...], msgspec.Meta(max_length=MAX_LISTED)]
    """The latest; the oldest first."""
    forgotten: Generation
    """The newest membership change that is only counted any more, as it is too long ago for workers to tell of it."""
    forgotten_changes: Count
    forgotten_steps: Count
    """Steps that those have repeated."""
    run: RunNumber = 1
    """The run of the script that ``series`` is of."""
    began: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """``Status.began``."""
