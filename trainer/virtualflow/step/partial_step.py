"""The optimizer's step in portions, while the rest of the reduced gradient is still on its way.

An attempt that fails must leave the model as it was, and nobody could compute the gradient again from parameters that
are half stepped. So what a portion overwrites is kept until the whole gradient has arrived (an undo log), and only as
long as there is something to wait for: on a fast network everything is there at once, and nothing is copied. Stepping
some parameters and then the others gives the bits of one step where an optimizer treats each element for itself and
nobody looks in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as base

from virtualflow.state import optimizers_of
from virtualflow.step.elementwise import try_slices

HARMLESS = "_virtualflow_harmless"
"""The attribute of a hook that changes nothing and does not care how often it is called."""


def is_separable(optimizer: torch.optim.Optimizer, block: int, device: torch.device | None = None) -> bool:
    """Whether stepping some parameters and then the others is as good as stepping all, and nobody sees it."""
    return why_not_separable(optimizer, block, device) is None


def why_not_separable(optimizer: torch.optim.Optimizer, block: int, device: torch.device | None = None) -> str | None:
    """What speaks against stepping one part of the parameters, or of one of them, apart from the others.

    Somebody would see that who has replaced ``step`` (learning rate schedulers do, only to count) or has hooked it.
    """
    for part in optimizers_of(optimizer):
        step: Any = vars(part).get("step")
        hooks: list[Any] = [
            part._optimizer_step_pre_hooks,
            part._optimizer_step_post_hooks,
            base._global_optimizer_pre_hooks,
            base._global_optimizer_post_hooks,
        ]
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            return "its step has been replaced"
        if any(not hasattr(hook, HARMLESS) for registered in hooks for hook in registered.values()):
            return "its step has been hooked"
        reason = try_slices(part, block, device).reason
        if reason is not None:
            return reason
    return None


class StepInPortions:
    """One step of the optimizer, portion by portion; none of the parameters has a gradient at first."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[tuple[nn.Parameter, Tensor, dict[str, Any] | None]] = []

    @property
    def stepped(self) -> list[nn.Parameter]:
        return [parameter for parameter, _, _ in self._before]

    def step(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self._optimizer.state.get(parameter)
            kept = None if state is None else {key: _copy(value) for key, value in state.items()}
            self._before.append((parameter, parameter.detach().clone(), kept))
            parameter.grad = gradient
        self._optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def undo(self) -> None:
        with torch.no_grad():
            for parameter, value, state in self._before:
                parameter.copy_(value)
                if state is None:
                    self._optimizer.state.pop(parameter, None)
                else:
                    self._optimizer.state[parameter] = state
        self._before.clear()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
