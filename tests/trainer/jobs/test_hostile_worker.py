"""A worker with a certificate of the job that does all that it may not, and strangers at each port: the job goes on."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from coordinator_server import hello, told
from elastic_jobs import MEMBERSHIP, PATIENCE, ElasticJob, alone, trained
from identities import Identities, identities
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol import messages as m
from virtualflow.transport.key_agreement import SECRET, Introduction

STEPS = 100
GARBAGE = (
    b"",
    b"\x16\x03\x01\x02\x00" + b"x" * 512,
    b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    bytes(range(16)) + bytes([1, 0, 0, 0, 0]),
    os.urandom(300),
)
"""What strangers say: nothing, half of TLS, HTTP, a member's greeting with a secret that is none, and noise."""
CLOSED = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)
"""How the system says that the other end has closed a connection before all was said."""
AT_ONCE = 2_000
"""Connections while one generation is being built: members give up building after ten seconds."""
SPARE = 20
"""Descriptors that a process may have more than before: they come and go with generations."""
GROWTH = 64 << 20


def train(steps: int) -> Any:
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(24, 4, generator=draw), torch.randn(24, 1, generator=draw))
    with vf.elastic(model, optimizer, dataset, batch_size=12, steps=steps, virtual_nodes=4) as run:
        for step in run:
            for x, y in step:
                nn.functional.mse_loss(model(x), y).backward()
    return trained(run, model, optimizer)


