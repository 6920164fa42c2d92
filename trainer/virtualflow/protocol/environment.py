"""What a worker is told through its environment, read and checked; the variables' names stand in ``settings``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from virtualflow._start import from_start
from virtualflow.errors import ConfigurationError
from virtualflow.protocol import settings as names
from virtualflow.protocol.settings import (
    ACTIVATIONS,
    ON_NON_FINITE,
    PLACEMENTS,
    REDUNDANCIES,
    REPRODUCIBILITY,
    SHARD_CHOICES,
    THREADS,
    ActivationsChoice,
    BackwardSpec,
    OnNonFinite,
    Placement,
    Redundancy,
    Reproducibility,
    ShardChoice,
)

if TYPE_CHECKING:
    from virtualflow.protocol.identity import Credential  # loads what few commands need

Chosen = TypeVar("Chosen", bound=str)

ABOVE_ZERO = math.ulp(0.0)
"""The least number above 0."""


def read_number(name: str, kind: type[int] | type[float], least: float) -> int | float | None:
    """Read a number from the environment variable ``name``; ``None`` when it is not set or empty."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not number >= least:
        what = "a whole number" if kind is int else "a number"
        bound = "above 0" if least == ABOVE_ZERO else f"of at least {least:g}"
        raise ConfigurationError(f"{name}={text!r} must be {what} {bound}; correct or unset it")
    return number


def read_credential(url: str | None = None) -> Credential:
    """By what this process's environment says that it is known: an identity, or else the token of a job in plaintext.

    Args:
        url: of the coordinator that it is for; one that begins with http:// takes a token only.

    Raises:
        ConfigurationError: it says nothing, or names what is no identity.
    """
    identity, token = _path(names.ENV_IDENTITY), os.environ.get(names.ENV_TOKEN, "").strip()
    plain = url is not None and not url.startswith("https://")
    if identity is not None and not plain:
        from virtualflow.protocol.identity import Identity

        return Identity(identity)
    if not token:
        raise ConfigurationError(
            f"set {names.ENV_TOKEN} to the job's token (the one beside {names.ENV_COORDINATOR} of its workers), or, "
            f"for an address with https://, {names.ENV_IDENTITY} to the folder of an identity"
        )
    return token


@dataclass(frozen=True)
class LocalPlace:
    """Which process of a worker of several processes this one is."""

    launch: str
    """Names the start of that worker, which its processes have in common."""
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls) -> LocalPlace | None:
        """``None``: this process is its worker.

        Raises:
            ConfigurationError: what it is told cannot be.
        """
        text = os.environ.get(names.ENV_LAUNCH, "").strip()
        if not text:
            return None
        launch, _, numbers = text.partition("/")
        rank, _, size = numbers.partition("/")
        known = launch and rank.isdecimal() and size.isdecimal()
        if not known or not (int(rank) < int(size) and 2 <= int(size) <= names.MAX_PROCESSES):
            raise ConfigurationError(
                f"{names.ENV_LAUNCH}={text!r} does not say which process of its worker this is, as START/RANK/COUNT "
                "does; leave it to virtualflow"
            )
        return cls(launch, int(rank), int(size))

    def __str__(self) -> str:
        return f"{self.launch}/{self.local_rank}/{self.local_world_size}"


