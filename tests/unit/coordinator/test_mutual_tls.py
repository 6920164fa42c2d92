"""A coordinator whose parties have certificates: who is let in, what each may do, and what the others are told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec
import pytest
from coordinator_server import hello, told, until
from identities import HOUR, PAGE, QUICK, Guarded, Identities, guarded, identities, with_guarded

from virtualflow.protocol import messages as m
from virtualflow.protocol.certificates import Party, Role, make_key
from virtualflow.protocol.http_api import COPY_HEADER, COPY_PATH, CopyHeader, GoneCall, ScaleCall
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient, CoordinatorUnreachable
from virtualflow.protocol.identity import Identity, IssuedIdentity, identity_files
from virtualflow.protocol.job_record import AGE, PATH
from virtualflow.protocol.live_view import VIEW_PATH, view_token

# --- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "method", "path", "status"),
    [
        *(
            pytest.param("worker", "POST", path, 403, id=f"a worker's {path}")
            for path in ("/v1/gone", "/v1/begin", "/v1/scale", "/v1/stop", "/v1/fail", "/v1/hold", "/v1/drain")
        ),
        pytest.param("worker", "GET", "/v1/status", 403, id="a worker that would see the status"),
        pytest.param("worker", "GET", PATH, 200, id="a worker that keeps the record"),
        pytest.param("view", "GET", VIEW_PATH, 200, id="a viewer"),
        pytest.param("view", "GET", "/v1/status", 403, id="a viewer that would see the status"),
        pytest.param("view", "POST", "/v1/stop", 403, id="a viewer that would stop the job"),
        pytest.param("view", "GET", COPY_PATH, 403, id="a viewer that would have the state"),
        pytest.param("control", "GET", VIEW_PATH, 200, id="whoever runs the job looks"),
        pytest.param("control", "GET", "/v1/worker", 403, id="whoever runs the job is no worker"),
        pytest.param("control", "GET", COPY_PATH, 403, id="nor takes its state"),
    ],
)
def test_roles_decide(tmp_path: Path, role: Role, method: str, path: str, status: int) -> None:
    async def story(server: Guarded) -> None:
        said = f"the certificate is of {role} somebody, and {path} is not for its role"
        data = b"{}" if method == "POST" else None
        async with (
            server.as_(server.job.hold(role, "somebody")) as session,
            session.request(method, server.url + path, data=data) as answer,
        ):
            assert answer.status == status
            if status == 403:
                assert (await answer.json())["message"] == said

    with_guarded(tmp_path, story)


def test_control_decides_about_ends_and_numbers(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        async with server.worker("worker-0", hello("worker-0", ready=True)) as stream:
            assert isinstance(await told(stream), m.Welcome)
            async with CoordinatorClient(server.url, server.job.hold("control", "control"), QUICK) as client:
                assert await client.send(ScaleCall(3)) == "3 workers wanted"
                assert (await client.send(GoneCall("worker-0", "worker-0.0", "killed"))).startswith("worker-0 is gone")

    with_guarded(tmp_path, story)


def test_who_issues_its_own_identity_controls_the_job(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        made: list[float] = []

        def issue(now: float) -> dict[str, bytes]:
            made.append(now)
            key, party = make_key(), Party(server.job.job, "control", "operator")
            certificate = server.job.authority.issue(key.public_key(), party, now, HOUR)
            return identity_files(key, certificate, [server.job.authority.certificate])

        identity = IssuedIdentity(issue, 0.0)  # anew for each connection
        async with CoordinatorClient(server.url, identity, QUICK) as client:
            for workers in (2, 3):
                assert await client.send(ScaleCall(workers)) == f"{workers} workers wanted"
        assert len(made) > 2

    with_guarded(tmp_path, story)


# --- inside a job: nobody speaks for another --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(m.encode(hello("worker-1", "worker-1.0", ready=True)), id="of this version"),
        pytest.param(b'{"type":"hello","worker":"worker-1","protocol":999}', id="of a version too far away"),
    ],
)
def test_a_worker_that_claims_another_ones_name_is_refused_in_its_own(tmp_path: Path, data: bytes) -> None:
    async def story(server: Guarded) -> None:
        async with (
            server.as_(server.job.hold("worker", "worker-0")) as session,
            session.ws_connect(f"{server.url}/v1/worker") as stream,
        ):
            await stream.send_bytes(data)
            refusal = await told(stream)
        said = "the certificate is of worker-0, and this process calls itself worker-1"
        assert refusal == m.Refuse(said)
        (event,) = [event for event in server.coordinator.state.history.events if event.refusal is not None]
        assert event.refusal is not None
        assert event.refusal.worker == "worker-0", "worker-1 is not taken for refused by whoever runs it"
        assert not server.coordinator.state.roster.workers

    with_guarded(tmp_path, story)


def test_a_worker_that_publishes_another_ones_address_is_not_relayed(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        async with (
            server.worker("worker-0", hello("worker-0", ready=True)) as one,
            server.worker("worker-1", hello("worker-1", ready=True)) as other,
        ):
            plan = await next_of(m.Plan, one)
            own, others = (plan.rank_of(name, f"{name}.0") for name in ("worker-0", "worker-1"))
            await next_of(m.Plan, other)
            for rank in (others, own):
                assert rank is not None
                await one.send_bytes(m.encode(m.Publish(plan.generation, m.member_key(rank), b"where I say")))
            keys = await next_of(m.Keys, other)
            assert own is not None
            assert keys.values == {m.member_key(own): b"where I say"}

    with_guarded(tmp_path, story)


Told = TypeVar("Told", m.Plan, m.Keys)


async def next_of(kind: type[Told], stream: aiohttp.ClientWebSocketResponse) -> Told:
    while not isinstance(message := await told(stream), kind):
        assert message is not None
    return message


def test_a_worker_that_hands_over_another_ones_copy_is_refused(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        async with server.worker("worker-0", hello("worker-0", ready=True)) as stream:
            assert isinstance(await told(stream), m.Welcome)
            header = CopyHeader(m.Generation(1, 1), "worker-0.0", 7, 1, "0" * 64)
            asked = {COPY_HEADER: msgspec.json.encode(header).decode()}
            for sender, said in (("worker-1", "none of the job's workers"), ("worker-0", "which does not run")):
                async with (
                    server.as_(server.job.hold("worker", sender)) as session,
                    session.put(server.url + COPY_PATH, data=b"copy", headers=asked) as answer,
                ):
                    assert answer.status == 409
                    assert said in (await answer.json())["message"]

    with_guarded(tmp_path, story)


def test_a_record_that_no_coordinator_has_signed_is_not_taken_up(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        async with server.as_(server.job.hold("worker", "worker-0")) as session:
            async with session.get(server.url + PATH) as answer:
                record = await answer.read()
            worker = server.job.hold("worker", "worker-0")
            end = 2 + int.from_bytes(record[:2])
            forged = record[end:].replace(b'"number":1', b'"number":9999999')
            own = worker.sign(b"virtualflow record " + forged)
            for body, status in (
                (record, 200),
                (record[:end] + forged, 400),
                (len(own).to_bytes(2) + own + forged, 400),
                (forged, 400),
            ):
                async with session.put(server.url + PATH, data=body, params={AGE: "1"}) as answer:
                    assert answer.status == status, await answer.text()
        assert server.coordinator.state.inherited == 0

    with_guarded(tmp_path, story)


# --- strangers --------------------------------------------------------------------------------------------------------


def of_another_job(job: Identities, folder: Path) -> Identity:
    """A certificate of job B, of an authority of its own; it has somehow got job A's to believe."""
    other = identities(folder, "job-b")
    return Identity(other.issue("control", "control", believed=[other.authority, job.authority]))


