"""Whether an optimizer or a scheduler goes on as before where its state is restored, found by trying.

What it keeps as a plain attribute (a count of its steps, slow weights) is not in its ``state_dict``, so a joiner or a
resumed training would begin with a new one. A copy of it is stepped a few times. A second copy, as a new process would
have it, gets the state of the first. Attributes in which they differ then are suspects: they are lost if the copies
come to different values from here on, or if they hold tensors that do not become equal again. Many attributes are
neither, such as flags of what was warned of.

Of each parameter the copies have a corner only, so a trial takes little memory. Nothing of the script's own objects is
stepped, and no random numbers but the trial's own are drawn.
"""

from __future__ import annotations

import copy
import inspect
import random
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from virtualflow.data import seeded
from virtualflow.state import content_hash, copy_optimizer_state, optimizers_of, schedulers_of, snapshot

_BEFORE = 11
"""Steps of the first copy alone: no multiple of a period that people choose."""
_AFTER = 64
"""Steps of both copies, which show what happens every so many."""
_SECONDS = 1.0
"""After so long no further step is made."""
_CORNER = 3
"""Elements of each dimension."""
_LARGE = 1 << 16
"""Elements of other tensors of which there is a corner only."""
_DEPTH = 8
_LONGEST = 1 << 14
"""A list of more is one of samples or the like, and is not gone through."""
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)
_COVERED = ("state", "param_groups", "defaults")


def find_lost_state(optimizer: torch.optim.Optimizer, scheduler: Any, companions: Mapping[str, Any]) -> str | None:
    """A sentence that names what would be lost where the training is resumed, and says what to do."""
    optimizers = optimizers_of(optimizer)
    trials: list[tuple[str, list[Any], Callable[[_Copies, int], None]]] = [
        ("optimizer", [each], _step_optimizer) for each in optimizers if not _is_torchs(type(each))
    ]
    trials += [
        ("scheduler", [each, *optimizers], _step_scheduler)
        for each in schedulers_of(scheduler)
        if not _is_torchs(getattr(type(each), "state_dict", None))
    ]
    for kind, things, step in trials:
        beside = [each for each in companions.values() if _refer(each, things[0])]
        try:
            lost = _try(things, beside, step)
        except Exception:  # noqa: BLE001 - it may be anybody's code, and what cannot be tried is not accused
            continue
        if lost:
            they, them, ones = ("it", "it", "a new one") if len(lost) == 1 else ("them", "them", "new ones")
            return (
                f"the {kind} {type(things[0]).__name__} keeps {', '.join(lost)} outside of its state_dict, so a worker "
                f"that joins, or begins from a checkpoint, would have {ones}; keep {they} in its state, let its "
                f"state_dict and load_state_dict hold {them}, or pass an object that does so in state= of vf.elastic"
            )
    return None


def _is_torchs(of: Any) -> bool:
    return getattr(of, "__module__", "").startswith("torch.")


def _refer(one: Any, other: Any) -> bool:
    pairs = ((one, other), (other, one))
    return any(value is of for holder, of in pairs for value in getattr(holder, "__dict__", {}).values())


def _try(things: list[Any], companions: list[Any], step: Callable[[_Copies, int], None]) -> list[str]:
    with seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that are not in their order
        first = _Copies(things, companions)
        for number in range(_BEFORE):
            step(first, number)
        second = _Copies(things, companions)
        second.become(first)
        suspects = first.differing(second)
        if not suspects:
            return []
        limit = time.monotonic() + _SECONDS
        for number in range(_BEFORE, _BEFORE + _AFTER):
            step(first, number)
            step(second, number)
            if first.values() != second.values():
                return suspects
            if time.monotonic() > limit:
                break
        still = first.differing(second)
        return [name for name in suspects if name in still and _holds_tensors(vars(first.things[0])[name])]


def _step_optimizer(copies: _Copies, number: int) -> None:
    for place, parameter in enumerate(copies.parameters):
        if parameter.requires_grad:
            draw = torch.Generator().manual_seed(1_000 * (number + 1) + place)
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.device, parameter.dtype)
    with seeded(number):
        optimizer = copies.things[0]
        inspect.unwrap(type(optimizer).step, stop=lambda function: not hasattr(function, "hooked"))(optimizer)


