"""How a queue's capacity is counted and shared between its jobs, and what the jobs make of it: pure.

A satellite: only the operator's admissions load it, for the first job that names a queue.
"""

from virtualflow_operator.queues.admission import QueueAdmission
from virtualflow_operator.queues.allocation import QueueDecision, QueueScene, allocate
from virtualflow_operator.queues.capacity import requested, worker_units
from virtualflow_operator.queues.members import Grant, QueueMember, known_grant
