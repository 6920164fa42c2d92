"""What the kubelet and Prometheus are answered."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from virtual_time import run

from virtualflow.errors import ConfigurationError
from virtualflow_operator.controllers.workqueue import WorkQueue
from virtualflow_operator.observability.health import HealthServer, queue_moves
from virtualflow_operator.observability.metrics import Metrics
from virtualflow_operator.settings import QueueSettings

LIMIT = aiohttp.ClientTimeout(total=10)


class Operator:
    """What the checks look at."""

    def __init__(self) -> None:
        self.dead: str | None = None
        self.unready: str | None = "the caches are not filled yet"
        self.metrics = Metrics()

    def server(self, health_port: int = 0, metrics_port: int = 0, host: str = "127.0.0.1") -> HealthServer:
        return HealthServer(
            alive=lambda: self.dead,
            ready=lambda: self.unready,
            metrics=self.metrics,
            health_port=health_port,
            metrics_port=metrics_port,
            host=host,
        )


async def ask(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(timeout=LIMIT) as session,
        session.get(f"http://127.0.0.1:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()


def test_the_probes_say_what_is_wrong() -> None:
    async def story() -> None:
        operator = Operator()
        async with operator.server() as server:
            assert await ask(server.health_port, "/healthz") == (200, "ok\n")
            assert await ask(server.health_port, "/readyz") == (503, "the caches are not filled yet\n")
            operator.unready, operator.dead = None, "jobs have waited for 130 s, and none was reconciled"
            assert await ask(server.health_port, "/readyz") == (200, "ok\n")
            assert await ask(server.health_port, "/healthz") == (503, f"{operator.dead}\n")
            assert (await ask(server.health_port, "/metrics"))[0] == 404

    asyncio.run(story())


def test_metrics_are_on_a_port_of_their_own() -> None:
    async def story() -> None:
        operator = Operator()
        operator.metrics.leader.set(1)
        async with operator.server() as server:
            status, text = await ask(server.metrics_port, "/metrics")
            assert status == 200
            assert "\nvirtualflow_leader 1.0\n" in text
            assert (await ask(server.metrics_port, "/healthz"))[0] == 404

    asyncio.run(story())


@pytest.mark.parametrize("what", ["health", "metrics"])
def test_a_port_that_is_taken_is_said_so_and_nothing_stays_open(what: str) -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as spare:
            port, free = taken.getsockname()[1], spare.getsockname()[1]
            spare.close()
            ports = {"health": (port, free), "metrics": (free, port)}[what]
            with pytest.raises(ConfigurationError, match=f"port {port} is taken; give another with --{what}-port"):
                async with Operator().server(*ports):
                    pass
            socket.create_server(("127.0.0.1", free)).close()

    asyncio.run(story())


def test_by_default_every_address_is_listened_on() -> None:
    async def story() -> None:
        async with Operator().server(host="") as server:
            assert (await ask(server.health_port, "/healthz"))[0] == 200

    asyncio.run(story())


def test_a_queue_in_which_a_job_waits_for_too_long_does_not_move() -> None:
    async def story() -> None:
        queue = WorkQueue[str](QueueSettings(concurrency=1, slow_most=0))
        moves = queue_moves(queue.stalled, limit=60)
        never = asyncio.Event()

        async def process(_: str) -> None:
            await never.wait()

        task = asyncio.create_task(queue.run(process))
        queue.add("stuck")
        queue.add("waiting")
        await asyncio.sleep(59)
        assert moves() is None
        await asyncio.sleep(2)
        assert moves() == "jobs have waited for 61 s, and none was reconciled"
        never.set()
        await asyncio.sleep(1)
        assert moves() is None
        queue.stop()
        await task

    run(story())
