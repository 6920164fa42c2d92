"""The trace of a whole run, put together from what its workers have written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from virtualflow.errors import ConfigurationError
from virtualflow.verify.records import Began, Committed, Computed, Opened, Record, Values, decode

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
        """The numbers of the steps that were committed, ascending."""
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
    """Read the trace that a run has left in a directory.

    Raises:
        ConfigurationError: there is none.
    """
    if not directory.is_dir():
        what = "no directory" if directory.exists() else "not there"
        raise ConfigurationError(f"{directory} is {what}; name the DIR of a virtualflow run --trace DIR")
    fragments = []
    try:
        for path in sorted(directory.glob("*.jsonl")):
            with path.open("rb") as file:
                fragments.append([record for record in map(decode, file) if record is not None])
    except OSError as error:
        raise ConfigurationError(f"the trace in {directory} cannot be read: {error.strerror}") from error
    trace = merge_trace(fragments)
    if not trace.opened:
        raise ConfigurationError(f"there is no trace in {directory}; name the DIR of a virtualflow run --trace DIR")
    return trace
