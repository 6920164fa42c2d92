"""The fake API server as a test holds it: its life, its faults, its log, and hands that change objects."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

from aiohttp import web

from fake_api import kinds, selectors
from fake_api.faults import Fault
from fake_api.frontend import Frontend
from fake_api.kinds import Kind
from fake_api.status import Object, Refusal
from fake_api.store import Store

T = TypeVar("T")


class ResourceLike(Protocol):
    """Whatever names a resource: KubeApi's Resource, or a Kind."""

    @property
    def group(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def plural(self) -> str: ...


class FakeApi:
    """An API server on a port of its own: ``async with FakeApi() as server``, then ``server.url``.

    What the test does by its methods goes past HTTP and is in no log. It is stopped and started again by
    :meth:`stop` and :meth:`start`, on the same port and with all its objects.
    """

    def __init__(
        self, *definitions: Object, token: str | None = None, encryption: ssl.SSLContext | None = None
    ) -> None:
        self.store = Store()
        self._frontend = Frontend(self.store, token)
        self.requests = self._frontend.requests
        self.faults = self._frontend.faults
        for definition in definitions:
            self.add(definition)
        self._encryption = encryption
        self._runner: web.AppRunner | None = None
        self.port = 0
        """Chosen at the first start."""

    @property
    def url(self) -> str:
        return f"{'https' if self._encryption else 'http'}://127.0.0.1:{self.port}"

    @property
    def token(self) -> str | None:
        """The bearer token that opens it; None: no token is asked for."""
        return self._frontend.token

    @token.setter
    def token(self, token: str | None) -> None:
        self._frontend.token = token

    async def start(self) -> None:
        """Listen, on the former port if there was one."""
        application = web.Application(client_max_size=3 * 1024 * 1024)
        application.router.add_route("*", "/{path:.*}", self._frontend.answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self._encryption)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close all connections and the port: an outage."""
        self.drop_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.heal()
        await self.stop()

    # Faults

    def inject(self, fault: Fault) -> Fault:
        """Put a fault to work, until it is used up or healed."""
        fault.begin = time.monotonic()
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Take all faults away and let go of what they hold."""
        for fault in self.faults:
            if fault.gate is not None:
                fault.gate.set()
        self.faults.clear()

    def drop_watches(self, resource: ResourceLike | None = None) -> int:
        """Close the watches of a resource (None: all), and return how many there were."""
        hit = [
            queue for queue, kind in self._frontend.watches.items() if resource is None or kind is self.kind(resource)
        ]
        for queue in hit:
            queue.put_nowait(None)
        return len(hit)

    def expire(self) -> None:
        """Close all watches and make all versions up to now too old: who comes back gets a 410."""
        self.store.forget_history()
        self._frontend.forget_lists()
        self.drop_watches()

    # The log

    def count(
        self, verb: str | None = None, resource: str | None = None, code: int | None = None, since: int = 0
    ) -> int:
        """Return how many requests there were, after the first ``since``."""
        wanted = (verb, resource, code)
        found = [(request.verb, request.resource, request.code) for request in self.requests[since:]]
        return sum(all(want in {None, has} for want, has in zip(wanted, own, strict=True)) for own in found)

    def watches(self, resource: ResourceLike) -> int:
        """Return how many watches of a resource are open."""
        return sum(kind is self.kind(resource) for kind in self._frontend.watches.values())

    async def wait_for(self, condition: Callable[[], T], seconds: float = 60.0) -> T:
        """Return the condition's value as soon as it is true; asked again after every change and every request."""
        try:
            async with asyncio.timeout(seconds):
                while not (value := condition()):
                    await self._frontend.news.wait()
        except TimeoutError:
            last = "\n".join(f"{r.method} {r.path} -> {r.code}" for r in self.requests[-10:])
            raise AssertionError(
                f"The condition did not come true within {seconds:g} s. Last requests:\n{last}"
            ) from None
        return value

    # The test's hands

    def kind(self, resource: ResourceLike) -> Kind:
        return self.store.kinds[resource.group, resource.version, resource.plural]

    def add(self, manifest: Object) -> Object:
        """Create an object; a CustomResourceDefinition adds its kind."""
        kind = next(k for k in self.store.kinds.values() if (k.api_version, k.kind) == _type(manifest))
        namespace = manifest["metadata"].get("namespace", "default") if kind.namespaced else None
        return self.store.create(kind, namespace, manifest)

    def all(self, resource: ResourceLike, namespace: str | None = None, labels: str = "") -> list[Object]:
        """Return the objects of a namespace (None: of all) that the selector matches; not to be changed."""
        return list(filter(selectors.labels(labels), self.store.all(self.kind(resource), namespace)))

    def find(self, resource: ResourceLike, namespace: str | None, name: str) -> Object | None:
        """Return an object, or None; not to be changed."""
        with contextlib.suppress(Refusal):
            return self.store.get(self.kind(resource), namespace, name)
        return None

    def modify(
        self, resource: ResourceLike, namespace: str | None, name: str, patch: Object, part: str | None = None
    ) -> Object:
        """Merge a patch into an object as somebody else would; ``part``: "status"."""
        return self.store.patch(self.kind(resource), namespace, name, patch, part)

    def remove(self, resource: ResourceLike, namespace: str | None, name: str, grace: int | None = None) -> None:
        """Delete an object as somebody else would."""
        options = {} if grace is None else {"gracePeriodSeconds": grace}
        self.store.delete(self.kind(resource), namespace, name, options)

    def finish_deletion(self, namespace: str, name: str) -> None:
        """Let a pod that is being deleted go, as its kubelet does."""
        self.store.delete(kinds.PODS, namespace, name, {"gracePeriodSeconds": 0})

    def set_pod(
        self, namespace: str, name: str, *, node: str | None = None, ready: bool | None = None, **fields: Any
    ) -> Object:
        """Bind a pod to a node, and set fields of its status (phase, podIP, reason, containerStatuses, conditions)."""
        pod = self.store.get(kinds.PODS, namespace, name)
        if node is not None:
            self.store.bind(pod, node)
        if ready is not None:
            conditions = [
                c for c in fields.get("conditions", pod["status"].get("conditions", [])) if c["type"] != "Ready"
            ]
            fields["conditions"] = [*conditions, {"type": "Ready", "status": str(ready)}]
        return self.store.patch(kinds.PODS, namespace, name, {"status": fields}, "status")

    def add_node(
        self, name: str, *, ready: bool = True, labels: dict[str, str] | None = None, **allocatable: str
    ) -> Object:
        """Add a node; its allocatable resources by name (cpu="8")."""
        resources = {"cpu": "8", "memory": "32Gi", "pods": "110"} | allocatable
        body: Object = {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}}
        body["status"] = {"allocatable": resources, "capacity": resources}
        body["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]
        return self.store.create(kinds.NODES, None, body)

    def set_node(self, name: str, *, ready: bool | str | None = None, **spec: Any) -> Object:
        """Set fields of a node's spec (taints, unschedulable), and whether it is Ready (True, False, "Unknown")."""
        node = self.store.patch(kinds.NODES, None, name, {"spec": spec})
        if ready is None:
            return node
        conditions = [{"type": "Ready", "status": str(ready)}]
        return self.store.patch(kinds.NODES, None, name, {"status": {"conditions": conditions}}, "status")


def _type(manifest: Object) -> tuple[str, str]:
    return manifest["apiVersion"], manifest["kind"]
