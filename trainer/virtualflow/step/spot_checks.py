"""Which virtual node a second worker computes, and who was wrong if it comes to other gradients. Pure functions.

All workers have the same seed and the same assignment, so all know who checks whom. Checks are spread evenly over the
steps and go round over the virtual nodes, so that ``virtual_nodes`` checks in a row have each of them once, and over
those who check. A difference is settled by computing once more: with a third worker, its word counts; of two, the one
that does not come to the same twice was wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

from virtualflow.data import derive_seed

_PARTS = 1 << 20
"""Of a step, in which the first check may be due: few enough that whole steps are added to them without rounding."""


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
        step: counted from 1.
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
    """Who was wrong."""
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
