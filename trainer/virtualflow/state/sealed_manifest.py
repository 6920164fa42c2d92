"""Manifests that tell whether they are what was written, and by whom."""

from __future__ import annotations

import hashlib

import msgspec

from virtualflow.protocol.signatures import Signature, SigningKeys

MANIFEST = "manifest.json"
MAX_SEALED = 64 << 20
"""Bytes of a manifest: a model of a million parameters needs less."""
UNSIGNED = SigningKeys()
"""Neither signs nor asks for a signature."""


class _Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """``manifest.json``: a flipped bit in it must not pass for another job or another format."""

    checksum: str
    """SHA-256 (hex) of the manifest as it stands in the file."""
    manifest: msgspec.Raw
    signature: Signature | None = None
    """Of the manifest as it stands in the file, and so of all whose checksums it tells."""


def seal(manifest: msgspec.Struct, keys: SigningKeys = UNSIGNED) -> bytes:
    """A manifest as JSON, so that a flipped bit in it does not pass for another job or another format; signed, if
    ``keys`` do."""
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    return msgspec.json.encode(_Envelope(hashlib.sha256(content).hexdigest(), msgspec.Raw(content), keys.sign(content)))


def open_seal(sealed: bytes, name: str, keys: SigningKeys = UNSIGNED) -> bytes:
    """The JSON of what :func:`seal` made into bytes.

    Raises:
        ValueError: it is not what was written.
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: likewise.
        ConfigurationError: nobody whom ``keys`` trust has signed it.
    """
    envelope = msgspec.json.decode(sealed, type=_Envelope)
    content = bytes(envelope.manifest)
    if hashlib.sha256(content).hexdigest() != envelope.checksum:
        raise ValueError(f"the content of {MANIFEST} is not what was written (its checksum differs)")
    keys.verify(content, envelope.signature, name)
    return content
