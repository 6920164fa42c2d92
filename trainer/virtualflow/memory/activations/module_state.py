"""What the modules of a block hold when its forward pass begins: parameters, buffers and attributes of their own.

A block that is computed again must find all of it as it was: its model may be in another mode by then, another call may
have given it other weights (``torch.func.functional_call``, ``spectral_norm``) or moved its buffers. What is bound to
another object is bound again; buffers stand back as copies. Of what else is changed in place there is no copy, so that
is noticed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from virtualflow.memory.settings import MANY_ITEMS, SMALL_BUFFER

_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
"""What torch itself keeps in a module: it is bound again, but nobody looks into it."""
_PLAIN = frozenset({bool, int, float, str, type(None)})
_CONTAINERS: Mapping[type, Callable[[Any, Any], object]] = {
    list: lambda held, before: held.__setitem__(slice(None), before),
    dict: lambda held, before: (held.clear(), held.update(before)),
    set: lambda held, before: (held.clear(), held.update(before)),
}
"""Of which the contents are put back, and how."""


class _Buffer:
    """A buffer, and its bits while a first forward pass may change them."""

    __slots__ = ("before", "name", "now", "part", "version")

    def __init__(self, part: nn.Module, name: str, buffer: Tensor) -> None:
        self.part, self.name = part, name
        self.now, self.version = buffer, buffer._version
        self.before: Tensor | None = (
            buffer.detach().clone().requires_grad_() if buffer.requires_grad else buffer.clone()
        )

    def forget_unchanged(self) -> None:
        """If it is large and was left alone, it needs no copy. Batch norm does not count what it changes."""
        if self.before is None or self.now._version != self.version:
            return
        strided = self.now.layout is torch.strided
        if not strided or (self.now.nbytes > SMALL_BUFFER and same_bits(self.now, self.before)):
            self.before = None

    @property
    def changed(self) -> bool:
        """Whether somebody has changed it since, and there is no copy."""
        return self.before is None and self.now._version != self.version


class ModuleState:
    """All that a block's modules hold now."""

    def __init__(self, module: nn.Module) -> None:
        self.others: list[Any] = []
        """Attributes that are no tensors, numbers or containers; generators may be among them."""
        self._module = module
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """What modules keep attributes in, and which these were."""
        self._contents: list[tuple[Any, Any]] = []
        """Lists and the like, and what was in them."""
        self._watched: list[tuple[nn.Module, str, Tensor, int, bool]] = []
        """Tensors that are not copied, with their version and whether they required a gradient."""
        self._buffers: dict[int, _Buffer] = {}
        self._places: list[tuple[dict[str, Any], str, int]] = []
        """Where buffers may be bound, and the tensor that is: by its ``id``, so that nothing holds on to a graph."""
        for part in _parts(module):
            self._note(part)
        self._places = [place for place in self._places if place[2] in self._buffers]

    def _note(self, part: nn.Module) -> None:
        own = vars(part).copy()
        for name, value in own.items():
            kind = type(value)
            if kind in _PLAIN or name in _MACHINERY:
                continue
            if isinstance(value, Tensor):
                own[name] = self._watch(part, name, value)
                self._places.append((vars(part), name, id(value)))
            elif (kind in _CONTAINERS or kind is tuple) and len(value) <= MANY_ITEMS:
                if kind is not tuple:
                    self._contents.append((value, value.copy()))
                for each in value.values() if kind is dict else value:
                    if isinstance(each, Tensor):
                        self._watch(part, name, each)
            else:
                self.others.append(value)
        parameters = {
            name: None if value is None else self._watch(part, name, value) for name, value in part._parameters.items()
        }
        buffers = dict(part._buffers)
        for name, buffer in buffers.items():
            if buffer is not None:
                self._places.append((part._buffers, name, id(buffer)))
                if id(buffer) not in self._buffers:
                    self._buffers[id(buffer)] = _Buffer(part, name, buffer)
        self._held += [(vars(part), own), (part._parameters, parameters), (part._buffers, buffers)]

    def _watch(self, part: nn.Module, name: str, tensor: Tensor) -> Tensor:
        """It is to be as it is, or this is noticed; what is bound again does not hold on to a graph."""
        held = tensor if tensor.grad_fn is None else tensor.detach().requires_grad_(tensor.requires_grad)
        self._watched.append((part, name, held, held._version, held.requires_grad))
        return held

    def forget_unchanged(self) -> None:
        """The forward pass is over: of large buffers that it has left alone, no copies are needed."""
        for buffer in self._buffers.values():
            buffer.forget_unchanged()

    def changed(self) -> str | None:
        """What was changed in place since, of which there is no copy; ``None``: nothing."""
        for part, name, tensor, version, required in self._watched:
            if tensor._version != version or tensor.requires_grad is not required:
                return self._name(part, name)
        for buffer in self._buffers.values():
            if buffer.changed:
                return self._name(buffer.part, buffer.name)
        return None

    def _name(self, part: nn.Module, name: str) -> str:
        names = {id(module): path for path, module in self._module.named_modules()}
        return f"{names[id(part)]}.{name}".lstrip(".")

    @contextmanager
    def again(self) -> Iterator[None]:
        """All is as it was; behind it, as before it. To be used once: buffers change in their copies."""
        present = [(attributes, attributes.copy()) for attributes, _ in self._held]
        contents = [(held, held.copy()) for held, _ in self._contents]
        try:
            for attributes, before in self._held:
                _bind(attributes, before)
            for attributes, name, key in self._places:
                copy = self._buffers[key].before
                if copy is not None:
                    attributes[name] = copy
            for held, before in self._contents:
                _CONTAINERS[type(held)](held, before)
            yield
        finally:
            for attributes, before in present:
                _bind(attributes, before)
            for held, before in contents:
                _CONTAINERS[type(held)](held, before)


