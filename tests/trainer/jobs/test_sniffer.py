"""Somebody who hears every packet of a job: of a sealed one neither keys, tokens, gradients, state nor samples.

The job has a network namespace of its own, so that all it sends passes one interface. In plaintext the same ears hear
everything, which shows that they would.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from namespaces import INSIDE, can_part_networks, enter, ip

import programs
from tiers import nightly
from virtualflow.errors import ConfigurationError
from virtualflow.launcher import registry
from virtualflow.protocol.identity import OWN, context_of
from virtualflow.protocol.live_view import PAGE_PATH, VIEW_PATH, view_token

ROOT = Path(__file__).parents[3]
STEPS = 40
SCHEDULE = "6:=3,12:=1,26:kill"
"""A third worker gets the state, two leave, and the last one's successor takes up its copy at the coordinator."""

GRADIENT = struct.unpack("<f", struct.pack("<f", 0.7654321))[0]
STATE = b"what is in the state of this job"
SAMPLE = b"what is in a sample of this job."
METRIC = "a-name-that-the-page-shows"
SCRIPT = f"""
import time
import torch, virtualflow as vf

class Known(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2_000))
        self.register_buffer("said", torch.frombuffer(bytearray({STATE!r} * 40), dtype=torch.uint8))

    def forward(self, x):
        return {GRADIENT} * self.weight.sum() + 0.0 * x.float().mean()

model = Known()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.frombuffer(bytearray({SAMPLE!r} * 64), dtype=torch.uint8).view(64, -1)
data = torch.utils.data.TensorDataset(samples)
with vf.elastic(model, optimizer, data, batch_size=16, steps={STEPS}, virtual_nodes=4) as run:
    for step in run:
        for (x,) in step:
            loss = model(x)
            loss.backward()
            step.log(**{{"{METRIC}": loss}})
        if step.number % 4 == 0:
            vf.evaluate(model, data, lambda batch: batch[0], batch_size=16)
        time.sleep(0.05)
"""

OUTGOING = 4
"""PACKET_OUTGOING: on a loopback each packet is heard as it goes and as it comes."""
_BUFFER, _STATISTICS = (socket.SOL_SOCKET, 33), (263, 6)
"""SO_RCVBUFFORCE, and PACKET_STATISTICS of SOL_PACKET."""


class Sniffer:
    """Hears all that passes the loopback of a network namespace, by connection and direction."""

    def __init__(self, namespace: str) -> None:
        self._flows: dict[bytes, bytearray] = defaultdict(bytearray)
        self.dropped = 0
        """Packets that came faster than they were heard."""
        with ThreadPoolExecutor(1, initializer=enter, initargs=(namespace,)) as insider:
            self._socket = insider.submit(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)).result()
        self._socket.setsockopt(*_BUFFER, 1 << 28)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def close(self) -> None:
        """Hear no more."""
        self._over.set()
        self._thread.join()
        _, self.dropped = struct.unpack("II", self._socket.getsockopt(*_STATISTICS, 8))
        self._socket.close()

    def hears(self, pattern: bytes) -> bool:
        return any(pattern in flow for flow in self._flows.values())

    @property
    def total(self) -> int:
        return sum(map(len, self._flows.values()))

    def _listen(self) -> None:
        while True:
            try:
                packet, address = self._socket.recvfrom(1 << 18)
            except TimeoutError:
                if self._over.is_set():
                    return
                continue
            if address[2] != OUTGOING:
                self._keep(packet[14:])

    def _keep(self, packet: bytes) -> None:
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            self._flows[b"no TCP"] += packet
            return
        segment = packet[4 * (packet[0] & 15) :]
        self._flows[packet[12:20] + segment[:4]] += segment[4 * (segment[12] >> 4) :]


@pytest.fixture
def namespace() -> Iterator[str]:
    if not can_part_networks():
        pytest.skip("needs root and iproute2: it listens in a network namespace")
    name = f"vf-heard-{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "del", name)


