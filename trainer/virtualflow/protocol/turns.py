"""What a node's turn server and the workers that share its devices say to each other: typed JSON, a line a message.

A worker attaches once to a device, asks for it, computes, and gives it back. A turn is a matter of speed: who computes
without one disturbs others, and comes to the same bits.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from virtualflow.protocol.messages import Base, Count, Seconds, encode
from virtualflow.protocol.settings import MAX_NAME

MAX_LINE = 4_096
"""Bytes of a message; a longer one ends the connection."""

STAGE = "waiting for its turn"
"""What a training thread does meanwhile, as it tells the coordinator: it waits, and for no worker of its job."""

Label = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class Attach(Base, frozen=True, tag="attach"):
    """The first message of a connection. Workers of one job have the device together, in one turn."""

    job: Label
    device: Label


class Ask(Base, frozen=True, tag="ask"):
    """The device is wanted. A worker numbers its turns, and asks for one at a time."""

    turn: Count


class GiveBack(Base, frozen=True, tag="give-back"):
    """It is not needed any more, or not wanted any more; a turn that has gone to others by then stays theirs."""

    turn: Count


class Wait(Base, frozen=True, tag="wait"):
    """Others come first."""

    turn: Count
    most: Seconds
    """By then it has its turn, however long those take."""


class Granted(Base, frozen=True, tag="granted"):
    """The device is lent."""

    turn: Count


FromSharer = Attach | Ask | GiveBack
ToSharer = Wait | Granted


def line(message: FromSharer | ToSharer) -> bytes:
    return encode(message) + b"\n"


from_sharer: msgspec.json.Decoder[FromSharer] = msgspec.json.Decoder(FromSharer)
to_sharer: msgspec.json.Decoder[ToSharer] = msgspec.json.Decoder(ToSharer)
