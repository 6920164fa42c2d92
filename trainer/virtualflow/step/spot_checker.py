"""A second worker computes one of another one's virtual nodes now and then: their gradients are hashed and compared.

What the state watch cannot see is a gradient that was wrong before anybody hashed it, since the sum of all is the same
wrong one for all. So whoever holds the virtual node hashes what autograd has left, and so does the one that checks; the
hashes travel in the step header, before anything is applied. Who checks whom is in ``spot_checks``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from virtualflow.errors import VirtualFlowError
from virtualflow.step.header import StepHeader
from virtualflow.step.part import Attempt, StepPart
from virtualflow.step.spot_checks import SpotCheck, choose_check
from virtualflow.step.state_watch import bytes_of, condense, hash_of, hashes_of, is_plain
from virtualflow.transport import Collectives

_NONE = b"none----"
"""In place of the hash of a parameter that has no gradient."""


class Doubted(VirtualFlowError):
    """Two workers came to different gradients of one virtual node; nothing of the attempt was applied."""

    def __init__(self, check: SpotCheck, values: Sequence[int]) -> None:
        super().__init__(f"virtual node {check.virtual_node} came to different gradients in step {check.step}")
        self.check = check
        self.first = {rank: values[rank] for rank in check.pair}


class SpotChecker(StepPart):
    """One worker's part in the spot checks.

    Args:
        sample: the share of steps with a check, above 0 and up to 1.
    """

    def __init__(self, model: nn.Module, *, seed: int, virtual_nodes: int, sample: float) -> None:
        self.sample = sample
        self.check: SpotCheck | None = None
        self._parameters = list(model.parameters())
        self._seed, self._virtual_nodes = seed, virtual_nodes
        self._condensed: list[Tensor | None] | None = None
        self._weight: float | None = None
        self._value = 0

    def begin(self, attempt: Attempt) -> None:
        """An attempt at a step begins.

        The hash of the former attempt stays: if this worker has kept what it came to, it is of that.
        """
        self.choose(attempt.number, attempt.holdings)

    def after_node(self, attempt: Attempt) -> None:
        """A virtual node has been computed that this worker contributes: is it the one that another checks?"""
        if self.check is not None and self.check.virtual_node == attempt.present.virtual_node:
            self.note(attempt.told.weight)

    def header(self) -> Mapping[str, int]:
        return {"check": self.value}

    def check_headers(self, communicator: Collectives, headers: Sequence[StepHeader]) -> None:
        doubted = self.differs([header.check for header in headers])
        if doubted is not None:
            raise doubted

    def choose(self, step: int, holdings: Sequence[Sequence[int]]) -> None:
        self.check = choose_check(self._seed, step, self._virtual_nodes, self.sample, holdings)

    def note(self, weight: float | None = None) -> None:
        """The gradients of the virtual node are there, as autograd has left them, and what was told of its weight."""
        self._weight = weight
        gradients = [parameter.grad for parameter in self._parameters]
        self._condensed = [None if g is None or not is_plain(g) else condense(bytes_of(g)) for g in gradients]

    @property
    def value(self) -> int:
        """The hash of both, as int64; of interest only from those who compute what is checked."""
        if self._condensed is not None:
            found = iter(hashes_of([raw for raw in self._condensed if raw is not None]))
            hashes = [_NONE if raw is None else struct.pack("<q", next(found)) for raw in self._condensed]
            weight = b"" if self._weight is None else struct.pack("<d", self._weight)
            self._condensed, self._value = None, hash_of(b"".join(hashes) + weight)
        return self._value

    def differs(self, values: Sequence[int]) -> Doubted | None:
        """What is to be raised if the two hashes differ; ``values`` are all members', in the order of their ranks."""
        check = self.check
        equal = check is None or values[check.holder] == values[check.checker]
        return None if check is None or equal else Doubted(check, values)
