"""Whether an optimizer treats each element for itself, found by trying.

A copy of the optimizer, with its options and other parameters, steps random ones: whole, cut into slices, and in two
portions one after the other. If all come to the same bits, in values and states, then so does whoever steps a part of
the parameters only. Slices are cut where a sharded optimizer cuts them: at multiples of a block of the gradient's norm,
so that an optimizer whose state has a number for each block of its own is good as well if its blocks fit in there, and
at multiples of 64 bytes, since vectorised loops may round differently at the ends of others. Nothing of the optimizer
itself is touched, and no random numbers but the trial's own are drawn.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from virtualflow.data import seeded
from virtualflow.state import optimizers_of

_ALIGNMENT = 64
"""Bytes at whose multiples slices begin."""
_STEPS = 7
"""RAdam steps in another way from the sixth on."""
_RATE = 0.05
"""In place of the learning rate, which may be too small to change anything while a schedule warms up."""
_CUTS = (0, 1, 3, 6)
"""Where slices begin, in units; the last one has less than one."""
_PLAIN = int | float | str | None


@dataclass(frozen=True)
class TrialVerdict:
    """What a trial has shown."""

    reason: str | None = None
    """Why stepping slices of parameters would not be stepping the parameters; ``None``: it is."""
    grains: Mapping[str, int] = field(default_factory=dict)
    """For each tensor of a state how many elements of the parameter one of its own is for: 1, or those of a block; 0:
    all slices have the same."""


_verdicts: WeakKeyDictionary[torch.optim.Optimizer, dict[tuple[int, torch.device | None], TrialVerdict]] = (
    WeakKeyDictionary()
)


def cut_unit(parameter: Tensor, block: int) -> int:
    """At multiples of how many elements a contiguous parameter may be cut.

    Args:
        block: elements of a block of the norm (``reduction.norm``); none is cut.
    """
    return math.lcm(block, max(1, _ALIGNMENT // parameter.itemsize))


def try_slices(optimizer: torch.optim.Optimizer, block: int, device: torch.device | None = None) -> TrialVerdict:
    """Whether stepping slices of parameters is stepping the parameters.

    Tried once for each optimizer, which takes a few milliseconds.

    Args:
        optimizer: any; a copy of it is stepped.
        device: on which it steps; ``None``: on that of its parameters.
    """
    known, key = _verdicts.setdefault(optimizer, {}), (block, device)
    if key not in known:
        try:
            with seeded(0), torch.no_grad():
                known[key] = _try(optimizer, block, device)
        except Exception as error:  # noqa: BLE001 - it may be anybody's code, and whatever it raises is the answer
            reason = f"a copy of it could not step slices of parameters ({type(error).__name__}: {error})"
            known[key] = TrialVerdict(reason)
    return known[key]


def grains_of(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, block: int, device: torch.device | None = None
) -> list[Mapping[str, int]]:
    """For each parameter the ``Verdict.grains`` of whoever steps it; ``optimizer`` may be several."""
    found = {
        id(parameter): try_slices(part, block, device).grains
        for part in optimizers_of(optimizer)
        for group in part.param_groups
        for parameter in group["params"]
    }
    return [found.get(id(parameter), {}) for parameter in parameters]


def _try(optimizer: torch.optim.Optimizer, block: int, device: torch.device | None) -> TrialVerdict:
    groups = _distinct_groups(optimizer)
    whole, sliced, apart = (_Trial(optimizer, groups, block, device, cut=cut) for cut in (False, True, True))
    for number in range(_STEPS):
        gradients = [whole.draw_gradient(number, place) for place in range(len(whole.parameters))]
        whole.step(gradients, lambda _: True)
        sliced.step(gradients, lambda _: True)
        for half in (0, 1):
            apart.step(gradients, lambda at, half=half: at % 2 == half)  # type: ignore[misc]
    if not whole.has_changed():
        return TrialVerdict("a copy of it changed nothing in a trial")
    grains = sliced.compare(whole)
    if grains is None:
        return TrialVerdict(
            "it does not treat each element for itself: in a trial, slices came to other bits than whole parameters"
        )
    if apart.compare(whole) is None:
        return TrialVerdict(
            "in a trial, stepping one half of the parameters after the other came to other bits than all at once"
        )
    return TrialVerdict(grains=grains)


class _Trial:
    """A copy of an optimizer with a random parameter for each kind that it has, whole or in slices."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[tuple[int, nn.Parameter]],
        block: int,
        device: torch.device | None,
        *,
        cut: bool,
    ) -> None:
        self._optimizer = _copy_without_parameters(optimizer)
        self._values: list[Tensor] = []
        self.parameters: list[list[nn.Parameter]] = []
        """For each of them its slices, or itself."""
        kept: list[dict[str, Any]] = []
        for number, like in groups:
            draw = torch.Generator().manual_seed(number)
            value = torch.randn(_shape(like.dim(), cut_unit(like, block)), generator=draw)
            value = value.to(device or like.device, like.dtype)
            bounds = [*(cut_unit(like, block) * at for at in _CUTS), value.numel()] if cut and like.dim() else []
            pieces = [value.view(-1)[begin:end] for begin, end in itertools.pairwise(bounds)]
            self._values.append(value)
            self.parameters.append([nn.Parameter(piece) for piece in pieces or [value]])
            # Some optimizers make their states when they are made, and not in the first step.
            for parameter in self.parameters[-1] if like in optimizer.state else ():
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
        self._changed: set[int] = set()

    def draw_gradient(self, step: int, place: int) -> Tensor:
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
        pairs = enumerate(zip(self._values, self._before, strict=True))
        self._changed |= {place for place, (value, before) in pairs if not torch.equal(value, before)}

    def has_changed(self) -> bool:
        return len(self._changed) == len(self._values)

    def compare(self, whole: _Trial) -> dict[str, int] | None:
        """How states are cut with parameters (``Verdict.grains``)."""
        if self._rest() != whole._rest() or any(map(_differ, self._values, whole._values)):
            return None
        grains: dict[str, int] = {}
        for pieces, (one,) in zip(self.parameters, whole.parameters, strict=True):
            states = [self._optimizer.state.get(piece, {}) for piece in pieces]
            found = _grains(states, whole._optimizer.state.get(one, {}), pieces, one)
            if found is None:
                return None
            if len(pieces) == 1:
                continue  # a scalar, which shows nothing of that
            if any(grains.get(key, grain) != grain for key, grain in found.items()):
                return None
            grains |= found
        return grains

    def _rest(self) -> list[dict[str, Any]]:
        own = {name: value for name, value in vars(self._optimizer).items() if isinstance(value, _PLAIN)}
        groups = self._optimizer.param_groups
        return [own, *({name: _bits(value) for name, value in group.items() if name != "params"} for group in groups)]


