"""The micro-batches of this worker's virtual nodes, read ahead in the portions that are run together.

The one to come may be read and brought to the device before its turn (``send_ahead``, ``read_ahead``). That is a cache
and nothing else: what a step computes on is what :meth:`Loading.fetch` returns, at the position where all workers are,
and a change of the workers or of the position empties it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from virtualflow.data import MicroBatch, Source, Staged, Staging, chunks, fuse
from virtualflow.step import MicrobatchFusion, StepPart
from virtualflow.worker.contents import check_reading
from virtualflow.worker.train_state import Training


class _Place(NamedTuple):
    epoch: int
    epoch_step: int
    nodes: range


class _Ahead(NamedTuple):
    place: _Place
    version: object
    """The source's when it was read."""
    staged: Staged


class Loading(StepPart):
    """Reads for one training from its source.

    Args:
        fusion: says which virtual nodes run together; ``None``: none do.
        staging: brings micro-batches to the device; ``None``: they stay where they are.
        collate: the script's own ``collate_fn``, if it has one.
    """

    def __init__(
        self,
        source: Source,
        fusion: MicrobatchFusion | None,
        training: Training,
        staging: Staging | None,
        collate: Callable[[Any], Any] | None = None,
    ) -> None:
        self._source = source
        self._fusion = fusion
        self._training = training
        self._staging = staging
        self._collate = collate
        self._ahead: _Ahead | None = None
        self._peeked: dict[tuple[int, int, int], MicroBatch] = {}
        self._assigned = range(0)
        self._width = 1
        self._portions: Sequence[range] = ()
        """What the source has been told of the portions to come."""

    @property
    def _over(self) -> bool:
        return self._training.is_over

    def enter(self, assigned: range) -> None:
        """Other virtual nodes are assigned to this worker, or it begins again from where the others are."""
        self._peeked.clear()
        self._assigned = assigned
        if not self._over:
            self._width = 1 if self._fusion is None else self._fusion.width
            self._assign()

    def adjust(self, width: int) -> None:
        if width != self._width and self._source.steps_per_epoch is not None and not self._over:
            self._width = width
            self._assign()

    def _assign(self) -> None:
        self._ahead, self._portions = None, chunks(self._assigned, self._width)
        self._source.assign(self._assigned, *self._training.position, self._width)

    @property
    def steps_per_epoch(self) -> int | None:
        """``None`` for streams."""
        return self._source.steps_per_epoch

    def samples(self) -> int | None:
        """Of the present step's whole global batch; ``None`` for streams, which must be read to know."""
        return self._source.samples(self._training.position[1])

    def fetch(self, nodes: range) -> MicroBatch:
        """The micro-batch of neighbouring virtual nodes for the present step, on the device."""
        place = _Place(*self._training.position, nodes)
        ahead = self._ahead
        if ahead is not None and ahead.place == place:
            self._ahead = None
            if ahead.version == self._source.version:
                return ahead.staged.batch if self._staging is None else self._staging.finish(ahead.staged)
            self._assign()  # the script has written to its samples: what was read before is forgotten
        batch = self._read(place)
        return batch if self._staging is None else self._staging.move(batch)

    def _read(self, place: _Place) -> MicroBatch:
        epoch, epoch_step, nodes = place
        if not self._peeked:
            return self._source.fetch(epoch, epoch_step, nodes.start, len(nodes))
        peeked = [self._peeked.pop((epoch, epoch_step, node), None) for node in nodes]
        return fuse([at or self._source.fetch(epoch, epoch_step, node) for node, at in zip(nodes, peeked, strict=True)])

    @property
    def copies_beside(self) -> bool:
        """Whether micro-batches are copied to the device beside its computation, so that one is best sent ahead."""
        return self._staging is not None and self._staging.beside

    def send_ahead(self, nodes: range) -> None:
        """The device computes on the micro-batch of these virtual nodes: send it the one to come."""
        self._fetch_early(nodes)

    def read_ahead(self) -> None:
        """This worker's part of the step is under way to the others: read the first micro-batch of the next step."""
        if self._portions and (self._staging is None or not self._staging.beside):
            self._fetch_early(self._portions[-1])

    def _fetch_early(self, nodes: range) -> None:
        place = self._following(nodes)
        if place is not None and (self._ahead is None or self._ahead.place != place):
            batch = self._source.fetch(place.epoch, place.epoch_step, place.nodes.start, len(place.nodes))
            staged = Staged(batch) if self._staging is None else self._staging.start(batch)
            self._ahead = _Ahead(place, self._source.version, staged)

    def _following(self, nodes: range) -> _Place | None:
        """What comes behind the micro-batch of these virtual nodes, as far as it may be fetched now."""
        early = self._source.early
        if early == "nothing":
            return None
        epoch, epoch_step = self._training.position
        portions = self._portions
        if nodes not in portions:
            return None  # one of another worker's, or of an attempt that was repaired
        after = portions.index(nodes) + 1
        if after < len(portions):
            return _Place(epoch, epoch_step, portions[after])
        steps = self._source.steps_per_epoch
        last = steps is None or epoch_step + 1 >= steps
        limit = self._training.last_step
        if early == "step" or last or (limit is not None and self._training.completed_steps + 1 >= limit):
            return None
        return _Place(epoch, epoch_step + 1, portions[0])

    def peek(self, assigned: range) -> bool:
        """Whether there are samples for a further step of the epoch; streams must be read to know."""
        epoch, epoch_step = self._training.position
        if self._source.steps_per_epoch is not None:
            return epoch_step + 1 < self._source.steps_per_epoch
        batches = [self._source.fetch(epoch, epoch_step + 1, node) for node in assigned]
        self._peeked = {(epoch, epoch_step + 1, batch.virtual_node): batch for batch in batches}
        return any(batch.size for batch in batches)

    def check_reading(self, dataset: Any, batch: MicroBatch) -> None:
        """See that a micro-batch that has just been fetched is the same when it is read again."""
        check_reading(dataset, self._collate, self._source, batch, *self._training.position)

    def first(self) -> MicroBatch:
        self._ahead = None
        self._source.assign(range(1), 0, 0)
        batch = self._source.fetch(0, 0, 0)
        return batch if self._staging is None else self._staging.move(batch)
