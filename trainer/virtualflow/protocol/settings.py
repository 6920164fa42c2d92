"""What every process of a job must agree on: names of environment variables, limits of messages, common defaults.

Durations are seconds and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

ENV_COORDINATOR = "VIRTUALFLOW_COORDINATOR"
ENV_TOKEN = "VIRTUALFLOW_TOKEN"
"""In plaintext: what all of a job share, and whoever knows it may do everything."""
ENV_IDENTITY = "VIRTUALFLOW_IDENTITY"
"""The folder of a process's identity (``identity``); with it, connections are mutual TLS and no token is needed."""
ENV_WORKER = "VIRTUALFLOW_WORKER"
ENV_ADDRESS = "VIRTUALFLOW_ADDRESS"
ENV_VIRTUAL_NODES = "VIRTUALFLOW_VIRTUAL_NODES"
ENV_CHECKPOINT_DIR = "VIRTUALFLOW_CHECKPOINT_DIR"
ENV_CHECKPOINT_STEPS = "VIRTUALFLOW_CHECKPOINT_STEPS"
ENV_CHECKPOINT_SECONDS = "VIRTUALFLOW_CHECKPOINT_SECONDS"
ENV_CHECKPOINT_KEEP = "VIRTUALFLOW_CHECKPOINT_KEEP"
ENV_CHECKPOINT_MEMORY = "VIRTUALFLOW_CHECKPOINT_MEMORY"
ENV_SIGN = "VIRTUALFLOW_SIGN"
"""The file of the private key that signs checkpoints: a path, never the key."""
ENV_TRUST = "VIRTUALFLOW_TRUST"
ENV_AUDIT_DIR = "VIRTUALFLOW_AUDIT_DIR"
ENV_TRACE_DIR = "VIRTUALFLOW_TRACE_DIR"
ENV_TRACE_REPEAT = "VIRTUALFLOW_TRACE_REPEAT"
ENV_EXPLAIN_OUT = "VIRTUALFLOW_EXPLAIN_OUT"
ENV_TURNS = "VIRTUALFLOW_TURNS"
ENV_THREADS = "VIRTUALFLOW_THREADS"
ENV_LAUNCH = "VIRTUALFLOW_LAUNCH"
"""Which process of a worker of several this one is, as START/RANK/COUNT: what names this start of the worker, its
place from 0, and how many there are."""
ENV_LOCAL_RANK = "LOCAL_RANK"
ENV_LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""The latter two for scripts, under the names that other launchers use. The library does not read them."""
ENV_REPRODUCIBILITY = "VIRTUALFLOW_REPRODUCIBILITY"
ENV_MAX_FUSED = "VIRTUALFLOW_MAX_FUSED"
ENV_ON_NON_FINITE = "VIRTUALFLOW_ON_NON_FINITE"
ENV_VERIFY = "VIRTUALFLOW_VERIFY"
ENV_DEVICE_MEMORY = "VIRTUALFLOW_DEVICE_MEMORY"
ENV_HOST_MEMORY = "VIRTUALFLOW_HOST_MEMORY"
ENV_ACTIVATIONS = "VIRTUALFLOW_ACTIVATIONS"
ENV_OPTIMIZER_PLACEMENT = "VIRTUALFLOW_OPTIMIZER_PLACEMENT"
ENV_BACKWARD = "VIRTUALFLOW_BACKWARD"
ENV_SHARD = "VIRTUALFLOW_SHARD"
ENV_REDUNDANCY = "VIRTUALFLOW_REDUNDANCY"
ENV_PROFILE = "VIRTUALFLOW_PROFILE"
ENV_PROFILE_OUT = "VIRTUALFLOW_PROFILE_OUT"
ENV_PROFILE_SIZES = "VIRTUALFLOW_PROFILE_SIZES"
ENV_TERMINATION_LOG = "VIRTUALFLOW_TERMINATION_LOG"
ENV_HANG_SECONDS = "VIRTUALFLOW_HANG_SECONDS"
ENV_CONFIRMED_START = "VIRTUALFLOW_CONFIRMED_START"
ENV_LOG_DIR = "VIRTUALFLOW_LOG_DIR"
ENV_HASH_SEED = "PYTHONHASHSEED"
"""Python's own: without it the order of a set of strings is another one in each process."""
HASH_SEED = 0
"""What whoever starts workers gives all of them."""
ENV_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE = ":4096:8"
"""With it cuBLAS gives the same bits from call to call (its documentation, "Results reproducibility"). torch reads it
once, at the first product on a GPU, perhaps before a job begins: so whoever starts workers gives it to them."""

