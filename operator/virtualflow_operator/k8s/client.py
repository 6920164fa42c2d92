"""The API server, as far as the operator needs it: objects are plain dicts, failures are exceptions with a code.

The official client's typed models check on the client and refuse what they do not know, a user's pod template among it,
so only its transport and its configuration are used here. Nothing is retried: the work-queue decides what comes again.
But where the API server says for how long it wants no further request (429 with ``Retry-After``), none is sent before.
(But aiohttp sends a GET, PUT or DELETE a second time when the server closes a kept connection instead of answering: a
replaced object may then be a Conflict and a deleted one NotFound, though this very call did it.)
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from virtualflow_operator.api import Object
from virtualflow_operator.constants import GROUP, KUEUE_GROUP, KUEUE_VERSION, MANAGED_BY, PLURAL, QUEUE_PLURAL, VERSION
from virtualflow_operator.k8s.nesting import TooDeep, bounded_response
from virtualflow_operator.settings import ApiSettings

_MESSAGE_LIMIT = 2000
"""Characters kept of an answer that is no Status object (a proxy's error page)."""


class ApiError(Exception):
    """The API server refused a request, or did not answer it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message or reason or f"HTTP {code}")
        self.code = code
        """The HTTP status, or 0 when there was no answer."""
        self.reason = reason
        """The Status object's reason in CamelCase (``AlreadyExists``), or the name of a connection's error."""
        self.message = message or reason or f"HTTP {code}"


class NotFound(ApiError):
    """404: there is no such object, or no such resource."""


class AlreadyExists(ApiError):
    """409: an object of this name is there."""


class Conflict(ApiError):
    """409: somebody else changed the object meanwhile, or a precondition does not hold."""


class Gone(ApiError):
    """410: a resourceVersion or a ``continue`` token is too old."""


class Invalid(ApiError):
    """400, 413, 422: the object will never be accepted as it is."""


class Forbidden(ApiError):
    """401, 403: the operator's account may not do this, or an admission rule forbids it."""


class TooManyRequests(ApiError):
    """429: the API server is overloaded, or a disruption budget forbids an eviction."""

    def __init__(self, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(code, reason, message)
        self.retry_after = retry_after
        """Seconds to wait as the API server wishes; None when it does not say."""


class Unavailable(ApiError):
    """5xx, a time-out, or no connection: the request may or may not have been carried out."""


_ERRORS: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: Invalid,
    422: Invalid,
}


def unanswered(error: Exception, seconds: float | None) -> Unavailable:
    if isinstance(error, TimeoutError):
        return Unavailable(0, "Timeout", f"The API server did not answer within {seconds:g} s.")
    return Unavailable(0, type(error).__name__, f"The API server cannot be reached: {error}")


def refusal(code: int, data: bytes, retry_after: str | None) -> ApiError:
    """Return what an answer that is no success means; its body is a Status object, or a proxy's text."""
    text = data.decode(errors="replace").strip()
    try:
        status = json.loads(text)
    except ValueError:
        status = None
    if not (isinstance(status, dict) and status.get("kind") == "Status"):
        status = {"message": text[:_MESSAGE_LIMIT]}
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or "")
    if code == 429:
        return TooManyRequests(code, reason, message, _seconds(retry_after, status.get("details")))
    if code >= 500 or code < 400:
        return Unavailable(code, reason, message)
    if code == 409 and reason == "AlreadyExists":
        return AlreadyExists(code, reason, message)
    return _ERRORS.get(code, ApiError)(code, reason, message)


def _seconds(header: str | None, details: object) -> float | None:
    """Return the seconds to wait by the header, else by the Status object's details."""
    if header is not None and header.isascii() and header.isdigit():
        return float(header)
    hint = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    return float(hint) if isinstance(hint, int) and hint > 0 else None


@dataclass(frozen=True)
class Resource:
    """One kind of object: where the API server keeps it."""

    group: str
    """Empty: the core group."""
    version: str
    plural: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """The path of its group and version, where discovery answers."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of an object, or without a name of the collection; a namespace only bears on namespaced ones.

        Raises ValueError for a name that would lead to another path: an empty one deletes or lists a whole collection.
        """
        parts = [self.root]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", _segment(namespace)]
        parts.append(self.plural)
        if name is not None:
            if self.namespaced and namespace is None:
                raise ValueError(f"{self.plural}/{name} needs a namespace.")
            parts.append(_segment(name))
            if subresource is not None:
                parts.append(_segment(subresource))
        return "/".join(parts)


