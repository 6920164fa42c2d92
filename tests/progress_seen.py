"""A progress that remembers what it was told, in place of the one that people see."""

from __future__ import annotations

from typing import Any

from virtualflow.progress import ProgressBar

SEEN: list[Seen] = []
"""All that were begun since a test emptied it."""


class Seen(ProgressBar):
    """Remembers."""

    def __init__(self, what: str, total: float | None = None, **options: Any) -> None:
        super().__init__(what, total, **options)
        self.what, self.reached = what, list[float]()
        SEEN.append(self)

    def reach(self, done: float) -> None:
        self.reached.append(done)
        super().reach(done)

    @property
    def shares(self) -> list[float]:
        """Of the total, in the order in which they were told."""
        assert self.total
        return [done / self.total for done in self.reached]