VIRTUAL_NODES = 8
"""Virtual nodes of a job that names no number."""

WORKERS = 2
"""Workers of ``virtualflow run`` without ``--workers``: the fewest that survive the loss of one."""

BACKOFF_LIMIT = 6
"""``virtualflow run`` with a script: replacements in a row without a step in between before the job has failed."""
MAX_MANIFEST = 3 << 20
"""Bytes of a manifest; the API server refuses larger objects, too."""

MANIFEST_BACKOFF_LIMIT = 3
"""``spec.backoffLimit`` of a manifest that names none, in a cluster and by ``virtualflow run -f``."""

MAX_VIRTUAL_NODES = 65_536
MAX_WORKERS = 4_096

MAX_PROCESSES = 64
"""Of one worker."""

MAX_CLASSES = 64
"""Classes of virtual nodes whose backward passes go equally far."""

MAX_NAME = 253
"""A worker's name is a pod's name: at most 253 characters."""

MAX_SENTENCE = 4_096
"""Characters of a sentence in a message; a longer one is refused, so senders cut theirs below it."""

MAX_WORD = 63
"""Characters of a kind or a cause in a message."""

MAX_TEXT = 4_000
"""Where they cut it."""

MAX_REASON = 400
"""Characters of a part of such a sentence."""

MAX_MESSAGE = 1 << 20
"""The largest message or request body that the coordinator reads; a larger one is refused."""

MAX_UNPACKED = 8 << 20
"""What a message may hold once it is inflated: a generation of ``MAX_WORKERS`` takes a quarter of it."""

MAX_VALUES = 1 << 17
"""Values of all lists and objects of a message or status together. A status with ``2 * MAX_WORKERS`` workers and all
else at its limit has fewer. Decoded, so many take 10 MiB, and those that fit into ``MAX_UNPACKED`` take 60."""

DEFLATED = 4_096
"""Messages above this size travel deflated: a generation's members shrink to a quarter, keys of a rendezvous more."""

MAX_KEY = 65_536
"""Bytes of one value of a generation's rendezvous."""

MAX_TRACEBACK = 16_384
"""Characters of a traceback that travel to the status; the end of it is what counts."""

MAX_CHANGES = 1_000
"""Membership changes that a job remembers in its status and state; the oldest go first."""

RECORD_KEEPERS = 3
"""Members, the first by rank, that keep the record of the job for coordinators to come."""

MAX_METRICS = 4_096
"""Metrics that a worker tells of and a job's status shows: the first ones."""

MAX_RUNS = 100
"""Ended runs of a script that a job remembers; the oldest go first."""

MAX_LISTED = 1_024
"""Events and lost workers in a status, at most; a coordinator keeps fewer."""

MAX_TERMINATION_MESSAGE = 4_096
"""Bytes of what a worker writes when it ends: what Kubernetes shows of a termination log."""

MAX_TERMINATION_METRICS = 16
"""Metrics in such a message."""

CHECKPOINT_KEEP = 3

CHECKPOINT_SECONDS = 60.0
"""With a checkpoint directory and no interval, a checkpoint is written this often."""

THREADS = 1
"""Threads of a worker's CPU kernels. Sums inside a kernel depend on it, so it is part of what makes bits equal."""

Reproducibility = Literal["bitwise", "statistical"]
"""Whether the result is the same to the bit on any number of workers, or in distribution."""

