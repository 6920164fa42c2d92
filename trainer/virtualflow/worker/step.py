"""What the outer loop yields: one optimizer update, to be iterated over for its micro-batches."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.settings import MAX_NAME
from virtualflow.protocol.wording import too_long
from virtualflow.step import Told

Loss = Callable[..., Tensor]
"""Gets what the model returns, and the elements of the micro-batch behind its first: ``loss(output, target)``."""

Weight = Callable[[Any], float | Tensor]
"""Gets a micro-batch, and says what it counts by."""


# Spans of a step for ``torch.profiler``: virtual node, exchange, update, commit. Without one, a look each.

_NOTHING = nullcontext()

profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler is at work."""


def span(name: str, virtual_node: int | None = None) -> AbstractContextManager[object]:
    """What runs in it appears under ``virtualflow: name`` where a profiler is at work; of a virtual node, with it."""
    # Entering a span costs some microseconds, profiler or not.
    if not profiled():
        return _NOTHING
    told = None if virtual_node is None else str(virtual_node)
    return torch.profiler.record_function(f"virtualflow: {name}", told)


def forget_cached_weights() -> None:
    """Empty torch's own caches of what was made of weights: autocast's copies, and those of ``parametrize.cached()``.

    They last as long as a ``with`` block. A script may open it around its whole training, so they are emptied for each
    virtual node, as if it were opened there.
    """
    torch.clear_autocast_cache()
    cached: dict[Any, Any] | None = getattr(parametrize, "_cache", None)
    if cached:
        cached.clear()


class Attempts(Protocol):
    """What makes a step."""

    layer_major: bool
    """Whether it yields what computes all micro-batches of an attempt, given a loss, and not each for itself."""
    told: Told

    @property
    def metrics(self) -> dict[str, float]:
        """The combined metrics of the last step."""

    @property
    def epoch_is_over(self) -> bool:
        """Whether the last step was the last one of its epoch."""

    def join(self) -> tuple[int, int]:
        """Become a member, if this worker is none yet; the number of the step to come, and its epoch."""

    def warm_up(self) -> Iterator[Any]:
        """Yield what a joiner warms up with before it joins; others go on at once."""

    def make(self, number: int) -> Iterator[Any]:
        """Yield this worker's micro-batches until the step is committed."""

    def weigh(self, weight: float) -> None:
        """Note what the present micro-batch counts by."""


