"""What becomes of a job whose workers hold different states: it ends before the next update, and says where to look.

Going on from the majority's state would not be right: the gradients of whoever was wrong are in it since that happened.
So the way back is a checkpoint from before, and whatever is newer must not be restored.
"""

from __future__ import annotations

from collections.abc import Sequence

from virtualflow.errors import ConfigurationError, StatesDiffer
from virtualflow.protocol import messages as m
from virtualflow.state import Checkpointer
from virtualflow.step import SETTINGS, Divergence


def end_by_divergence(found: Divergence, members: Sequence[m.Member], checkpointer: Checkpointer) -> StatesDiffer:
    """Set aside the checkpoints that may be wrong; the error that is to end the job, the same on all workers."""
    said = describe_divergence(found, [member.worker for member in members])
    odd = [members[rank].incarnation for rank in found.odd]
    return StatesDiffer(f"{said}; {_way_back(checkpointer, found.agreed)}", odd)


def describe_divergence(found: Divergence, names: Sequence[str]) -> str:
    """One sentence: which tensor, since when, on which workers."""
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
