"""Seals what the members of a generation send each other: nobody else reads it, changes it or sends it again.

Each member makes an X25519 key for each generation, and publishes it with its address under a signature of its
certificate (:class:`Signer`). The coordinator, which relays that, can read nothing: a pair's secret is known to the
pair alone. From it HKDF-SHA256 derives one AES-256-GCM key for each connection and direction. These keys end with the
generation, so a certificate that is stolen later opens nothing that was recorded.

A sealed frame is a sealed length and sealed pieces of the content, each with a tag of 16 bytes, which takes the
checksum's place. Pieces let a large frame be sealed while what is before it is on its way. A piece's number is its
nonce: what is lost, repeated, moved or of another connection opens with none. What a piece opens to is written where
it belongs, which is used when the whole frame has opened.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.transport.channel import Arrival, Channel, Departure, FrameExchange, without

SECRET = 16
"""Bytes by which a member that connects is known."""
PIECE = 1 << 20
"""Most bytes under one tag: two buffers of it, at most, belong to a connection, and stay in a processor's cache."""
_TAG = 16
_LENGTH = struct.Struct("<Q")
_HEAD = _LENGTH.size + _TAG
"""As long as a plain frame's."""
_HEAD_OF, _PIECE_OF = b"head", b"piece of "
"""What else a tag holds for; behind the second one the frame's length."""
_NONCE = struct.Struct("<IQ")
_KEY = 32
_NOTHING = memoryview(b"")


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
        worker, key = self._plan.members[peer].worker, said[:_KEY]
        try:
            self._signer.verify(worker, self._statement(peer, where, key), said[_KEY:])
            self._secrets[peer] = self._private.exchange(X25519PublicKey.from_public_bytes(key))
        except (VirtualFlowError, ValueError) as error:
            raise CommunicatorBroken(f"{worker} has not shown that it is {worker}: {error}") from error
        self._public[peer] = key

    def greeting(self, peer: int, lane: int) -> bytes:
        """What the member of the higher rank shows when it connects; it says nothing about any key."""
        return self._derive(peer, lane, "greeting", SECRET)

    def open_channel(self, connection: socket.socket, peer: int, lane: int) -> SealedChannel:
        sending, receiving = (self._derive(peer, lane, f"from {sender}", _KEY) for sender in (self._rank, peer))
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


class _Seal:
    """One direction of a connection: its key, and the number of the next piece."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0
        self._head = memoryview(bytearray(_HEAD))
        self._room = memoryview(bytearray())

    def room(self, size: int) -> memoryview:
        """For a sealed piece of ``size`` bytes."""
        if len(self._room) < size:
            self._room = memoryview(bytearray(size))
        return self._room[:size]

    def seal(self, content: memoryview | bytes, about: bytes, sealed: memoryview) -> memoryview:
        self._cipher.encrypt_into(self._next(), content, about, sealed)
        return sealed

    def open(self, sealed: memoryview, about: bytes, content: memoryview | bytearray) -> None:
        self._cipher.decrypt_into(self._next(), sealed, about, content)

    def frame(self, content: memoryview) -> Iterator[list[memoryview]]:
        """The frame of ``content``, each piece sealed when it is asked for, in the place of the one before it."""
        length = _LENGTH.pack(len(content))
        views = [self.seal(length, _HEAD_OF, self._head)]
        for at in range(0, len(content), PIECE):
            piece = content[at : at + PIECE]
            yield [*views, self.seal(piece, _PIECE_OF + length, self.room(len(piece) + _TAG))]
            views = []
        if views:
            yield views

    def forget(self) -> None:
        """Put a key that nobody knows in this one's place."""
        self._cipher = AESGCM(os.urandom(_KEY))

    def _next(self) -> bytes:
        self._number += 1
        return _NONCE.pack(0, self._number)


class SealedChannel(Channel):
    """A connection whose frames are sealed."""

    def __init__(self, connection: socket.socket, peer: str, sending: bytes, receiving: bytes) -> None:
        super().__init__(connection, peer)
        self._sending, self._receiving = _Seal(sending), _Seal(receiving)
        self._opened = 0
        """Bytes of the content that have come and opened, of the frame that is coming,"""
        self._target = self._sealed = _NOTHING
        """where its next piece belongs, and where that comes."""

    def send(self, content: memoryview, check: int, exchange: FrameExchange) -> None:
        exchange.left += 1
        left = _HEAD + len(content) + _TAG * -(-len(content) // PIECE)
        self._outgoing.append(Departure([], exchange, left, self._sending.frame(content)))

    def close(self) -> None:
        super().close()
        with self._lock:
            self._sending.forget()
            self._receiving.forget()

    def _room_for(self, arrival: Arrival) -> list[memoryview]:
        if not len(self._target):
            self._target = arrival.content[self._opened : self._opened + PIECE]
            self._sealed = self._receiving.room(len(self._target) + _TAG if len(self._target) else 0)
        return without([arrival.head, self._sealed], arrival.at)

    def _take(self, arrival: Arrival, received: int) -> bool:
        before, arrival.at = arrival.at, arrival.at + received
        if before < _HEAD <= arrival.at:
            length = bytearray(_LENGTH.size)
            self._open(arrival.head, _HEAD_OF, length)
            self._refuse_other_length(_LENGTH.unpack(length)[0], arrival)
        if arrival.at < _HEAD + len(self._sealed):
            return False
        if len(self._target):
            self._open(self._sealed, _PIECE_OF + _LENGTH.pack(len(arrival.content)), self._target)
            self._opened += len(self._target)
            self._target, arrival.at = _NOTHING, _HEAD
        if self._opened < len(arrival.content):
            return False
        self._opened = 0
        return True

    def _open(self, sealed: memoryview, about: bytes, content: memoryview | bytearray) -> None:
        with self._lock:
            self._refuse_if_over()
            try:
                self._receiving.open(sealed, about, content)
            except InvalidTag:
                raise self._damaged(len(content), "their seal does not hold") from None
