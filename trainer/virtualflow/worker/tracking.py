"""One run in a tracker, whoever writes it: what no store is known to have yet is part of the training's state.

Every worker notes each committed step. The leader writes what it has noted, from time to time, and forgets it; the
others keep the latest, a few times what a leader ever leaves unwritten. So whoever comes to lead can write what its
predecessor did not come to. It cannot know what of it is there already: that is each tracker's part (``tracker``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from virtualflow.step import Attempt, StepPart
from virtualflow.worker.settings import TrackingSettings
from virtualflow.worker.standalone import AnySession
from virtualflow.worker.tracker import Entry, NotWritten, Tracker
from virtualflow.worker.train_state import Training


class Tracking(StepPart):
    """The trackers of one run, in one worker."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        session: AnySession,
        training: Training,
        settings: TrackingSettings,
    ) -> None:
        self._writers = [_Writer(tracker) for tracker in trackers]
        self._session, self._training, self._settings = session, training, settings
        self._begun: int | None = None
        """The step that this worker makes, or has made and not noted yet."""
        self._rates: tuple[float, ...] = ()
        self._logged: dict[str, float] = {}
        self._noted_at: tuple[int, float] | None = None
        """The step noted last, and when."""
        self._tried_at = float("-inf")

    def begin(self, attempt: Attempt) -> None:
        """This worker is about to make a step, or to get it from others that have."""
        if self._begun != attempt.number:
            self._begun = attempt.number
            groups = self._training.optimizer.param_groups
            self._rates = tuple(float(group["lr"]) for group in groups if "lr" in group)

    def log(self, numbers: dict[str, float]) -> None:
        self._logged |= numbers

    def after_script(self, *, leaves: bool) -> None:
        """Note the step. Who leaves, or no longer leads, hands over nothing that it could have written."""
        self.note()
        self.flush(now=leaves)

    def note(self) -> None:
        """Note the last step, now that all code behind it has run; said again, what was logged since is added to it."""
        training, now = self._training, time.monotonic()
        step = training.completed_steps
        logged, self._logged = self._logged, {}
        if self._begun != step:
            last = training.tracked.get(step)
            if logged and last is not None:
                training.tracked[step] = _with(last, logged)
            else:
                self._logged = logged  # for the first step of this worker
            return
        self._begun = None
        follows = self._noted_at is not None and self._noted_at[0] == step - 1
        seconds = now - self._noted_at[1] if self._noted_at is not None and follows else None
        self._noted_at = step, now
        epoch, epoch_step = training.position
        training.tracked[step] = Entry(
            step,
            epoch if epoch_step else epoch - 1,
            time.time(),
            seconds,
            training.workers or 0,
            self._rates,
            {**training.metrics, **logged},
            next((change for change in reversed(training.changes.values()) if change.step == step), None),
        )
        if not self._session.state.leader:
            self._keep(self._settings.kept)

    def flush(self, *, now: bool = False) -> None:
        """Write what is due, or all of it ``now``, if this worker leads."""
        tracked = self._training.tracked
        if not self._session.state.leader:
            for writer in self._writers:
                writer.close()
            return
        missing = sum(step > self._written for step in tracked)
        waited = time.monotonic() - self._tried_at
        settings = self._settings
        if not missing or not (now or missing >= settings.steps or waited >= settings.seconds):
            return
        self._tried_at = time.monotonic()
        self._session.activity.mark("writing to trackers", self._training.completed_steps)
        generation = self._session.generation
        fence = generation.incarnation, generation.counter
        for writer in self._writers:
            if not (writer.tracker.fenced or self._session.holds_lease()):
                continue
            failure = writer.write(self._training.id, fence, [tracked[step] for step in sorted(tracked)])
            if failure is not None:
                self._session.note("warning", failure)
        for step in [step for step in tracked if step <= self._written]:
            del tracked[step]
        self._keep(settings.most)

    def end(self) -> None:
        for writer in self._writers:
            writer.end()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    @property
    def _written(self) -> int:
        return min((writer.written for writer in self._writers), default=0)

    def _keep(self, most: int) -> None:
        tracked = self._training.tracked
        for step in sorted(tracked)[:-most]:
            del tracked[step]


class _Writer:
    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.written = 0
        self._open_in: tuple[int, int] | None = None
        self._fails = False

    def write(self, run: str, fence: tuple[int, int], tracked: Sequence[Entry]) -> str | None:
        """Write what this tracker lacks; a new reason why it cannot be done, if there is one."""
        missing = [entry for entry in tracked if entry.step > self.written]
        if not missing:
            return None
        try:
            if self._open_in != fence:
                self.tracker.open(run, fence)
                self._open_in = fence
            self.tracker.write(missing)
        except (OSError, NotWritten) as error:
            self.close()
            failed_before, self._fails = self._fails, True
            name = type(self.tracker).__name__
            return None if failed_before else f"{name} cannot be written to, and will be tried again: {error}"
        self.written, self._fails = missing[-1].step, False
        return None

    def end(self) -> None:
        """Mark the run as complete; one that is left without that mark is whole all the same."""
        if self._open_in is not None:
            with suppress(OSError, NotWritten):
                self.tracker.end()

    def close(self) -> None:
        if self._open_in is not None:
            self._open_in = None
            self.tracker.close()


def _with(entry: Entry, logged: dict[str, float]) -> Entry:
    return Entry(
        entry.step,
        entry.epoch,
        entry.at,
        entry.seconds,
        entry.workers,
        entry.rates,
        {**entry.metrics, **logged},
        entry.change,
    )