@dataclass(frozen=True)
class WorkerEnvironment:
    """What a worker is told through its environment (see the outside contracts in docs/design.md)."""

    coordinator: str | None
    token: str
    worker: str
    address: str
    virtual_nodes: int | None
    checkpoint_dir: Path | None
    checkpoint_steps: int | None
    checkpoint_seconds: float | None
    checkpoint_keep: int | None
    audit_dir: Path | None
    threads: int
    reproducibility: Reproducibility | None
    """``None``: the script says."""
    max_fused: int | None
    """The most virtual nodes of a micro-batch in a statistical job; ``None``: the script says."""
    on_non_finite: OnNonFinite = "Continue"
    """What to do once a metric is NaN or infinite."""
    verify: float = 0.0
    """In which share of the steps another worker computes one virtual node again."""
    checkpoint_memory: bool = False
    """Whether the only worker of a job keeps a copy of the state in the coordinator's memory."""
    sign: Path | None = None
    """The private key that signs checkpoints; ``None``: the script says."""
    trust: Path | None = None
    """The public keys whose checkpoints are taken; ``None``: the script says."""
    device_memory: int | None = None
    """Bytes of the device that this worker may use; ``None``: the script says."""
    host_memory: int | None = None
    """Bytes of the host for what is swapped; ``None``: as much as is needed, or as the script says."""
    activations: ActivationsChoice | None = None
    """What becomes of them within that; ``None``: the script says."""
    optimizer: Placement | None = None
    """Where the optimizer steps; ``None``: the script says."""
    backward: BackwardSpec | None = None
    """How far backward passes go; ``None``: the script says."""
    shard: ShardChoice | None = None
    """What is divided over the workers; ``None``: the script says."""
    redundancy: Redundancy | None = None
    """Who else has a worker's share of it; ``None``: the script says."""
    profile: Path | None = None
    """A profile of this device, for a first guess of its speed."""
    profile_out: Path | None = None
    """Where to write one: the script is run to be measured, not to train."""
    profile_sizes: tuple[int, ...] = ()
    """The sizes to measure, in virtual nodes; none: those that suggest themselves."""
    trace_dir: Path | None = None
    """Where to note what is computed, as hashes."""
    trace_repeat: int | None = None
    """A step to attempt twice, while that is noted."""
    explain_out: Path | None = None
    """Where to write down how gradients travel."""
    turns: Path | None = None
    """The socket of the turn server, where the device is shared with other jobs."""
    identity: Path | None = None
    """The folder of this worker's identity; ``None``: connections are in plaintext."""
    place: LocalPlace | None = None
    """``None``: this process is the worker."""

    @cached_property
    def credential(self) -> Credential:
        """By what the coordinator knows this worker."""
        if self.identity is None:
            return self.token
        from virtualflow.protocol.identity import Identity

        return Identity(self.identity)

    @property
    def job(self) -> str:
        """What tells the job from others: its uid, or its token."""
        return self.credential if isinstance(self.credential, str) else self.credential.party.job

    @classmethod
    def read(cls) -> WorkerEnvironment:
        """Read the environment of this process.

        Raises:
            ConfigurationError: a variable is malformed, or a coordinator is named without a token.
        """
        coordinator = os.environ.get(names.ENV_COORDINATOR, "").strip().rstrip("/") or None
        token = os.environ.get(names.ENV_TOKEN, "").strip()
        if coordinator and not coordinator.startswith(("http://", "https://")):
            raise ConfigurationError(f"{names.ENV_COORDINATOR}={coordinator!r} must look like http://host:port")
        identity = _path(names.ENV_IDENTITY)
        if coordinator and coordinator.startswith("https://") != (identity is not None):
            raise ConfigurationError(
                f"{names.ENV_COORDINATOR}={coordinator!r} does not fit: with {names.ENV_IDENTITY} it begins with "
                "https://, and without it (a job in plaintext) with http://; give what belongs together"
            )
        if coordinator and not token and identity is None:
            raise ConfigurationError(
                f"{names.ENV_COORDINATOR} is set but {names.ENV_TOKEN} is not; set both, or neither to run alone"
            )
        device_memory, host_memory = _whole(names.ENV_DEVICE_MEMORY), _whole(names.ENV_HOST_MEMORY)
        activations = _choice(names.ENV_ACTIVATIONS, ACTIVATIONS)
        for name, given in ((names.ENV_HOST_MEMORY, host_memory), (names.ENV_ACTIVATIONS, activations)):
            if given is not None and device_memory is None:
                raise ConfigurationError(
                    f"{name} is set but {names.ENV_DEVICE_MEMORY} is not; set both, or let the script say"
                )
        return cls(
            coordinator=coordinator,
            token=token,
            worker=os.environ.get(names.ENV_WORKER, "").strip() or f"worker-{os.getpid()}",
            address=os.environ.get(names.ENV_ADDRESS, "").strip() or "127.0.0.1",
            virtual_nodes=_whole(names.ENV_VIRTUAL_NODES),
            checkpoint_dir=_path(names.ENV_CHECKPOINT_DIR),
            checkpoint_steps=_whole(names.ENV_CHECKPOINT_STEPS),
            checkpoint_seconds=read_number(names.ENV_CHECKPOINT_SECONDS, float, ABOVE_ZERO),
            checkpoint_keep=_whole(names.ENV_CHECKPOINT_KEEP),
            audit_dir=_path(names.ENV_AUDIT_DIR),
            threads=_whole(names.ENV_THREADS) or THREADS,
            reproducibility=_choice(names.ENV_REPRODUCIBILITY, REPRODUCIBILITY),
            max_fused=_whole(names.ENV_MAX_FUSED),
            on_non_finite=_choice(names.ENV_ON_NON_FINITE, ON_NON_FINITE) or "Continue",
            verify=_share(names.ENV_VERIFY),
            checkpoint_memory=_choice(names.ENV_CHECKPOINT_MEMORY, {"1": "1", "0": "0"}) == "1",
            sign=_path(names.ENV_SIGN),
            trust=_path(names.ENV_TRUST),
            device_memory=device_memory,
            host_memory=host_memory,
            activations=activations,
            optimizer=_choice(names.ENV_OPTIMIZER_PLACEMENT, PLACEMENTS),
            backward=_backward(),
            shard=_choice(names.ENV_SHARD, SHARD_CHOICES),
            redundancy=_choice(names.ENV_REDUNDANCY, REDUNDANCIES),
            profile=_path(names.ENV_PROFILE),
            profile_out=_path(names.ENV_PROFILE_OUT),
            profile_sizes=_sizes(),
            trace_dir=_path(names.ENV_TRACE_DIR),
            trace_repeat=_whole(names.ENV_TRACE_REPEAT),
            explain_out=_path(names.ENV_EXPLAIN_OUT),
            turns=_path(names.ENV_TURNS),
            identity=identity,
            place=LocalPlace.read(),
        )


