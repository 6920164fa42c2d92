"""What people and programs see of the operator: logs, metrics, health."""

from virtualflow_operator.observability.health import HealthServer, queue_moves
from virtualflow_operator.observability.logs import configure, job_context
from virtualflow_operator.observability.metrics import JobSample, Metrics, QueueSample, sample