JOBS = Resource(GROUP, VERSION, PLURAL, namespaced=True)
QUEUES = Resource(GROUP, VERSION, QUEUE_PLURAL, namespaced=False)
PODS = Resource("", "v1", "pods", namespaced=True)
SERVICES = Resource("", "v1", "services", namespaced=True)
SECRETS = Resource("", "v1", "secrets", namespaced=True)
NODES = Resource("", "v1", "nodes", namespaced=False)
EVENTS = Resource("", "v1", "events", namespaced=True)
LEASES = Resource("coordination.k8s.io", "v1", "leases", namespaced=True)
PDBS = Resource("policy", "v1", "poddisruptionbudgets", namespaced=True)
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", namespaced=True)
WORKLOADS = Resource(KUEUE_GROUP, KUEUE_VERSION, "workloads", namespaced=True)
FLAVORS = Resource(KUEUE_GROUP, KUEUE_VERSION, "resourceflavors", namespaced=False)
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", namespaced=False)
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", namespaced=False)
PRIORITY_CLASSES = Resource(KUEUE_GROUP, KUEUE_VERSION, "workloadpriorityclasses", namespaced=False)


def _segment(part: str) -> str:
    """Return a part of a path, escaped; raises ValueError where escaping does not help."""
    if part in {"", ".", ".."}:
        raise ValueError(f"{part!r} cannot be the name of an object or a namespace.")
    return quote(part, safe="")


"""An object of the API as JSON has it."""
_WATCH_SLACK = 30.0
"""A watch that should have ended is closed after this long."""
LIST_ATTEMPTS = 3
"""How often a list is begun when its ``continue`` token expires on the way."""

Observe = Callable[[str, str, int, float], None]
"""Called after every request: HTTP method, resource, status code (0: no answer) and seconds."""


