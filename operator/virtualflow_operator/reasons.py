"""Reasons of conditions and events. Users' programs depend on them: they may be added to, never renamed."""

# Progressing
STARTING = "Starting"
TRAINING = "Training"
SCALING = "Scaling"
ROLLING = "RollingUpdate"
EFFICIENT = "LimitedByEfficiency"
BACK_OFF = "BackOff"
INVALID_SPEC = "InvalidSpec"
TEMPLATE_REJECTED = "TemplateRejected"
CREATION_REFUSED = "CreationRefused"
UNSCHEDULABLE = "Unschedulable"
CANNOT_START = "CannotStart"
FINISHED = "Finished"
# Ready
WAITING = "WaitingForWorkers"
COORDINATOR_UNREACHABLE = "CoordinatorUnreachable"
COORDINATOR_MISBEHAVES = "CoordinatorMisbehaves"
TOKEN_REFUSED = "TokenRefused"
PROTOCOL_MISMATCH = "ProtocolMismatch"
# Degraded
AS_WANTED = "AsWanted"
FEWER_WORKERS = "FewerWorkers"
# Suspended
SUSPENDING = "Suspending"
SUSPENDED = "Suspended"
RESUMED = "Resumed"
NOT_SUSPENDED = "NotSuspended"
# Allocated
ALLOCATED = "Allocated"
QUEUED = "Queued"
QUEUE_MISSING = "QueueMissing"
QUEUE_NOT_READY = "QueueNotReady"
NEVER_FITS = "NeverFits"
# NonFinite
METRIC_NOT_FINITE = "MetricNotFinite"
METRICS_FINITE = "MetricsFinite"
# CheckpointFailed
CHECKPOINT_NOT_WRITTEN = "CheckpointNotWritten"
CHECKPOINT_WRITTEN = "CheckpointWritten"
# Complete, Failed
COMPLETE = "Complete"
NOT_FINISHED = "NotFinished"
BACK_OFF_LIMIT = "BackoffLimitExceeded"
DEADLINE = "DeadlineExceeded"
# Events only
CREATED = "WorkersCreated"
RESIZED = "Resized"
REBALANCED = "Rebalanced"
RECOVERED = "Recovered"
RESTARTED = "Restarted"
DRAINING = "Draining"
LOST = "WorkerLost"
COORDINATOR_LOST = "CoordinatorLost"
CRASHED = "WorkerCrashed"

# Of a queue's Ready
SHARING = "Sharing"
NO_NODES = "NoNodes"
NO_CAPACITY = "NoCapacity"
NODES_UNKNOWN = "NodesUnknown"
UNKNOWN_POLICY = "UnknownPolicy"
INVALID_QUEUE = "InvalidQueue"
