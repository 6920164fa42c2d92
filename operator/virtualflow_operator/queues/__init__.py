"""How a queue's capacity is counted and shared between its jobs: pure."""

from virtualflow_operator.queues.allocation import Member, QueueDecision, QueueScene, allocate
from virtualflow_operator.queues.capacity import requested, unfitness, worker_units
from virtualflow_operator.queues.grants import (
    MAX_MESSAGE,
    Grant,
    Granted,
    decision,
    known_grant,
    settle_grant,
    with_allocation,
)
from virtualflow_operator.queues.kueue import (
    Chain,
    Kueue,
    admitted_counts,
    chain_of,
    follows_kueue,
    settle_admission,
)
from virtualflow_operator.queues.scaling_history import remember

__all__ = [
    "MAX_MESSAGE",
    "Chain",
    "Grant",
    "Granted",
    "Kueue",
    "Member",
    "QueueDecision",
    "QueueScene",
    "admitted_counts",
    "allocate",
    "chain_of",
    "decision",
    "follows_kueue",
    "known_grant",
    "remember",
    "requested",
    "settle_admission",
    "settle_grant",
    "unfitness",
    "with_allocation",
    "worker_units",
]