class KubeApi:
    """A client of one API server; closes its connections with :meth:`close` or at the end of ``async with``.

    Every method raises a subclass of :class:`ApiError` when the request fails.
    """

    def __init__(self, client: ApiClient, settings: ApiSettings, *, observe: Observe | None = None) -> None:
        self.observe = observe
        self.may_write: Callable[[], bool] = lambda: True
        """Asked before each request that changes something: a leader that slept past its lease sends none."""
        self._settings = settings
        self._client = client
        self._client.user_agent = MANAGED_BY
        self._timeout = aiohttp.ClientTimeout(total=settings.request_timeout)
        self._quiet_until = -math.inf
        """Monotonic seconds until which the API server wants no further request."""

    @classmethod
    async def connect(
        cls,
        settings: ApiSettings,
        *,
        observe: Observe | None = None,
        too_deep: TooDeep | None = None,
    ) -> Self:
        """Connect as the pod's service account, or outside of a cluster as ``KUBECONFIG`` (~/.kube/config) says.

        The service account's token is read again every minute, as it is renewed in place. ``too_deep`` hears of objects
        that are nested deeper than anything is read.
        Raises kubernetes.aio.config.ConfigException when neither is there.
        """
        configuration = configure(settings, too_deep)
        try:
            load_incluster_config(client_configuration=configuration)
        except ConfigException:
            path = os.environ.get("KUBECONFIG") or "~/.kube/config"
            loading = load_kube_config(path, client_configuration=configuration, persist_config=False)
            await loading
        return cls(ApiClient(configuration), settings, observe=observe)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        return await self._request("GET", resource, resource.path(namespace, name))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        label_selector: str | None = None,
        page: int | None = None,
        field_selector: str | None = None,
        most: int | None = None,
        read: Callable[[Object], Any] = lambda body: body,
    ) -> list[Any]:
        """Return all objects of a namespace (None: of all), ``page`` at a time; they bear no apiVersion and kind.

        ``most``: only so many, by one request. ``read``: what is wanted of each; the rest is let go with its page.

        A list that expires on the way is begun again; after ``LIST_ATTEMPTS`` of them :class:`Gone` is raised.
        """
        path = resource.path(namespace)
        query = [("limit", str(most or page or self._settings.page))]
        if label_selector is not None:
            query.append(("labelSelector", label_selector))
        if field_selector is not None:
            query.append(("fieldSelector", field_selector))
        attempt = 1
        items: list[Any] = []
        token = ""
        while True:
            try:
                answer = await self._request(
                    "GET", resource, path, query=[*query, ("continue", token)] if token else query
                )
            except Gone:
                if attempt >= LIST_ATTEMPTS:
                    raise
                attempt += 1
                items, token = [], ""
                continue
            items.extend(map(read, answer.get("items") or ()))
            token = (answer.get("metadata") or {}).get("continue") or ""
            if not token or most is not None:
                return items

    async def watch(
        self, resource: Resource, namespace: str | None, label_selector: str, field_selector: str, seconds: float
    ) -> AsyncIterator[tuple[str, Object]]:
        """Yield what there is as ``ADDED``, then each change, as (type, object), until ``seconds`` are over.

        What is deleted between two watches is not told: list now and then.
        """
        # From version 0, as informers do: the API server answers from its cache, which may be a moment behind. Without
        # a version it may read each watch from etcd (kubernetes #123448).
        query = [("watch", "true"), ("resourceVersion", "0")]
        query += [("labelSelector", label_selector), ("fieldSelector", field_selector)]
        query.append(("timeoutSeconds", str(int(seconds))))
        headers, path = {"Accept": "application/json"}, resource.path(namespace)
        await self._keep_quiet()
        limits = aiohttp.ClientTimeout(sock_connect=self._timeout.total, sock_read=seconds + _WATCH_SLACK)
        try:
            request = await self._client.param_serialize(
                "GET", path, query_params=query, header_params=headers, auth_settings=["BearerToken"]
            )
            answer = await self._client.call_api(*request, _request_timeout=limits)
            response: aiohttp.ClientResponse = answer.response
            try:
                if response.status >= 300:
                    text, wish = await response.read(), response.headers.get("Retry-After")
                    raise self._note(refusal(response.status, text, wish))
                rest = b""
                async for chunk in response.content.iter_any():  # not by lines: aiohttp refuses long ones
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        change = json.loads(line)
                        if change["type"] == "ERROR":
                            told = change["object"]
                            raise refusal(told.get("code") or 500, json.dumps(told).encode(), None)
                        yield change["type"], change["object"]
            finally:
                response.close()
        except (aiohttp.ClientError, ConfigException, OSError, TimeoutError, ValueError) as error:
            raise unanswered(error, seconds) from error

    async def create(self, resource: Resource, namespace: str | None, body: Object, dry_run: bool = False) -> Object:
        """Create an object and return it as it was stored.

        ``dry_run`` only has it checked and filled with defaults: a field that the API server does not know is refused,
        where it would be dropped.
        """
        query = [("dryRun", "All"), ("fieldValidation", "Strict")] if dry_run else []
        return await self._request("POST", resource, resource.path(namespace), query=query, body=body)

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> Object:
        """Delete an object and, in the background, what it owns; what is left of it, or a Status.

        With ``uid`` only that very object: :class:`Conflict` when another one has taken its name.
        ``grace_seconds``: what a pod gets between SIGTERM and SIGKILL; 0 removes it from the API at once.
        """
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._request("DELETE", resource, resource.path(namespace, name), body=body)

    async def patch(
        self, resource: Resource, namespace: str | None, name: str, body: Object, subresource: str | None = None
    ) -> Object:
        """Merge ``body`` into an object (None removes a key, a list replaces a list) and return the outcome."""
        path = resource.path(namespace, name, subresource)
        return await self._request("PATCH", resource, path, body=body, content_type="application/merge-patch+json")

    async def replace(self, resource: Resource, namespace: str | None, name: str, body: Object) -> Object:
        """Put ``body`` in an object's place; :class:`Conflict` when its resourceVersion is no longer the newest."""
        return await self._request("PUT", resource, resource.path(namespace, name), body=body)

    async def _keep_quiet(self) -> None:
        """Wait for as long as the API server wants no further request."""
        rest = self._quiet_until - time.monotonic()
        if rest > 0:
            await asyncio.sleep(rest)

    def _note(self, error: ApiError) -> ApiError:
        """Note for how long the API server wants no further request; a request's own limit is the most."""
        if isinstance(error, TooManyRequests) and error.retry_after is not None:
            wish = min(error.retry_after, self._settings.request_timeout)
            self._quiet_until = max(self._quiet_until, time.monotonic() + wish)
        return error

    async def _request(
        self,
        method: str,
        resource: Resource,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send one request and return its answer's JSON object, or raise what the answer means."""
        await self._keep_quiet()
        if method != "GET" and not self.may_write():
            raise Unavailable(0, "NotLeading", "This process does not lead any more.")
        begin = time.monotonic()
        code = 0
        try:
            headers = {"Accept": "application/json", "Content-Type": content_type}
            request = await self._client.param_serialize(
                method, path, query_params=list(query), header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = await self._client.call_api(*request, _request_timeout=self._timeout)
            data: bytes = await response.read()
            code = response.status
        except (aiohttp.ClientError, ConfigException, OSError, TimeoutError) as error:
            raise unanswered(error, self._timeout.total) from error
        finally:
            if self.observe is not None:
                self.observe(method, resource.plural, code, time.monotonic() - begin)
        if code >= 300:  # redirects are followed; what is left of them is no answer either
            raise self._note(refusal(code, data, response.headers.get("Retry-After")))
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise Unavailable(code, "NotJson", "The API server's answer is no JSON.") from error
        if not isinstance(answer, dict):
            raise Unavailable(code, "NotJson", "The API server's answer is no JSON object.")
        return answer


def configure(settings: ApiSettings, too_deep: TooDeep | None = None) -> Configuration:
    """Return the client's own defaults, and our limits: no retries, a bounded pool of connections, a bounded depth."""
    response_class = bounded_response(too_deep or (lambda kind, metadata: None))
    return Configuration(
        connection_pool_maxsize=settings.connections,
        retries=None,
        client_session_kwargs={"response_class": response_class},
    )