REPRODUCIBILITY: dict[str, Reproducibility] = {"Bitwise": "bitwise", "Statistical": "statistical"}
"""What a manifest and the environment may ask for, and what ``vf.elastic`` calls it."""

OnNonFinite = Literal["Continue", "Stop"]
"""What a job does once a metric is NaN or infinite: train on, or fail before it writes another checkpoint."""

ON_NON_FINITE: dict[str, OnNonFinite] = {"Continue": "Continue", "Stop": "Stop"}

ActivationsChoice = Literal["auto", "keep", "recompute", "swap"]
"""What becomes of the activations of a model's blocks under a budget of memory."""

ACTIVATIONS: dict[str, ActivationsChoice] = {
    "Auto": "auto", "Keep": "keep", "Recompute": "recompute", "Swap": "swap"
}  # fmt: skip

Placement = Literal["device", "host"]
"""Where the optimizer steps, and has its state."""

PLACEMENTS: dict[str, Placement] = {"Device": "device", "Host": "host"}

ShardChoice = Literal["parameters", "hybrid", "optimizer", "none"]
"""What is divided over the workers: the parameters with the optimizer's state, that state while each worker has the
parameters among its processes, that state alone, or nothing."""

SHARD_CHOICES: dict[str, ShardChoice] = {
    "Parameters": "parameters", "Hybrid": "hybrid", "Optimizer": "optimizer", "None": "none"
}  # fmt: skip

Redundancy = Literal["peer", "checkpoint", "none"]
"""Who else has a worker's share of what is divided: another worker, a checkpoint, or nobody."""

REDUNDANCIES: dict[str, Redundancy] = {"Peer": "peer", "Checkpoint": "checkpoint", "None": "none"}

HEARTBEAT_LIMIT = 5.0
"""A worker that was silent for this long is lost."""

DRAIN_GRACE = 30.0
"""The deadline of a drain that names none: what Kubernetes gives a pod."""

STOP_GRACE = 30.0
"""``virtualflow run``: how long a drain of the whole job may take before it is killed."""


@dataclass(frozen=True)
class SignalSettings:
    """The client of the coordinator's HTTP API, for whoever signals or watches a job."""

    request_timeout: float = 5.0
    """One request, from connecting to its answer."""
    retry_first: float = 0.05
    """The first wait between two tries of a request; it doubles."""
    retry_most: float = 0.5
    """The longest such wait."""
    patience: float = 15.0
    """How long a request is repeated while no coordinator answers: it may be restarting."""
    max_answer: int = 64 << 20
    """The largest answer or status that is read."""


# How far backward passes go, as a manifest says it, and what the coordinator knows of it to assign virtual nodes.

Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]


class BackwardSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """``spec.backward`` of a job: what :class:`virtualflow.PartialBackward` says, but for the model's blocks."""

    fractions: Annotated[tuple[Fraction, ...], msgspec.Meta(min_length=1, max_length=MAX_CLASSES)]
    rotate: bool = True
    scale: Literal["Mean", "Sum"] = "Mean"
    full_every: Annotated[int, msgspec.Meta(ge=1)] | None = None


class PassClass(msgspec.Struct, frozen=True):
    """Neighbouring virtual nodes whose backward passes go equally far, for a job's life."""

    cost: Fraction
    """The computing of one, as a share of that of a virtual node with a whole pass; on average over the steps."""
    reach: Fraction
    """The part of the model's blocks that the longest of its passes reaches: with it goes what activations take."""


_FORWARD_SHARE = 1 / 3
"""Of computing a virtual node, the forward pass: a backward pass multiplies twice as often."""


def cost_of(fraction: float) -> float:
    """The computing of a virtual node whose pass reaches that part of the blocks, as a share of a whole one's."""
    return _FORWARD_SHARE + (1 - _FORWARD_SHARE) * fraction


def class_of(virtual_node: int, virtual_nodes: int, classes: int) -> int:
    """Of equally large classes of neighbours, the one to which a virtual node belongs."""
    return virtual_node * classes // virtual_nodes
