"""The trace of a whole run: its records, as each worker writes them, and what they make together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from virtualflow.atomic_file import open_regular
from virtualflow.errors import ConfigurationError

# What a worker notes of its part in a training: one line of JSON each, in a file of its own.
#
# A value is a hash (16 hexadecimal digits), or for a number its shortest exact text: equal texts mean equal bits. What
# belongs to one name is in the order in which the model and the optimizer have it.

BESIDE = "beside the model: "
"""How the name of something begins that the script keeps itself, and that no joiner gets."""

Values = dict[str, str]
"""Hashes or numbers by the name of what they are of."""


class Opened(msgspec.Struct, frozen=True, tag="opened", tag_field="kind"):
    """The first line: who writes, and what should be the same in all workers of both runs."""

    worker: str
    incarnation: str
    virtual_nodes: int
    seed: int
    batch_size: int
    reproducibility: str
    torch: str
    hash_seed: str = ""
    """PYTHONHASHSEED; empty where it is not set."""


class Began(msgspec.Struct, frozen=True, tag="began", tag_field="kind"):
    """The state before the first attempt at a step: what the user's code after the step before has made of it."""

    step: int
    state: Values


class Computed(msgspec.Struct, frozen=True, tag="computed", tag_field="kind"):
    """What went into one virtual node and what came out, in an attempt that need not have counted."""

    generation: tuple[int, int]
    step: int
    virtual_node: int
    samples: str
    """Which ones: of their indices, or positions in a stream."""
    data: str
    """What the data loader made of them, before the user's code had it."""
    random: str
    """The process's random number generators behind the virtual node: how many numbers it has drawn."""
    gradients: Values
    buffers: Values
    metrics: Values


class Committed(msgspec.Struct, frozen=True, tag="committed", tag_field="kind"):
    """The update of a step is applied: the state right after it."""

    generation: tuple[int, int]
    step: int
    state: Values
    metrics: Values


Record = Opened | Began | Computed | Committed

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """One line."""
    return msgspec.json.encode(record) + b"\n"


def decode(line: bytes) -> Record | None:
    """The record of a line; ``None`` for one that is torn, because its writer was killed, or of a later version."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


Process = tuple[str, str]
"""A worker's name, and the incarnation that tells one process of that name from the next."""


Node = tuple[Process, Computed]
"""Who has computed a virtual node, and what."""


@dataclass
class Trace:
    """What counted in a run: an attempt that was aborted is not in it, but for how often there was one."""

    opened: dict[Process, Opened] = field(default_factory=dict)
    before: dict[int, dict[Process, Values]] = field(default_factory=dict)
    """The state in which each process began a step."""
    nodes: dict[int, dict[int, Node]] = field(default_factory=dict)
    """By step and virtual node."""
    after: dict[int, dict[Process, Committed]] = field(default_factory=dict)
    attempts: dict[tuple[int, int], int] = field(default_factory=dict)
    """How often a virtual node of a step was computed, the attempts that counted and those that did not."""

    @property
    def steps(self) -> list[int]:
        return sorted(self.after)


def merge_trace(fragments: Iterable[Iterable[Record]]) -> Trace:
    """Put the records of each process of a run together.

    A step that was committed in several generations counts in the highest one. A virtual node counts as it was computed
    last in that generation, or in the highest one before, of which a survivor may have kept it.
    """
    trace = Trace()
    computed: dict[tuple[int, int], list[Node]] = {}
    counts: dict[int, tuple[int, int]] = {}
    for records in fragments:
        process: Process | None = None
        for record in records:
            if isinstance(record, Opened):
                process = record.worker, record.incarnation
                trace.opened[process] = record
                continue
            if process is None:
                continue
            match record:
                case Began():
                    trace.before.setdefault(record.step, {})[process] = record.state
                case Computed():
                    computed.setdefault((record.step, record.virtual_node), []).append((process, record))
                case Committed():
                    counts[record.step] = max(record.generation, counts.get(record.step, record.generation))
                    trace.after.setdefault(record.step, {})[process] = record
    for step, generation in counts.items():
        trace.after[step] = {p: c for p, c in trace.after[step].items() if c.generation == generation}
    for (step, node), attempts in computed.items():
        trace.attempts[step, node] = len(attempts)
        counted = [entry for entry in attempts if step in counts and entry[1].generation <= counts[step]]
        if counted:
            latest = max(entry[1].generation for entry in counted)
            trace.nodes.setdefault(step, {})[node] = [e for e in counted if e[1].generation == latest][-1]
    return trace


def read_trace(directory: Path) -> Trace:
    """Read the trace that a run has left in a directory."""
    if not directory.is_dir():
        what = "no directory" if directory.exists() else "not there"
        raise ConfigurationError(f"{directory} is {what}; name the DIR of a virtualflow run --trace DIR")
    fragments = []
    try:
        for path in sorted(directory.glob("*.jsonl")):
            with open_regular(path) as file:
                fragments.append([record for record in map(decode, file) if record is not None])
    except OSError as error:
        raise ConfigurationError(f"the trace in {directory} cannot be read: {error.strerror}") from error
    trace = merge_trace(fragments)
    if not trace.opened:
        raise ConfigurationError(f"there is no trace in {directory}; name the DIR of a virtualflow run --trace DIR")
    return trace
