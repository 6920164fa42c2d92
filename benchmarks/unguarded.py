"""A worker that hashes nothing: what the checksums and the comparison of states cost is measured beside it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from virtualflow.step.state_watch import StateWatch
from virtualflow.transport.gloo import Communicator
from virtualflow.transport.interface import DONE, Message, Pending
from virtualflow.transport.pending import Letter


class _Bare(Letter):
    """A message without a checksum."""

    def wait(self, timeout: object) -> None:
        """Wait for it to its end."""
        self.works[0].wait(timeout)  # type: ignore[arg-type]


def _post(self: Communicator, group: c10d.ProcessGroup, message: Message, _: Tensor | None = None) -> Letter:
    key = message.peer, message.incoming
    self._tags[key] = tag = self._tags.get(key, 0) + 1
    start = group.recv if message.incoming else group.send
    work = start([message.stretch], message.peer, tag)
    return _Bare(message, message.stretch, (work, work), "")


def _start_all_gather(self: Communicator, out: Tensor, block: Tensor) -> Pending:
    if self._group is None:
        out.copy_(block)
        return DONE
    return self._gather(out.view(-1).view(torch.uint8), block.view(-1).view(torch.uint8))


def leave_unguarded() -> None:
    """Let this process hash nothing of what it sends, receives or holds; all workers of the job have to do so."""
    Communicator._post = _post  # type: ignore[method-assign]
    Communicator.start_all_gather = _start_all_gather  # type: ignore[method-assign]
    StateWatch.begin = lambda self, step: None  # type: ignore[method-assign]
