"""What the outer loop yields: one optimizer update, to be iterated over for its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from virtualflow.errors import ConfigurationError, VirtualFlowError

if TYPE_CHECKING:
    from virtualflow.loop import Run


class Step:
    """One optimizer update of the whole job: iterate over it once for the micro-batches that this worker carries.

    After the iteration the update is applied, and :attr:`metrics` holds what was logged, combined over all virtual
    nodes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._number: int | None = None
        self._epoch = 0
        self._iterating = False
        self._rehearsing = False
        self.metrics: dict[str, float] = {}
        self.complete = False

    @property
    def number(self) -> int:
        """The number of this update, from 1.

        A joiner's rehearsal counts as the first one: joining here would replace the weights between a forward pass and
        its backward pass.
        """
        return 1 if self._rehearsing else self.bind()._number or 0

    @property
    def epoch(self) -> int:
        """The epoch that its samples belong to, from 0."""
        return 0 if self._rehearsing else self.bind()._epoch

    def bind(self) -> Step:
        """Learn which step this is; a worker that is about to join does so now, without warming up."""
        if self._number is None:
            self._run.participation.join()
            self._number = self._run.training.completed_steps + 1
            self._epoch = self._run.training.position[0]
        return self

    def log(self, **metrics: float | Tensor) -> None:
        """Log numbers of the present micro-batch: their means over all samples of the step are :attr:`metrics`.

        Raises:
            VirtualFlowError: there is no present micro-batch.
            ConfigurationError: something is not one real number.
        """
        if self.complete or not self._iterating:
            raise VirtualFlowError(
                "step.log belongs into the loop over the micro-batches; for numbers about the whole job use run.log"
            )
        values: dict[str, float | Tensor] = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
                raise ConfigurationError(
                    f"step.log got {name} of shape {list(value.shape)} and type {value.dtype}; log one real number"
                )
            # A copy: it may be a view of something that changes before the step's exchange, a buffer for example.
            values[name] = value.detach().clone() if isinstance(value, Tensor) else value
        self._run.log_metrics(values)

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches that this worker carries, again when an attempt was void; then commit the step."""
        if self.complete:
            raise VirtualFlowError(f"step {self._number} was iterated over twice; take the next one from the run")
        self._iterating = True
        if self._number is None:
            self._rehearsing = True
            try:
                yield from self._run.rehearse()
            finally:
                self._rehearsing = False
        self.bind()
        yield from self._run.carry(self.number)
        self._run.seed_between_steps()
        self.metrics = dict(self._run.metrics)
        self.complete = True
