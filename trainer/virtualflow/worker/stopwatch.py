"""How long steps take, and how long a membership change made a survivor wait."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_TEXT
from virtualflow.worker.settings import MAX_STEP_TIMES

_RECENT = 50
"""Steps that the present rate is taken over, at most: those of another generation took another time."""

_FORGETTING = 0.999
"""What a step leaves of the slowest one before it: half is forgotten after 700 steps."""

_LATEST = 10
"""Steps that the present duration is the median of."""


class Stopwatch:
    """Measures from commit to commit; times in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._plans: list[m.Plan] = []
        """Generations entered since the last commit."""
        self.moved: tuple[int, float, int] | None = None
        """The state that others were given since the last commit: its bytes, the seconds, the donors."""
        self._held = 0.0
        self._committed_at: float | None = None
        self._steps: deque[float] = deque(maxlen=MAX_STEP_TIMES)
        self._latest: deque[float] = deque(maxlen=_RECENT)
        """Of the present generation alone."""
        self._attempted = 0
        self._failed_attempts = 0
        self._repeated_nodes = 0
        self.slowest = 0.0
        """The slowest of the latest steps, seconds."""

    def enter(self, plan: m.Plan, *, has_state: bool) -> None:
        """A generation is being entered; a worker that ``has_state`` was in the one before.

        What a joiner tried to enter before never came about for it, and the plan that took over says again who joins.
        """
        if plan.mode == "planned" and not has_state:
            self._plans.clear()
        self._plans.append(plan)

    def attempt(self, step: int) -> None:
        if step != self._attempted:
            self._attempted, self._failed_attempts, self._repeated_nodes = step, 0, 0

    def fail(self) -> None:
        self._failed_attempts += 1

    def repeat(self, virtual_nodes: int) -> None:
        if self._failed_attempts:
            self._repeated_nodes += virtual_nodes

    def hold(self, seconds: float) -> None:
        """The job was held on purpose for so long, which is nobody's pause."""
        self._held += seconds

    def commit(self, now: float, step: int, workers_before: int | None, generation: m.Generation) -> m.Change | None:
        """``step`` is committed; the membership change that came before it, if there was one.

        Args:
            workers_before: how many workers made the step before it, ``None`` at the start: there may have been others,
                of whom nobody survived and no checkpoint is left, so the restart is told as one from no workers.
        """
        passed = None if self._committed_at is None else now - self._committed_at - self._held
        plans, self._plans = self._plans, []
        moved, self.moved = self.moved, None
        repeated, nodes = (self._failed_attempts, self._repeated_nodes) if step == self._attempted else (0, 0)
        self._held, self._committed_at, self._failed_attempts, self._repeated_nodes = 0.0, now, 0, 0
        if not plans:
            if passed is not None:
                self._steps.append(passed)
                self.slowest = max(passed, _FORGETTING * self.slowest)
                self._latest.append(passed)
            return None
        self._latest.clear()
        cause = _cause(plans)
        if cause == "start" or (workers_before is None and cause != "restart"):
            return None
        return m.Change(
            generation=generation,
            step=step,
            from_=workers_before or 0,
            to=plans[-1].workers,
            cause=cause,
            reason="; ".join(plan.reason for plan in plans)[:MAX_TEXT],
            pause_ms=None if passed is None else 1_000 * passed,
            repeated_steps=repeated,
            repeated_virtual_nodes=nodes,
            state_bytes=moved[0] if moved else None,
            state_ms=1_000 * moved[1] if moved else None,
            state_donors=moved[2] if moved else None,
        )

    @property
    def steps_per_second(self) -> float:
        """The rate of the latest steps of the present generation; 0: none is measured yet."""
        passed = sum(self._latest)
        return len(self._latest) / passed if passed > 0 else 0.0

    @property
    def latest_ms(self) -> float | None:
        return 1_000 * statistics.median(list(self._latest)[-_LATEST:]) if self._latest else None

    @property
    def median_ms(self) -> float | None:
        return 1_000 * statistics.median(self._steps) if self._steps else None

    @property
    def timed_steps(self) -> int:
        return len(self._steps)


def _cause(plans: Sequence[m.Plan]) -> m.Cause:
    order: list[m.Cause] = ["restart", "lost", "broken", "resize", "drain", "join", "rebalance", "stop", "start"]
    return min((plan.cause for plan in plans), key=order.index)
