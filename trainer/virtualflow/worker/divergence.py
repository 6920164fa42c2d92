"""Workers that differ: in their states, which ends the job, or in one gradient, which judges decide about.

A job whose workers hold different states ends before the next update, and says where to look.

Going on from the majority's state would not be right: the gradients of whoever was wrong are in it since that happened.
So the way back is a checkpoint from before, and whatever is newer must not be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from virtualflow.errors import CommunicatorBroken, ConfigurationError, Convicted, StatesDiffer, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.state import Checkpointer
from virtualflow.step import (
    SETTINGS,
    Attempt,
    Divergence,
    Doubted,
    SpotChecker,
    choose_judges,
    describe_open_doubt,
    judge,
)
from virtualflow.worker.setup import Context


def end_by_divergence(found: Divergence, members: Sequence[m.Member], checkpointer: Checkpointer) -> StatesDiffer:
    """Set aside the checkpoints that may be wrong; the error that is to end the job, the same on all workers."""
    said = describe_divergence(found, [member.worker for member in members])
    odd = [members[rank].incarnation for rank in found.odd]
    return StatesDiffer(f"{said}; {_way_back(checkpointer, found.agreed)}", odd)


def describe_divergence(found: Divergence, names: Sequence[str]) -> str:
    if found.keepers and not found.odd:
        who = (
            f"{_listed([names[rank] for rank in found.keepers])}, which both keep it, and nobody can tell who is wrong"
        )
    elif found.odd:
        who = f"{_listed([names[rank] for rank in found.odd])} against {len(names) - len(found.odd)} of {len(names)}"
    else:
        who = f"{_listed(names)}, of which no majority is equal"
    if found.tensor == SETTINGS:
        remedy = (
            "the script sets one, such as the learning rate, from what each worker computes for itself; set it after "
            "the step from step.metrics, which are equal on all workers, or from step.number"
        )
    else:
        remedy = (
            "look at the memory of that machine, and for code that changes the model or the optimizer on some workers "
            "only"
        )
    return (
        f"the workers' states differ before step {found.step}, first in {found.tensor}: {who}; the last state that all "
        f"are known to have had alike is that of step {found.agreed}: {remedy}"
    )


def _way_back(checkpointer: Checkpointer, agreed: int) -> str:
    if not checkpointer.keeps:
        return "there is no checkpoint directory, so the job has to begin anew"
    try:
        step = checkpointer.distrust(agreed)
    except ConfigurationError as error:
        return f"{error}: remove all checkpoints of steps after {agreed} before the job is started again"
    where = "anew" if step < 0 else f"from the checkpoint of step {step}"
    return f"started again, the job goes on {where}; newer checkpoints were renamed to diverged-step-…"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# Spot checks in the loop: this worker computes one of another one's virtual nodes, or judges between two others.
#
# What is computed for a check goes through the script's inner loop as any micro-batch does, with the samples and random
# streams of its virtual node, and leaves nothing behind but a hash: no gradients, buffers, metrics or lines of the
# audit.

Present = Callable[[Attempt], Iterator[Any]]


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
