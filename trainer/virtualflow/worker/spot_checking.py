"""Spot checks in the loop: this worker computes one of another one's virtual nodes, or judges between two others.

What is computed for a check goes through the script's inner loop as any micro-batch does, with the samples and random
streams of its virtual node, and leaves nothing behind but a hash: no gradients, buffers, metrics or lines of the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from virtualflow.data import MicroBatch
from virtualflow.errors import CommunicatorBroken, Convicted, VirtualFlowError
from virtualflow.step import Doubted, choose_judges, describe_open_doubt, judge
from virtualflow.worker.setup import Context

Present = Callable[[MicroBatch, int], Iterator[Any]]
"""Gives a micro-batch to the script, for a step."""


class SpotChecking:
    """One worker's spot checks.

    Args:
        context: the parts of the run.
        present: see :data:`Present`.
        weight: what the script has told that the micro-batch counts by.
    """

    def __init__(self, context: Context, present: Present, weight: Callable[[], float | None]) -> None:
        self._context = context
        self._present = present
        self._weight = weight
        self._checker = context.update.spot_checker
        self._state = context.session.state

    def begin(self, number: int) -> Iterator[Any]:
        """An attempt at the step ``number`` begins: compute another worker's virtual node, if this one is to."""
        if self._checker is None:
            return
        self._checker.begin(number, self._state.holdings)
        check = self._checker.check
        if check is not None and check.checker == self._state.rank:
            self._context.membership.check()
            self._context.pace.disregard()
            self._context.turns.take(number, self._context.membership.check)
            yield from self._compute(check.virtual_node, number)
            self._context.guard.check()

    def note(self, virtual_node: int) -> None:
        """A virtual node that this worker contributes has been computed; its gradients are as autograd left them."""
        check = None if self._checker is None else self._checker.check
        if self._checker is not None and check is not None and check.virtual_node == virtual_node:
            self._checker.note(self._weight())

    def settle(self, number: int, doubted: Doubted) -> Generator[Any, None, VirtualFlowError]:
        """Two workers came to different gradients: have the virtual node computed once more, and see who was wrong.

        Returns:
            What the attempt is to end with: ``Convicted``, or the end of the job if nobody can tell.

        Raises:
            CommunicatorBroken: a member was lost meanwhile. Nobody is convicted: the next attempt checks anew what is
                then contributed, if another worker is left to compute it.
        """
        check, checker, communicator = doubted.check, self._checker, self._context.membership.communicator
        assert checker is not None
        judges = choose_judges(check, communicator.size)
        if self._state.rank == check.holder:
            self._context.update.abandon()  # what is in doubt is not kept, whatever comes of it
        if self._state.rank in judges:
            yield from self._compute(check.virtual_node, number)
        self._context.session.activity.mark("synchronizing", number)
        mine = torch.tensor([checker.value], dtype=torch.int64).view(torch.uint8)
        members = communicator.plan.members
        names = [member.worker for member in members]
        try:
            values = communicator.all_gather(mine).contiguous().view(-1).view(torch.int64).tolist()
        except CommunicatorBroken:
            if self._state.rank in check.pair:
                self._context.session.note("warning", describe_open_doubt(check, names))
            raise
        verdict = judge(check, doubted.first, {rank: values[rank] for rank in judges}, names)
        if verdict.odd is None:
            return VirtualFlowError(verdict.reason)
        return Convicted(members[verdict.odd].incarnation, verdict.reason)

    def _compute(self, virtual_node: int, number: int) -> Iterator[Any]:
        """Hash the gradients of a virtual node that this worker does not contribute now, and forget all else."""
        context = self._context
        assert self._checker is not None
        context.session.activity.mark("loading samples", number)
        batch = context.loading.fetch(range(virtual_node, virtual_node + 1))
        context.session.activity.mark("computing", number)
        yield from self._present(batch, number)
        self._checker.note(self._weight())
        context.update.sync.discard()
