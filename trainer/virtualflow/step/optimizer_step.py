"""The optimizer's step on a reduced gradient: clipping, the gradient scaler, portions, shares, the scheduler.

Nothing of it happens before the gradient is there; what is stepped before all of it is (``partial_step``) can be put
back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from virtualflow.reduction import Tensors, block_norms, clip_by_norm, total_norm
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state import optimizers_of
from virtualflow.state.settings import TransferSettings
from virtualflow.step.gradient_sync import Portion
from virtualflow.step.partial_step import StepInPortions, is_separable
from virtualflow.step.sharded_optimizer import Shards

SchedulerInterval = Literal["step", "epoch", "manual"]


@dataclass(frozen=True)
class OptimizerOptions:
    """What the user wants to happen at a step."""

    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    scheduler_interval: SchedulerInterval = "step"
    scaler: Any = None
    clip_norm: float | None = None
    clip_value: float | None = None
    sharded: bool = False


class OptimizerStep:
    """Steps the parameters of a model.

    Args:
        model: whose parameters.
        options: what happens at a step.
        reduction: of what a norm is made, and how new values of a sharded optimizer travel.
        transfer: how its states do.
    """

    def __init__(
        self, model: nn.Module, options: OptimizerOptions, reduction: ReductionSettings, transfer: TransferSettings
    ) -> None:
        self._parameters = list(model.parameters())
        self._wanted = options
        self._norm_block = reduction.norm_block
        self._clips = options.clip_norm is not None or options.clip_value is not None
        self._in_portions = StepInPortions(options.optimizer)
        self.shards: Shards | None = None
        """This worker's share of a sharded optimizer."""
        if options.sharded:
            self.shards = Shards(
                self._parameters,
                options.optimizer,
                clip_norm=options.clip_norm,
                clip_value=options.clip_value,
                reduction=reduction,
                transfer=transfer,
            )

    @property
    def steps_scheduler(self) -> bool:
        """Whether the learning rate is changed here, and not by the user's code between two steps."""
        return self._wanted.scheduler is not None and self._wanted.scheduler_interval != "manual"

    def begin(self) -> None:
        """An attempt begins."""
        if self._wanted.scaler is not None and self._parameters:
            # A scaler comes into being when it first scales; a worker without samples must be able to step it, too.
            self._wanted.scaler.scale(torch.ones((), device=self._parameters[0].device))

    @property
    def portion(self) -> Portion | None:
        """Steps some parameters while the gradients of others are still on their way; ``None``: that is impossible."""
        whole = self._wanted.scaler is not None or self._clips or self.shards is not None
        return None if whole else self._step_portion

    def _step_portion(self, gradients: Mapping[int, Tensor]) -> None:
        if is_separable(self._wanted.optimizer, self._norm_block):
            self._in_portions.step([self._parameters[place] for place in gradients], list(gradients.values()))

    def step(self, gradients: Tensors) -> None:
        """Clip and step whatever no portion has stepped."""
        wanted, stepped = self._wanted, set(self._in_portions.stepped)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if parameter in stepped else gradient
        parameters = [p for p in self._parameters if p.grad is not None]
        scaled: list[torch.optim.Optimizer] = []
        if wanted.scaler is not None:
            # It looks at the gradients of each for itself, and cannot where there is none.
            scaled = [part for part in optimizers_of(wanted.optimizer) if _has_gradients(part)]
        for part in scaled if self._clips else ():
            wanted.scaler.unscale_(part)
        if wanted.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, wanted.clip_value)
        if wanted.clip_norm is not None:
            given = [parameter.grad for parameter in parameters if parameter.grad is not None]
            clip_by_norm(given, wanted.clip_norm, total_norm(block_norms(given, self._norm_block)))
        if wanted.scaler is not None:
            for part in scaled:
                wanted.scaler.step(part)
            wanted.scaler.update()
        else:
            wanted.optimizer.step()

    def commit(self, gradients: Tensors) -> None:
        """The step counts: leave the gradients for the user to look at."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._in_portions = StepInPortions(self._wanted.optimizer)

    def schedule(self, epoch_ends: bool) -> None:
        """Let the scheduler go on, if it is its time."""
        interval = self._wanted.scheduler_interval
        if self.steps_scheduler and (interval == "step" or epoch_ends):
            self._wanted.scheduler.step()

    def undo(self) -> None:
        """The attempt is aborted: put back what a portion has stepped."""
        self._in_portions.undo()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