def expired(job: Identities, folder: Path) -> Identity:
    early = time.time() - 2 * HOUR
    return Identity(job.issue("control", "late", now=early), clock=lambda: early)


def issued_by_a_clock_an_hour_ahead(job: Identities, folder: Path) -> Identity:
    ahead = time.time() + HOUR
    return Identity(job.issue("control", "early", now=ahead), clock=lambda: ahead)


def of_the_same_authority_but_another_job(job: Identities, folder: Path) -> Identity:
    return Identities(folder, job.authority, "job-b").hold("control", "control")


def a_coordinator(job: Identities, folder: Path) -> Identity:
    return job.hold("coordinator", "second")


@pytest.mark.parametrize(
    "make",
    [of_another_job, expired, issued_by_a_clock_an_hour_ahead, of_the_same_authority_but_another_job, a_coordinator],
)
def test_a_certificate_that_does_not_count_opens_nothing(
    tmp_path: Path, make: Callable[[Identities, Path], Identity]
) -> None:
    async def story(server: Guarded) -> None:
        context = make(server.job, tmp_path / "other").client_context()
        before = ssl.SSLContext.wrap_bio

        class Careless(type(context)):  # type: ignore[misc] - it does not look at the server's name
            def __new__(cls) -> Careless:
                return ssl.SSLContext.__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

            def __init__(self) -> None:
                pass

            def wrap_bio(self, *ends: ssl.MemoryBIO, **_: object) -> ssl.SSLObject:
                inner = context._present()
                inner.check_hostname = False
                inner.verify_mode = ssl.CERT_NONE
                return before(inner, *ends)

        connector = aiohttp.TCPConnector(ssl=Careless(), force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(aiohttp.ClientError):
                await session.post(f"{server.url}/v1/stop", data=b"{}")
        assert server.coordinator.state.stop is None
        assert not server.coordinator.door._strangers

    with_guarded(tmp_path, story)


@pytest.mark.parametrize(("off", "said"), [(-HOUR, "is valid only from"), (2 * HOUR, "has expired at")])
def test_a_coordinator_whose_clock_is_wrong_lets_nobody_in_and_says_to_compare_the_clocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, off: float, said: str
) -> None:
    async def play() -> None:
        async with asyncio.timeout(60.0), guarded(tmp_path, lambda: time.time() + off) as server:
            async with CoordinatorClient(server.url, server.job.hold("control", "control"), QUICK) as client:
                with pytest.raises(CoordinatorUnreachable):
                    await client.send(ScaleCall(3))
            assert server.coordinator.state.wanted == 2
            await until(lambda: not server.coordinator.door._strangers)

    asyncio.run(play())
    assert any(said in text and "compare the clocks" in text for text in caplog.messages)


