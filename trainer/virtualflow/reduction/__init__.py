"""Sums in the order of a job's summation: within a worker as gradients come, between workers slice by slice, during the
backward pass where that is safe. Bits depend on this package alone, so it knows nothing of membership or models.
"""

from virtualflow.reduction.accumulation import Accumulator, Parts, Tensors
from virtualflow.reduction.early import Early
from virtualflow.reduction.norm import block_norms, clip_by_norm, count_blocks, total_norm
from virtualflow.reduction.overlap import AttemptSpoiled, Overlap
from virtualflow.reduction.ownership import (
    Move,
    Owners,
    Piece,
    Row,
    Shares,
    lost,
    plan_hand_over,
    plan_moves,
    share_row,
)
from virtualflow.reduction.pipeline import as_raw
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.spans import Spans, covers, difference, intersection, union
from virtualflow.reduction.summation import Summation, choose_summation

__all__ = [
    "Accumulator",
    "AttemptSpoiled",
    "Early",
    "Move",
    "Overlap",
    "Owners",
    "Parts",
    "Piece",
    "Reducer",
    "Row",
    "Shares",
    "Spans",
    "Summation",
    "Tensors",
    "as_raw",
    "block_norms",
    "choose_summation",
    "clip_by_norm",
    "count_blocks",
    "covers",
    "difference",
    "intersection",
    "lost",
    "plan_hand_over",
    "plan_moves",
    "share_row",
    "total_norm",
    "union",
]
