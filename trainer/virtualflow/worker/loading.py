"""The micro-batches of this worker's virtual nodes, read ahead in the portions that are run together.

The one to come may be read and brought to the device before its turn (``send_ahead``, ``read_ahead``). That is a cache
and nothing else: what a step computes on is what :meth:`Loading.fetch` returns, at the position where all workers are,
and a change of the workers or of the position empties it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from virtualflow.data import MicroBatch, Source, chunks, fuse
from virtualflow.step import MicrobatchFusion, StepPart
from virtualflow.worker.contents import check_reading
from virtualflow.worker.train_state import Training

# Micro-batches on their way to a device: copied beside its computation, from pinned memory, on a stream of their own.
#
# A copy from ordinary memory makes the host wait for all kernels that were launched before it, so that the device idles
# while the next ones are launched (CUDA C++ Best Practices Guide, "Asynchronous and overlapping transfers with
# computation"). From pinned memory it is only queued. What is copied are the same bytes.


@dataclass(frozen=True)
class Staged:
    """A micro-batch whose tensors are on their way; nothing may use it before :meth:`Staging.finish`."""

    batch: MicroBatch
    leaves: list[Any] = field(default_factory=list)
    """Its tensors on the device, and whatever else is in it, as ``shape`` has them,"""
    shape: pytree.TreeSpec | None = None
    copied: torch.cuda.Event | None = None
    """and when those of the host are there; ``None``: nothing has set out."""


class Staging:
    """Brings micro-batches to one device: tensors in lists, tuples and dicts, and whatever has a method ``to``.

    Args:
        device: where to; ``None`` leaves them as they are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device is not None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    @property
    def beside(self) -> bool:
        """Whether copies go on beside the computation, so that a micro-batch is better sent ahead of its use."""
        return self._stream is not None

    def start(self, batch: MicroBatch) -> Staged:
        """Let the tensors that are on the host set out; if the device is another one, they may change afterwards."""
        if self._stream is None:
            return Staged(batch)
        leaves, shape = pytree.tree_flatten(batch.data)
        with torch.cuda.stream(self._stream):
            sent = [self._send(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return Staged(batch, sent, shape, self._stream.record_event())

    def finish(self, staged: Staged) -> MicroBatch:
        """The micro-batch on the device; what is launched on the current stream from now on finds it complete."""
        batch, shape = staged.batch, staged.shape
        if self._device is None:
            return batch
        if shape is None or staged.copied is None:
            return replace(batch, data=pytree.tree_map(self._put, batch.data))
        current = torch.cuda.current_stream(self._device)
        current.wait_event(staged.copied)
        for leaf in staged.leaves:
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                # Its memory belongs to the other stream, which must not use it again before this one is done.
                leaf.record_stream(current)
        return replace(batch, data=pytree.tree_unflatten([self._put(leaf) for leaf in staged.leaves], shape))

    def move(self, batch: MicroBatch) -> MicroBatch:
        return self.finish(self.start(batch))

    def _send(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
            return tensor  # of another device: the stream that computes it is the one to copy it
        if tensor.is_pinned():
            # Whoever pinned it may write to it next, so the host waits: for this stream only, and for no kernel.
            return tensor.to(self._device)
        # torch frees pinned memory for other uses when the copies that were queued from it are over. Not pin_memory(),
        # which refuses tensors of expand().
        pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return pinned.to(self._device, non_blocking=True)

    def _put(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == self._device:
            return leaf
        move = getattr(leaf, "to", None)
        return move(self._device) if callable(move) else leaf


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
        self._assigned: Sequence[int] = range(0)
        self._width = 1
        self._portions: Sequence[range] = ()
        """What the source has been told of the portions to come."""

    def enter(self, assigned: Sequence[int]) -> None:
        self._peeked.clear()
        self._assigned = assigned
        if not self._training.is_over:
            self._width = 1 if self._fusion is None else self._fusion.width
            self._assign()

    def adjust(self, width: int) -> None:
        if width != self._width and self._source.steps_per_epoch is not None and not self._training.is_over:
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

    def peek(self, assigned: Sequence[int]) -> bool:
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
