"""Whether an optimizer treats each element for itself, found by trying.

A copy of the optimizer, with its options and other parameters, steps random ones: whole, cut into slices, and in two
portions one after the other. If all come to the same bits, in values and states, then so does whoever steps a part of
the parameters only. Slices begin at multiples of 64 bytes: at others, vectorised loops may round differently at their
ends. Nothing of the optimizer itself is touched, and no random numbers but the trial's own are drawn.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes at whose multiples slices begin."""
_STEPS = 4
_RATE = 0.05
"""In place of the learning rate, which may be too small to change anything while a schedule warms up."""
_CUTS = (0, 1, 4, 20, 37)
"""Where slices begin, in units of the alignment."""
_PLAIN = int | float | str | None

_verdicts: WeakKeyDictionary[torch.optim.Optimizer, str | None] = WeakKeyDictionary()


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Why stepping slices of parameters would not be stepping the parameters; ``None``: it is.

    Tried once for each optimizer, which takes a few milliseconds.
    """
    if optimizer not in _verdicts:
        try:
            with _own_randomness(optimizer), torch.no_grad():
                _verdicts[optimizer] = _try(optimizer)
        except Exception as error:  # noqa: BLE001 - it may be anybody's code, and whatever it raises is the answer
            _verdicts[optimizer] = f"a copy of it could not step slices of parameters ({type(error).__name__}: {error})"
    return _verdicts[optimizer]


def _try(optimizer: torch.optim.Optimizer) -> str | None:
    groups = _distinct_groups(optimizer)
    whole, sliced, apart = (_Trial(optimizer, groups, cut=cut) for cut in (False, True, True))
    for number in range(_STEPS):
        gradients = [whole.draw_gradient(number, place) for place in range(len(whole.parameters))]
        whole.step(gradients, lambda _: True)
        sliced.step(gradients, lambda _: True)
        for half in (0, 1):
            apart.step(gradients, lambda at, half=half: at % 2 == half)  # type: ignore[misc]
    if not whole.has_changed():
        return "a copy of it changed nothing in a trial"
    if not sliced.equals(whole):
        return "it does not treat each element for itself: in a trial, slices came to other bits than whole parameters"
    if not apart.equals(whole):
        return "in a trial, stepping one half of the parameters after the other came to other bits than all at once"
    return None


class _Trial:
    """A copy of an optimizer with a random parameter of two dimensions for each of its groups, whole or in slices."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: list[tuple[int, nn.Parameter]], *, cut: bool) -> None:
        self._optimizer = _copy_without_parameters(optimizer)
        self._values: list[Tensor] = []
        self.parameters: list[list[nn.Parameter]] = []
        """For each of them its slices, or itself."""
        kept: list[dict[str, Any]] = []
        for number, like in groups:
            unit = max(1, ALIGNMENT // like.itemsize)
            draw = torch.Generator().manual_seed(number)
            value = torch.randn(7, 7 * unit + 1, generator=draw).to(like.device, like.dtype)
            bounds = [*(unit * at for at in _CUTS), value.numel()] if cut else []
            pieces = [value.view(-1)[begin:end] for begin, end in itertools.pairwise(bounds)]
            self._values.append(value)
            self.parameters.append([nn.Parameter(piece) for piece in pieces or [value]])
            # Some optimizers make their states when they are made, and not in the first step.
            for parameter in self.parameters[-1] if like.dim() and like in optimizer.state else ():
                self._optimizer.state[parameter] = _state_like(optimizer.state[like], like, parameter)
            group = self._optimizer.param_groups[number]
            if all(group is not other for other in kept):
                group["params"].clear()
                kept.append(group)
            group["params"] += self.parameters[-1]
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(_RATE)
            elif "lr" in group:
                group["lr"] = _RATE
        self._optimizer.param_groups[:] = kept
        self._before = [value.clone() for value in self._values]

    def draw_gradient(self, step: int, place: int) -> Tensor:
        """For one of its parameters, with elements of very different sizes."""
        value = self._values[place]
        draw = torch.Generator().manual_seed(1_000 * (step + 1) + place)
        drawn = torch.randn(value.shape, generator=draw) * torch.randn(value.shape, generator=draw).mul_(2.0).exp_()
        return drawn.to(value.device, value.dtype)

    def step(self, gradients: list[Tensor], takes_part: Callable[[int], bool]) -> None:
        """Step those of the slices whose number (or whole parameters whose place) takes part."""
        for pieces, gradient in zip(self.parameters, gradients, strict=True):
            sizes = [piece.numel() for piece in pieces]
            for at, (piece, part) in enumerate(zip(pieces, torch.split(gradient.view(-1), sizes), strict=True)):
                piece.grad = part.view(piece.shape).clone() if takes_part(at) else None
        step = inspect.unwrap(type(self._optimizer).step, stop=lambda function: not hasattr(function, "hooked"))
        step(self._optimizer)

    def has_changed(self) -> bool:
        """Whether its steps have changed every parameter."""
        pairs = zip(self._values, self._before, strict=True)
        return all(not torch.equal(value, before) for value, before in pairs)

    def equals(self, whole: _Trial) -> bool:
        """Whether values, states and all else are those of another trial, whose parameters are not cut."""
        return self._rest() == whole._rest() and all(
            _bits(value) == _bits(of_whole)
            and _are_of([self._optimizer.state.get(piece, {}) for piece in pieces], whole._optimizer.state.get(one, {}))
            for value, of_whole, pieces, (one,) in zip(
                self._values, whole._values, self.parameters, whole.parameters, strict=True
            )
        )

    def _rest(self) -> list[dict[str, Any]]:
        """The optimizer's own numbers, and each group's options."""
        own = {name: value for name, value in vars(self._optimizer).items() if isinstance(value, _PLAIN)}
        groups = self._optimizer.param_groups
        return [own, *({name: _bits(value) for name, value in group.items() if name != "params"} for group in groups)]


def _state_like(state: dict[str, Any], like: nn.Parameter, parameter: nn.Parameter) -> dict[str, Any]:
    """The state that a parameter may have where another one has this."""
    return {
        key: value.new_full(parameter.shape, value.view(-1)[0].item())
        if isinstance(value, Tensor) and value.shape == like.shape and value.numel()
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def _are_of(states: list[dict[str, Any]], whole: dict[str, Any]) -> bool:
    """Whether states of slices are those of the whole parameter: cut as it is, or the same for all."""
    if any(state.keys() != whole.keys() for state in states):
        return False
    for key, value in whole.items():
        parts = [state[key] for state in states]
        if isinstance(value, Tensor) and value.dim():
            if not all(isinstance(part, Tensor) and part.dim() == 1 for part in parts):
                return False
            if _bits(torch.cat(parts)) != _bits(value):
                return False
        elif not isinstance(value, _PLAIN | Tensor) or any(_bits(part) != _bits(value) for part in parts):
            return False
    return True


def _bits(value: Any) -> Any:
    """What can be compared: a tensor's type and bytes, anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _distinct_groups(optimizer: torch.optim.Optimizer) -> list[tuple[int, nn.Parameter]]:
    """The numbers of groups that may be stepped in different ways, with the largest parameter of each type in them."""
    found: dict[Any, tuple[int, nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        kind = tuple((name, _kind(value)) for name, value in group.items() if name != "params")
        for parameter in group["params"]:
            key = kind, parameter.device, parameter.dtype
            if key not in found or (found[key][0] == number and found[key][1].numel() < parameter.numel()):
                found[key] = number, parameter
    return sorted(found.values(), key=lambda pair: pair[0])


def _kind(value: Any) -> Any:
    """Of an option: a number is 0 or any other, since code asks that much of weight decay or momentum."""
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, float):
        return value != 0.0
    return repr(value) if not isinstance(value, Tensor) else (value.dtype, value.device)


def _copy_without_parameters(optimizer: torch.optim.Optimizer) -> Any:
    """A copy with one stand-in for all parameters, and without a state or anybody's hooks."""
    kind = type(optimizer)
    twin = kind.__new__(kind)
    stand_in = nn.Parameter(torch.zeros(0))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known: dict[int, Any] = {id(optimizer): twin, **{id(parameter): stand_in for parameter in parameters}}
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "step") and not name.startswith("_optimizer_")
    }
    twin.__setstate__({**copy.deepcopy(kept, known), "state": defaultdict(dict)})
    return twin


def _own_randomness(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    return torch.random.fork_rng([device for device in devices if device.type == "cuda"])
