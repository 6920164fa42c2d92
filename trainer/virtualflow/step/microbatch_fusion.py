"""Neighbouring virtual nodes run as one micro-batch, in a worker of a ``statistical`` job.

Between the decision (``fusion_tuner``) and the loop: measures attempts, cuts the worker's range into chunks, and tells
batch norms which samples belong to which virtual node. In a ``bitwise`` job every chunk is one virtual node.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

import torch
from torch import nn

from virtualflow.data import chunks
from virtualflow.device import MemoryGauge, device_of
from virtualflow.device.settings import MemorySettings
from virtualflow.step.fusion_tuner import Tuner
from virtualflow.step.ghost_batch_norm import GhostBatchNorm
from virtualflow.step.part import Attempt, StepPart
from virtualflow.step.settings import FusionSettings

logger = logging.getLogger("virtualflow.worker")

BatchNorm = Literal["virtual-node", "micro-batch"]
"""Over which samples batch norm normalises."""


class MicrobatchFusion(StepPart):
    """How this worker's virtual nodes are put together.

    Args:
        model: its batch norms are taken over until :meth:`close`, if ``batch_norm`` says so.
        cap: the most virtual nodes of a micro-batch; ``None`` for no limit but memory. 1 in a ``bitwise`` job.
        memory: how much may be used.
    """

    def __init__(
        self,
        model: nn.Module,
        cap: int | None,
        micro_batch: int,
        batch_norm: BatchNorm,
        *,
        settings: FusionSettings,
        memory: MemorySettings,
    ) -> None:
        self._tuner = Tuner(cap, settings)
        self._gauge = MemoryGauge(device_of(model), memory)
        self._micro_batch = micro_batch
        self._assigned = range(0)
        self._began = 0.0
        self._samples = 0
        self._ghost = GhostBatchNorm(model) if batch_norm == "virtual-node" and cap != 1 else None
        self._check_obstacle()

    @property
    def width(self) -> int:
        return self._tuner.width

    def enter(self, assigned: range) -> None:
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
        """The last micro-batch of the attempt has been computed."""
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
