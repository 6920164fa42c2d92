"""What a user says about memory: :class:`Memory`, an argument of :func:`virtualflow.elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from virtualflow.errors import ConfigurationError
from virtualflow.memory import Budget, parse_bytes

Activations = Literal["auto", "keep", "recompute", "swap"]
Order = Literal["node-major", "layer-major"]


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
        order: ``"node-major"``: one virtual node after the other goes through the whole model. ``"layer-major"``: one
            block after the other runs for all virtual nodes of a worker, for models whose weights do not fit. The model
            is a sequence of blocks, stays on the host, and is trained by :meth:`virtualflow.Step.layer_major`.

    Raises:
        ConfigurationError: a size or a word makes no sense.
    """

    device: str | int
    host: str | int | None = None
    activations: Activations = "auto"
    blocks: Sequence[str | nn.Module] | None = None
    order: Order = "node-major"

    def __post_init__(self) -> None:
        if self.activations not in get_args(Activations):
            words = ", ".join(f'"{word}"' for word in get_args(Activations))
            raise ConfigurationError(f"activations is {self.activations!r}; it must be one of {words}")
        if self.order not in get_args(Order):
            words = " or ".join(f'"{word}"' for word in get_args(Order))
            raise ConfigurationError(f"order is {self.order!r}; it must be {words}")
        if self.layer_major and self.activations in ("keep", "swap"):
            raise ConfigurationError(
                f'activations is "{self.activations}", and in layer-major order every block is recomputed; leave it out'
            )
        _ = self.budget

    @property
    def layer_major(self) -> bool:
        """Whether blocks come before virtual nodes."""
        return self.order == "layer-major"

    @property
    def budget(self) -> Budget:
        """The same in bytes."""
        return Budget(_bytes(self.device), None if self.host is None else _bytes(self.host))


def _bytes(size: str | int) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
