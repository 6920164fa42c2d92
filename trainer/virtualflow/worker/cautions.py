"""What a script may not have meant, told once: what a micro-batch counts by, and buffers that count."""

from __future__ import annotations

from collections.abc import Sequence

from virtualflow.data import CountWatch, MicroBatch
from virtualflow.worker.standalone import AnySession
from virtualflow.worker.step import Told


class Cautions:
    """One worker's.

    Args:
        session: tells the user.
    """

    def __init__(self, session: AnySession) -> None:
        self._session = session
        self._counts: CountWatch | None = CountWatch()
        """``None``: there was a doubt, and it was told."""

    def look_at(self, batch: MicroBatch, told: Told) -> None:
        """A micro-batch has been computed: does it hold as many samples as it counts by?"""
        if self._counts is None or told.weight is not None:
            return
        doubt = self._counts.doubts(batch.size, batch.count)
        if doubt is not None:
            self._counts = None
            self._session.note(
                "warning",
                f"{doubt}, and a micro-batch counts by the samples that were loaded for it; if collate_fn drops some, "
                "say how many are left, by weight=lambda batch: len(batch[0]) in vf.elastic or by step.weight",
            )

    def tell_of_copied(self, names: Sequence[str]) -> None:
        """A step is made in which these buffers have changed, of types that have no mean; each is told of once."""
        if names and self._session.state.leader:
            buffers, have = ("buffer", "has") if len(names) == 1 else ("buffers", "have")
            self._session.note(
                "warning",
                f"the forward pass changes the {buffers} {', '.join(names)}, which {have} no mean: of each step the "
                "first virtual node's change alone counts; where a buffer counts samples or calls, let the changes be "
                f'added up by vf.elastic(..., buffers={{"{names[0]}": "sum"}})',
            )
