"""How a process shows who it is: by its identity, a folder with a certificate, its key and the authorities that it
believes; or, in plaintext, by the token that a job's processes share.

Whoever issues certificates writes new files in time. They are looked at before each handshake and each signature, so
nothing is restarted when they change, and authorities may come and go while a job runs.
"""

from __future__ import annotations

import asyncio.sslproto
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from virtualflow.atomic_file import PRIVATE, read_regular, write_whole
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.certificates import NotTrusted, Party, pem_of, read_party, server_name
from virtualflow.protocol.settings import ENV_IDENTITY, ENV_TOKEN

logger = logging.getLogger("virtualflow.identity")

OWN = "identity.pem"
"""A private key and its certificate: one file, so that none is read beside the other's successor."""
AUTHORITIES = "authorities.pem"
PAGE_TOKEN = "page-token"
"""Beside them, of a coordinator: what the live page's token is derived from."""
_LARGEST = 64 << 10
_ALGORITHM = ec.ECDSA(hashes.SHA256())
_READ_AT_ONCE = 32 << 10
"""Bytes: the buffer of a TLS connection, where there are many."""
_LENGTH = 2
"""Bytes in front of the certificate in a signature."""
_Stamp = tuple[tuple[int, int], ...]
"""What tells versions of its files apart."""


def write_identity(
    directory: Path,
    key: ec.EllipticCurvePrivateKey,
    certificate: x509.Certificate,
    authorities: Sequence[x509.Certificate],
) -> None:
    """Give the process that looks into ``directory`` an identity, or a newer one in its place."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in identity_files(key, certificate, authorities).items():
        write_whole(directory / name, content, PRIVATE)


def identity_files(
    key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, authorities: Sequence[x509.Certificate]
) -> dict[str, bytes]:
    """The files of an identity by their names, in the order in which they are written."""
    plain = serialization.NoEncryption()
    own = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return {AUTHORITIES: pem_of(*authorities), OWN: own + pem_of(certificate)}


@dataclass(frozen=True)
class _Held:
    """What the files said when they were read last."""

    stamp: _Stamp
    party: Party
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    authorities: tuple[x509.Certificate, ...]
    client: ssl.SSLContext
    server: ssl.SSLContext | None
    """``None``: it serves nobody."""


def _hold(own: bytes, bundle: bytes, path: Path, now: float, stamp: _Stamp = (), *, serves: bool = True) -> _Held:
    """What the files of an identity say.

    Args:
        own: the content of ``OWN``, which is also at ``path``: TLS reads it there.
        bundle: the content of ``AUTHORITIES``.
        serves: whether it is for a server, too.

    Raises:
        OSError, ValueError, NotTrusted: it is none that is valid now.
    """
    key = serialization.load_pem_private_key(own, None)
    certificate, *_ = x509.load_pem_x509_certificates(own)
    authorities = tuple(x509.load_pem_x509_certificates(bundle))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("its key is none of an elliptic curve")
    (uri,) = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.UniformResourceIdentifier
    )
    named = Party.read(uri)
    party = read_party(certificate, authorities, named.job if named is not None else "", now)
    client = _context(path, bundle, server_side=False)
    server = _context(path, bundle, server_side=True) if serves else None
    return _Held(stamp, party, key, certificate, authorities, client, server)


def _context(path: Path, authorities: bytes, *, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.hostname_checks_common_name = False
    context.load_cert_chain(path)
    context.load_verify_locations(cadata=authorities.decode("ascii"))
    if server_side:
        context.num_tickets = 0  # a session that is taken up again would outlive its certificate
    return context


class Identity:
    """Who this process is to others, and whom it believes.

    Args:
        directory: as :func:`write_identity` writes it.
        clock: Unix time.

    Raises:
        ConfigurationError: there is none, or one that is not valid.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory, self._clock = directory, clock
        self._lock = threading.Lock()
        try:
            self._held = self._read()
        except (OSError, ValueError, NotTrusted) as error:
            raise ConfigurationError(
                f"{ENV_IDENTITY}={directory} must be a folder with {OWN} and {AUTHORITIES}, as whoever starts the job "
                f"writes it: {error}"
            ) from error

    @property
    def party(self) -> Party:
        return self._held.party

    def read_beside(self, name: str) -> str:
        """The text of another file of this identity's folder.

        Raises:
            ConfigurationError: there is none.
        """
        try:
            return read_regular(self._directory / name, _LARGEST).decode()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self._directory / name} cannot be read: {error}") from error

    def server_context(self) -> ssl.SSLContext:
        """For connections of the job's parties, and nobody else: see :meth:`believe` about which one it is."""
        return _Newest(self.newest, None)

    def client_context(self) -> ssl.SSLContext:
        """For connections to the job's coordinator, and nobody else."""
        return _Newest(self.newest, server_name(self.party.job))

    def newest(self) -> _Held:
        """What the files say now; while they say nothing that holds, what they said before."""
        with self._lock:
            try:
                if _stamp(self._directory) != self._held.stamp:
                    self._held = self._read()
            except (OSError, ValueError, NotTrusted) as error:
                logger.debug("the identity in %s stays as it was: %s", self._directory, error)
            return self._held

    def believe(self, certificate: bytes) -> Party:
        """Whose certificate this is (DER).

        Raises:
            NotTrusted: it is nobody's of this job, or not now.
        """
        return self._believe(certificate)[0]

    def _believe(self, der: bytes) -> tuple[Party, x509.Certificate]:
        try:
            certificate = x509.load_der_x509_certificate(der)
        except (ValueError, x509.InvalidVersion) as error:
            raise NotTrusted(f"that is no certificate: {error}") from None
        held = self.newest()
        return read_party(certificate, held.authorities, held.party.job, self._clock()), certificate

    def sign(self, content: bytes) -> bytes:
        """A signature that says who has made it: with the certificate in front."""
        held = self.newest()
        certificate = held.certificate.public_bytes(serialization.Encoding.DER)
        return len(certificate).to_bytes(_LENGTH) + certificate + held.key.sign(content, _ALGORITHM)

    def read_signature(self, content: bytes, signature: bytes) -> Party:
        """Who has signed ``content``.

        Raises:
            NotTrusted: nobody of this job has.
        """
        end = _LENGTH + int.from_bytes(signature[:_LENGTH])
        party, certificate = self._believe(signature[_LENGTH:end])
        key = certificate.public_key()
        try:
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise InvalidSignature
            key.verify(signature[end:], content, _ALGORITHM)
        except InvalidSignature:
            raise NotTrusted(f"that is no signature of {party}") from None
        return party

    def verify(self, worker: str, content: bytes, signature: bytes) -> None:
        """See that the worker of that name has signed ``content``.

        Raises:
            NotTrusted: it has not.
        """
        party = self.read_signature(content, signature)
        if (party.role, party.name) != ("worker", worker):
            raise NotTrusted(f"{party} has signed for {worker}")

    def _read(self) -> _Held:
        stamp = _stamp(self._directory)  # what changes from here on is read the next time
        own = read_regular(self._directory / OWN, _LARGEST)
        bundle = read_regular(self._directory / AUTHORITIES, _LARGEST)
        return _hold(own, bundle, self._directory / OWN, self._clock(), stamp)


