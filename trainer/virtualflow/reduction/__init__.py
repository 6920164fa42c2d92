"""Sums in the order of a job's summation: within a worker as gradients come, between workers slice by slice, during the
backward pass where that is safe. Bits depend on this package alone, so it knows nothing of membership or models.
"""

from virtualflow.reduction.accumulation import Accumulator, Parts, Tensors
from virtualflow.reduction.early import Early
from virtualflow.reduction.norm import block_norms, clip_by_norm, count_blocks, total_norm
from virtualflow.reduction.overlap import AttemptSpoiled, Overlap
from virtualflow.reduction.ownership import Move, Owners, lost, owned_by, plan_hand_over, plan_moves, plan_owners
from virtualflow.reduction.pipeline import as_raw
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.summation import Summation, choose_summation

__all__ = [
    "Accumulator",
    "AttemptSpoiled",
    "Early",
    "Move",
    "Overlap",
    "Owners",
    "Parts",
    "Reducer",
    "Summation",
    "Tensors",
    "as_raw",
    "block_norms",
    "choose_summation",
    "clip_by_norm",
    "count_blocks",
    "lost",
    "owned_by",
    "plan_hand_over",
    "plan_moves",
    "plan_owners",
    "total_norm",
]
