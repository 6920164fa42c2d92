"""Workers' connections where parties have certificates: to a coordinator of their job, and to one that is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from coordinator_server import Server, hello, with_server
from identities import PAGE, Guarded, Identities, identities, with_guarded

from virtualflow.errors import ConfigurationError
from virtualflow.protocol import messages as m
from virtualflow.protocol.identity import Credential
from virtualflow.transport import CopyClient, Link
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


def ignore(plan: m.Plan) -> None:
    """It is never admitted."""


async def refused(link: Link, said: str) -> None:
    try:
        with pytest.raises(ConfigurationError, match=said):
            await asyncio.to_thread(link.start)
    finally:
        await asyncio.to_thread(link.close)
