"""The whole operator and jobs with certificates: who is let in, and what is replaced while they train."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from cryptography import x509
from fake_api import Fault
from stage import KEY, NAMESPACE, Stage, play

from virtualflow.protocol.certificates import Party
from virtualflow.protocol.http_api import GoneCall, ScaleCall
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient, CoordinatorUnreachable
from virtualflow.protocol.identity import Credential, Identity, IssuedIdentity
from virtualflow.protocol.settings import SignalSettings
from virtualflow_operator.constants import COORDINATOR, COORDINATOR_PORT, WORKER
from virtualflow_operator.controllers.issuer import Issuer, fingerprint
from virtualflow_operator.k8s.client import PODS, SECRETS, Object
from virtualflow_operator.settings import DELIVERY, CertificateSettings

OFTEN = CertificateSettings(lifetime=DELIVERY + 2.0, renewal=2.0)
"""Certificates are replaced every two seconds."""
ONCE = SignalSettings(request_timeout=10.0, patience=0.0)


def certificate_of(stage: Stage, pod: Object) -> x509.Certificate:
    """What the pod's files have by now."""
    content = (stage.kubelet.folder_of(pod) / "identity.pem").read_bytes()
    return x509.load_pem_x509_certificates(content)[0]


@contextlib.asynccontextmanager
async def calling(stage: Stage, name: str, credential: Credential) -> AsyncIterator[CoordinatorClient]:
    """A client of the coordinator of the job of that name."""
    (pod,) = stage.pods(name, COORDINATOR)
    scheme = "http" if isinstance(credential, str) else "https"
    url = f"{scheme}://{pod['status']['podIP']}:{COORDINATOR_PORT}"
    async with CoordinatorClient(url, credential, ONCE) as client:
        yield client


def holder(stage: Stage, name: str, role: str) -> Identity:
    return Identity(stage.kubelet.folder_of(stage.pods(name, role)[0]))


