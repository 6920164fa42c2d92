"""A device that is played on the CPU: it runs one kernel at a time to its end, in the order in which they came.

Processes share it. What they do beside it (loading, exchanges, updates) takes their own processors, so it is as an
accelerator that has no way to interrupt a kernel, and takes kernels of several processes. Where a real one starts a
kernel behind another one by itself, here the process that comes next is woken for it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

NUMBER = 8
"""Bytes of the number of the kernel that came last, at the beginning of the file. Locks are of bytes behind them."""


class OneKernelAtATime(TorchDispatchMode):
    """What is computed in this mode is computed on the device.

    Kernels are numbered as they come. Each has a byte of a file locked from then until it has ended, and waits for the
    lock of the byte of the one before. The kernel gives up the locks of a process that ends.

    Args:
        device: a file; all processes on the device give the same.
    """

    def __init__(self, device: Path) -> None:
        super().__init__()
        device.touch()
        self._file = device.open("r+b", buffering=0)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor | Any:
        if only_views(func):
            return func(*args, **kwargs or {})
        with self._kernel():
            return func(*args, **kwargs or {})

    @contextmanager
    def _kernel(self) -> Iterator[None]:
        number = self._come()
        self._lock(number - 1)
        self._free(number - 1)
        try:
            yield
        finally:
            self._free(number)

    def _come(self) -> int:
        """The number of a kernel that comes now, whose byte is locked."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, NUMBER)
        self._file.seek(0)
        number = int.from_bytes(self._file.read(NUMBER), "little") + 1
        self._file.seek(0)
        self._file.write(number.to_bytes(NUMBER, "little"))
        self._lock(number)
        fcntl.lockf(self._file, fcntl.LOCK_UN, NUMBER)
        return number

    def _lock(self, number: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, NUMBER + number)

    def _free(self, number: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, NUMBER + number)


def only_views(func: OpOverload) -> bool:
    """Whether it computes nothing: what it returns is another view of what it got."""
    returned = [result.alias_info for result in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
