"""The optimizer's step on a reduced gradient: clipping, the gradient scaler, portions, shares, the scheduler.

Nothing of it happens before the gradient is there; what is stepped before all of it is (``partial_step``) can be put
back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from virtualflow.reduction import HostMemory, Tensors, block_norms, clip_by_norm, total_norm
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state import optimizers_of
from virtualflow.step.gradient_sync import Portion
from virtualflow.step.meta_parameters import MetaModel
from virtualflow.step.partial_step import StepInPortions, is_separable
from virtualflow.step.placement import DevicePlacement, HostPlacement, OptimizerPlacement
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
    shard_copies: int = 0
    """How many workers keep each share of its state; 0: it is not sharded, and every worker keeps all of it."""
    alike: bool = True
    """Whether all workers step to the same bits."""
    shards_values: bool = False
    """Whether a worker keeps only the values of its share, too."""
    meta: MetaModel | None = None
    """Makes parameters that have no values yet; ``None``: all have."""
    averages: Mapping[str, AveragedModel] = field(default_factory=dict)
    """Of the weights, by name, which are divided where these are."""
    host: HostMemory | None = None
    """In which the optimizer steps; ``None``: on the device of its parameters."""


class OptimizerStep:
    """Steps the parameters of a model."""

    def __init__(self, model: nn.Module, options: OptimizerOptions, reduction: ReductionSettings) -> None:
        self._parameters = list(model.parameters())
        self._wanted = options
        self._norm_block = reduction.norm_block
        self._clips = options.clip_norm is not None or options.clip_value is not None
        self.in_portions: StepInPortions | None = None
        """What has been stepped already of a step that does not count yet; ``None``: nothing."""
        self._placement: OptimizerPlacement = DevicePlacement()
        if options.host is not None:
            self._placement = HostPlacement(
                options.optimizer, options.host, portion=reduction.bucket, norm_block=reduction.norm_block
            )
        self.shards: Shards | None = None
        if options.shard_copies:
            self.shards = Shards(
                self._parameters,
                options.optimizer,
                clip_norm=options.clip_norm,
                clip_value=options.clip_value,
                reduction=reduction,
                placement=self._placement,
                copies=options.shard_copies,
                alike=options.alike,
                names=[name for name, _ in model.named_parameters()] if options.shards_values else None,
                meta=options.meta,
                averages=options.averages,
            )

    @property
    def steps_scheduler(self) -> bool:
        """Whether the learning rate is changed here, and not by the user's code between two steps."""
        return self._wanted.scheduler is not None and self._wanted.scheduler_interval != "manual"

    def begin(self) -> None:
        if self._wanted.scaler is not None and self._parameters:
            # A scaler comes into being when it first scales; a worker without samples must be able to step it, too.
            self._wanted.scaler.scale(torch.ones((), device=self._parameters[0].device))

    @property
    def portion(self) -> Portion | None:
        """Steps some parameters while the gradients of others are still on their way; ``None``: that is impossible."""
        whole = self._wanted.scaler is not None or self._clips or self.shards is not None
        return None if whole else self._step_portion

    def _step_portion(self, gradients: Mapping[int, Tensor]) -> None:
        if is_separable(self._wanted.optimizer, self._norm_block, self._placement.device):
            given = {self._parameters[place]: gradient for place, gradient in gradients.items()}

            portions = self.in_portions = self.in_portions or StepInPortions(self._wanted.optimizer)

            def work(parameters: Sequence[nn.Parameter]) -> None:
                portions.step(parameters, [given[parameter].to(parameter.dtype) for parameter in parameters])

            self._placement.visit(list(given), work, at_once=False)

    def step(self, gradients: Tensors) -> None:
        wanted = self._wanted
        stepped = set[Tensor]() if self.in_portions is None else set[Tensor](self.in_portions.stepped)
        given: dict[nn.Parameter, Tensor] = {}
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None
            if gradient is not None and parameter not in stepped:
                given[parameter] = gradient
        if wanted.host is not None:
            self._placement.await_gradients()
        if wanted.scaler is None and self._clips:
            self._clip(list(given.values()))
        for place, parameter in enumerate(self._parameters):
            gradient = given.get(parameter)
            if gradient is not None and gradient.dtype != parameter.dtype:  # where sums are wider
                given[parameter] = gradients[place] = gradient.to(parameter.dtype)

        def work(parameters: Sequence[nn.Parameter]) -> None:
            for parameter in parameters:
                parameter.grad = given[parameter]
            if wanted.scaler is None:
                wanted.optimizer.step()
            else:
                self._step_scaled(list(given.values()))

        if wanted.host is None:
            work(list(given))
        else:
            self._placement.visit(list(given), work, at_once=wanted.scaler is not None)

    def _clip(self, gradients: list[Tensor]) -> None:
        wanted = self._wanted
        if wanted.clip_value is not None and gradients:
            torch._foreach_clamp_min_(gradients, -wanted.clip_value)
            torch._foreach_clamp_max_(gradients, wanted.clip_value)
        if wanted.clip_norm is not None:
            clip_by_norm(gradients, wanted.clip_norm, total_norm(block_norms(gradients, self._norm_block)))

    def _step_scaled(self, gradients: list[Tensor]) -> None:
        scaler = self._wanted.scaler
        # It looks at the gradients of each for itself, and cannot where there is none.
        scaled = [part for part in optimizers_of(self._wanted.optimizer) if _has_gradients(part)]
        if self._clips:
            for part in scaled:
                scaler.unscale_(part)
            self._clip(gradients)
        for part in scaled:
            scaler.step(part)
        scaler.update()

    def commit(self, gradients: Tensors) -> None:
        """The step counts: leave the gradients for the user to look at, if they are on the device."""
        shows = self._placement.shows_gradients
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None
            # And not what its keeper has of it.
            if shows and gradient is not None and gradient.shape == parameter.shape:
                parameter.grad = gradient.to(parameter.dtype)
        self.in_portions = None

    def schedule(self, epoch_ends: bool) -> None:
        interval = self._wanted.scheduler_interval
        if self.steps_scheduler and (interval == "step" or epoch_ends):
            self._wanted.scheduler.step()

    def undo(self) -> None:
        if self.in_portions is not None:
            self.in_portions.undo()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