@pytest.mark.parametrize("off", [HOUR, -2 * HOUR], ids=["not yet valid", "expired"])
def test_a_coordinator_whose_certificate_is_not_valid_now_hears_nothing(tmp_path: Path, off: float) -> None:
    async def play() -> None:
        job, heard = identities(tmp_path), asyncio.Event()
        moment = time.time() + off
        coordinator = Identity(job.issue("coordinator", "coordinator", now=moment), clock=lambda: moment)

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.set()

        server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=coordinator.server_context())
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, CoordinatorClient(url, job.hold("control", "control"), QUICK) as client:
            with pytest.raises(CoordinatorUnreachable, match=r"not the coordinator of this job .*the clocks of both"):
                await client.status()
        assert not heard.is_set()

    asyncio.run(play())


def test_an_honest_client_of_another_job_is_told_so_before_it_says_anything(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        for other in (
            identities(tmp_path, "job-b").hold("control", "control"),
            of_the_same_authority_but_another_job(server.job, tmp_path / "other"),
        ):
            async with CoordinatorClient(server.url, other, QUICK) as client:
                with pytest.raises(CoordinatorUnreachable, match="is not the coordinator of this job"):
                    await client.status()

    with_guarded(tmp_path, story)


def test_a_worker_cannot_pass_for_the_coordinator(tmp_path: Path) -> None:
    async def play() -> None:
        job = identities(tmp_path)
        heard = asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.set()

        server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=job.hold("worker", "worker-0").server_context())
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, CoordinatorClient(url, job.hold("control", "control"), QUICK) as client:
            with pytest.raises(CoordinatorUnreachable, match="is not the coordinator of this job"):
                await client.status()
        assert not heard.is_set()

    asyncio.run(play())


