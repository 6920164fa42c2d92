"""How a queue's capacity is counted and shared between its jobs: pure."""

from virtualflow_operator.queues.allocation import Member, QueueDecision, QueueScene, allocate
from virtualflow_operator.queues.capacity import requested, unfitness, worker_units
from virtualflow_operator.queues.grants import MAX_MESSAGE, Grant, Granted, known_grant, settle_grant, with_allocation
from virtualflow_operator.queues.scaling_history import remember

__all__ = [
    "MAX_MESSAGE",
    "Grant",
    "Granted",
    "Member",
    "QueueDecision",
    "QueueScene",
    "allocate",
    "known_grant",
    "remember",
    "requested",
    "settle_grant",
    "unfitness",
    "with_allocation",
    "worker_units",
]
