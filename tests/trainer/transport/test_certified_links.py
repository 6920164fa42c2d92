"""Workers' connections where parties have certificates: to a coordinator of their job, and to one that is not."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from coordinator_server import Server, hello, with_server
from identities import HOUR, PAGE, Guarded, Identities, identities, with_guarded
from meshes import Board, mesh, plan_of

from virtualflow.errors import CommunicatorBroken, ConfigurationError
from virtualflow.protocol import messages as m
from virtualflow.protocol.identity import Credential, Identity
from virtualflow.transport import CopyClient, Link
from virtualflow.transport.key_agreement import Introduction
from virtualflow.transport.mesh import build_mesh
from virtualflow.transport.settings import CopySettings, LinkSettings

WORKER = hello("worker-0", ready=True)


def test_a_copy_of_the_state_travels_over_mutual_tls(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        client = CopyClient(server.url, server.job.hold("worker", "worker-0"), CopySettings())
        assert await asyncio.to_thread(client.head) is None

    with_guarded(tmp_path, story)


@pytest.mark.parametrize(
    ("scheme", "credential", "said"),
    [
        pytest.param(
            "http",
            lambda job, folder: PAGE,
            "speaks mutual TLS: give its address with https:// and an VIRTUALFLOW_IDENTITY",
            id="in plaintext",
        ),
        pytest.param(
            "https",
            lambda job, folder: identities(folder, "job-b").hold("worker", "worker-0"),
            "is not the coordinator of this job .*; give its address, or an VIRTUALFLOW_IDENTITY of its job",
            id="of job B",
        ),
        pytest.param(
            "https",
            lambda job, folder: job.hold("control", "control"),
            "takes no worker by this certificate",
            id="of another role",
        ),
    ],
)
def test_a_worker_that_does_not_belong_here_is_told_so_at_once(
    tmp_path: Path, scheme: str, credential: Callable[[Identities, Path], Credential], said: str
) -> None:
    async def story(server: Guarded) -> None:
        url = server.url.replace("https", scheme)
        await refused(Link(url, credential(server.job, tmp_path / "b"), lambda: WORKER, ignore, LinkSettings()), said)

    with_guarded(tmp_path, story)


def test_a_worker_with_a_certificate_is_told_that_a_coordinator_is_in_plaintext(tmp_path: Path) -> None:
    worker = identities(tmp_path).hold("worker", "worker-0")

    async def story(server: Server) -> None:
        url = server.url.replace("http", "https")
        said = "does not speak TLS .*: it may be a coordinator in plaintext, which takes a VIRTUALFLOW_TOKEN"
        await refused(Link(url, worker, lambda: WORKER, ignore, LinkSettings()), said)

    with_server(story)


# --- the other members ------------------------------------------------------------------------------------------------


def now_and_then(off: float) -> Callable[[Identities, Path], Identity]:
    """A worker whose certificate counted, or will count, at another time."""

    def make(job: Identities, folder: Path) -> Identity:
        moment = time.time() + off
        return Identity(job.issue("worker", "worker-0", now=moment), clock=lambda: moment)

    return make


PRETENDERS: dict[str, tuple[Callable[[Identities, Path], Identity], str]] = {
    "another worker of the job": (
        lambda job, folder: job.hold("worker", "worker-2"),
        "worker worker-2 has signed for worker-0",
    ),
    "whoever runs the job": (
        lambda job, folder: job.hold("control", "worker-0"),
        "control worker-0 has signed for worker-0",
    ),
    "its name in another job": (
        lambda job, folder: identities(folder, "job-b").hold("worker", "worker-0"),
        "the certificate is of another authority",
    ),
    "its name in another job of the authority": (
        lambda job, folder: Identities(folder, job.authority, "job-b").hold("worker", "worker-0"),
        "the certificate is of worker worker-0 of job job-b, and this is job job-a",
    ),
    "expired": (now_and_then(-2 * HOUR), "the certificate has expired at .* compare the clocks"),
    "not yet valid": (now_and_then(HOUR), "the certificate is valid only from .* compare the clocks"),
}


@pytest.mark.parametrize(("make", "why"), PRETENDERS.values(), ids=PRETENDERS)
def test_a_member_whose_certificate_does_not_count_is_not_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Identities, Path], Identity], why: str
) -> None:
    job, board, plan = identities(tmp_path), Board(), plan_of(2)
    where = b"127.0.0.1 9"
    said = Introduction(make(job, tmp_path / "b"), plan, 0).say(where)
    board.publish("member-0", bytes(16) + where + b"\0" + said)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it dials"))
    introduction = Introduction(job.hold("worker", "worker-1"), plan, 1)
    with pytest.raises(CommunicatorBroken, match=f"worker-0 has not shown that it is worker-0: {why}"):
        build_mesh(board, 1, 2, "127.0.0.1", 20.0, introduction=introduction)


def test_members_with_certificates_find_each_other(tmp_path: Path) -> None:
    job = identities(tmp_path)
    signers = {rank: job.hold("worker", f"worker-{rank}") for rank in range(2)}
    for communicator in mesh(2, signers=signers):
        communicator.close()


def ignore(plan: m.Plan) -> None:
    """It is never admitted."""


async def refused(link: Link, said: str) -> None:
    try:
        with pytest.raises(ConfigurationError, match=said):
            await asyncio.to_thread(link.start)
    finally:
        await asyncio.to_thread(link.close)
