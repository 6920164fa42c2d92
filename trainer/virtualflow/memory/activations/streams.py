"""What a block's forward pass depends on beside its inputs and parameters: random streams, autocast, buffers.

A block that is computed again must find all of it as it was, and must not leave a trace: batch norm would otherwise
move its running statistics twice, as it does under ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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
        self._buffers = [
            (part, name, buffer.detach().clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    @property
    def buffers(self) -> list[Tensor]:
        """Copies that stand in for buffers when it is computed again."""
        return [before for _, _, before in self._buffers]

    def forget_unchanged(self) -> None:
        """The forward pass is over: of the buffers that it has left alone, no copies are needed."""
        self._buffers = [
            (part, name, before)
            for part, name, before in self._buffers
            if (now := part._buffers[name]) is None or not same_bits(now, before)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """All is as it was; behind it, as before it. To be used once: buffers change in their copies."""
        present = read_streams(self._device)
        with ExitStack() as back:
            for part, name, before in self._buffers:
                back.callback(part._buffers.__setitem__, name, part._buffers[name])
                part._buffers[name] = before
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


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether they are equal to the bit, not a number included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return (
        torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
        if left.dim()
        else (left.item() == right.item())
    )
