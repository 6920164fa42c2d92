"""Be another version of the library, in a process of its own: what it says has other fields than what this one says.

A newer version adds a field to every object of every message, names kinds and causes that nobody has heard of, and
speaks one more protocol. An older one says nothing that came with a default, and only what protocol it speaks. One that
is far away speaks none that this one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from virtualflow.protocol import framing, http_api, http_client, versions
from virtualflow.protocol import messages as m

Version = Literal["this", "newer", "older", "far"]
ADDED = {"addedLater": {"by": ["a", "newer", "version"]}}
NEWER = "99.0.0"
FAR = 2
"""How many protocols there are to the version that is far away."""
UNHEARD = "unheard-of"
"""A kind and a cause of the newer version."""
_EVENT = {"number": 1_000_000, "time": 1.0, "kind": UNHEARD, "text": "what only a newer version tells", **ADDED}


def be(version: Version) -> None:
    """Let this process be that version from now on."""
    encode = {"newer": encode_newer, "older": encode_older}.get(version)
    if encode is not None:
        m.encode = framing.encode = http_client.encode = encode
    if version == "newer":
        versions.PROTOCOL += 1
        versions.__version__ = NEWER
    elif version == "far":
        versions.OLDEST_PROTOCOL = versions.PROTOCOL = versions.PROTOCOL + FAR
        versions.__version__ = NEWER


def encode_newer(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(_objects(message, _newer))


def encode_older(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(_objects(message, _older))


def _objects(value: Any, shape: Callable[[msgspec.Struct, dict[str, Any]], dict[str, Any]]) -> Any:
    """``value`` as JSON has it, with each object in another shape."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        said = {} if config.tag is None else {str(config.tag_field): config.tag}
        for field in msgspec.structs.fields(value):
            said[field.encode_name] = _objects(getattr(value, field.name), shape)
        return shape(value, said)
    if isinstance(value, dict):
        return {key: _objects(inner, shape) for key, inner in value.items()}
    return [_objects(inner, shape) for inner in value] if isinstance(value, tuple | list) else value


def _newer(message: msgspec.Struct, said: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message, http_api.Status):
        said["events"].append(_EVENT)
    elif isinstance(message, m.Change):
        said["cause"] = UNHEARD
    elif isinstance(message, m.Note):
        said["kind"] = UNHEARD
    return said | ADDED


def _older(message: msgspec.Struct, said: dict[str, Any]) -> dict[str, Any]:
    late = {field.encode_name for field in msgspec.structs.fields(message) if not field.required}
    return {key: value for key, value in said.items() if key not in late}
