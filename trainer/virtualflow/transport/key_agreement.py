"""Who is at the other end of a connection, and the keys that a pair seals its frames by (``channel``).

Each member makes an X25519 key for each generation, and publishes it with its address under a signature of its
certificate (:class:`Signer`). The coordinator, which relays that, can read nothing: a pair's secret is known to the
pair alone. From it HKDF-SHA256 derives one AES-256-GCM key for each connection and direction. These keys end with the
generation, so a certificate that is stolen later opens nothing that was recorded.
"""

from __future__ import annotations

import json
import socket
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.transport.channel import KEY, SealedChannel

SECRET = 16
"""Bytes by which a member that connects is known."""
_PUBLIC = 32
"""Bytes of an X25519 key."""


class Signer(Protocol):
    """What proves who a worker is: its certificate, and those of the others of its job."""

    def sign(self, content: bytes) -> bytes:
        """A signature by this worker, with all that the others need to verify it."""

    def verify(self, worker: str, content: bytes, signature: bytes) -> None:
        """Make sure that the worker of that name, of this job and no other, has signed this.

        Raises:
            VirtualFlowError: it has not; the sentence says what is wrong with it.
        """


class Introduction:
    """What a member of a generation says of itself to the others, and the secrets that it shares with each of them."""

    def __init__(self, signer: Signer, plan: m.Plan, rank: int) -> None:
        self._signer = signer
        self._plan = plan
        self._rank = rank
        self._private = X25519PrivateKey.generate()
        self._public = {rank: self._private.public_key().public_bytes_raw()}
        self._secrets: dict[int, bytes] = {}

    def say(self, where: bytes) -> bytes:
        """This member's key, and the signature over it and its address."""
        key = self._public[self._rank]
        return key + self._signer.sign(self._statement(self._rank, where, key))

    def meet(self, peer: int, where: bytes, said: bytes) -> None:
        """Take up what a peer says.

        Raises:
            CommunicatorBroken: it is not that peer who says it, or not now, or the key is none.
        """
        worker, key = self._plan.members[peer].worker, said[:_PUBLIC]
        try:
            self._signer.verify(worker, self._statement(peer, where, key), said[_PUBLIC:])
            self._secrets[peer] = self._private.exchange(X25519PublicKey.from_public_bytes(key))
        except (VirtualFlowError, ValueError) as error:
            raise CommunicatorBroken(f"{worker} has not shown that it is {worker}: {error}") from error
        self._public[peer] = key

    def greeting(self, peer: int, lane: int) -> bytes:
        """What the member of the higher rank shows when it connects; it says nothing about any key."""
        return self._derive(peer, lane, "greeting", SECRET)

    def open_channel(self, connection: socket.socket, peer: int, lane: int) -> SealedChannel:
        sending, receiving = (self._derive(peer, lane, f"from {sender}", KEY) for sender in (self._rank, peer))
        return SealedChannel(connection, self._plan.members[peer].worker, sending, receiving)

    def _statement(self, member: int, where: bytes, key: bytes) -> bytes:
        who, number = self._plan.members[member], self._plan.generation
        said = [number.incarnation, number.counter, member, who.worker, who.incarnation, where.hex(), key.hex()]
        return json.dumps(["virtualflow member", *said]).encode()

    def _derive(self, peer: int, lane: int, purpose: str, length: int) -> bytes:
        number, pair = self._plan.generation, sorted((self._rank, peer))
        about = [number.incarnation, number.counter, *pair, *(self._public[one].hex() for one in pair), lane, purpose]
        info = json.dumps(["virtualflow frames", *about]).encode()
        return HKDF(SHA256(), length, salt=None, info=info).derive(self._secrets[peer])