@pytest.mark.parametrize("token", [PAGE, view_token(PAGE), ""], ids=["the page's secret", "the view's", "none"])
@pytest.mark.parametrize("path", ["/v1/status", "/v1/worker", COPY_PATH])
def test_without_tls_nothing_but_the_page_is_there(tmp_path: Path, token: str, path: str) -> None:
    async def story(server: Guarded) -> None:
        plain = server.url.replace("https", "http")
        said = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=said) as session:
            async with session.get(plain + path) as answer:
                if token == view_token(PAGE):
                    assert answer.status == 403
                else:
                    assert (answer.status, answer.headers["Upgrade"]) == (426, "TLS/1.3")
                    assert "--insecure-plaintext" in (await answer.json())["message"]
            async with session.get(plain + VIEW_PATH) as answer:
                assert answer.status == (200 if token == view_token(PAGE) else 426)
            async with session.get(f"{plain}/ui") as answer:
                assert answer.status == 200

    with_guarded(tmp_path, story)


def test_a_client_in_plaintext_is_told_what_to_do(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        async with CoordinatorClient(server.url.replace("https", "http"), PAGE, QUICK) as client:
            with pytest.raises(CallRefused, match="speaks mutual TLS: give its address with https://"):
                await client.status()

    with_guarded(tmp_path, story)


def test_who_listens_on_the_wire_reads_nothing(tmp_path: Path) -> None:
    heard = bytearray()

    async def story(server: Guarded) -> None:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, here = await asyncio.open_connection("127.0.0.1", server.port)

            async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                while data := await source.read(65_536):
                    heard.extend(data)
                    target.write(data)
                target.close()

            await asyncio.gather(pass_on(reader, here), pass_on(there, writer))

        between = await asyncio.start_server(relay, "127.0.0.1", 0)
        url = f"https://127.0.0.1:{between.sockets[0].getsockname()[1]}"
        async with (
            between,
            server.as_(server.job.hold("worker", "worker-0")) as session,
            session.ws_connect(f"{url}/v1/worker") as stream,
        ):
            await stream.send_bytes(m.encode(hello("worker-0", ready=True)))
            assert isinstance(await told(stream), m.Welcome)
            async with CoordinatorClient(url, server.job.hold("control", "control"), QUICK) as client:
                (worker,) = (await client.status()).workers
            assert worker.worker == "worker-0"

    with_guarded(tmp_path, story)
    assert len(heard) > 2_000
    for known in (b"worker-0", b"virtualNodes", b"/v1/", b"Bearer", b"fingerprint", b"job-a/"):
        assert known not in heard


def test_half_a_handshake_and_garbage_cost_their_place_and_nothing_else(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        door = server.coordinator.door
        said = (b"\x16", b"\x16\x03\x01\x02\x00" + b"x" * 512, b"\x16" * 200_000, b"GET / HT", b"\x00" * 9, b"")
        held = []
        for number in range(60):
            one = socket.create_connection(("127.0.0.1", server.port))
            held.append(one)
            with contextlib.suppress(ConnectionError):
                one.sendall(said[number % len(said)])
            await server.serves() if number % 20 == 0 else await asyncio.sleep(0)
        await until(lambda: len(door._strangers) <= 40)  # those that may still say something
        for one in held:
            one.close()
        await until(lambda: not door._strangers)
        assert not door._parties

    with_guarded(tmp_path, story)


def test_certificates_change_under_open_connections(tmp_path: Path) -> None:
    async def story(server: Guarded) -> None:
        job = server.job
        control = job.hold("control", "control")
        async with (
            CoordinatorClient(server.url, control, QUICK) as client,
            server.worker("worker-0", hello("worker-0", ready=True)) as stream,
        ):
            assert isinstance(await told(stream), m.Welcome)
            for uid in ("second", "third"):
                job.issue("coordinator", "coordinator", uid)
                job.issue("control", "control", uid)
                assert len((await client.status()).workers) == 1
            await stream.send_bytes(m.encode(m.Ready()))
            assert not stream.closed

    with_guarded(tmp_path, story)
