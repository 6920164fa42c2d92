"""What the members of a generation tell each other to connect, relayed by the coordinator; bounded."""

from __future__ import annotations

from collections.abc import Iterator

from virtualflow.messages import Generation, Publish

KEYS = 64
"""Keys that one member may publish for one generation; gloo needs one or two."""


class Rendezvous:
    """The published keys of the generations that may still be built."""

    def __init__(self) -> None:
        self._keys: dict[Generation, dict[str, dict[str, Publish]]] = {}

    def add(self, incarnation: str, message: Publish) -> bool:
        """Take a key of a member; whether there was room for it."""
        keys = self._keys.setdefault(message.generation, {}).setdefault(incarnation, {})
        if len(keys) >= KEYS and message.key not in keys:
            return False
        keys[message.key] = message
        return True

    def of(self, generation: Generation) -> Iterator[Publish]:
        """All keys of a generation."""
        for keys in self._keys.get(generation, {}).values():
            yield from keys.values()

    def takes_part(self, generation: Generation, incarnation: str) -> bool:
        """Whether that member has published anything for that generation."""
        return bool(self._keys.get(generation, {}).get(incarnation))

    def forget_before(self, generation: Generation) -> None:
        """Generations older than ``generation`` are history."""
        self._keys = {of: keys for of, keys in self._keys.items() if of >= generation}
