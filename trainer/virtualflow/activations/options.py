"""What a user says about memory: :class:`Memory`, an argument of :func:`virtualflow.elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import nn

from virtualflow.errors import ConfigurationError
from virtualflow.memory import Budget, parse_bytes

Activations = Literal["auto", "keep", "recompute", "swap"]


@dataclass(frozen=True)
class Memory:
    """How much memory a worker may use, and what becomes of activations.

    No bits depend on it, so each worker may have its own, and another one after a restart.

    Args:
        device: the device's memory for this training, like ``"24GiB"``, or bytes.
        host: the host's memory for what is swapped; without it, as much as is needed.
        activations: ``"auto"``: for each block of the model what makes steps shortest within this memory. ``"keep"``,
            ``"recompute"`` or ``"swap"``: the same for all blocks, refused if it does not fit.
        blocks: the model's blocks, in the order in which they run: modules, or their names. Without them, the longest
            ``nn.ModuleList`` or ``nn.Sequential`` of the model, and others of the same class of children.

    Raises:
        ConfigurationError: a size or a word makes no sense.
    """

    device: str | int
    host: str | int | None = None
    activations: Activations = "auto"
    blocks: Sequence[str | nn.Module] | None = None

    def __post_init__(self) -> None:
        if self.activations not in get_args(Activations):
            words = ", ".join(f'"{word}"' for word in get_args(Activations))
            raise ConfigurationError(f"activations is {self.activations!r}; it must be one of {words}")
        _ = self.budget

    @property
    def budget(self) -> Budget:
        """The same in bytes."""
        return Budget(_bytes(self.device), None if self.host is None else _bytes(self.host))


def limit(said: Memory | None, device: int | None, host: int | None) -> Memory | None:
    """What a script says of memory, with the bytes that whoever runs it allows instead; ``None``: nobody says."""
    if device is None:
        return said
    if said is None:
        return Memory(device, host)
    return replace(said, device=device, host=said.host if host is None else host)


def _bytes(size: str | int) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
