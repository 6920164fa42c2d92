"""Keys that people sign their checkpoints with, and those that they trust: files of theirs that outlive every job.

A certificate of a job ends within hours, and a checkpoint is read after months. So its signature is by a key of its
owner: Ed25519, or ECDSA on P-256 with SHA-256.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, cast

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from virtualflow.atomic_file import read_regular
from virtualflow.errors import ConfigurationError

PrivateKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
PublicKey = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey

_ABOUT: Final = b"virtualflow checkpoint\n"
"""Stands in front of what is signed, so that a signature of something else is none of a checkpoint."""
_LARGEST: Final = 1 << 20
_ECDSA: Final = ec.ECDSA(SHA256())
_SHOWN: Final = 16
"""Digits of a key's name that people are shown."""
_KINDS: Final = "Ed25519 or P-256"


class Signature(msgspec.Struct, frozen=True):
    """Of a checkpoint."""

    key: str
    """Which one it is by: SHA-256 (hex) of the public key (DER)."""
    value: bytes


@dataclass(frozen=True)
class SigningKeys:
    """The key that signs here, and all that are trusted; without any, nothing is signed and everything is taken."""

    private: PrivateKey | None = None
    trusted: Mapping[str, PublicKey] = field(default_factory=dict)
    """By their names."""

    @classmethod
    def read(cls, sign: Path | None, trust: Path | None) -> Self:
        """Those of two files.

        Args:
            sign: of a private key (PEM), whose public half is trusted, too; ``None``: nothing is signed.
            trust: of public keys (PEM), one after another.

        Raises:
            ConfigurationError: a file cannot be read, or holds no such key.
        """
        trusted = [] if trust is None else _read_public(trust)
        private = None if sign is None else _read_private(sign)
        if private is not None:
            trusted.append(private.public_key())
        return cls(private, {_name(key): key for key in trusted})

    def sign(self, content: bytes) -> Signature | None:
        """A signature of what a checkpoint's manifest says; ``None``: nothing is signed here."""
        if self.private is None:
            return None
        said = _ABOUT + content
        if isinstance(self.private, ec.EllipticCurvePrivateKey):
            value = self.private.sign(said, _ECDSA)
        else:
            value = self.private.sign(said)
        return Signature(_name(self.private.public_key()), value)

    def verify(self, content: bytes, signature: Signature | None, name: str) -> None:
        """See that a trusted key has signed this.

        Args:
            name: of the checkpoint, for people.

        Raises:
            ConfigurationError: it bears no signature, or one by another key.
            ValueError: it is not what that key has signed.
        """
        if not self.trusted:
            return
        if signature is None:
            raise ConfigurationError(
                f"{name} bears no signature, and signed ones alone are trusted here (--sign, --trust); move it away, "
                "or, if you know that it is yours, go on without these options"
            )
        key = self.trusted.get(signature.key)
        if key is None:
            raise ConfigurationError(
                f"{name} is signed by the key {signature.key[:_SHOWN]}, which is not trusted here; move it away, or, "
                "if you know whose key that is, add its public half to the file of --trust"
            )
        try:
            if isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(signature.value, _ABOUT + content, _ECDSA)
            else:
                key.verify(signature.value, _ABOUT + content)
        except InvalidSignature:
            raise ValueError(
                f"it is not what the key {signature.key[:_SHOWN]} has signed: somebody has changed it, or put "
                "another checkpoint's signature there"
            ) from None


def _read_private(path: Path) -> PrivateKey:
    content = _read(path)
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:
        raise ConfigurationError(
            f"the key {path} is encrypted, and a job has nobody to ask for its password; give one without, in a file "
            "that you alone may read"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigurationError(
            f"{path} is no private key (PEM); make one with: openssl genpkey -algorithm ed25519 -out KEY.pem"
        ) from None
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    raise ConfigurationError(f"the key {path} is of another kind; checkpoints are signed by {_KINDS}")


def _read_public(path: Path) -> list[PublicKey]:
    blocks = re.findall(rb"-----BEGIN .*?-----END [^\n]*", _read(path), re.DOTALL)
    keys: list[PublicKey] = []
    for block in blocks:
        try:
            key = load_pem_public_key(block + b"\n")
        except (ValueError, UnsupportedAlgorithm):
            break
        of_curve = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
        if not of_curve and not isinstance(key, ed25519.Ed25519PublicKey):
            raise ConfigurationError(f"a key in {path} is of another kind; checkpoints are signed by {_KINDS}")
        keys.append(cast(PublicKey, key))
    if not blocks or len(keys) < len(blocks):
        raise ConfigurationError(
            f"{path} does not hold public keys (PEM) alone; a key's public half comes from: "
            "openssl pkey -in KEY.pem -pubout"
        )
    return keys


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _LARGEST)
    except OSError as error:
        raise ConfigurationError(
            f"the key {path} cannot be read ({error.strerror}); give a file that this user may read"
        ) from None


def _name(key: PublicKey) -> str:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
