"""How a queue's capacity is counted and shared between its jobs: pure."""

from virtualflow_operator.queues.allocation import QueueDecision, QueueScene, allocate
from virtualflow_operator.queues.capacity import requested, worker_units
from virtualflow_operator.queues.grants import (
    MAX_MESSAGE,
    Grant,
    Granted,
    decision,
    known_grant,
    settle_grant,
    with_allocation,
)
from virtualflow_operator.queues.kinds import ANY, kind_of, opposite, terms_of
from virtualflow_operator.queues.kueue import (
    Chain,
    Kueue,
    admitted_counts,
    chain_of,
    follows_kueue,
    settle_admission,
)
from virtualflow_operator.queues.members import Member
from virtualflow_operator.queues.node_fit import could_take, is_made_for
from virtualflow_operator.queues.scaling_history import remember

__all__ = [
    "ANY",
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
    "could_take",
    "decision",
    "follows_kueue",
    "is_made_for",
    "kind_of",
    "known_grant",
    "opposite",
    "remember",
    "requested",
    "settle_admission",
    "settle_grant",
    "terms_of",
    "with_allocation",
    "worker_units",
]
