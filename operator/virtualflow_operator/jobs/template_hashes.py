"""What pods are made from, as a hash: a pod with another one is replaced. Pure.

An operator that computes another hash for the same job restarts every job of the cluster. So what is hashed is named
here, since a newer schema gives each job its new defaults; a field comes in only where it is no default.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from virtualflow_operator.api import Job, Object, WorkerGroup

_CHECKPOINT = ("directory", "everySeconds", "everySteps", "keep", "volume")
"""Fields of ``spec.checkpoint`` that a worker's pod is made from."""


def template_hash(job: Job, group: WorkerGroup) -> str:
    """What a worker's pod is made from. A profile is not in it: it is but a first guess."""
    checkpoint = job.raw["spec"].get("checkpoint")
    if checkpoint is not None:
        checkpoint = {field: checkpoint[field] for field in _CHECKPOINT if field in checkpoint}
    made_from = {"template": group.template, "checkpoint": checkpoint}
    if job.spec.on_non_finite != "Continue":
        made_from["onNonFinite"] = job.spec.on_non_finite
    if job.spec.checkpoint is not None and job.spec.checkpoint.memory:
        made_from["checkpointMemory"] = True
    if group.memory is not None:
        made_from["memory"] = [group.memory.device, group.memory.host, group.memory.activations]
    return hash_of(made_from)


def coordinator_hash(job: Job) -> str:
    """What the coordinator's pod is made from; as for workers, nothing of it may change with the operator."""
    elasticity = job.spec.elasticity
    made_from: Object = {"template": job.spec.coordinator.template, "heartbeat": elasticity.heartbeat_limit_seconds}
    if elasticity.hang_seconds is not None:
        made_from["hang"] = elasticity.hang_seconds
    return hash_of(made_from)


@dataclass(frozen=True)
class TemplateHashes:
    groups: Mapping[str, str]
    coordinator: str
    all: str


def hash_templates(job: Job) -> TemplateHashes:
    groups, coordinator = [template_hash(job, group) for group in job.spec.worker_groups], coordinator_hash(job)
    names = (group.name for group in job.spec.worker_groups)
    return TemplateHashes(dict(zip(names, groups, strict=True)), coordinator, hash_of([coordinator, *groups]))


def hash_of(value: Any) -> str:
    """Sixteen hexadecimal digits of what JSON can say."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
