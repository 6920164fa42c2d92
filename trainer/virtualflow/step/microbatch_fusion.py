"""Neighbouring virtual nodes run as one micro-batch, in a worker of a ``statistical`` job.

Between the decision (``fusion_tuner``) and the loop: measures attempts, cuts the worker's range into chunks, and tells
batch norms which samples belong to which virtual node. In a ``bitwise`` job every chunk is one virtual node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from virtualflow.data import chunks
from virtualflow.device import MemoryGauge, device_of
from virtualflow.errors import VirtualFlowError
from virtualflow.protocol.wording import counted
from virtualflow.step.fusion_tuner import Tuner
from virtualflow.step.part import Attempt, StepPart

logger = logging.getLogger("virtualflow.worker")

# Batch norm over each virtual node's samples of a micro-batch that holds several: ghost batch norm.
#
# Normalising over a larger batch would be another training. So while a micro-batch of several virtual nodes is with the
# user's code, each batch norm in use splits its input and normalises each virtual node's samples by themselves. All
# start from the same running statistics, and the result is their mean, weighted by samples.
#
# While a run is active, each batch norm's ``forward`` is an attribute of the instance; a copy of the model that is made
# meanwhile (``copy.deepcopy``) gets one of its own, which does what the original method does.

_ADVICE = 'pass batch_norm="micro-batch" or max_fused=1 to vf.elastic'


class GhostBatchNorm:
    """Takes over the batch norms of ``model`` until :meth:`undo`.

    :attr:`obstacle` says why micro-batches of this model cannot be split, once that is known: that a model has a
    foreign kind of batch norm is known at once; that one gets something else than a row a sample, when it has run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.obstacle: str | None = None
        self.sizes: tuple[int, ...] = ()
        """Samples of each virtual node in the present micro-batch."""
        self._replaced: list[_SplitForward] = []
        for name, module in model.named_modules():
            if not isinstance(module, _BatchNorm):
                continue
            own = vars(module).get("forward")
            if type(module).forward is not _BatchNorm.forward or not (own is None or isinstance(own, _SplitForward)):
                self.obstacle = f"{name} is a {type(module).__name__} with a forward of its own"
                continue
            split = _SplitForward(module, name, self)
            module.forward = split  # type: ignore[assignment, method-assign]
            self._replaced.append(split)

    def undo(self) -> None:
        self.sizes = ()
        for split in self._replaced:
            if vars(split.module).get("forward") is split:
                del split.module.forward
        self._replaced.clear()

    def note_rows(self, name: str, rows: int) -> None:
        samples = sum(self.sizes)
        if rows == samples or not samples:
            return
        if len(self.sizes) > 1:
            raise VirtualFlowError(
                f"batch norm {name} got {counted(rows, 'row')} for a micro-batch of "
                f"{counted(samples, 'sample')}, so they cannot be told "
                f"apart by virtual node; {_ADVICE}"
            )
        self.obstacle = f"batch norm {name} gets {counted(rows, 'row')} for {counted(samples, 'sample')}"


class _SplitForward:
    def __init__(self, module: _BatchNorm, name: str, owner: GhostBatchNorm | None) -> None:
        self.module = module
        self.name = name
        self._owner = owner

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the model, or what is read from a file, is somebody else's: it is not told of micro-batches.
        return _SplitForward, (self.module, self.name, None)

    def __call__(self, rows: Tensor) -> Tensor:
        module, owner = self.module, self._owner
        uses_batch = module.training or (module.running_mean is None and module.running_var is None)
        if owner is not None and uses_batch:
            owner.note_rows(self.name, rows.shape[0])
            if len(owner.sizes) > 1:
                module._check_input_dim(rows)  # type: ignore[no-untyped-call]
                return normalize_apart(module, rows, owner.sizes)
        return _BatchNorm.forward(module, rows)


