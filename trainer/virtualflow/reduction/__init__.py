"""Sums in the order of a job's summation: within a worker as gradients come, between workers slice by slice, during the
backward pass where that is safe. Bits depend on this package alone, so it knows nothing of membership or models.
"""

from virtualflow.protocol.tree import Key
from virtualflow.reduction.accumulation import (
    OWN_TYPES,
    Accumulator,
    Addition,
    Parts,
    Precision,
    Summation,
    Tensors,
    choose_summation,
    deal,
    multiply,
    separate,
    sum_up,
)
from virtualflow.reduction.bucket_exchange import as_raw
from virtualflow.reduction.buckets import Reach
from virtualflow.reduction.norm import block_norms, clip_by_norm, count_blocks, total_norm
from virtualflow.reduction.offload import (
    FileMemory,
    HostMemory,
    Landing,
    Offload,
    choose_offloaded,
    host_memory,
    plan_offload,
)
from virtualflow.reduction.overlap import AttemptSpoiled, Overlap, Settled
from virtualflow.reduction.ownership import (
    Move,
    Portions,
    Row,
    Shares,
    Spans,
    Stretch,
    covers,
    difference,
    holders,
    intersection,
    lost,
    plan_hand_over,
    plan_moves,
    share_row,
    union,
)
from virtualflow.reduction.pipeline import Early
from virtualflow.reduction.reducer import Reducer, Scheduled
from virtualflow.reduction.schedule import Choose, choose_ways, stages
from virtualflow.reduction.settings import Exchange
from virtualflow.reduction.traffic import Passage, summarize
