"""What a worker notes of its part in a training: one line of JSON each, in a file of its own.

A value is a hash (16 hexadecimal digits), or for a number its shortest exact text: equal texts mean equal bits. What
belongs to one name is in the order in which the model and the optimizer have it.
"""

from __future__ import annotations

import msgspec

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
    except msgspec.DecodeError:
        return None