class IssuedIdentity(Identity):
    """The identity of a client that issues it to itself: in memory alone, and anew in time.

    Args:
        issue: makes its files, as :func:`identity_files` has them, for a Unix time.
        renewal: seconds after which it is issued anew.
        clock: Unix time.
    """

    def __init__(
        self, issue: Callable[[float], dict[str, bytes]], renewal: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._issue, self._renewal, self._clock = issue, renewal, clock
        self._lock = threading.Lock()
        self._held = self._make()

    def newest(self) -> _Held:
        with self._lock:
            if not 0 <= self._clock() - self._issued_at < self._renewal:  # or the clock was set back
                self._held = self._make()
            return self._held

    def _make(self) -> _Held:
        now = self._issued_at = self._clock()
        files = self._issue(now)
        descriptor = os.memfd_create(OWN)  # TLS takes a key from a file only
        try:
            os.write(descriptor, files[OWN])
            path = Path(f"/proc/self/fd/{descriptor}")
            return _hold(files[OWN], files[AUTHORITIES], path, now, serves=False)
        finally:
            os.close(descriptor)


def _stamp(directory: Path) -> _Stamp:
    facts = [os.stat(directory / name) for name in (OWN, AUTHORITIES)]
    return tuple((fact.st_mtime_ns, fact.st_ino) for fact in facts)


class _Newest(ssl.SSLContext):
    """Stands for the context of what an identity's files say at each handshake.

    Args:
        server: the name that the server's certificate must bear; ``None``: this end is the server.
    """

    def __new__(cls, newest: Callable[[], _Held], server: str | None) -> _Newest:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT if server else ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, newest: Callable[[], _Held], server: str | None) -> None:
        self._newest, self._server = newest, server

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return self._present().wrap_bio(incoming, outgoing, server_side, self._server)

    def wrap_socket(self, sock: Any, server_side: bool = False, *_: Any, **__: Any) -> ssl.SSLSocket:
        return self._present().wrap_socket(sock, server_side, server_hostname=self._server)

    def _present(self) -> ssl.SSLContext:
        held = self._newest()
        context = held.server if self._server is None else held.client
        assert context is not None, "an identity of a client serves nobody"
        return context


def expect_many_connections() -> None:
    """Keep TLS connections of this process small: asyncio's own buffer of 256 KiB, all touched at once, is for few."""
    asyncio.sslproto.SSLProtocol.max_size = _READ_AT_ONCE


TLS_ONLY = (
    f"speaks mutual TLS: give its address with https:// and an {ENV_IDENTITY}, or start the job with "
    "--insecure-plaintext"
)
"""What is to be said of a coordinator with an identity to who comes in plaintext (HTTP status 426)."""

Credential = str | Identity
"""By what a client is known to a coordinator: the job's token in plaintext, or an identity."""


def headers_of(credential: Credential) -> dict[str, str]:
    """What a request bears."""
    return {"Authorization": f"Bearer {credential}"} if isinstance(credential, str) else {}


def context_of(credential: Credential) -> ssl.SSLContext | Literal[True]:
    """``ssl=`` of a client of ``aiohttp``."""
    return True if isinstance(credential, str) else credential.client_context()


def explain_refusal(url: str, error: Exception) -> str:
    """Why a handshake with the coordinator at ``url`` has failed, in one sentence that says what to do."""
    cause = error.__cause__ or error  # clients wrap it
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"what answers at {url} is not the coordinator of this job ({cause.verify_message}); give its address, or "
            f"an {ENV_IDENTITY} of its job, and compare the clocks of both machines"
        )
    reason = cause.reason if isinstance(cause, ssl.SSLError) else cause
    return (
        f"what answers at {url} does not speak TLS ({reason}): it may be a coordinator in plaintext, which takes a "
        f"{ENV_TOKEN} and an address with http://"
    )
