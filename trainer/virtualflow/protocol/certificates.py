"""Who takes part in a job, by certificate: parties, the authority that vouches for them, and who is believed. Pure.

A certificate says in a URI which job it is of, in which role, and the name and uid of whoever holds its key. It is
valid for hours. Nobody revokes one: whoever may not take part any more gets no next one.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self, get_args
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from virtualflow.errors import VirtualFlowError

Role = Literal["worker", "coordinator", "control", "view"]
"""``control`` is whoever runs the job: ``virtualflow run`` and the commands of its user, or the operator. ``view`` only
looks."""

JOB: Final = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""The uid of a job: a label of a host name, as certificates of coordinators bear it as one."""

BACKDATED = 300.0
"""Seconds by which a clock may be behind that of the authority."""
AUTHORITY_LIFETIME = 10 * 366 * 86_400.0
"""Seconds that an authority is valid for: its key is worth nothing once its job is over, and no job lasts longer."""
_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of that curve."""
_DERIVED = 48
"""Bytes that a derived key is made from."""


class NotTrusted(VirtualFlowError):
    """A certificate or a signature proves nothing; the message says why, in one sentence."""


@dataclass(frozen=True)
class Party:
    """Somebody who takes part in a job."""

    job: str
    """Its uid."""
    role: Role
    name: str
    """Of a worker: the one that it goes by in the job."""
    uid: str = ""
    """What tells it from the former of that name, such as the uid of its pod."""

    def __str__(self) -> str:
        return f"{self.role} {self.name}"

    @property
    def uri(self) -> str:
        return f"virtualflow://{self.job}/{self.role}/{quote(self.name, safe='')}/{quote(self.uid, safe='')}"

    @classmethod
    def read(cls, uri: str) -> Self | None:
        """The party that a URI names; ``None``: it names none."""
        job, role, *rest = [*uri.removeprefix("virtualflow://").split("/"), ""]
        known = next((known for known in get_args(Role) if known == role), None)
        if known is None or len(rest) != 3 or not re.fullmatch(JOB, job):
            return None
        party = cls(job, known, unquote(rest[0]), unquote(rest[1]))
        return party if party.uri == uri else None


def server_name(job: str) -> str:
    """The host name that certificates of a job's coordinators alone bear, whatever address they listen at.

    So TLS itself sees that a server is the coordinator of that job, before anything is said to it.
    """
    return f"coordinator.{job}.virtualflow"


def make_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(_CURVE)


def derive_key(secret: bytes, purpose: str) -> ec.EllipticCurvePrivateKey:
    """The key that belongs to a secret and a purpose: whoever has the secret can tell it, and nobody else.

    Args:
        secret: at least as hard to guess as a key.
        purpose: what tells the keys of one secret apart.
    """
    derived = HKDF(hashes.SHA256(), _DERIVED, None, b"virtualflow key " + purpose.encode()).derive(secret)
    # From 384 bits, so that no scalar is noticeably more likely than another (FIPS 186-5, A.2.1).
    return ec.derive_private_key(int.from_bytes(derived) % (_ORDER - 1) + 1, _CURVE)


def pem_of(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates)


class Authority:
    """Vouches for the parties of a job: whoever has its key decides who takes part."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key, self.certificate = key, certificate

    @classmethod
    def make(cls, name: str, now: float, key: ec.EllipticCurvePrivateKey | None = None) -> Self:
        """An authority, with a new certificate of its own.

        Args:
            name: for people to read. Whoever believes two authorities finds them by it.
            now: Unix time.
            key: its key; ``None``: a new one. All authorities of one name and key are the same to others.
        """
        key = make_key() if key is None else key
        subject = _subject(f"virtualflow {name}"[:64])
        usage = x509.KeyUsage(False, False, False, False, False, True, False, False, False)
        made = (
            _builder(key.public_key(), subject, subject, now, AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        return cls(key, made.sign(key, hashes.SHA256()))

    def issue(self, key: ec.EllipticCurvePublicKey, party: Party, now: float, lifetime: float) -> x509.Certificate:
        """A certificate of ``party``, which holds the private part of ``key``; valid for ``lifetime`` seconds."""
        serves = party.role == "coordinator"
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(party.uri)]
        if serves:
            names.append(x509.DNSName(server_name(party.job)))
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if serves else ExtendedKeyUsageOID.CLIENT_AUTH
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        issuer = self._key.public_key()
        return (
            _builder(key, _subject(party.role), self.certificate.subject, now, lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, now: float, lifetime: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_date(now - BACKDATED))
        .not_valid_after(_date(now + lifetime))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _date(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def read_party(certificate: x509.Certificate, authorities: Sequence[x509.Certificate], job: str, now: float) -> Party:
    """Whose certificate this is.

    Args:
        authorities: that are believed: one, or two while one takes the other's place.
        job: the uid of the job whose parties are believed.
        now: Unix time.

    Raises:
        NotTrusted: no authority vouches for it, or not now, or not for this job.
    """
    if not any(_vouches(authority, certificate) for authority in authorities):
        raise NotTrusted("the certificate is of another authority: it belongs to another job")
    begins, ends, present = certificate.not_valid_before_utc, certificate.not_valid_after_utc, _date(now)
    if not begins <= present <= ends:
        what = f"is valid only from {begins:%F %T} on" if present < begins else f"has expired at {ends:%F %T}"
        raise NotTrusted(f"the certificate {what}, and it is {present:%F %T} (UTC) here; compare the clocks")
    party = _named_in(certificate)
    if party is None:
        raise NotTrusted("the certificate names nobody who takes part in a job")
    if party.job != job:
        raise NotTrusted(f"the certificate is of {party} of job {party.job}, and this is job {job}")
    return party


def _vouches(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _named_in(certificate: x509.Certificate) -> Party | None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return Party.read(uris[0]) if len(uris) == 1 else None
