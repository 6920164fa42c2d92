"""Spot checks in the loop: this worker computes one of another one's virtual nodes, or judges between two others.

What is computed for a check goes through the script's inner loop as any micro-batch does, with the samples and random
streams of its virtual node, and leaves nothing behind but a hash: no gradients, buffers, metrics or lines of the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from virtualflow.errors import CommunicatorBroken, Convicted, VirtualFlowError
from virtualflow.step import Attempt, Doubted, SpotChecker, choose_judges, describe_open_doubt, judge
from virtualflow.worker.setup import Context

Present = Callable[[Attempt], Iterator[Any]]
"""Gives the micro-batch in hand to the script."""


class SpotChecking:
    """One worker's spot checks."""

    def __init__(self, checker: SpotChecker, context: Context, present: Present) -> None:
        self._checker, self._context, self._present = checker, context, present
        self._state = context.session.state

    def begin(self, attempt: Attempt) -> Iterator[Any]:
        check = self._checker.check
        if check is not None and check.checker == self._state.rank:
            self._context.membership.check()
            attempt.timed = False
            yield from self._compute(check.virtual_node, attempt)
            self._context.guard.check()

    def settle(self, attempt: Attempt, doubted: Doubted) -> Generator[Any, None, VirtualFlowError]:
        """Two workers came to different gradients: have the virtual node computed once more, and see who was wrong.

        Returns:
            What the attempt is to end with: ``Convicted``, or the end of the job if nobody can tell.

        Raises:
            CommunicatorBroken: a member was lost meanwhile. Nobody is convicted: the next attempt checks anew what is
                then contributed, if another worker is left to compute it.
        """
        check, checker, communicator = doubted.check, self._checker, self._context.membership.communicator
        judges = choose_judges(check, communicator.size)
        if self._state.rank == check.holder:
            self._context.update.abandon()  # what is in doubt is not kept, whatever comes of it
        if self._state.rank in judges:
            yield from self._compute(check.virtual_node, attempt)
        self._context.session.activity.mark("synchronizing", attempt.number)
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

    def _compute(self, virtual_node: int, attempt: Attempt) -> Iterator[Any]:
        """Hash the gradients of a virtual node that this worker does not contribute now, and forget all else."""
        context = self._context
        context.session.activity.mark("loading samples", attempt.number)
        attempt.batch = context.loading.fetch(range(virtual_node, virtual_node + 1))
        yield from self._present(attempt)
        self._checker.note(attempt.told.weight)
        context.update.sync.discard()
