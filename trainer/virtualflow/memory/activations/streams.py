"""What a block's forward pass depends on beside its inputs: random streams, autocast, and what its modules hold.

A block that is computed again must find all of it as it was, and must not leave a trace: batch norm would otherwise
move its running statistics twice, as it does under ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from virtualflow.memory.activations.module_state import ModuleState


class Surroundings:
    """All that a block finds when its forward pass begins.

    Args:
        module: the block.
        device: on which it computes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._streams = read_streams(device)
        self._autocast = [_read_autocast(kind) for kind in sorted({"cpu", device.type})]
        self._state = ModuleState(module)
        self._streams += _streams_of(self._state.others)

    def forget_unchanged(self) -> None:
        """The forward pass is over: of large buffers that it has left alone, no copies are needed."""
        self._state.forget_unchanged()

    def changed(self) -> str | None:
        """What of the block was changed in place since, so that it cannot be as it was; ``None``: nothing."""
        return self._state.changed()

    @contextmanager
    def again(self) -> Iterator[None]:
        """All is as it was; behind it, as before it. To be used once: buffers change in their copies."""
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
    """The states of those that are a block's own; what is no generator has none."""
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
    """Let each generator go on from there."""
    for write, state in states:
        write(state)


def _read_autocast(kind: str) -> Callable[[], Any]:
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache = torch.is_autocast_cache_enabled()

    def enter() -> Any:
        return torch.autocast(kind, dtype, enabled, cache)

    return enter