class Hostile:
    """A worker of the job, by its certificate: it is admitted, says its key, and never comes."""

    def __init__(self, job: ElasticJob, parties: Identities, name: str, steps: int) -> None:
        self._job, self._name, self._steps = job, name, steps
        self._identity = parties.hold("worker", name)

    async def attack(self, count: int) -> int:
        """Shout at all ports, then lie; how many connections the members have let in, to turn them away."""
        connector = aiohttp.TCPConnector(ssl=self._identity.client_context(), force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            await self._ask_for_what_is_not_its(session)
            async with session.ws_connect(f"{self._job.url}/v1/worker") as stream:
                await stream.send_bytes(m.encode(self._hello()))
                plan = await self._next(m.Plan, stream)
                others = await self._addresses(plan, stream)
                introduction = await self._introduce(plan, stream)
                step = self._job.status().step
                ports = {int(key.removeprefix(m.MEMBER)): port_of(value) for key, value in others.items()}
                for rank, port in ports.items():
                    introduction.meet(rank, *address_of(others[m.member_key(rank)]))
                    for claimed in {*ports} - {rank}:
                        greeting = introduction.greeting(rank, 0) + struct.pack("<IB", claimed, 0)
                        assert await asyncio.to_thread(refused, port, greeting)
                let_in = await asyncio.to_thread(shout, [*ports.values()], count // 2)
                await asyncio.to_thread(self._job.reach, step + 2)
                await asyncio.to_thread(shout, [int(self._job.url.rpartition(":")[2])], count // 2)
                await self._lie(plan, others, stream)
        return let_in

    def _hello(self) -> m.Hello:
        """As of an honest worker, whose facts it knows."""
        roster = self._job.coordinator.state.roster
        known = next(contact for contact in roster.contacts.values() if contact.fingerprint)
        facts = {"fingerprint": known.fingerprint, "device": known.device, "self_test": known.self_test}
        return hello(self._name, virtual_nodes=4, total_steps=self._steps, ready=True, **facts)

    async def _ask_for_what_is_not_its(self, session: aiohttp.ClientSession) -> None:
        for call in ("gone", "begin", "scale", "stop", "fail", "hold", "drain"):
            async with session.post(f"{self._job.url}/v1/{call}", data=b"{}") as answer:
                assert answer.status == 403

    async def _addresses(self, plan: m.Plan, stream: aiohttp.ClientWebSocketResponse) -> dict[str, bytes]:
        """What the other members have published."""
        found: dict[str, bytes] = {}
        while len(found) < len(plan.members) - 1:
            keys = await self._next(m.Keys, stream)
            if keys.generation == plan.generation:
                found |= {key: value for key, value in keys.values.items() if key.startswith(m.MEMBER)}
        return found

    async def _introduce(self, plan: m.Plan, stream: aiohttp.ClientWebSocketResponse) -> Introduction:
        """Say what an honest worker would, of a port where nobody listens."""
        own = plan.rank_of(self._name, f"{self._name}.0")
        assert own is not None
        introduction, where = Introduction(self._identity, plan, own), b"127.0.0.1 9"
        said = bytes(SECRET) + where + b"\0" + introduction.say(where)
        await stream.send_bytes(m.encode(m.Publish(plan.generation, m.member_key(own), said)))
        return introduction

    async def _lie(self, plan: m.Plan, others: dict[str, bytes], stream: aiohttp.ClientWebSocketResponse) -> None:
        """Publish in the others' places, and their words and noise in its own."""
        own = plan.rank_of(self._name, f"{self._name}.0")
        assert own is not None
        for key in others:
            await stream.send_bytes(m.encode(m.Publish(plan.generation, key, b"x" * 16 + b"127.0.0.1 9")))
        for value in (*others.values(), os.urandom(200)):
            await stream.send_bytes(m.encode(m.Publish(plan.generation, m.member_key(own), value)))

    async def _next(self, kind: Any, stream: aiohttp.ClientWebSocketResponse) -> Any:
        while not isinstance(message := await told(stream), kind):
            assert message is not None, "it is refused"
        return message


def address_of(published: bytes) -> tuple[bytes, bytes]:
    """A member's address, and what it says of its key."""
    where, _, said = published[SECRET:].partition(b"\0")
    return where, said


def port_of(published: bytes) -> int:
    return int(address_of(published)[0].split()[-1])


def refused(port: int, said: bytes) -> bool:
    """Whether the other end takes a connection and then closes it; not when there is no port any more."""
    try:
        one = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    except ConnectionError:
        return False
    with one:
        try:
            one.sendall(said)
            one.shutdown(socket.SHUT_WR)
            while one.recv(65_536):
                pass
        except OSError as error:
            if error.errno not in CLOSED:
                raise
    return True


def shout(ports: Sequence[int], count: int) -> int:
    """So many connections, each of which is to be closed by the other end; how many were let in to be turned away."""
    return sum(refused(ports[n % len(ports)], GARBAGE[n % len(GARBAGE)]) for n in range(count))


def processes(job: ElasticJob) -> list[psutil.Process]:
    """The coordinator's, which is this one, and the workers'."""
    return [psutil.Process(), *(psutil.Process(worker.process.pid) for worker in job.workers.values())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [400, pytest.param(100_000, marks=[pytest.mark.nightly, pytest.mark.timeout(2 * 3_600)])]
)
def test_a_hostile_worker_and_crowds_at_each_port_cost_a_job_nothing(
    tmp_path: Path, start_job: Callable[..., ElasticJob], count: int
) -> None:
    rounds = -(-count // AT_ONCE)
    steps = STEPS + 4 * rounds
    wanted = alone(train, steps)
    parties = identities(tmp_path)
    # It is neither silent nor late: its attack is what ends it.
    membership = MembershipSettings(
        restart_grace=MEMBERSHIP.restart_grace, rebalance_gain=1.0, admission_window=0.1, heartbeat_limit=PATIENCE
    )
    job = start_job(train, steps, workers=2, hold=2, membership=membership, parties=parties)
    job.reach(2)
    before = [(process.num_fds(), process.memory_info().rss) for process in processes(job)]
    let_in = 0
    for number in range(rounds):
        name = f"hostile-{number}"
        job.call("scale", workers=3)
        let_in += asyncio.run(Hostile(job, parties, name, steps).attack(count // rounds))
        job.call("scale", workers=2)
        job.call("gone", worker=name, reason="it was hostile")
        job.wait_for(lambda status: len(status.workers) == 2 and status.prepared, f"a generation without {name}")
        job.reach(job.status().step + 2)  # they agree on it in one step, and enter it before the next
    assert let_in > count // 8, "members were at home"
    assert {worker.worker for worker in job.status().workers} == {"worker-0", "worker-1"}
    deadline = time.monotonic() + PATIENCE
    for process, (descriptors, memory) in zip(processes(job), before, strict=True):
        while process.num_fds() > descriptors + SPARE:
            assert time.monotonic() < deadline, f"{process.num_fds()} descriptors, and {descriptors} before"
            time.sleep(0.05)
        assert process.memory_info().rss < memory + GROWTH
    assert job.results() == [wanted] * 2
