"""The API server at arm's length: a client, a cache of what the watches have told, leader election, events."""

from virtualflow_operator.k8s.cache import Key, Store, key_of, queue_key
from virtualflow_operator.k8s.client import (
    EVENTS,
    FLAVORS,
    JOBS,
    LEASES,
    NETWORK_POLICIES,
    PDBS,
    PODS,
    PRIORITY_CLASSES,
    QUEUES,
    SECRETS,
    SERVICES,
    WORKLOADS,
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    KubeApi,
    NotFound,
    Resource,
)
from virtualflow_operator.k8s.event_recorder import EventRecorder, TokenBucket
from virtualflow_operator.k8s.following import OURS, ForeignPodWatch, WatchPace, WorkloadWatch, relist
from virtualflow_operator.k8s.leader_election import LeaseThread, leave_at_once
from virtualflow_operator.k8s.nesting import DeepObjects, WatchLines, bounded_response
from virtualflow_operator.k8s.readers import Readers
