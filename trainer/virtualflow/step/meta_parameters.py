"""Models that are built on torch's meta device, so that nobody ever has all of their parameters.

A worker makes the parameters of one module after the other, by the module's own ``reset_parameters`` as torch's other
sharded trainings do, and keeps its slices of them. Which random numbers a module gets follows from the seed and its
place in the model alone, so slices fit together whoever makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from virtualflow.data import derive_seed, seeded
from virtualflow.errors import ConfigurationError

_HOW = "give it a method reset_parameters() that fills them, or build the model on a real device"


@dataclass(frozen=True)
class UnmadeModule:
    """A module whose own parameters, or some of them, are still to be made."""

    number: int
    module: nn.Module
    places: tuple[int, ...]


class MetaModel:
    """A model that was built on the meta device, from now on with parameters that have a device and no values yet.

    Args:
        device: where its parameters are to be.
        seed: what their values follow from.

    Raises:
        ConfigurationError: some of them nobody could make.
    """

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self._seed = seed
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        unmade = {id(parameter) for parameter in model.parameters() if parameter.is_meta}
        self.places = frozenset(places[each] for each in unmade)
        self.modules = []
        for number, (name, module) in enumerate(model.named_modules()):
            own = [each for each in module._parameters.values() if each is not None and id(each) in unmade]
            buffers = [key for key, each in module._buffers.items() if each is not None and each.is_meta]
            if not own and not buffers:
                continue
            if not callable(getattr(module, "reset_parameters", None)):
                what = f"parameter {next(iter(module._parameters))}" if own else f"buffer {buffers[0]}"
                raise ConfigurationError(
                    f"module {name or type(module).__name__} is on the meta device with its {what}, and has no "
                    f"reset_parameters(); {_HOW}"
                )
            self.modules.append(UnmadeModule(number, module, tuple(places[id(each)] for each in own)))
        for parameter in list(model.parameters()):
            if parameter.is_meta:
                _swap(parameter, nn.Parameter(hollow(parameter, device), parameter.requires_grad))
        for each in self.modules:
            self._make_buffers(each, device)

    def _make_buffers(self, unmade: UnmadeModule, device: torch.device) -> None:
        """All workers have all buffers, whatever they keep of the parameters."""
        module = unmade.module
        there = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for key in there:
            module._buffers[key] = torch.empty_like(module._buffers[key], device=device)  # type: ignore[arg-type]
        if there:
            own = {each: each.data for each in module._parameters.values() if each is not None}
            for parameter in own:
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            self.make(unmade)
            for parameter, before in own.items():
                parameter.data = before

    def make(self, unmade: UnmadeModule) -> None:
        """Fill what belongs to a module; its parameters have memory by now."""
        with seeded(derive_seed("parameters", self._seed, unmade.number)), torch.no_grad():
            unmade.module.reset_parameters()  # type: ignore[operator]

    def needed(self, places: frozenset[int]) -> Iterator[UnmadeModule]:
        """The modules that make these parameters, each the first that has it."""
        left = set(places & self.places)
        for each in self.modules:
            if left & set(each.places):
                left -= set(each.places)
                yield each


_swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors


def hollow(like: Tensor, device: torch.device) -> Tensor:
    """What a parameter shows that is not here: NaN, in its shape, in the memory of one element."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    if like.numel() == 1:
        return torch.full(like.shape, value, dtype=like.dtype, device=device)
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)
