"""Somebody who hears every packet of a job: of a sealed one neither keys, tokens, gradients, state nor samples.

The job has a network namespace of its own, so that all it sends passes one interface. In plaintext the same ears hear
everything, which shows that they would.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from namespaces import INSIDE, can_part_networks, enter, ip
from sniffing import METRIC, Sniffer, key_patterns, known_patterns, training

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
        script.write_text(training(STEPS, 0.05))
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
            found = key_patterns(content)
            if found["key"] not in self.secrets.values():
                who = f"{path.parent.name} {len(self.secrets)}"
                self.secrets |= {f"{what} of {who}": secret for what, secret in found.items()}


@pytest.mark.parametrize("interface", ["lo", "l*"], ids=["one interface", "all of some name"])
def test_ears_close_while_others_go_on_to_send(namespace: str, interface: str) -> None:
    silence = threading.Event()

    def send() -> None:
        enter(namespace)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            while not silence.wait(0.001):
                sender.sendto(b"noise", ("127.0.0.1", 9))

    sniffer = Sniffer(namespace, interface)
    talking = threading.Thread(target=send)
    closing = threading.Thread(target=sniffer.close, args=(0.1,))
    talking.start()
    try:
        while not sniffer.hears(b"noise"):
            time.sleep(0.01)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
    finally:
        silence.set()
        talking.join()
        closing.join()


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