def _step_scheduler(copies: _Copies, number: int) -> None:
    scheduler = copies.things[0]
    needed = [
        each
        for each in inspect.signature(scheduler.step).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    with seeded(number):
        scheduler.step(*[1.0 / (1 + number % 7)] * len(needed))  # a metric that gets better and worse


class _Copies:
    def __init__(self, things: list[Any], companions: list[Any]) -> None:
        roots = [*things, *companions]
        reached = list(walk_objects(roots))
        if any(isinstance(each, nn.Module) for each in reached):
            raise TypeError("a copy would change the script's own model")
        known: dict[int, Any] = {}
        optimizers = {id(each): each for each in reached if isinstance(each, torch.optim.Optimizer)}
        originals = {id(p): p for each in optimizers.values() for group in each.param_groups for p in group["params"]}
        copies = {key: nn.Parameter(_corner(of), of.requires_grad) for key, of in originals.items()}
        known |= copies
        shapes = {of.shape for of in originals.values()}
        for tensor in reached:
            is_other = isinstance(tensor, Tensor) and id(tensor) not in known
            if is_other and (tensor.shape in shapes or tensor.numel() > _LARGE):
                known[id(tensor)] = _corner(tensor)
        for key, optimizer in optimizers.items():
            known[key] = type(optimizer).__new__(type(optimizer))
        for key, optimizer in optimizers.items():
            # Its own __getstate__ would leave attributes out. Hooks of its steps are others'.
            kept = {
                name: value
                for name, value in vars(optimizer).items()
                if name not in ("state", "step") and not name.startswith("_optimizer_step")
            }
            state = defaultdict(dict, copy.deepcopy(dict(optimizer.state), known))
            known[key].__setstate__({**copy.deepcopy(kept, known), "state": state})
        self.parameters = list(copies.values())
        self._optimizers = [known[key] for key in optimizers]
        self.things = [copy.deepcopy(each, known) for each in things]
        self._companions = [copy.deepcopy(each, known) for each in companions]

    def become(self, other: _Copies) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.parameters, other.parameters, strict=True):
                mine.copy_(theirs)
        for mine, theirs in zip(self.things, other.things, strict=True):
            if isinstance(mine, torch.optim.Optimizer):
                copy_optimizer_state(theirs, mine)
        for mine, theirs in self._pairs(other):
            mine.load_state_dict(snapshot(theirs.state_dict()))

    def _pairs(self, other: _Copies) -> Iterator[tuple[Any, Any]]:
        for mine, theirs in zip(self.things, other.things, strict=True):
            if not isinstance(mine, torch.optim.Optimizer):
                yield mine, theirs
        yield from zip(self._companions, other._companions, strict=True)

    def differing(self, other: _Copies) -> list[str]:
        here, there = vars(self.things[0]), vars(other.things[0])
        names = [name for name in here if name not in _COVERED and not name.startswith("_optimizer_")]
        return [name for name in names if name not in there or not _alike(here[name], there[name], _DEPTH, set())]

    def values(self) -> str:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
        return content_hash([self.parameters, groups])


def _corner(tensor: Tensor) -> Tensor:
    """A copy of the first elements in each dimension: tensors of one shape have corners of one shape."""
    return tensor.detach()[tuple(slice(0, _CORNER) for _ in tensor.shape)].clone()


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):  # other mappings may compute what they hold, or refuse to
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value if len(value) <= _LONGEST else ()
    if isinstance(value, (Tensor, np.ndarray, *_OPAQUE)):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def walk_objects(roots: Sequence[Any]) -> Iterator[Any]:
    """Objects in containers and in attributes, some levels deep, each once."""
    seen: dict[int, Any] = {}
    front: list[tuple[Any, int]] = [(root, _DEPTH) for root in roots]
    while front:
        value, depth = front.pop()
        if id(value) in seen or type(value) in weakref.ProxyTypes:
            continue
        seen[id(value)] = value
        yield value
        if depth:
            front += [(part, depth - 1) for part in _parts(value)]


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(each, Tensor | np.ndarray) for each in walk_objects([value]))


def _alike(one: Any, other: Any, depth: int, seen: set[tuple[int, int]]) -> bool:
    if one is other or depth == 0 or (id(one), id(other)) in seen:
        return True
    if type(one) is not type(other):
        return False
    seen.add((id(one), id(other)))
    if isinstance(one, Mapping):
        if len(one) != len(other):
            return False
        keys = list(one) if one.keys() == other.keys() else None  # else of parameters, of which each has its own
        values = zip(one.values(), other.values(), strict=True) if keys is None else ((one[k], other[k]) for k in keys)
        return all(_alike(here, there, depth - 1, seen) for here, there in values)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True) if len(one) == len(other) else None
        return pairs is not None and all(_alike(here, there, depth - 1, seen) for here, there in pairs)
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, random.Random):
        return bool(one.getstate() == other.getstate())
    if isinstance(one, np.random.Generator):
        return content_hash(one.bit_generator.state) == content_hash(other.bit_generator.state)
    if isinstance(one, _OPAQUE):
        return True
    if not isinstance(one, Tensor | np.ndarray) and hasattr(one, "__dict__"):
        return _alike(vars(one), vars(other), depth - 1, seen)
    return content_hash(one) == content_hash(other)