def _parts(module: nn.Module) -> list[nn.Module]:
    """The module and all within it, each once. Of many small ones, ``modules()`` takes several times as long."""
    parts, known = [module], {module}
    for part in parts:
        for child in part._modules.values():
            if child is not None and child not in known:
                known.add(child)
                parts.append(child)
    return parts


def _bind(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    if (
        len(attributes) == len(values)
        and all(map(is_, attributes, values))
        and all(map(is_, attributes.values(), values.values()))
    ):
        return
    for name in [name for name in attributes if name not in values]:
        del attributes[name]
    attributes.update(values)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether they are equal to the bit, not a number included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return (
        torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
        if left.dim()
        else (left.item() == right.item())
    )


# What a block's forward pass depends on beside its inputs: random streams, autocast, and what its modules hold.
#
# A block that is computed again must find all of it as it was, and must not leave a trace: batch norm would otherwise
# move its running statistics twice, as it does under ``torch.utils.checkpoint``.


class Surroundings:
    """All that a block finds when its forward pass begins."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._streams = read_streams(device)
        self._autocast = [_read_autocast(kind) for kind in sorted({"cpu", device.type})]
        self._state = ModuleState(module)
        self._streams += _streams_of(self._state.others)

    def forget_unchanged(self) -> None:
        self._state.forget_unchanged()

    def changed(self) -> str | None:
        return self._state.changed()

    @contextmanager
    def again(self) -> Iterator[None]:
        present = read_streams(self._device) + _streams_of(self._state.others)
        with self._state.again(), ExitStack() as back:
            back.callback(write_streams, present)
            write_streams(self._streams)
            for autocast in self._autocast:
                back.enter_context(autocast())
            yield


Streams = list[tuple[Callable[[Any], object], Any]]
"""What sets each generator, and its state."""


def read_streams(device: torch.device) -> Streams:
    """The states of all global generators that a block may draw from."""
    states: Streams = [(torch.set_rng_state, torch.get_rng_state()), (random.setstate, random.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    if device.type == "cuda":

        def write(state: Tensor) -> None:
            torch.cuda.set_rng_state(state, device)

        states.append((write, torch.cuda.get_rng_state(device)))
    return states


def _streams_of(generators: Iterable[Any]) -> Streams:
    states: Streams = []
    numpy = sys.modules.get("numpy")
    for each in generators:
        if isinstance(each, torch.Generator):
            states.append((each.set_state, each.get_state()))
        elif isinstance(each, random.Random):
            states.append((each.setstate, each.getstate()))
        elif numpy is not None and isinstance(each, numpy.random.Generator):
            states.append((partial(setattr, each.bit_generator, "state"), each.bit_generator.state))
        elif numpy is not None and isinstance(each, numpy.random.RandomState):
            states.append((each.set_state, each.get_state()))
    return states


def write_streams(states: Streams) -> None:
    for write, state in states:
        write(state)


def _read_autocast(kind: str) -> Callable[[], Any]:
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache = torch.is_autocast_cache_enabled()

    def enter() -> Any:
        return torch.autocast(kind, dtype, enabled, cache)

    return enter
