"""What a user says about memory: :class:`Memory`, an argument of :func:`virtualflow.elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import nn

from virtualflow._arguments import checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.memory import Budget, Placement, parse_bytes
from virtualflow.protocol.settings import ActivationsChoice

Order = Literal["node-major", "layer-major"]


@checked_class("vf.Memory")
@dataclass(frozen=True)
class Memory:
    """How much memory a worker may use, what becomes of activations, and where the optimizer is.

    No bits depend on it but for ``optimizer``, so each worker may have its own, and another one after a restart.

    Args:
        device: the device's memory for this training, like ``"24GiB"``, or bytes. Without it, all activations are kept.
        host: the host's memory for what is swapped, and for an optimizer that is there; without it, as much as is
            needed.
        activations: ``"auto"``: for each block of the model what makes steps shortest within this memory. ``"keep"``,
            ``"recompute"`` or ``"swap"``: the same for all blocks, refused if it does not fit.
        blocks: the model's blocks, in the order in which they run: modules, or their names. Without them, the longest
            ``nn.ModuleList`` or ``nn.Sequential`` of the model, and others of the same class of children.
        optimizer: ``"host"``: its state is in the host's memory, and it steps there. That may round otherwise than the
            device does, so it is the same in all workers, for a job's life. It changes nothing where a device has no
            memory of its own, like the CPU.
        order: ``"node-major"``: one virtual node after the other goes through the whole model. ``"layer-major"``: one
            block after the other runs for all virtual nodes of a worker, for models whose weights do not fit. The model
            is a sequence of blocks, stays on the host, and is trained by :meth:`virtualflow.Step.layer_major`.

    Raises:
        ConfigurationError: a size or a word makes no sense, or there is nothing to do.
    """

    device: str | int | None = None
    host: str | int | None = None
    activations: ActivationsChoice = "auto"
    blocks: Sequence[str | nn.Module] | None = None
    optimizer: Placement = "device"
    order: Order = "node-major"

    def __post_init__(self) -> None:
        for name, word, known in (
            ("activations", self.activations, get_args(ActivationsChoice)),
            ("optimizer", self.optimizer, get_args(Placement)),
            ("order", self.order, get_args(Order)),
        ):
            if word not in known:
                words = ", ".join(f'"{one}"' for one in known)
                raise ConfigurationError(f"{name} is {word!r}; it must be one of {words}")
        if self.layer_major and self.activations in ("keep", "swap"):
            raise ConfigurationError(
                f'activations is "{self.activations}", and in layer-major order every block is recomputed; leave it out'
            )
        if self.device is not None:
            _ = self.budget
        elif self.layer_major:
            raise ConfigurationError('layer-major order needs the size of the device; pass device="24GiB"')
        elif self.activations != "auto" or self.host is not None or self.blocks is not None:
            raise ConfigurationError(
                'vf.Memory plans activations for a size of device memory; pass device="24GiB", or whatever there is'
            )
        elif self.optimizer == "device":
            raise ConfigurationError(
                'vf.Memory() says nothing; pass device="24GiB" to plan activations, or optimizer="host"'
            )

    @property
    def plans_activations(self) -> bool:
        """Whether a plan says what becomes of activations."""
        return self.device is not None and not self.layer_major

    @property
    def layer_major(self) -> bool:
        """Whether blocks come before virtual nodes."""
        return self.order == "layer-major"

    @property
    def budget(self) -> Budget:
        """The same in bytes, where activations are planned."""
        assert self.device is not None
        return Budget(_bytes(self.device), None if self.host is None else _bytes(self.host), self.optimizer)


def limit(
    said: Memory | None,
    device: int | None,
    host: int | None,
    activations: ActivationsChoice | None = None,
    optimizer: Placement | None = None,
) -> Memory | None:
    """What a script says of memory, with what whoever runs it says instead; ``None``: nobody says anything.

    Raises:
        ConfigurationError: together it makes no sense.
    """
    words = {"device": device, "host": host, "activations": activations, "optimizer": optimizer}
    instead: dict[str, Any] = {name: word for name, word in words.items() if word is not None}
    if instead == {"optimizer": "device"} and (said is None or said.device is None):
        return None  # where it is anyway; a script without a size says no more than another place
    if said is None:
        return Memory(**instead) if instead else None
    return replace(said, **instead)


def _bytes(size: str | int) -> int:
    return parse_bytes(size) if isinstance(size, str) else size
