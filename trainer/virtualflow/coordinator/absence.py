"""The coordinator's own absence: where it did not run, or nobody reached it, the silence is not the workers'."""

from __future__ import annotations

import logging

from virtualflow.coordinator.snapshot import Worker
from virtualflow.coordinator.state import JobState

logger = logging.getLogger("virtualflow.coordinator")


def note_return(state: JobState, worker: Worker, now: float) -> None:
    """That worker is about to be heard of: if nobody who trains was for long, nobody's silence in that time counts."""
    quiet = state.settings.heartbeat_limit / 2
    if worker.connected and now - worker.last_heard < quiet:
        return  # nearly always, at once
    cluster = state.snapshot()
    if worker not in cluster.training:
        return
    if now - cluster.heard_at >= quiet:
        logger.info("nobody who trains was heard of for %.1f s", now - cluster.heard_at)
        excuse(state, now - cluster.heard_at, now)
        state.note_news()
    elif cluster.isolated:
        state.excused_at = now


def excuse(state: JobState, seconds: float, now: float) -> None:
    """The coordinator itself did not run, or was cut off, for so long: nobody's silence in that time counts."""
    state.excused_at = now
    state.history.series.miss()
    state.roster.shift(seconds, now)
    state.broken = {generation: min(now, since + seconds) for generation, since in state.broken.items()}
    state.proposed_at = min(now, state.proposed_at + seconds)
