"""Keys that sign checkpoints: which files hold one, and whose signature counts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from signing import KINDS, write_key

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.signatures import Signature, SigningKeys

CONTENT = b'{"step": 7}'


@pytest.mark.parametrize("kind", KINDS)
def test_a_signature_counts_for_its_content_alone(kind: str, tmp_path: Path) -> None:
    private, public = write_key(tmp_path, "mine", kind)
    signature = SigningKeys.read(private, None).sign(CONTENT)
    assert signature is not None
    for keys in (SigningKeys.read(private, None), SigningKeys.read(None, public)):
        keys.verify(CONTENT, signature, "it")
        for content, value in (
            (CONTENT + b" ", signature.value),
            (CONTENT, b""),
            (CONTENT, signature.value[:-1]),
            (CONTENT, signature.value[:-1] + bytes([signature.value[-1] ^ 1])),
        ):
            with pytest.raises(ValueError, match=r"it is not what the key [0-9a-f]{16} has signed"):
                keys.verify(content, Signature(signature.key, value), "it")


def test_several_keys_are_trusted_and_no_others(tmp_path: Path) -> None:
    pairs = [write_key(tmp_path, name, kind) for name, kind in (("one", "ed25519"), ("two", "p256"))]
    both = tmp_path / "both.pem"
    both.write_text("our keys:\n" + "\n".join(public.read_text() for _, public in pairs))
    keys = SigningKeys.read(None, both)
    for private, _ in pairs:
        keys.verify(CONTENT, SigningKeys.read(private, None).sign(CONTENT), "it")
    stranger = SigningKeys.read(write_key(tmp_path, "stranger")[0], None).sign(CONTENT)
    assert stranger is not None
    with pytest.raises(ConfigurationError, match=rf"it is signed by the key {stranger.key[:16]}, which is not trusted"):
        keys.verify(CONTENT, stranger, "it")
    with pytest.raises(ConfigurationError, match=r"it bears no signature, .*; move it away, or"):
        keys.verify(CONTENT, None, "it")


def test_without_keys_nothing_is_signed_and_everything_is_taken(tmp_path: Path) -> None:
    keys = SigningKeys.read(None, None)
    assert keys.sign(CONTENT) is None
    keys.verify(CONTENT, None, "it")
    keys.verify(CONTENT, Signature("of somebody", b""), "it")


def test_a_key_is_named_by_what_others_compute(tmp_path: Path) -> None:
    private, public = write_key(tmp_path, "mine")
    signature = SigningKeys.read(private, None).sign(CONTENT)
    command = f"openssl pkey -pubin -in {public} -outform DER | sha256sum"
    found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert signature is not None
    assert found.stdout.split()[0] == signature.key


def rsa_pair() -> tuple[bytes, bytes]:
    return _pair(rsa.generate_private_key(65_537, 2_048))


def p384_pair() -> tuple[bytes, bytes]:
    return _pair(ec.generate_private_key(ec.SECP384R1()))


def _pair(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> tuple[bytes, bytes]:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize("pair", [rsa_pair, p384_pair], ids=["RSA", "P-384"])
def test_keys_of_other_kinds_are_refused(tmp_path: Path, pair: object) -> None:
    assert callable(pair)
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    for path, content in zip((private, public), pair(), strict=True):
        path.write_bytes(content)
    for sign, trust in ((private, None), (None, public)):
        with pytest.raises(ConfigurationError, match="of another kind; checkpoints are signed by Ed25519 or P-256"):
            SigningKeys.read(sign, trust)


@pytest.mark.parametrize("content", ["", "no key", "the other half", "cut"])
def test_what_holds_no_key_is_refused_with_the_command_that_makes_one(tmp_path: Path, content: str) -> None:
    private, public = write_key(tmp_path, "mine")
    halves = private.read_text(), public.read_text()
    wrong = {
        "the other half": (halves[1], halves[0]),
        "cut": (halves[0][:40], halves[1][:40]),
    }.get(content, (content, content))
    private.write_text(wrong[0])
    public.write_text(wrong[1])
    with pytest.raises(ConfigurationError, match=r"is no private key .*; make one with: openssl genpkey"):
        SigningKeys.read(private, None)
    with pytest.raises(ConfigurationError, match=r"does not hold public keys .* comes from: openssl pkey .* -pubout"):
        SigningKeys.read(None, public)


def test_a_key_beside_public_ones_is_refused_and_not_left_out(tmp_path: Path) -> None:
    private, public = write_key(tmp_path, "mine")
    public.write_text(public.read_text() + private.read_text())
    with pytest.raises(ConfigurationError, match="does not hold public keys"):
        SigningKeys.read(None, public)


def test_an_encrypted_key_is_refused_as_nobody_can_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    secret = KINDS["p256"]().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    path.write_bytes(secret)
    with pytest.raises(ConfigurationError, match="is encrypted, and a job has nobody to ask for its password"):
        SigningKeys.read(path, None)


@pytest.mark.parametrize("half", ["sign", "trust"])
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, half: str) -> None:
    files = {"sign": None, "trust": None} | {half: tmp_path / "nowhere"}
    with pytest.raises(ConfigurationError, match=r"nowhere cannot be read .No such file"):
        SigningKeys.read(**files)
