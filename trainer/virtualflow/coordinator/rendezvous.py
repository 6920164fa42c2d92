"""What the members of a generation tell each other to connect, relayed by the coordinator; bounded.

Keys are relayed in bundles, the same ones to all members: with n members that is a few times n messages instead of n
times n, each of which is encoded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from virtualflow.coordinator.settings import KEYS, MAX_BUNDLE
from virtualflow.protocol.messages import Generation, Keys, Publish


class Rendezvous:
    """The published keys of the generations that may still be built."""

    def __init__(self) -> None:
        self._keys: dict[Generation, dict[str, dict[str, bytes]]] = {}
        self._fresh: dict[Generation, dict[str, bytes]] = {}
        """What was published since the last :meth:`take`."""

    def add(self, incarnation: str, message: Publish) -> bool:
        """Take a key of a member; whether there was room for it."""
        keys = self._keys.setdefault(message.generation, {}).setdefault(incarnation, {})
        if len(keys) >= KEYS and message.key not in keys:
            return False
        keys[message.key] = message.value
        self._fresh.setdefault(message.generation, {})[message.key] = message.value
        return True

    def of(self, generation: Generation) -> Iterator[Keys]:
        """All keys of a generation, in messages of bounded size."""
        published = self._keys.get(generation, {}).values()
        return _bundled(generation, [item for keys in published for item in keys.items()])

    def take(self) -> Iterator[Keys]:
        """What was published since the last time, in messages of bounded size."""
        fresh, self._fresh = self._fresh, {}
        for generation, keys in fresh.items():
            yield from _bundled(generation, keys.items())

    def takes_part(self, generation: Generation, incarnation: str) -> bool:
        """Whether that member has published anything for that generation."""
        return bool(self._keys.get(generation, {}).get(incarnation))

    def forget_before(self, generation: Generation) -> None:
        """Generations older than ``generation`` are history."""
        self._keys = {of: keys for of, keys in self._keys.items() if of >= generation}
        self._fresh = {of: keys for of, keys in self._fresh.items() if of >= generation}


def _bundled(generation: Generation, items: Iterable[tuple[str, bytes]]) -> Iterator[Keys]:
    bundle: dict[str, bytes] = {}
    size = 0
    for key, value in items:
        if bundle and size + len(value) > MAX_BUNDLE:
            yield Keys(generation, bundle)
            bundle, size = {}, 0
        bundle[key] = value
        size += len(key) + len(value)
    if bundle:
        yield Keys(generation, bundle)
