"""A network that flips bits: a real communicator's, of which one member's messages are damaged on their way."""

from __future__ import annotations

import random
from typing import Any

import virtualflow.transport.communicator
from virtualflow.transport.channel import Channel, FrameExchange
from virtualflow.transport.communicator import Communicator


class Damaging:
    """Damages what is sent: the frame number ``at``, counted from 1, in the bit that is drawn."""

    def __init__(self, at: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self.at = at
        self.sent = 0

    def join(self, communicator: Communicator) -> None:
        """Stand between that member and all others."""
        for lane in communicator._lanes:
            for channel in lane.channels.values():
                self._stand_before(channel)

    def _stand_before(self, channel: Channel) -> None:
        send = channel.send

        def damaging(content: memoryview, check: int, exchange: FrameExchange) -> None:
            self.sent += 1
            send(content, check, exchange)
            if self.sent == self.at:
                views = channel._outgoing[-1].views
                which = self._draw.randrange(len(views)) if len(content) else 0
                damaged = bytearray(views[which])
                damaged[self._draw.randrange(len(damaged))] ^= 1 << self._draw.randrange(8)
                views[which] = memoryview(damaged)

        channel.send = damaging  # type: ignore[method-assign]


def damage(communicator: Communicator, at: int, seed: int) -> Damaging:
    """Let what that member sends be damaged."""
    faulty = Damaging(at, seed)
    faulty.join(communicator)
    return faulty


def damage_first_generation(at: int) -> None:
    """Let one thing that this process sends in its first generation be damaged."""
    made: list[Damaging] = []
    begin = Communicator.__init__

    def building(self: Communicator, *arguments: Any) -> None:
        begin(self, *arguments)
        if self.size > 1 and not made:
            made.append(Damaging(at, seed=at))
            made[0].join(self)

    virtualflow.transport.communicator.Communicator.__init__ = building  # type: ignore[method-assign]
