"""Who is believed, and as whom: certificates, signatures, and files that change while a process runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from identities import HOUR, JOB, Identities, identities

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.certificates import (
    BACKDATED,
    Authority,
    NotTrusted,
    Party,
    derive_key,
    make_key,
    read_party,
)
from virtualflow.protocol.identity import AUTHORITIES, OWN, Identity, IssuedIdentity, identity_files

NOW = 1_800_000_000.0
KEY = make_key()
OURS, FOREIGN = (Authority.make(name, NOW) for name in ("ours", "foreign"))
WORKER = Party(JOB, "worker", "worker-0", "7")
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


def certificate(party: Party = WORKER, authority: Authority = OURS, at: float = NOW) -> x509.Certificate:
    return authority.issue(KEY.public_key(), party, at, HOUR)


@given(name=names, uid=names, role=st.sampled_from(["worker", "coordinator", "control", "view"]))
def test_a_certificate_says_who_its_holder_is_whatever_the_name(name: str, uid: str, role: str) -> None:
    party = Party(JOB, role, name, uid)  # type: ignore[arg-type]
    assert Party.read(party.uri) == party
    assert read_party(certificate(party), [OURS.certificate], JOB, NOW) == party


@given(st.text(max_size=60))
def test_no_other_text_names_a_party(text: str) -> None:
    party = Party.read(text)
    assert party is None or party.uri == text


@pytest.mark.parametrize(
    ("shown", "at", "said"),
    [
        pytest.param(certificate(), NOW + HOUR + 1, "has expired at", id="expired"),
        pytest.param(
            certificate(), NOW - HOUR, "is valid only from .* compare the clocks", id="a clock an hour behind"
        ),
        pytest.param(certificate(), NOW + 2 * HOUR, "has expired .* compare the clocks", id="a clock two hours ahead"),
        pytest.param(certificate(authority=FOREIGN), NOW, "of another authority", id="a foreign authority"),
        pytest.param(
            certificate(dataclasses.replace(WORKER, job="job-b")), NOW, "of job job-b, and this is job job-a", id="job"
        ),
        pytest.param(OURS.certificate, NOW, "names nobody", id="the authority's own"),
    ],
)
def test_a_certificate_that_proves_nothing_is_refused(shown: x509.Certificate, at: float, said: str) -> None:
    with pytest.raises(NotTrusted, match=said):
        read_party(shown, [OURS.certificate], JOB, at)


@pytest.mark.parametrize("at", [NOW - BACKDATED, NOW, NOW + HOUR])
def test_a_certificate_holds_from_a_little_before_it_was_issued_to_its_end(at: float) -> None:
    assert read_party(certificate(), [OURS.certificate], JOB, at) == WORKER


def test_while_an_authority_is_replaced_both_are_believed() -> None:
    for authority in (OURS, FOREIGN):
        shown = certificate(authority=authority)
        assert read_party(shown, [OURS.certificate, FOREIGN.certificate], JOB, NOW) == WORKER


# --- signatures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Identities:
    return identities(tmp_path)


def test_a_signature_of_a_worker_holds_for_what_it_has_signed(job: Identities) -> None:
    one, other = job.hold("worker", "worker-0"), job.hold("worker", "worker-1")
    other.verify("worker-0", b"content", one.sign(b"content"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda content, signature: (b"other", signature), "no signature of worker", id="other content"),
        pytest.param(
            lambda content, signature: (content, signature[:-1] + bytes([signature[-1] ^ 1])),
            "no signature of worker",
            id="a bit of the signature",
        ),
        pytest.param(
            lambda content, signature: (content, signature[:40] + bytes([signature[40] ^ 1]) + signature[41:]),
            "certificate",
            id="a bit of the certificate",
        ),
        pytest.param(lambda content, signature: (content, signature[:100]), "no certificate", id="cut short"),
        pytest.param(lambda content, signature: (content, b""), "no certificate", id="nothing"),
    ],
)
def test_an_altered_signature_is_refused(
    job: Identities, change: Callable[[bytes, bytes], tuple[bytes, bytes]], said: str
) -> None:
    one, other = job.hold("worker", "worker-0"), job.hold("worker", "worker-1")
    content, signature = change(b"content", one.sign(b"content"))
    with pytest.raises(NotTrusted, match=said):
        other.verify("worker-0", content, signature)


def test_nobody_signs_for_another_worker(job: Identities, tmp_path: Path) -> None:
    reader = job.hold("worker", "worker-1")
    with pytest.raises(NotTrusted, match="worker worker-2 has signed for worker-0"):
        reader.verify("worker-0", b"content", job.hold("worker", "worker-2").sign(b"content"))
    with pytest.raises(NotTrusted, match="control worker-0 has signed for worker-0"):
        reader.verify("worker-0", b"content", job.hold("control", "worker-0").sign(b"content"))
    stranger = identities(tmp_path / "b").hold("worker", "worker-0")
    with pytest.raises(NotTrusted, match="another authority"):
        reader.verify("worker-0", b"content", stranger.sign(b"content"))


# --- the files --------------------------------------------------------------------------------------------------------


def test_an_identity_follows_its_files_and_keeps_what_it_has_while_they_are_damaged(job: Identities) -> None:
    holder, reader = job.hold("worker", "worker-0"), job.hold("worker", "worker-1")
    first = reader.read_signature(b"x", holder.sign(b"x"))
    folder = job.issue("worker", "worker-0", "renewed")
    assert (first.uid, reader.read_signature(b"x", holder.sign(b"x")).uid) == ("", "renewed")
    (folder / OWN).write_bytes(b"half a file")
    assert reader.read_signature(b"x", holder.sign(b"x")).uid == "renewed"


def test_an_authority_is_replaced_under_running_processes(job: Identities) -> None:
    holder, reader = job.hold("worker", "worker-0"), job.hold("worker", "worker-1")
    old, signed_before = job.authority, holder.sign(b"x")
    job.authority = Authority.make("next", time.time())
    for step in ([old, job.authority], [job.authority]):
        for name in ("worker-0", "worker-1"):
            job.issue("worker", name, believed=step)
        reader.verify("worker-0", b"x", holder.sign(b"x"))
    with pytest.raises(NotTrusted, match="another authority"):
        reader.verify("worker-0", b"x", signed_before)


@pytest.mark.parametrize("missing", [OWN, AUTHORITIES])
def test_a_folder_without_an_identity_is_said_in_one_sentence(job: Identities, missing: str) -> None:
    folder = job.issue("worker", "worker-0")
    (folder / missing).unlink()
    with pytest.raises(ConfigurationError, match=f"must be a folder with .*No such file.*{missing}"):
        Identity(folder)


def test_an_expired_identity_is_said_before_anything_is_tried(job: Identities) -> None:
    folder = job.issue("worker", "worker-0", now=time.time() - 2 * HOUR)
    with pytest.raises(ConfigurationError, match=r"the certificate has expired at .*compare the clocks"):
        Identity(folder)


def test_nobody_else_may_read_an_identity(job: Identities) -> None:
    folder = job.issue("worker", "worker-0")
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


# --- derived and issued by whoever holds them -------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=40), names)
def test_a_derived_key_is_the_same_each_time_and_another_for_all_else(secret: bytes, purpose: str) -> None:
    number = derive_key(secret, purpose).private_numbers().private_value
    assert derive_key(secret, purpose).private_numbers().private_value == number
    others = [derive_key(secret + b"x", purpose), derive_key(secret, purpose + "x")]
    assert number not in {other.private_numbers().private_value for other in others}


def test_authorities_of_one_key_are_the_same_to_others() -> None:
    here, there = (Authority.make("ours", at, derive_key(b"k", "job-a")) for at in (NOW, NOW + HOUR))
    assert read_party(certificate(authority=here), [there.certificate], JOB, NOW + HOUR) == WORKER


def issued_by(authority: Authority, clock: Callable[[], float], party: Party) -> IssuedIdentity:
    def issue(now: float) -> dict[str, bytes]:
        key = make_key()
        return identity_files(key, authority.issue(key.public_key(), party, now, HOUR), [authority.certificate])

    return IssuedIdentity(issue, HOUR / 2, clock)


@pytest.mark.parametrize(
    ("moved", "renewed"),
    [
        pytest.param(HOUR / 4, False, id="before its time"),
        pytest.param(HOUR / 2, True, id="in time"),
        pytest.param(10 * HOUR, True, id="after a long sleep"),
        pytest.param(-HOUR, True, id="the clock was set back"),
    ],
)
def test_whoever_issues_its_own_identity_renews_it(moved: float, renewed: bool) -> None:
    now = [NOW]
    held = issued_by(OURS, lambda: now[0], WORKER)
    first = held.newest()
    now[0] += moved
    assert (held.newest().certificate != first.certificate) == renewed
    assert held.believe(certificate(at=now[0]).public_bytes(Encoding.DER)) == WORKER