class Job:
    """``virtualflow run`` in a namespace; what it must keep to itself is looked up while it runs."""

    def __init__(self, directory: Path, namespace: str, *options: str) -> None:
        script = directory / "train.py"
        script.write_text(SCRIPT)
        command = ["run", "--plain", "--workers", "2", "--name", "heard", "--schedule", SCHEDULE]
        command += ["--checkpoint-memory", *options, str(script)]
        self.secrets: dict[str, bytes] = {}
        self.views = 0
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._program = programs.Program(
                [sys.executable, "-c", INSIDE, f"/run/netns/{namespace}", "-m", "virtualflow", *command],
                env=os.environ | {"PYTHONPATH": str(ROOT / "trainer")},
                stdout=log,
                stderr=log,
            )
        self._insider = ThreadPoolExecutor(1, initializer=enter, initargs=(namespace,))

    def run(self) -> str:
        """Look at its page until it ends; what it has printed."""
        self._insider.submit(asyncio.run, self._look()).result()
        output = self._log.read_text()
        assert self._program.wait(60) == 0, output
        return output

    def close(self) -> None:
        self._program.kill()
        self._program.wait()
        self._insider.shutdown()

    async def _look(self) -> None:
        limit = time.monotonic() + 120.0
        while self._program.poll() is None:
            assert time.monotonic() < limit, self._log.read_text()
            for job in registry.running_jobs():
                self._note_secrets(job)
                if job.url:
                    await self._look_at_page(job)
            await asyncio.sleep(0.1)

    async def _look_at_page(self, job: registry.RunningJob) -> None:
        headers = {} if job.identity else {"Authorization": f"Bearer {view_token(job.token)}"}
        try:
            connector = aiohttp.TCPConnector(ssl=context_of(job.credential))
            async with aiohttp.ClientSession(connector=connector, headers=headers) as browser:
                for path in (PAGE_PATH, VIEW_PATH):
                    async with browser.get(job.url + path) as answer:
                        assert answer.status == 200
                        self.views += METRIC.encode() in await answer.read()
        except (aiohttp.ClientError, ConfigurationError):
            pass  # the job has ended

    def _note_secrets(self, job: registry.RunningJob) -> None:
        if job.token:
            self.secrets |= {"token": job.token.encode(), "view token": view_token(job.token).encode()}
        for path in Path(job.identity or "/nowhere").parent.glob(f"*/{OWN}"):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # the job has ended
            key = load_pem_private_key(content, None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            raw = key.private_numbers().private_value.to_bytes(32)
            who = f"{path.parent.name} {len(self.secrets)}"
            if raw not in self.secrets.values():
                lines = content.split(b"\n")
                self.secrets |= {f"key of {who}": raw, f"its file, {who}": lines[1], f"and its end, {who}": lines[2]}


def known_patterns() -> dict[str, list[bytes]]:
    """What is in the job's messages, in each form that it may have there."""
    return {
        "gradients": [struct.pack("<f", GRADIENT * 2.0**power) * 16 for power in range(-6, 5)],
        "state": [STATE],
        "samples": [SAMPLE],
        "page": [METRIC.encode()],
    }


@pytest.mark.parametrize(
    "options", [pytest.param([], id="sealed"), nightly(["--insecure-plaintext"], id="in plaintext")]
)
@pytest.mark.slow
def test_who_hears_every_packet_of_a_job_learns_nothing(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    sniffer = Sniffer(namespace)
    try:
        job = Job(tmp_path, namespace, *options)
        try:
            said = job.run()
        finally:
            job.close()
    finally:
        sniffer.close()
    assert re.search(r"2 -> 3|3 workers", said), said
    assert "came from the coordinator's memory" in said, said
    assert job.views > 0
    assert sniffer.dropped == 0
    assert sniffer.total > 500_000, "gradients of all steps, a state twice, and the page"
    heard = {what: any(map(sniffer.hears, forms)) for what, forms in known_patterns().items()}
    secrets = {what: sniffer.hears(secret) for what, secret in job.secrets.items()}
    if options:
        assert all(heard.values()), heard
        assert secrets == {"token": True, "view token": True}
    else:
        assert not any(heard.values()), heard
        assert not any(secrets.values()), [what for what, audible in secrets.items() if audible]
        assert len([what for what in secrets if what.startswith("key of")]) >= 6, "control, coordinator, four workers"
