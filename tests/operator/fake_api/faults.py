"""Faults at will: which requests they hit, how often, and what happens to those."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What goes wrong with the requests that it matches; fields left at None match everything.

    ``FakeApi.inject`` puts it to work; faults are asked in the order of their injection.
    """

    code: int | None = None
    """Answer with this status instead; a watch answers 200 and then an ERROR event with 410 and 504."""
    reason: str = ""
    message: str = "injected"
    retry_after: int | None = None
    """Seconds; sent as the Retry-After header."""
    cut: bool = False
    """Close the connection without an answer."""
    end: bool = False
    """Answer a watch, and end it at once."""
    after: bool = False
    """Carry the request out first: the client cannot know."""
    delay: float = 0.0
    """Seconds to wait first."""
    gate: asyncio.Event | None = None
    """Wait first until it is set."""

    method: str | None = None
    verb: str | None = None
    """get, list, watch, create, update, patch, delete, or discover."""
    resource: str | None = None
    """The plural; with its subresource for those: virtualflowjobs/status."""
    namespace: str | None = None
    name: str | None = None
    """A regular expression for the whole name."""

    times: int | None = 1
    """How many requests it hits; None: all."""
    seconds: float | None = None
    """How long it lasts from its injection on; None: until healed."""

    hits: int = 0
    """How many requests it has hit."""
    begin: float = field(default_factory=time.monotonic)

    def strikes(self, method: str, verb: str, resource: str, namespace: str | None, name: str | None) -> bool:
        """Return whether it hits this request, and count the hit."""
        if self.times is not None and self.hits >= self.times:
            return False
        if self.seconds is not None and time.monotonic() - self.begin > self.seconds:
            return False
        own = (self.method, self.verb, self.resource, self.namespace)
        if any(
            mine not in {None, theirs} for mine, theirs in zip(own, (method, verb, resource, namespace), strict=True)
        ):
            return False
        if self.name is not None and not re.fullmatch(self.name, name or ""):
            return False
        self.hits += 1
        return True