def _state_like(state: dict[str, Any], like: nn.Parameter, parameter: nn.Parameter) -> dict[str, Any]:
    return {
        key: value.new_full(parameter.shape, value.reshape(-1)[0].item(), device=parameter.device)
        if isinstance(value, Tensor) and value.shape == like.shape and value.numel()
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def _shape(dimensions: int, unit: int) -> tuple[int, ...]:
    """Of a parameter of so many dimensions, which has what is cut in :data:`_CUTS`, and three elements more."""
    if dimensions < 2:
        return (6 * unit + 3,) * dimensions
    return 3, *[1] * (dimensions - 2), 2 * unit + 1


def _grains(
    states: list[dict[str, Any]], whole: dict[str, Any], pieces: list[nn.Parameter], one: nn.Parameter
) -> dict[str, int] | None:
    """The ``Verdict.grains`` of a parameter's state; ``None`` if those of its slices are not like it."""
    if any(state.keys() != whole.keys() for state in states):
        return None
    grains: dict[str, int] = {}
    for key, value in whole.items():
        parts = [state[key] for state in states]
        if not isinstance(value, Tensor):
            if not isinstance(value, _PLAIN) or any(_differ(part, value) for part in parts):
                return None
            continue
        if not any(_differ(part, value) for part in parts):
            grains[key] = 0
            continue
        if not all(isinstance(part, Tensor) and part.dim() == 1 and len(part) for part in parts):
            return None
        grain = pieces[0].numel() // len(parts[0])
        lengths = [-(-piece.numel() // grain) for piece in pieces] if grain else []
        is_flat = value.dim() == 1 or value.shape == one.shape
        if not is_flat or list(map(len, parts)) != lengths or _differ(torch.cat(parts), value.reshape(-1)):
            return None
        grains[key] = grain
    return grains


def _differ(left: Any, right: Any) -> bool:
    return bool(_bits(left) != _bits(right))


def _bits(value: Any) -> Any:
    """What can be compared: a tensor's type, shape and bytes, anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.shape, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _distinct_groups(optimizer: torch.optim.Optimizer) -> list[tuple[int, nn.Parameter]]:
    """Parameters that may be stepped in different ways: the largest of each kind, with the number of its group."""
    found: dict[Any, tuple[int, nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        kind = tuple((name, _kind(value)) for name, value in group.items() if name not in ("params", "param_names"))
        for parameter in group["params"]:
            key = kind, parameter.device, parameter.dtype, parameter.dim()
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
