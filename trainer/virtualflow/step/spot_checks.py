"""A second worker computes one of another one's virtual nodes now and then: their gradients are hashed and compared.

What the state watch cannot see is a gradient that was wrong before anybody hashed it, since the sum of all is the same
wrong one for all. So whoever holds the virtual node hashes what autograd has left, and so does the one that checks; the
hashes travel in the step header, before anything is applied.

Which virtual node that is, and who was wrong, pure functions say. All workers have the same seed and the same
assignment, so all know who checks whom. Checks are spread evenly over the
steps and go round over the virtual nodes, so that ``virtual_nodes`` checks in a row have each of them once, and over
those who check. A difference is settled by computing once more: with a third worker, its word counts; of two, the one
that does not come to the same twice was wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

from torch import Tensor, nn

from virtualflow.data import derive_seed
from virtualflow.errors import VirtualFlowError
from virtualflow.step.header import StepHeader
from virtualflow.step.part import Attempt, StepPart
from virtualflow.step.state_watch import bytes_of, condense, hash_of, hashes_of, is_plain
from virtualflow.transport import Collectives

_PARTS = 1 << 20
"""Of a step, in which the first check may be due: few enough that whole steps are added to them without rounding."""


_NONE = b"none----"
"""In place of the hash of a parameter that has no gradient."""


@dataclass(frozen=True)
class SpotCheck:
    """One virtual node of one step that two workers compute, by their ranks."""

    number: int
    """Of the job's checks; it grows by one from check to check."""
    step: int
    virtual_node: int
    holder: int
    """Whose gradients of it count."""
    checker: int

    @property
    def pair(self) -> tuple[int, int]:
        """Both workers."""
        return self.holder, self.checker


@dataclass(frozen=True)
class Verdict:
    """What came of a doubt."""

    odd: int | None
    """The rank of whoever was wrong; ``None``: that cannot be told."""
    reason: str
    """The end of a sentence about that worker, or a whole one about all."""


def choose_virtual_node(seed: int, step: int, virtual_nodes: int, sample: float) -> tuple[int, int] | None:
    """The number of the check that is due in a step, and its virtual node; ``None``: none is.

    Args:
        seed: of the job.
        step: counted from 1.
        virtual_nodes: of the job.
        sample: the share of steps with a check, from 0 to 1.
    """
    drawn = derive_seed("spot checks", seed)
    begin = drawn % _PARTS / _PARTS
    number = floor(step * sample + begin)
    if number == floor((step - 1) * sample + begin):
        return None
    return number, (drawn // _PARTS + number) % virtual_nodes


def choose_check(
    seed: int, step: int, virtual_nodes: int, sample: float, holdings: Sequence[Sequence[int]]
) -> SpotCheck | None:
    """The check that is due in a step, among workers that hold these virtual nodes; ``None``: there is none.

    Args:
        seed: see :func:`choose_virtual_node`, as for the next three.
        step: see there.
        virtual_nodes: see there.
        sample: see there.
        holdings: which virtual nodes each member contributes to the step, in the order of their ranks.
    """
    chosen = choose_virtual_node(seed, step, virtual_nodes, sample) if len(holdings) > 1 else None
    if chosen is None:
        return None
    number, node = chosen
    holder = next(rank for rank, nodes in enumerate(holdings) if node in nodes)
    others = [rank for rank in range(len(holdings)) if rank != holder]
    # One place further from virtual node to virtual node, and from round to round.
    turn = number // virtual_nodes + number % virtual_nodes
    return SpotCheck(number, step, node, holder, others[turn % len(others)])


def choose_judges(check: SpotCheck, members: int) -> tuple[int, ...]:
    """The ranks of those who compute the virtual node once more: a third worker or, if there is none, both."""
    others = [rank for rank in range(members) if rank not in check.pair]
    return (others[check.number % len(others)],) if others else check.pair


def judge(check: SpotCheck, first: Mapping[int, int], again: Mapping[int, int], names: Sequence[str]) -> Verdict:
    """Who was wrong.

    Args:
        check: that two workers came to different gradients in.
        first: the hashes of the gradients that they came to, by rank.
        again: those of the judges.
        names: of all members, in the order of their ranks.
    """
    what = f"of virtual node {check.virtual_node} in step {check.step}"
    third = next((rank for rank in again if rank not in check.pair), None)
    if third is not None:
        odd = [rank for rank in check.pair if first[rank] != again[third]]
    else:
        odd = [rank for rank in check.pair if first[rank] != again[rank]]
    if len(odd) == 1:
        other = names[sum(check.pair) - odd[0]]
        if third is not None:
            how = f"it came to other gradients {what} than {other} and {names[third]}"
        else:
            how = f"it came to other gradients {what} when it computed it once more, and {other} to the same"
        return Verdict(odd[0], f"{how}: look at its device and its memory")
    one, other = (names[rank] for rank in check.pair)
    if third is not None:
        outcome = f"{names[third]} to yet others"
    else:
        outcome = f"{'both' if odd else 'neither'} to others again"
    return Verdict(
        None,
        f"{one} and {other} came to different gradients {what}, and {outcome}, so nobody can tell who is wrong; "
        "nothing of that step was applied: look at their devices and memory, and for code that does not come to the "
        "same bits twice, before the job is started again from its newest checkpoint",
    )


def describe_open_doubt(check: SpotCheck, names: Sequence[str]) -> str:
    """What is to be told if a member is lost before it is settled who was wrong; ``names`` as for :func:`judge`."""
    one, other = (names[rank] for rank in check.pair)
    return (
        f"{one} and {other} came to different gradients of virtual node {check.virtual_node} in step {check.step}, and "
        f"a worker was lost before it was known who was wrong: {one}'s are computed again"
    )


class Doubted(VirtualFlowError):
    """Two workers came to different gradients of one virtual node; nothing of the attempt was applied."""

    def __init__(self, check: SpotCheck, values: Sequence[int]) -> None:
        super().__init__(f"virtual node {check.virtual_node} came to different gradients in step {check.step}")
        self.check = check
        self.first = {rank: values[rank] for rank in check.pair}
        """The two hashes, by rank."""


class SpotChecker(StepPart):
    """One worker's part in the spot checks.

    Args:
        model: whose gradients.
        seed: of the job.
        virtual_nodes: of the job.
        sample: the share of steps with a check, above 0 and up to 1.
    """

    def __init__(self, model: nn.Module, *, seed: int, virtual_nodes: int, sample: float) -> None:
        self.sample = sample
        self.check: SpotCheck | None = None
        """That of the present attempt."""
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
        """The hash of what is checked."""
        return {"check": self.value}

    def check_headers(self, communicator: Collectives, headers: Sequence[StepHeader]) -> None:
        """See that both hashes are equal.

        Raises:
            Doubted: they are not.
        """
        doubted = self.differs([header.check for header in headers])
        if doubted is not None:
            raise doubted

    def choose(self, step: int, holdings: Sequence[Sequence[int]]) -> None:
        """See whether a virtual node of that step is checked, and by whom."""
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