def normalize_apart(module: _BatchNorm, rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Normalise consecutive stretches of ``rows`` (``[n, channels, ...]``) of these ``sizes``, each by itself.

    Running statistics become the mean, weighted by size, of what each stretch alone would have made of them.
    """
    momentum = module.momentum
    tracks = module.training and module.track_running_stats
    if tracks and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
    mean = module.running_mean if tracks else None
    var = module.running_var if tracks else None
    outcomes, passed, samples = [], 0, sum(sizes)
    for part, size in zip(torch.split(rows, list(sizes)), sizes, strict=True):
        # Each stretch updates what those before it have left. Of r <- (1 - m_i) r + m_i s_i one after the other
        # remains (1 - m) r + m sum(w_i s_i) with m_i = m w_i / (1 - m (w_(i+1) + ...)).
        passed += size
        later = (samples - passed) / samples
        share = (momentum or 0.0) * (size / samples) / (1.0 - (momentum or 0.0) * later)
        outcomes.append(F.batch_norm(part, mean, var, module.weight, module.bias, True, share, module.eps))
    return torch.cat(outcomes)


BatchNorm = Literal["virtual-node", "micro-batch"]
"""Over which samples batch norm normalises."""


class MicrobatchFusion(StepPart):
    """How this worker's virtual nodes are put together.

    Args:
        model: its batch norms are taken over until :meth:`close`, if ``batch_norm`` says so.
        cap: the most virtual nodes of a micro-batch; ``None`` for no limit but memory. 1 in a ``bitwise`` job.
    """

    def __init__(
        self,
        model: nn.Module,
        cap: int | None,
        micro_batch: int,
        batch_norm: BatchNorm,
    ) -> None:
        self._tuner = Tuner(cap)
        self._gauge = MemoryGauge(device_of(model))
        self._micro_batch = micro_batch
        self._assigned: Sequence[int] = range(0)
        self._began = 0.0
        self._samples = 0
        self._ghost = GhostBatchNorm(model) if batch_norm == "virtual-node" and cap != 1 else None
        self._check_obstacle()

    @property
    def width(self) -> int:
        return self._tuner.width

    def enter(self, assigned: Sequence[int]) -> None:
        self._assigned = assigned
        self._tuner.assign(len(assigned))

    def begin(self, attempt: Attempt) -> None:
        """An attempt begins: say which virtual nodes run as one micro-batch each, unless it mends another one."""
        if self._tuner.exploring:
            attempt.timed = False  # how long a size takes that is tried is no measure of the worker
        if attempt.repairs:
            return
        if self._tuner.exploring:
            if self._tuner.fresh == self._gauge.slows:
                self._gauge.begin()
            self._began, self._samples = time.perf_counter(), 0
        attempt.portions = chunks(self._assigned, self._tuner.width)

    def before_pass(self, attempt: Attempt) -> None:
        batch = attempt.present
        if self._ghost is not None:
            self._ghost.sizes = tuple(size for size in batch.counts if size)
        self._samples += batch.size

    def exclude(self, seconds: float) -> None:
        """So much of the attempt was waiting for a device that others had."""
        self._began += seconds

    def computed(self, attempt: Attempt) -> None:
        if self._ghost is not None:
            self._ghost.sizes = ()
            self._check_obstacle()
        # A last short batch tells little about what a micro-batch costs.
        if self._tuner.exploring and 2 * self._samples >= self._micro_batch * len(self._assigned):
            self._gauge.wait()
            seconds = time.perf_counter() - self._began
            self._tuner.observe(seconds * self._micro_batch / self._samples, self._gauge.end())

    def explain(self, error: BaseException) -> None:
        """Add to an out-of-memory error what to do about it."""
        if isinstance(error, torch.cuda.OutOfMemoryError) and self.width > 1:
            error.add_note(
                f"{self.width} virtual nodes ran as one micro-batch; pass max_fused={self.width // 2} to vf.elastic or "
                f"set VIRTUALFLOW_MAX_FUSED={self.width // 2}"
            )

    def close(self) -> None:
        if self._ghost is not None:
            self._ghost.undo()

    def _check_obstacle(self) -> None:
        if self._ghost is None or self._ghost.obstacle is None:
            return
        logger.warning(
            "virtual nodes run one by one, because %s; to let batch norm see the larger micro-batch, pass "
            'batch_norm="micro-batch" to vf.elastic',
            self._ghost.obstacle,
        )
        self._ghost.undo()
        self._ghost = None
        self._tuner.forbid()
