"""Sums in the order of a job's summation: within a worker as gradients come, between workers slice by slice, during the
backward pass where that is safe. Bits depend on this package alone, so it knows nothing of membership or models.
"""

from virtualflow.reduction.accumulation import Accumulator, Addition, Parts, Tensors, separate
from virtualflow.reduction.bucket_exchange import as_raw
from virtualflow.reduction.early import Early
from virtualflow.reduction.offload import HostMemory, Offload, choose_offloaded, plan_offload
from virtualflow.reduction.overlap import AttemptSpoiled, Overlap, Settled
from virtualflow.reduction.ownership import Move, Owners, lost, owned_by, plan_hand_over, plan_moves, plan_owners
from virtualflow.reduction.program import UpdateRule
from virtualflow.reduction.reducer import Reducer, Scheduled
from virtualflow.reduction.schedule import Choose, choose_programs
from virtualflow.reduction.settings import Exchange
from virtualflow.reduction.summation import Summation, choose_summation

__all__ = [
    "Accumulator",
    "Addition",
    "AttemptSpoiled",
    "Choose",
    "Early",
    "Exchange",
    "HostMemory",
    "Move",
    "Offload",
    "Overlap",
    "Owners",
    "Parts",
    "Reducer",
    "Scheduled",
    "Settled",
    "Summation",
    "Tensors",
    "UpdateRule",
    "as_raw",
    "choose_offloaded",
    "choose_programs",
    "choose_summation",
    "lost",
    "owned_by",
    "plan_hand_over",
    "plan_moves",
    "plan_offload",
    "plan_owners",
    "separate",
]
