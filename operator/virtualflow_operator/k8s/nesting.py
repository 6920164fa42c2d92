"""What the API server sends, cut where it nests deeper than a program can follow.

Where a schema preserves unknown fields, as it does for pod templates, the API server stores what nests up to 10,000
levels. Python's reader raises RecursionError at about a tenth of that, and whoever compares or copies what a newer
Python may have read does so later. One such object would end a watch, a list or a renewal, for all jobs of all users.
So nothing is read before it is cut: each value that lies too deep becomes a sentence, all else stays as it is. What is
left is still deeper than :mod:`virtualflow_operator.api.validation` allows, so the object's own condition says what is
wrong.

Both clients, kopf's and ours, are given :func:`bounded_response` for their sessions. It sees text before either does.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import accumulate
from typing import Any, Final, Self, cast

import aiohttp
from aiohttp.connector import Connection

from virtualflow_operator.api import Object

logger = logging.getLogger(__name__)

MAX_LEVELS: Final = 128
"""Lists and mappings within one another that are read, those of a list or a watch around an object among them.

More than validation allows, and few enough for every recursive function of the supported Pythons: copy.deepcopy, the
greediest, takes three frames a level, of 1,000.
"""
LEFT_OUT: Final = f"(left out: it is nested deeper than {MAX_LEVELS} levels)"
"""What stands in the place of a value that lies too deep."""
_REMEMBERED: Final = 10_000
"""Objects of which it is remembered that it was told."""

TooDeep = Callable[[str, Object], None]
"""Called with the kind and the metadata of each object that was cut, at every reading."""

_LEFT_OUT = json.dumps(LEFT_OUT).encode()
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{\]}]', re.DOTALL)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _STEP)


def cut(text: bytes) -> bytes:
    """Return a JSON text with :data:`LEFT_OUT` for what lies too deep; the same object where there is nothing such."""
    if text.count(b"{") + text.count(b"[") <= MAX_LEVELS or _levels(text) <= MAX_LEVELS:
        return text
    parts: list[bytes] = []
    level, begin = 0, 0
    for token in _TOKEN.finditer(text):
        step = _STEP.get(text[token.start()], 0)
        if step == 1 and level == MAX_LEVELS:
            parts += text[begin : token.start()], _LEFT_OUT
        level += step
        if step == -1 and level == MAX_LEVELS:
            begin = token.end()
    parts.append(text[begin:])
    return b"".join(parts)


def _levels(text: bytes) -> int:
    """Return how deep a text nests; without a loop of Python's over more than its brackets."""
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_of_strings = b"".join(unescaped.split(b'"')[::2])
    brackets = outside_of_strings.translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


def bounded_response(too_deep: TooDeep) -> type[aiohttp.ClientResponse]:
    """Return the class of responses for a session that is to read nothing deeper than :data:`MAX_LEVELS`."""

    def bounded(text: bytes) -> bytes:
        short = cut(text)
        if short is not text:
            for kind, metadata in _objects_cut(short):
                too_deep(kind, metadata)
        return short

    class BoundedResponse(aiohttp.ClientResponse):
        async def start(self, connection: Connection) -> Self:
            await super().start(connection)
            if "watch" in self.url.query:
                self.content = cast(aiohttp.StreamReader, WatchLines(self.content, bounded))
            return self

        async def read(self) -> bytes:
            if self._body is None:
                whole = await super().read()
                self._body = bounded(whole) if self.content_type.endswith("json") else whole
                return self._body
            return await super().read()

    return BoundedResponse


class WatchLines:
    """The content of a watch: line by line, each of which is JSON of its own, and goes through ``edit``."""

    def __init__(self, content: aiohttp.StreamReader, edit: Callable[[bytes], bytes]) -> None:
        self._content, self._edit = content, edit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.iter_any()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yield whole lines, as they come."""
        rest: list[bytes] = []
        async for chunk in self._content.iter_any():
            *lines, last = chunk.split(b"\n")
            for line in lines:
                yield self._edit(b"".join((*rest, line))) + b"\n"
                rest = []
            rest.append(last)
        if any(rest):
            yield self._edit(b"".join(rest))

    def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        return self.iter_any()


def _objects_cut(text: bytes) -> Iterator[tuple[str, Object]]:
    """Yield kind and metadata of the objects of an answer, or of an event of a watch, that were cut."""
    try:
        answer = json.loads(text)
    except ValueError:
        return  # whoever reads it finds out
    if not isinstance(answer, dict):
        return
    kind = str(answer.get("kind") or "").removesuffix("List")
    bodies = answer.get("items") if isinstance(answer.get("items"), list) else [answer.get("object", answer)]
    for body in bodies or ():
        if isinstance(body, dict) and LEFT_OUT in json.dumps(body):
            metadata = body.get("metadata")
            yield str(body.get("kind") or kind), metadata if isinstance(metadata, dict) else {}


class DeepObjects:
    """Says once of each object, and of each change of what it asks for, that it was cut."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._told: dict[tuple[object, object], None] = {}

    def __call__(self, kind: str, metadata: Object) -> None:
        """Take note of an object that was cut; fits :data:`TooDeep`."""
        key = (metadata.get("uid"), metadata.get("generation"))
        if key in self._told:
            return
        self._told[key] = None
        if len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        self._count(kind)
        logger.warning(
            "the %s %s/%s is nested deeper than %d levels; what lies deeper is not read",
            kind,
            metadata.get("namespace") or "",
            metadata.get("name") or "",
            MAX_LEVELS,
        )