def control(uid: str, key: str = KEY) -> IssuedIdentity:
    """Like the operator's own, of the job with that uid, by that key."""
    return Issuer([key.encode()], CertificateSettings()).control(uid)


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_nobody_but_the_operator_controls_a_job(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        uids = {name: stage.apply(name)["metadata"]["uid"] for name in ("digits", "other")}
        for name in uids:
            await stage.until(lambda name=name: stage.trains(name))
        token = stage.secret("digits")["data"]["token"]
        (worker, *_) = stage.workers("digits")
        refused: Sequence[tuple[Credential, str]] = [
            (holder(stage, "digits", WORKER), f"the certificate is of worker {worker}, and /v1/scale is not for"),
            (token, "speaks mutual TLS"),
        ]
        for credential, said in refused:
            async with calling(stage, "digits", credential) as client:
                with pytest.raises(CallRefused, match=said):
                    await client.send(ScaleCall(1))
        for stranger in (
            holder(stage, "other", WORKER),
            holder(stage, "digits", COORDINATOR),
            control(uids["other"]),
            control(uids["digits"], "another key, of somebody else's operator"),
        ):
            async with calling(stage, "digits", stranger) as client:
                with pytest.raises(CoordinatorUnreachable):
                    await client.send(GoneCall(worker, None, "so that another takes its place"))
        async with calling(stage, "digits", control(uids["digits"])) as client:
            assert (await client.status()).plaintext is False
        assert stage.told("digits", GoneCall) == []
        assert stage.trains("digits")

    play(tmp_path, story)


def test_no_secret_stands_in_a_pods_manifest_or_is_read(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        for pod in stage.pods("digits"):
            (variable,) = (v for v in pod["spec"]["containers"][0]["env"] if v["name"] == "VIRTUALFLOW_IDENTITY")
            assert variable["value"] == "/virtualflow/identity"
            party = Identity(stage.kubelet.folder_of(pod)).party
            assert party == Party(party.job, party.role, pod["metadata"]["name"], pod["metadata"]["uid"])
        assert not any(r.resource == "secrets" and r.verb not in ("create", "update") for r in stage.server.requests)
        stage.delete("digits")
        await stage.until(lambda: stage.nothing_left("digits"))

    play(tmp_path, story)


# --- what is replaced while they train --------------------------------------------------------------------------------


@pytest.mark.slow
def test_certificates_are_replaced_while_a_job_trains(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start(certificates=OFTEN)
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        pods, incarnations = stage.pods("digits"), {*stage.kubelet.trainers}
        for _ in range(3):
            before = [certificate_of(stage, pod) for pod in pods]
            shown = stage.status("digits")["certificates"]
            await stage.until(
                lambda before=before: all(
                    certificate_of(stage, pod) != old for pod, old in zip(pods, before, strict=True)
                )
            )
            await stage.until(lambda shown=shown: stage.status("digits")["certificates"] != shown)
        stage.change("digits", replicas=3)
        await stage.until(lambda: stage.trains("digits", 3))
        assert incarnations < {*stage.kubelet.trainers}
        status = stage.status("digits")
        assert status.get("repeatedSteps", 0) == 0
        stage.change("digits", suspend=True)
        await stage.until(lambda: stage.status("digits")["phase"] == "Suspended")
        assert {"certificates", "plaintext"}.isdisjoint(stage.status("digits"))

    play(tmp_path, story)


@pytest.mark.slow
def test_workers_are_replaced_while_no_certificate_can_be(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        fault = Fault(code=403, message="policy pinned", verb="update", resource="secrets", times=None)
        stage.server.inject(fault)
        stage.start(certificates=OFTEN, queue__backoff_first=0.1, queue__backoff_most=0.5)
        stage.apply("digits")
        await stage.until(lambda: fault.hits >= 3)
        await stage.until(lambda: stage.trains("digits"))
        (lost, *_) = stage.pods("digits", WORKER)
        stage.server.remove(PODS, NAMESPACE, lost["metadata"]["name"])
        uid = lost["metadata"]["uid"]
        await stage.until(
            lambda: stage.trains("digits") and uid not in {pod["metadata"]["uid"] for pod in stage.pods("digits")}
        )
        stage.server.heal()
        shown = stage.status("digits")["certificates"]
        await stage.until(lambda: stage.status("digits")["certificates"] != shown)

    play(tmp_path, story)


@pytest.mark.slow
def test_another_operator_issues_nothing_before_its_time(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        process = stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        before = [certificate_of(stage, pod) for pod in stage.pods("digits")]
        process.kill()
        since = len(stage.server.requests)
        await stage.replace(process)
        stage.change("digits", replicas=3)
        await stage.until(lambda: stage.trains("digits", 3))
        assert [certificate_of(stage, pod) for pod in stage.pods("digits")][: len(before)] == before
        assert "update secrets" not in stage.writes(since)

    play(tmp_path, story)


@pytest.mark.slow
def test_a_pod_whose_secret_was_not_made_gets_it_from_the_next_operator(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.kubelet.unmounted.add("digits")  # so that its workers wait
        process = stage.start()
        stage.apply("digits")
        await stage.until(lambda: len(stage.workers("digits")) == 2 and len(_identities(stage)) == 3)
        process.kill()
        await process.ended()
        for secret in _identities(stage):
            if COORDINATOR not in secret["metadata"]["name"]:
                stage.server.remove(SECRETS, NAMESPACE, secret["metadata"]["name"])
        stage.kubelet.unmounted.clear()
        await stage.replace(process)
        await stage.until(lambda: stage.trains("digits"))

    play(tmp_path, story)


@pytest.mark.slow
def test_secrets_that_somebody_deletes_are_made_again_for_pods_that_do_not_start(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.kubelet.unmounted.add("digits")
        stage.start(startup_patience=0.5, events_retry=0.5)
        stage.apply("digits")
        await stage.until(lambda: len(stage.workers("digits")) == 2 and len(_identities(stage)) == 3)
        for secret in _identities(stage):
            if COORDINATOR not in secret["metadata"]["name"]:
                stage.server.remove(SECRETS, NAMESPACE, secret["metadata"]["name"])
        stage.kubelet.unmounted.clear()
        await stage.until(lambda: stage.trains("digits"))
        (lost,) = (pod["metadata"] for pod in stage.pods("digits", COORDINATOR))
        stage.server.remove(SECRETS, NAMESPACE, stage.secret("digits")["metadata"]["name"])
        stage.server.remove(PODS, NAMESPACE, lost["name"])
        await stage.until(
            lambda: any(
                pod["status"]["phase"] == "Running" and pod["metadata"]["uid"] != lost["uid"]
                for pod in stage.pods("digits", COORDINATOR)
            )
        )

    play(tmp_path, story)


def _identities(stage: Stage) -> list[Object]:
    return [secret for secret in stage.server.all(SECRETS, NAMESPACE) if "-identity-" in secret["metadata"]["name"]]


@pytest.mark.slow
def test_the_operators_key_is_replaced_in_three_steps_under_a_job_that_trains(tmp_path: Path) -> None:
    keys = {name: f"{name} key, which is long enough to be one" for name in ("first", "second")}
    for name, key in keys.items():
        (tmp_path / name).write_text(key)

    async def story(stage: Stage) -> None:
        def flags(first: str, other: str) -> list[str]:
            return [f"--key-file={tmp_path / first}", f"--other-key-file={tmp_path / other}"]

        process = stage.start(*flags("first", "none"))
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        made = {pod["metadata"]["uid"] for pod in stage.pods("digits")}
        for workers, (first, other) in enumerate((("first", "second"), ("second", "first"), ("second", "none")), 3):
            process.kill()
            process = await stage.replace(process, *flags(first, other))
            ids = [fingerprint(keys[name].encode()) for name in (first, other) if name in keys]
            await stage.until(lambda ids=ids: stage.status("digits")["certificates"]["keys"] == ids)
            stage.change("digits", replicas=workers)
            await stage.until(lambda workers=workers: stage.trains("digits", workers))
        assert made < {pod["metadata"]["uid"] for pod in stage.pods("digits")}
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


@pytest.mark.slow
def test_with_another_key_at_once_the_operator_is_refused_until_the_pods_have_certificates_by_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "second").write_text("another key, which is long enough to be one")

    async def story(stage: Stage) -> None:
        process = stage.start()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        process.kill()
        stage.kubelet.undelivered = True
        flags = [f"--key-file={tmp_path / 'second'}", f"--other-key-file={tmp_path / 'none'}"]
        await stage.replace(process, *flags, refused_retry=0.5)
        await stage.until(lambda: stage.condition("digits", "Ready").get("reason") == "TokenRefused")
        assert "is not the coordinator of this job" in stage.condition("digits", "Ready")["message"]
        stage.kubelet.deliver()
        await stage.until(lambda: stage.trains("digits"))
        stage.change("digits", replicas=3)
        await stage.until(lambda: stage.trains("digits", 3))
        assert stage.status("digits")["certificates"]["keys"] == [fingerprint((tmp_path / "second").read_bytes())]
        assert stage.status("digits").get("repeatedSteps", 0) == 0

    play(tmp_path, story)


# --- in plaintext -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_in_plaintext_begins_where_it_is_allowed_and_says_so(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        process = stage.start()
        stage.apply("digits", security={"plaintext": True})
        refused = "PlaintextNotAllowed"
        await stage.until(lambda: stage.condition("digits", "Progressing").get("reason") == refused)
        await stage.until(lambda: refused in stage.events("digits"))
        assert stage.pods("digits") == []
        process.kill()
        process = await stage.replace(process, "--allow-plaintext")
        await stage.until(lambda: stage.trains("digits"))
        await stage.until(lambda: "Plaintext" in stage.events("digits"))
        assert stage.status("digits")["plaintext"] is True
        assert _identities(stage) == []
        process.kill()
        await stage.replace(process)  # where it is not allowed any more, it trains on, and loses no worker for good
        stage.change("digits", replicas=3)
        await stage.until(lambda: stage.trains("digits", 3))

    play(tmp_path, story)
