"""What autograd saves in blocks, storage by storage: where it is, whose it is, and how many bytes it takes.

Several tensors that are saved may be views of one storage, and neighbouring blocks may save the same one: the output of
a block is the input of the next. So bytes are counted, copied and given back for storages, each once. A storage that
more than one block needs belongs to the one that gets it as its input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from virtualflow.memory.activations.copies import Copies, HostCopy


class Packed(Protocol):
    """What autograd keeps in place of a tensor that a block has saved."""

    def load(self) -> Tensor:
        """The tensor, to the bit."""


class Kept:
    """A tensor that stays where it is and is not counted: a parameter, the user's data."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version

    def load(self) -> Tensor:
        check_version(self._tensor, self._version)
        return self._tensor


class StorageEntry:
    """One storage: on the device, or on the host."""

    __slots__ = ("__weakref__", "_ledger", "alias", "claimed", "host", "key", "savers", "size", "version")

    def __init__(self, ledger: Ledger, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._ledger = ledger
        self.key, self.size = storage._cdata, storage.nbytes()
        self.alias: Tensor | None = tensor.detach()
        """A tensor of that storage, which shares its count of changes; ``None``: it is on the host."""
        self.version: int | None = tensor._version
        self.host: HostCopy | None = None
        self.claimed = False
        """Whether it is some block's input."""
        self.savers: set[int] = set()
        """Blocks in which autograd has saved it."""
        ledger.count(self.size)

    def swap_out(self) -> None:
        """Copy it to the host and give the device's memory back, unless the host has no room.

        Raises:
            RuntimeError: it was changed in place since it was saved.
        """
        if self.alias is None:
            return
        if self.version is not None:
            check_version(self.alias, self.version)
        self.host = self._ledger.copies.out(self.alias, partial(_gone, self._ledger, self.alias, self.alias._version))
        if self.host is not None:
            self._ledger.forget(self)
            self.alias = None

    def swap_in(self) -> Tensor:
        if self.alias is None:
            assert self.host is not None
            self._ledger.count(self.size)
            self.alias, self.host, self.version = self._ledger.copies.back(self.host), None, None
            self.key = key_of(self.alias)
            self._ledger.know(self)
        return self.alias

    def __del__(self) -> None:
        if self.alias is not None:
            self._ledger.give_back(self.size)


class Saved:
    __slots__ = ("_dtype", "_entry", "_offset", "_size", "_stride", "_version")

    def __init__(self, entry: StorageEntry, tensor: Tensor) -> None:
        assert entry.alias is not None
        self._entry, self._version = entry, entry.alias._version
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def load(self) -> Tensor:
        alias = self._entry.swap_in()
        self._entry._ledger.copies.arrive(alias)
        if self._entry.version is not None:
            check_version(alias, self._version)
        blank = torch.empty(0, dtype=self._dtype, device=alias.device)
        return blank.set_(alias.untyped_storage(), self._offset, self._size, self._stride)


class Ledger:
    """All entries of a model, and their bytes."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.device_bytes = 0
        """Of entries on the device now, with those that are about to leave,"""
        self.peak = 0
        """and the most at a time."""
        self._present: WeakValueDictionary[int, StorageEntry] = WeakValueDictionary()

    def find(self, tensor: Tensor) -> StorageEntry | None:
        """The entry of that tensor's storage, if it is known and on the device."""
        return self._present.get(key_of(tensor))

    def save(self, tensor: Tensor, block: int, made: Callable[[ref[StorageEntry]], object]) -> Saved:
        """A handle of what autograd has saved in that block; ``made`` is told if its entry is a new one."""
        entry = self.find(tensor)
        if entry is None:
            entry = StorageEntry(self, tensor)
            self.know(entry)
            made(ref(entry))
        entry.savers.add(block)
        return Saved(entry, tensor)

    def know(self, entry: StorageEntry) -> None:
        self._present[entry.key] = entry

    def forget(self, entry: StorageEntry) -> None:
        """It leaves the device, and its storage may be given to another tensor."""
        self._present.pop(entry.key, None)

    def count(self, size: int) -> None:
        self.device_bytes += size
        self.peak = max(self.peak, self.device_bytes)

    def give_back(self, size: int) -> None:
        self.device_bytes -= size


def _gone(ledger: Ledger, alias: Tensor, version: int, size: int) -> None:
    """A copy to the host is over; it may have gone on beside what the device computed.

    Raises:
        RuntimeError: what was copied was changed in place meanwhile, so nobody knows what was copied.
    """
    ledger.give_back(size)
    if alias._version != version:
        raise RuntimeError(
            f"{alias.type()} {list(alias.shape)} was changed in place while the plan of memory copied it to the host; "
            "write that operation out of place (x = x + y, not x += y)"
        )


def key_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def has_storage(tensor: Tensor) -> bool:
    """Whether it is a window of one, and not sparse."""
    return tensor.layout is torch.strided


def is_plain(tensor: Tensor) -> bool:
    """Whether it is nothing but a window of a storage."""
    usual = type(tensor) in (Tensor, torch.nn.Parameter) and has_storage(tensor)
    return usual and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)


class ChangedInPlace(RuntimeError):
    """A tensor is no longer what was saved."""


def check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise ChangedInPlace(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
        )
