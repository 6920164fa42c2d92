"""Which versions of the messages a party speaks, and whether two parties can talk to each other.

Fields come and go without a new number: unknown ones are ignored, and those that were added later have defaults. A
number is needed where that is not enough. What to do when is in CONTRIBUTING.md, "How to change a message".
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from virtualflow._version import __version__
from virtualflow.protocol.framing import inflated
from virtualflow.protocol.messages import Base, Count, Name, Version

PROTOCOL = 7
"""The newest protocol that this version speaks: raised when a party that does not know a change would misread it, or
when what workers exchange among themselves changes. 3 is the first in which unknown fields are ignored. 4 is the
first in which a sharded optimizer's keepers tell norms of blocks, and cut parameters, and in which workers agree on how
each bucket of gradients travels. 5 is the first in which a step header tells what each virtual node weighs, 6 the first
in which workers reach each other over connections of the library's own, 7 the first in which a script's runs follow one
another in one job, in which a step header tells what a virtual node has frozen and added to buffers, in which rows of
gradients that hold nothing do not travel, in which a worker may be several processes, and in which keepers of a share
do not send each other new values."""

RUNS_PROTOCOL = 7
"""Who speaks an older one knows of one run only."""

PROCESSES_PROTOCOL = 7
"""Who speaks an older one takes a worker's second process for the same worker, started again."""

OLDEST_PROTOCOL = 3
"""The oldest that it still speaks: raised when code for an older one is taken out."""

NUMERICS = 4
"""Raised when the same script, data and machine would come to other bits than with the version before. 2 is the first
in which a gradient is clipped by a norm that is made of blocks (``reduction.norm``), 3 the first in which a gradient
counts that was there when its micro-batch ended, caches of weights end with a virtual node, and samples that
``collate_fn`` has dropped do not count, 4 the first in which random numbers that a script draws before a step's
micro-batches follow from the step."""


@dataclass(frozen=True)
class Speaker:
    """Somebody who speaks a range of protocols, its newest included."""

    name: str
    """For sentences, such as "the coordinator"."""
    oldest: int
    newest: int
    version: str = ""
    """Of its library, for people to read; empty where it is not known."""

    def __str__(self) -> str:
        numbers = f"protocol {self.newest}"
        if self.oldest != self.newest:
            numbers = f"protocols {self.oldest} to {self.newest}"
        return numbers + (f" (virtualflow {self.version})" if self.version else "")


class HelloHeader(Base, frozen=True, tag="hello"):
    """What every version's ``Hello`` begins with, also one that cannot be read as a whole."""

    protocol: Count
    worker: Name
    oldest_protocol: Count | None = None
    version: Version = ""


class StatusHeader(Base, frozen=True, tag=False):
    """What every version's ``Status`` bears, also one that cannot be read as a whole."""

    protocol: Count | None = None
    oldest_protocol: Count | None = None
    version: Version = ""


_hello_header = msgspec.json.Decoder(HelloHeader)
_status_header = msgspec.json.Decoder(StatusHeader)


def this_speaker(name: str) -> Speaker:
    return Speaker(name, OLDEST_PROTOCOL, PROTOCOL, __version__)


def speaker(name: str, newest: int, oldest: int | None, version: str) -> Speaker:
    """Somebody who has said so; one that tells no oldest protocol speaks but one."""
    return Speaker(name, newest if oldest is None else oldest, newest, version)


def read_hello_header(data: bytes | str) -> HelloHeader | None:
    """Who says a Hello that cannot be read as a whole; ``None``: it is none of any version."""
    try:
        return _hello_header.decode(inflated(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read_status_header(data: bytes | str) -> StatusHeader | None:
    """Of what version a status is that cannot be read as a whole; ``None``: it is none of any version."""
    try:
        return _status_header.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def negotiate(one: Speaker, other: Speaker) -> int | None:
    """The newest protocol that both speak; ``None``: there is none."""
    newest = min(one.newest, other.newest)
    return newest if newest >= max(one.oldest, other.oldest) else None


def explain_mismatch(one: Speaker, other: Speaker) -> str | None:
    if negotiate(one, other) is not None:
        return None
    older, newer = sorted((one, other), key=lambda party: party.newest)
    return (
        f"{one.name} speaks {one} and {other.name} {other}, which have none in common; give {older.name} a newer "
        f"virtualflow, or {newer.name} an older one"
    )
