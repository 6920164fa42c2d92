"""How a thread waits for its peers: it polls its channels to all of them, and looks at the news between.

A peer whose process dies closes its connections, which is noticed at once. One that is stopped, or whose machine lost
its power, does not; then the coordinator's word ends the wait.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping

from virtualflow.errors import CommunicatorBroken
from virtualflow.transport.channel import CLOSED, Channel, Exchange
from virtualflow.transport.settings import CommunicatorSettings


class Lane:
    """The channels of one thread, by the peers' ranks.

    Args:
        channels: see above.
        check: raises ``CommunicatorBroken`` if nothing is to be waited for any longer.
        settings: how long is waited for what.
    """

    def __init__(
        self, channels: Mapping[int, Channel], check: Callable[[], None], settings: CommunicatorSettings
    ) -> None:
        self.channels = channels
        self._check = check
        self._settings = settings
        self._poll = select.poll()
        self._by_number = {channel.number: channel for channel in channels.values()}
        self._asked: dict[int, int] = {}
        """What is polled for, by descriptor."""
        self._moved = set(channels.values())
        """Those for which it may be something else now."""

    def expect(self, peer: int, content: memoryview, exchange: Exchange) -> None:
        """See :meth:`Channel.expect`."""
        channel = self.channels[peer]
        channel.expect(content, exchange)
        self._moved.add(channel)

    def send(self, peer: int, content: memoryview, check: int, exchange: Exchange) -> None:
        """See :meth:`Channel.send`; it is under way behind this, as far as it goes without waiting."""
        channel = self.channels[peer]
        channel.send(content, check, exchange)
        channel.advance()
        self._moved.add(channel)

    def advance(self) -> None:
        """Send and receive what goes without waiting."""
        for channel in self.channels.values():
            if channel.waits:
                channel.advance()
                self._moved.add(channel)

    @property
    def leaves(self) -> bool:
        """Whether something is still to leave."""
        return any(channel.leaves for channel in self.channels.values())

    def wait(self, done: Callable[[], bool], timeout: float) -> None:
        """Send and receive until it is done.

        Args:
            done: see above.
            timeout: seconds in which nothing has moved that are too many: the last resort.

        Raises:
            CommunicatorBroken: a peer is lost, what came is damaged, or the coordinator says that it is over.
            VirtualFlowError: a peer sends something else.
        """
        self.advance()
        if done():
            return
        slice_ = self._settings.wait_slice
        checked = moved = time.monotonic()
        while not done():
            any_moved = self._poll_once(slice_)
            now = time.monotonic()
            if any_moved:
                moved = now
            if now - checked >= slice_:
                checked = now
                self._check()
                self.advance()  # also tells whether the connections were cut meanwhile
                self._give_up(now - moved, timeout)

    def _poll_once(self, seconds: float) -> bool:
        """Wait until something can move, and move it; whether anything has."""
        for channel in self._moved:
            interest = channel.interest
            if self._asked.get(channel.number) != interest:
                self._poll.register(channel.number, interest)
                self._asked[channel.number] = interest
        self._moved.clear()
        any_moved = False
        for number, events in self._poll.poll(1e3 * seconds):
            channel = self._by_number[number]
            if events & CLOSED and not channel.expects:
                if channel.leaves:
                    # What a peer does not read any more, though it has not let go of the connection, leaves never.
                    raise CommunicatorBroken(f"{channel.peer} has closed its connection")
                # It may be through with all that these members exchange.
                channel.closed = True
                self._poll.unregister(number)
                self._asked[number] = channel.interest
            elif channel.waits:
                any_moved |= channel.advance()
                self._moved.add(channel)
        return any_moved

    def _give_up(self, still: float, timeout: float) -> None:
        if still >= timeout:
            raise CommunicatorBroken(f"nothing has moved for {still:.0f} s")
        lost = [channel.peer for channel in self.channels.values() if channel.closed]
        if lost and still >= self._settings.lost_wait:
            raise CommunicatorBroken(f"{' and '.join(lost)} closed the connection")

    def cut(self) -> None:
        """Close all connections; no memory is read or written behind this."""
        for channel in self.channels.values():
            channel.cut()

    def close(self) -> None:
        """Cut them, and free their descriptors."""
        for channel in self.channels.values():
            channel.close()
