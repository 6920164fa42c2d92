"""Signers of workers in tests: each process derives the keys of all workers of a job from their names."""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from virtualflow.errors import VirtualFlowError

HOW = ec.ECDSA(SHA256())


class NamedSigner:
    """Signs as ``worker`` of ``job``, with P-256 as certificates do."""

    def __init__(self, worker: str, job: str = "a job") -> None:
        self._worker, self._job = worker, job

    def sign(self, content: bytes) -> bytes:
        """A signature alone: everybody knows the keys."""
        return self._key(self._worker).sign(content, HOW)

    def verify(self, worker: str, content: bytes, signature: bytes) -> None:
        """See that this worker of this job has signed it."""
        try:
            self._key(worker).public_key().verify(signature, content, HOW)
        except InvalidSignature:
            raise VirtualFlowError(f"{worker} of {self._job} has not signed this") from None

    def _key(self, worker: str) -> ec.EllipticCurvePrivateKey:
        number = int.from_bytes(hashlib.sha256(f"{self._job}\n{worker}".encode()).digest()[:31])
        return ec.derive_private_key(number + 1, ec.SECP256R1())
