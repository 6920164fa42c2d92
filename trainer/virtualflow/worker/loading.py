"""The micro-batches of this worker's virtual nodes, read ahead in the portions that are run together."""

from __future__ import annotations

from virtualflow.data import MicroBatch, Source, fuse
from virtualflow.step import MicrobatchFusion
from virtualflow.worker.options import Options
from virtualflow.worker.train_state import Training


class Loading:
    """Reads for one training from its source."""

    def __init__(self, source: Source, fusion: MicrobatchFusion, training: Training, options: Options) -> None:
        self._source = source
        self._fusion = fusion
        self._training = training
        self._options = options
        self._peeked: dict[tuple[int, int, int], MicroBatch] = {}
        self._width = 1
        """What the source has been told of the portions to come."""

    @property
    def _over(self) -> bool:
        return self._options.is_over(self._training.completed_steps, self._training.position[0])

    def enter(self, assigned: range) -> None:
        """Other virtual nodes are assigned to this worker, or it begins again from where the others are."""
        self._peeked.clear()
        self._fusion.assign(assigned)
        if not self._over:
            self._width = self._fusion.width
            self._source.assign(assigned, *self._training.position, self._width)

    def adjust(self, assigned: range) -> None:
        """Load the coming steps in other portions, if other virtual nodes are now put together."""
        width = self._fusion.width
        if width != self._width and self._source.steps_per_epoch is not None and not self._over:
            self._source.assign(assigned, *self._training.position, width)
            self._width = width

    def samples(self) -> int | None:
        """Of the present step's whole global batch; ``None`` for streams, which must be read to know."""
        return self._source.samples(self._training.position[1])

    def fetch(self, nodes: range) -> MicroBatch:
        """The micro-batch of neighbouring virtual nodes for the present step."""
        epoch, epoch_step = self._training.position
        if not self._peeked:
            return self._source.fetch(epoch, epoch_step, nodes.start, len(nodes))
        peeked = [self._peeked.pop((epoch, epoch_step, node), None) for node in nodes]
        return fuse([at or self._source.fetch(epoch, epoch_step, node) for node, at in zip(nodes, peeked, strict=True)])

    def peek(self, assigned: range) -> bool:
        """Whether there are samples for a further step of the epoch; streams must be read to know."""
        epoch, epoch_step = self._training.position
        if self._source.steps_per_epoch is not None:
            return epoch_step + 1 < self._source.steps_per_epoch
        batches = [self._source.fetch(epoch, epoch_step + 1, node) for node in assigned]
        self._peeked = {(epoch, epoch_step + 1, batch.virtual_node): batch for batch in batches}
        return any(batch.size for batch in batches)

    def first(self) -> MicroBatch:
        """The very first micro-batch, which a joiner warms up with."""
        self._source.assign(range(1), 0, 0)
        return self._source.fetch(0, 0, 0)