def _choice(name: str, choices: Mapping[str, Chosen]) -> Chosen | None:
    text = os.environ.get(name, "").strip()
    if text not in ("", *choices):
        raise ConfigurationError(f"{name}={text!r} must be {' or '.join(choices)}; correct or unset it")
    return choices.get(text)


def _backward() -> BackwardSpec | None:
    text = os.environ.get(names.ENV_BACKWARD, "").strip()
    try:
        return msgspec.json.decode(text, type=BackwardSpec) if text else None
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{names.ENV_BACKWARD}={text!r} must be spec.backward of a job as JSON ({error}); correct or unset it"
        ) from None


def _share(name: str) -> float:
    share = read_number(name, float, 0.0) or 0.0
    if share > 1:
        raise ConfigurationError(f"{name}={share:g} must be a number of at most 1; correct or unset it")
    return share


def _path(name: str) -> Path | None:
    text = os.environ.get(name, "").strip()
    return from_start(text) if text else None


def _sizes() -> tuple[int, ...]:
    text = os.environ.get(names.ENV_PROFILE_SIZES, "").strip()
    try:
        sizes = tuple(sorted({int(word) for word in text.split(",")})) if text else ()
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise ConfigurationError(
            f"{names.ENV_PROFILE_SIZES}={text!r} must be whole numbers like 1,2,4; correct or unset it"
        )
    return sizes


def _whole(name: str) -> int | None:
    number = read_number(name, int, 1)
    return None if number is None else int(number)
