"""A model as a chain of blocks that are on a device one at a time; between their turns they are on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from virtualflow.errors import ConfigurationError
from virtualflow.memory.activations.blocks import Named, find_blocks
from virtualflow.memory.activations.copies import Copies, open_copies
from virtualflow.memory.activations.live_bytes import LiveBytes
from virtualflow.memory.activations.module_state import same_bits

# Tensors on their way between the host, where a model lives, and a device that holds only a few of its blocks.
#
# **This has run on the CPU only**, where it stands in for a device.


class Carrier:
    """Copies tensors to a device and back, and counts the bytes.

    A copy has the strides of its original, gaps included: kernels may come to other bits with other strides.

    Args:
        copies: how they are made that begin ahead; ``None``: as the device can.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        self.device = device
        self._copies = copies or open_copies(device)
        self.weight_bytes = 0
        """Parameters and buffers that were brought to the device."""
        self.bytes_in = 0
        """All that was brought there, with these,"""
        self.bytes_out = 0
        """and back."""
        self._watchers: list[LiveBytes] = []

    def bring(self, tensor: Tensor) -> Tensor:
        with self._unseen():
            made = copy_to(tensor, self.device)
        for live in self._watchers:
            live.add([made])
        self.bytes_in += made.untyped_storage().nbytes()
        return made

    @property
    def beside(self) -> bool:
        """Whether copies that begin ahead go on beside the computation."""
        return self._copies.beside

    def begin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin to bring them; nobody may use the copies before they :meth:`arrive`."""
        with self._unseen():
            sources = [_plain(tensor) for tensor in tensors]
            made = [_blank(source, self.device) for source in sources]
            for pair in zip(sources, made, strict=True):
                self._copies.bring(*(_row(tensor).view(torch.uint8) for tensor in pair))
        for live in self._watchers:
            live.add(made)
        self.bytes_in += sum(tensor.untyped_storage().nbytes() for tensor in made)
        return made

    def arrive(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._copies.arrive(tensor)

    def take(self, tensor: Tensor) -> Tensor:
        with self._unseen():
            made = copy_to(tensor, torch.device("cpu"))
        self.bytes_out += made.untyped_storage().nbytes()
        return made

    @contextmanager
    def seen_by(self, live: LiveBytes) -> Iterator[None]:
        """Meanwhile somebody counts what is on the device: not what is taken from there."""
        self._watchers.append(live)
        try:
            with live:
                yield
        finally:
            self._watchers.remove(live)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        with ExitStack() as stack:
            for live in self._watchers:
                stack.enter_context(live.pause())
            yield


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, in memory of its own."""
    source = _plain(tensor)
    made = _blank(source, device)
    _row(made).copy_(_row(source))
    return made


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def _blank(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _row(tensor: Tensor) -> Tensor:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


@dataclass(frozen=True)
class ChainedBlock:
    name: str
    module: nn.Module
    places: list[int]
    """Of its parameters among all of the model's."""


@dataclass(frozen=True)
class _Buffer:
    name: str
    value: Tensor
    """What every virtual node begins with, on the device."""
    places: list[tuple[nn.Module, str]]
    """The modules that have it, and what they call it."""

    @property
    def present(self) -> Tensor | None:
        module, attribute = self.places[0]
        return module._buffers[attribute]

    def renew(self) -> None:
        copy = self.value.clone()
        for module, attribute in self.places:
            module._buffers[attribute] = copy


@dataclass(frozen=True)
class Loaded:
    """A block while it is on the device, in place of the module's own parameters and buffers."""

    link: ChainedBlock
    trained: dict[int, nn.Parameter]
    """Those of its parameters that are trained, by place."""
    tensors: list[Tensor]
    """All of them, and the buffers that every virtual node begins with."""
    buffers: list[_Buffer]

    def renew_buffers(self) -> None:
        for buffer in self.buffers:
            buffer.renew()

    def changed_buffers(self, carrier: Carrier) -> dict[str, Tensor]:
        """Copies on the host of the buffers that the virtual node has changed, by their names in the model."""
        present = [(buffer, buffer.present) for buffer in self.buffers]
        return {b.name: carrier.take(now) for b, now in present if now is not None and not same_bits(now, b.value)}


class Chain:
    """A model's blocks, of which each gets the output of the one before.

    Args:
        wanted: its blocks, see ``Memory``; ``None``: the children of the model, an ``nn.Sequential``.

    Raises:
        ConfigurationError: they are not the whole model, or two share a parameter.
    """

    def __init__(self, model: nn.Module, wanted: Sequence[str | nn.Module] | None) -> None:
        if wanted is None and type(model).forward is not nn.Sequential.forward:
            raise ConfigurationError(
                f"in layer-major order the model must be an nn.Sequential, and is {type(model).__name__}; make it one, "
                "or name the modules that it is a sequence of: vf.Memory(..., blocks=[...])"
            )
        blocks, _ = find_blocks(model, [name for name, _ in model.named_children()] if wanted is None else wanted)
        self._model = model
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        self.links = [
            ChainedBlock(name, module, [places[id(parameter)] for parameter in module.parameters()])
            for name, module in blocks
        ]
        self.parameters = list(model.parameters())
        self._check(blocks)
        several = Counter(id(buffer) for link in self.links for buffer in link.module.buffers())
        self._shared = {name for name, buffer in _all_buffers(model) if several[id(buffer)] > 1}
        """Buffers that more than one block has."""

    def _check(self, blocks: Sequence[Named]) -> None:
        named, owner = list(self._model.named_parameters()), dict[int, str]()
        for link in self.links:
            for place in link.places:
                if place in owner:
                    raise ConfigurationError(
                        f"blocks {owner[place]} and {link.name} share parameter {named[place][0]}, so in layer-major "
                        "order its gradient would never be whole; put both into one block, or give each its own"
                    )
                owner[place] = link.name
        inside = {id(part) for _, module in blocks for part in module.modules()}
        for prefix, module in self._model.named_modules():
            if id(module) in inside:
                continue
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            if own or not any(module.children()):
                name = ".".join(filter(None, (prefix, own[0][0] if own else "")))
                raise ConfigurationError(
                    f"{name} is in none of the blocks, so in layer-major order nobody would use it; make it part of one"
                )
        for name, parameter in named:
            if parameter._backward_hooks:
                raise ConfigurationError(
                    f"parameter {name} has a gradient hook, which layer-major order does not call; remove it"
                )

    def put_buffers(self, values: dict[str, Tensor]) -> None:
        """Set buffers of the model as a virtual node has left them.

        Raises:
            ConfigurationError: two blocks have one of them, and one did not see what the other one did.
        """
        for name, value in values.items():
            if name in self._shared:
                raise ConfigurationError(
                    f"buffer {name} is shared by two blocks and changes in a forward pass, so in layer-major order "
                    "each would see another one; put both into one block, or give each its own"
                )
            prefix, _, attribute = name.rpartition(".")
            module = self._model.get_submodule(prefix)
            present = module._buffers[attribute]
            if present is not None and present.shape == value.shape and present.dtype == value.dtype:
                with torch.no_grad():
                    present.copy_(value)
            else:
                module._buffers[attribute] = value

    def pin(self) -> None:
        """Move parameters to page-locked memory, from which copies go on beside the computation."""
        owners = Counter(parameter.untyped_storage().data_ptr() for parameter in self.parameters)
        for parameter in self.parameters:
            if owners[parameter.untyped_storage().data_ptr()] == 1:  # others stay views of what they share
                parameter.data = parameter.data.pin_memory()

    def tensors(self, index: int) -> list[Tensor]:
        """Parameters and buffers of a block that is not loaded, each once."""
        return [*self.links[index].module.parameters(), *self.links[index].module.buffers()]

    @contextmanager
    def load(self, index: int, carrier: Carrier, ahead: Sequence[Tensor] | None = None) -> Iterator[Loaded]:
        """Put a block on the device.

        Args:
            ahead: copies of its :meth:`tensors` that were begun before.
        """
        link, originals = self.links[index], self.tensors(index)
        if ahead is None:
            ahead = [carrier.bring(tensor) for tensor in originals]
        else:
            carrier.arrive(ahead)
        brought = {id(tensor): copy for tensor, copy in zip(originals, ahead, strict=True)}
        with ExitStack() as back:
            for module in link.module.modules():
                back.callback(_put_tensors, module, _tensors_of(module))
            parameters, trained = _load_parameters(link, brought, back)
            buffers: dict[int, _Buffer] = {}
            for prefix, module in link.module.named_modules(prefix=link.name):
                for attribute, buffer in module._buffers.items():
                    if buffer is not None:
                        if id(buffer) not in buffers:
                            buffers[id(buffer)] = _Buffer(f"{prefix}.{attribute}", brought[id(buffer)], [])
                        buffers[id(buffer)].places.append((module, attribute))
                        back.callback(module._buffers.__setitem__, attribute, buffer)
            there: list[Tensor] = [*parameters, *(buffer.value for buffer in buffers.values())]
            carrier.weight_bytes += sum(tensor.untyped_storage().nbytes() for tensor in there)
            yield Loaded(link, trained, there, list(buffers.values()))


def _all_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return model.named_buffers(remove_duplicate=False)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Attributes that are no parameters or buffers: a weight that is computed from parameters before each call."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


def _put_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name in _tensors_of(module).keys() - tensors.keys():
        delattr(module, name)
    vars(module).update(tensors)


def _load_parameters(
    link: ChainedBlock, brought: dict[int, Tensor], back: ExitStack
) -> tuple[list[nn.Parameter], dict[int, nn.Parameter]]:
    made: dict[int, nn.Parameter] = {}
    trained: dict[int, nn.Parameter] = {}
    for place, parameter in zip(link.places, link.module.parameters(), strict=True):
        made[id(parameter)] = copy = nn.Parameter(brought[id(parameter)], parameter.requires_grad)
        if parameter.requires_grad:
            trained[place] = copy
    for module in link.module.modules():
        for attribute, own in list(module._parameters.items()):
            if own is not None:
                # By setattr: recurrent modules have a list of them besides.
                back.callback(setattr, module, attribute, own)
                setattr(module, attribute, made[id(own)])
    return list(made.values()), trained
