"""Where the optimizer steps: on the device of the parameters, or in host memory, where its state is, too.

For an optimizer on the host, parameters are in host memory for as long as its step takes, and nobody else notices: it
finds its own parameters, each with the gradient that was reduced to host memory. Between two steps the parameters of
the device are the only ones. So whatever changes them there (a restored state, a joiner's, code behind a step) is what
the next step finds, at the price of one more copy out, which goes on while the optimizer steps what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from virtualflow.reduction import HostMemory
from virtualflow.state import placed
from virtualflow.step.partial_step import is_separable

Work = Callable[[Sequence[nn.Parameter]], None]
"""Steps some parameters, where they are then."""

HOST = torch.device("cpu")


class OptimizerPlacement(Protocol):
    """Where an optimizer steps."""

    @property
    def device(self) -> torch.device | None:
        """On which; ``None``: on that of each parameter."""

    @property
    def shows_gradients(self) -> bool:
        """Whether a step's reduced gradients may be left on the parameters."""

    def await_gradients(self) -> None:
        """Wait for reduced gradients that are on their way to where the optimizer steps."""

    def visit(self, parameters: Sequence[nn.Parameter], work: Work, *, at_once: bool) -> None:
        """Let ``work`` step these parameters where the optimizer is: all ``at_once``, or perhaps some after others."""


class DevicePlacement:
    """The optimizer steps where its parameters are."""

    device = None
    shows_gradients = True

    def await_gradients(self) -> None:
        """They are there."""

    def visit(self, parameters: Sequence[nn.Parameter], work: Work, *, at_once: bool) -> None:
        work(parameters)


class HostPlacement:
    """The optimizer and its state are in host memory, beside the device of the parameters.

    If it treats each element for itself, it steps some parameters while the next ones come and the last ones return.

    Args:
        portion: bytes of parameters that are stepped together, but at least one parameter.
    """

    device = HOST
    shows_gradients = False

    def __init__(self, optimizer: torch.optim.Optimizer, memory: HostMemory, *, portion: int, norm_block: int) -> None:
        self._optimizer, self._memory = optimizer, memory
        self._portion, self._norm_block = portion, norm_block
        for parameter in list(optimizer.state):
            self._bring_state(parameter)

    def await_gradients(self) -> None:
        self._memory.finish()

    def visit(self, parameters: Sequence[nn.Parameter], work: Work, *, at_once: bool) -> None:
        """See :class:`OptimizerPlacement`. The parameters are back for whatever runs on the device from now on."""
        at_once = at_once or not is_separable(self._optimizer, self._norm_block, HOST)
        portions = [list(parameters)] if at_once else self._divide(parameters)
        coming = self._fetch(portions[0])
        for portion, following in zip(portions, [*portions[1:], []], strict=True):
            self._memory.finish()
            there, coming = coming, self._fetch(following)
            self._work_on(portion, there, work)

    def _divide(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        portions: list[list[nn.Parameter]] = [[]]
        room = self._portion
        for parameter in parameters:
            if portions[-1] and parameter.nbytes > room:
                portions.append([])
                room = self._portion
            portions[-1].append(parameter)
            room -= parameter.nbytes
        return portions

    def _fetch(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [self._memory.store(parameter.detach()) for parameter in parameters]

    def _work_on(self, parameters: Sequence[nn.Parameter], there: Sequence[Tensor], work: Work) -> None:
        homes = [parameter.data for parameter in parameters]
        try:
            for parameter, copy in zip(parameters, there, strict=True):
                parameter.data = copy
                self._bring_state(parameter)
            work(parameters)
        finally:
            # The optimizer may have replaced what it was given.
            stepped = [parameter.data for parameter in parameters]
            for parameter, home in zip(parameters, homes, strict=True):
                parameter.grad = None  # it is of the host, and must not be where the parameter is of the device
                parameter.data = home
        for value, home in zip(stepped, homes, strict=True):
            self._memory.write(value, home)

    def _bring_state(self, parameter: Tensor) -> None:
        state = self._optimizer.state.get(parameter)
        if isinstance(state, dict):
            for key, value in state.items():
                state[key] = _on_host(value)


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()  # itself, if it is there
    return placed(value, HOST) if isinstance(value, dict | list | tuple) else value
