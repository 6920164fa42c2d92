"""What the kubelet and Prometheus ask the operator: whether it lives, whether it is ready, and its metrics.

A blocked event loop answers nobody, which is the right answer to a liveness probe; the rest is two closures that give
``None`` or a sentence.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Self

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from virtualflow.errors import ConfigurationError
from virtualflow_operator.observability.metrics import Metrics
from virtualflow_operator.settings import ENV_PREFIX

Check = Callable[[], str | None]
"""``None``: all is well; else a sentence that says what is not."""

QUEUE_LIMIT = 120.0
"""Seconds in which jobs wait and none gets its turn, after which the operator counts as stuck and is restarted. That
some wait for longer, behind ten thousand others of their namespace, is no reason."""
CLOSE_LIMIT = 1.0
"""Seconds that requests under way get at shutdown."""
BACKLOG = 64
"""Connections that may wait to be accepted."""


def queue_moves(stalled: Callable[[], float], limit: float = QUEUE_LIMIT) -> Check:
    """Check that a queue makes progress, by the seconds in which entries have waited and none was taken."""

    def check() -> str | None:
        waited = stalled()
        return None if waited < limit else f"jobs have waited for {waited:.0f} s, and none was reconciled"

    return check


class HealthServer:
    """``/healthz`` and ``/readyz`` on one port, ``/metrics`` on another; use it with ``async with``.

    Args:
        alive: asked by ``/healthz``; 503 restarts the container.
        ready: asked by ``/readyz``. A replica that stands by, and could lead, is ready.
        health_port: 0: any free one; :attr:`health_port` tells which.
        host: the address to listen on; empty: all, of both families.
        judge: says by a request's ``Authorization`` header whether it may read the metrics: 200, or another status and
            why not; ``None``: everybody may.
    """

    def __init__(
        self,
        *,
        alive: Check,
        ready: Check,
        metrics: Metrics,
        health_port: int,
        metrics_port: int,
        host: str = "",
        judge: Callable[[str], Awaitable[tuple[int, str]]] | None = None,
    ) -> None:
        self.health_port = health_port
        self.metrics_port = metrics_port
        self._host = host
        self._alive = alive
        self._ready = ready
        self._metrics = metrics
        self._judge = judge
        self._runners: list[web.AppRunner] = []

    async def __aenter__(self) -> Self:
        """Listen on both ports.

        Raises:
            ConfigurationError: one of them cannot be had; the sentence says which flag gives another.
        """
        health = web.Application()
        health.router.add_get("/healthz", _answer(self._alive))
        health.router.add_get("/readyz", _answer(self._ready))
        scraped = web.Application()
        scraped.router.add_get("/metrics", self._show_metrics)
        try:
            self.health_port = await self._serve(health, self.health_port, "health")
            self.metrics_port = await self._serve(scraped, self.metrics_port, "metrics")
        except ConfigurationError:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        while self._runners:
            await self._runners.pop().cleanup()

    async def _serve(self, app: web.Application, port: int, what: str) -> int:
        try:
            listener = _listen(self._host, port)
        except OSError as error:
            because = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            raise ConfigurationError(
                f"port {port} {because}; give another with --{what}-port or {ENV_PREFIX}{what.upper()}_PORT"
            ) from error
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_LIMIT)
        self._runners.append(runner)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        return int(listener.getsockname()[1])

    async def _show_metrics(self, request: web.Request) -> web.Response:
        if self._judge is not None:
            status, reason = await self._judge(request.headers.get("Authorization", ""))
            if status != 200:
                told = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
                return web.Response(status=status, text=f"{reason}\n", headers=told)
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        problem = check()
        return web.Response(text="ok\n") if problem is None else web.Response(status=503, text=f"{problem}\n")

    return answer


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        except OSError as error:
            # A kernel that knows IPv6 and may not use it.
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                raise
    return socket.create_server((host, port), backlog=BACKLOG)