class Step:
    """One optimizer update of the whole job: iterate over it once for the micro-batches assigned to this worker.

    After the iteration the update is applied, and ``metrics`` holds what was logged, combined over all virtual nodes.
    """

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._number: int | None = None
        self._epoch = 0
        self._thread = threading.get_ident()
        """The one that has taken it from the run."""
        self._iterating = False
        self._warming_up = False
        self.metrics: dict[str, float] = {}
        self._complete = self._ends_epoch = False

    @property
    def number(self) -> int:
        """The number of this update, from 1.

        Read before the micro-batches, it lets a joiner enter at once and without warming up: what the script does with
        the number must be right. A joiner's warm-up counts as the first step: joining in it would replace the weights
        between a forward pass and its backward pass.
        """
        return 1 if self._warming_up else self._bind()._number or 0

    @property
    def epoch(self) -> int:
        """The epoch that its samples belong to, from 0."""
        return 0 if self._warming_up else self._bind()._epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether this update was the last one of its epoch: known behind the micro-batches, the same on all workers.

        Raises:
            VirtualFlowError: the micro-batches are still to come.
        """
        if not self._complete:
            raise VirtualFlowError("step.ends_epoch is known after the micro-batches of the step")
        return self._ends_epoch

    def _bind(self) -> Step:
        """Learn which step this is, for integrations; a worker that is to join does so now, without warming up."""
        if self._number is None:
            self._number, self._epoch = self._attempts.join()
        return self

    def log(self, **metrics: float | Tensor) -> None:
        """Log numbers of the present micro-batch. Their means over all samples of the step are in ``metrics``.

        Raises:
            VirtualFlowError: there is no present micro-batch.
            ConfigurationError: something is not one real number, or its name is too long.
        """
        if self._complete or not self._iterating:
            raise VirtualFlowError(
                "step.log belongs into the loop over the micro-batches; for numbers about the whole job use run.log"
            )
        values: dict[str, float | Tensor] = {}
        for name, value in metrics.items():
            if len(name) > MAX_NAME:
                raise ConfigurationError(too_long(name, "step.log"))
            if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
                raise ConfigurationError(
                    f"step.log got {name} of shape {list(value.shape)} and type {value.dtype}; log one real number"
                )
            # A copy: it may be a view of something that changes before the step's exchange, a buffer for example.
            values[name] = value.detach().clone() if isinstance(value, Tensor) else float(value)
        self._attempts.told.metrics.update(values)

    def weight(self, weight: float | Tensor) -> None:
        """Let the present micro-batch count by this and not by its samples, such as by its tokens.

        The loss is to be a mean over so much. The step's gradient, metrics and averaged buffers are then means over all
        that the virtual nodes of the step weigh, whoever computes them. It is called for each micro-batch of a step or
        for none. Best before ``backward``: behind it, this worker cannot add up gradients while they are hot.

        Raises:
            VirtualFlowError: there is no present micro-batch.
            ConfigurationError: that is no weight.
        """
        if self._complete or not self._iterating:
            raise VirtualFlowError("step.weight belongs into the loop over the micro-batches")
        self._attempts.weigh(read_weight(weight))

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of this worker, again when an attempt was aborted; then commit the step."""
        if self._attempts.layer_major:
            raise ConfigurationError(
                'with vf.Memory(..., order="layer-major") a step has no micro-batches to iterate over; call '
                "step.layer_major(loss)"
            )
        return self._iterate()

    def layer_major(self, loss: Loss) -> None:
        """Make this update block by block, in place of the loop over the micro-batches.

        The first element of each micro-batch enters the model, the others are for the loss, whose value is logged as
        ``loss``. For runs with ``vf.Memory(..., order="layer-major")``.

        Args:
            loss: called once a virtual node, ``loss(output, *rest)``; returns a tensor of one number. It may call
                :meth:`log` and :meth:`weight`.

        Raises:
            ConfigurationError: the run is in another order, or micro-batches or the loss are not of this kind.
        """
        if not self._attempts.layer_major:
            raise ConfigurationError(
                'step.layer_major belongs to a run with vf.Memory(..., order="layer-major"); iterate over the step: '
                "for batch in step: ..."
            )
        for compute in self._iterate():
            compute(loss)

    def _iterate(self) -> Iterator[Any]:
        if self._complete:
            raise VirtualFlowError(f"step {self._number} was iterated over twice; take the next one from the run")
        if self._iterating:
            raise VirtualFlowError(
                "two loops iterate over one step at a time, as zip(step, step) does; let one loop take its "
                "micro-batches one after the other, and run backward for each before the next one is asked for"
            )
        if threading.get_ident() != self._thread:
            raise VirtualFlowError(
                "another thread than the one that iterates over the run has asked for the micro-batches of a step, as "
                "prefetchers do; iterate over the step in the thread that computes, and run backward for each "
                "micro-batch before the next one is asked for: vf.elastic loads ahead by num_workers= and copies ahead "
                "by device="
            )
        self._iterating = True
        try:
            if self._number is None:
                self._warming_up = True
                try:
                    yield from self._attempts.warm_up()
                finally:
                    self._warming_up = False
            self._bind()
            yield from self._attempts.make(self._number or 0)
        finally:
            self._iterating = False
        self.metrics, self._ends_epoch = dict(self._attempts.metrics), self._attempts.epoch_is_over
        self._complete = True


def read_weight(weight: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigurationError(
            f"a micro-batch is to weigh {weight!r}; its weight is one number from 0, such as how many tokens its loss "
            "is a mean over"
        )
    return number
