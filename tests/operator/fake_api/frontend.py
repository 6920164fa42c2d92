"""HTTP in front of the store: what a request means, what hits it, and what it is answered."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from fake_api import selectors, status
from fake_api.discovery import discover
from fake_api.faults import Fault
from fake_api.kinds import Kind
from fake_api.status import Object, Refusal, bad_request
from fake_api.store import Change, Store

_SUBRESOURCES = {"status", "scale", "finalize"}
_WATCH_SECONDS = 1800
_DEEP = re.compile(r'"@deep (\d+)@"')


def deep(levels: int) -> str:
    """Return a mark in an object that clients read as mappings within mappings, more than Python itself can nest."""
    return f"@deep {levels}@"


def written(answer: object) -> str:
    """Return an answer as JSON."""
    return _DEEP.sub(lambda mark: '{"a":' * int(mark[1]) + "1" + "}" * int(mark[1]), json.dumps(answer))


@dataclass(frozen=True)
class Request:
    """One request that was answered (a watch: begun)."""

    time: float
    """time.monotonic() of its arrival."""
    method: str
    verb: str
    path: str
    resource: str
    """The plural, with the subresource behind a slash; empty for discovery."""
    namespace: str | None
    name: str | None
    code: int
    """0: cut."""


@dataclass(frozen=True)
class _Call:
    """A request, understood."""

    verb: str
    kind: Kind | None = None
    namespace: str | None = None
    name: str | None = None
    part: str | None = None
    body: Any = None

    @property
    def about(self) -> str | None:
        """The name of the object, in its path or in its body."""
        metadata = self.body.get("metadata") if self.body else None
        return self.name or (metadata.get("name") if isinstance(metadata, dict) else None)

    @property
    def resource(self) -> str:
        return "" if self.kind is None else self.kind.plural + (f"/{self.part}" if self.part else "")


class Frontend:
    """Answers requests, keeps their log, and knows who watches what."""

    def __init__(self, store: Store, token: str | None) -> None:
        self.store = store
        self.token = token
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._collecting = False
        self.news = asyncio.Event()
        """Set, and a new one put in its place, at every change and request."""
        self.watches: dict[asyncio.Queue[Change | None], Kind] = {}
        self._lists: dict[str, tuple[int, list[Object]]] = {}
        store.listeners.append(self._changed)

    def forget_lists(self) -> None:
        """Make all ``continue`` tokens too old."""
        self._lists.clear()

    def _changed(self, change: Change) -> None:
        for queue, kind in self.watches.items():
            if kind is change.kind:
                queue.put_nowait(change)
        owned = change.type == "ADDED" and change.item["metadata"].get("ownerReferences")
        if owned or change.type == "DELETED":
            with contextlib.suppress(RuntimeError):  # before the loop runs there is nothing to collect
                loop = asyncio.get_running_loop()
                if not self._collecting:
                    self._collecting = True
                    loop.call_soon(self._collect)
        self._pulse()

    def _collect(self) -> None:
        self._collecting = False
        self.store.collect_garbage()

    def _pulse(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def _note(self, request: web.Request, call: _Call, begin: float, code: int) -> None:
        entry = (begin, request.method, call.verb, request.path_qs, call.resource, call.namespace, call.about, code)
        self.requests.append(Request(*entry))
        self._pulse()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        begin = time.monotonic()
        call = _Call("unknown")
        try:
            call = self._understand(request)
            if (
                self.token is not None
                and request.headers.get("Authorization", "").lower() != f"bearer {self.token}".lower()
            ):
                raise Refusal(401, "Unauthorized", "Unauthorized")
            call = replace(call, body=await _body(request))
            for fault in tuple(self.faults):
                if not fault.strikes(request.method, call.verb, call.resource, call.namespace, call.about):
                    continue
                self._pulse()
                await asyncio.sleep(fault.delay)
                if fault.gate is not None:
                    await fault.gate.wait()
                if fault.after and (fault.cut or fault.code):
                    with contextlib.suppress(Refusal):
                        self._carry_out(request, call)
                if fault.cut:
                    self._note(request, call, begin, 0)
                    assert request.transport is not None
                    request.transport.abort()
                    return web.Response()
                if fault.code:
                    raise _injected(fault)
                if fault.end:
                    self._note(request, call, begin, 200)
                    return web.Response()
            if call.verb == "watch":
                return await self._watch(request, call, begin)
            code, answer = self._carry_out(request, call)
        except Refusal as refusal:
            if call.verb == "watch" and refusal.code != 401:
                return await self._refuse_watch(request, call, begin, refusal)
            self._note(request, call, begin, refusal.code)
            retry = refusal.details.get("retryAfterSeconds")
            headers = {"Retry-After": str(retry)} if retry else None
            return web.json_response(refusal.status, status=refusal.code, headers=headers)
        self._note(request, call, begin, code)
        return web.json_response(answer, status=code, dumps=written)

    def _understand(self, request: web.Request) -> _Call:
        parts = request.path.strip("/").split("/")
        size = 2 if parts[0] == "api" else 3
        if parts[0] not in {"api", "apis"} or len(parts) <= size:
            return _Call("discover")
        group, version = ("", parts[1]) if parts[0] == "api" else (parts[1], parts[2])
        rest = parts[size:]
        namespace = None
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in _SUBRESOURCES:
            namespace, rest = rest[1], rest[2:]
        kind = self.store.kinds.get((group, version, rest[0]))
        if kind is None or len(rest) > 3:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        name = rest[1] if len(rest) > 1 else None
        part = rest[2] if len(rest) > 2 else None
        verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        if request.method == "GET":
            verb = "get" if name else "watch" if request.query.get("watch") in {"true", "1"} else "list"
        else:
            verb = verbs.get(request.method, "unknown")
        return _Call(verb, kind, namespace, name, part)

    def _carry_out(self, request: web.Request, call: _Call) -> tuple[int, Object]:
        """Return the status code and the answer."""
        kind, store, namespace, body = call.kind, self.store, call.namespace, call.body
        if kind is None:
            return 200, discover(store, request.path)
        dry_run = request.query.get("dryRun") == "All"
        if call.verb == "list":
            return 200, self._list(request, kind, namespace)
        if call.verb == "create" and call.name is None:
            if request.query.get("fieldValidation") == "Strict" and (unknown := kind.unknown(body)):
                raise bad_request(
                    f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: '
                    "strict decoding error: " + ", ".join(f'unknown field "{field}"' for field in unknown)
                )
            return 201, store.create(kind, namespace, body, dry_run)
        if call.name is None:
            raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        name = call.name
        known = {None} | ({"status"} if kind.status else set()) | ({"scale"} if kind.scale else set())
        if call.part not in known:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        if call.verb == "patch" and request.content_type != "application/merge-patch+json":
            raise Refusal(415, "UnsupportedMediaType", f"{request.content_type} is not supported here")
        if call.part == "scale" and call.verb in {"get", "update", "patch"}:
            scale = store.scale(kind, store.get(kind, namespace, name))
            return 200, scale if call.verb == "get" else store.rescale(kind, namespace, name, body)
        if call.verb == "get":
            return 200, store.get(kind, namespace, name)
        if call.verb == "update":
            return 200, store.replace(kind, namespace, name, body, call.part, dry_run)
        if call.verb == "patch":
            return 200, store.patch(kind, namespace, name, body, call.part, dry_run)
        if call.verb == "delete" and call.part is None:
            seconds = request.query.get("gracePeriodSeconds")
            options = (body or {}) | ({} if seconds is None else {"gracePeriodSeconds": int(seconds)})
            return 200, store.delete(kind, namespace, name, options, dry_run)
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _list(self, request: web.Request, kind: Kind, namespace: str | None) -> Object:
        query = request.query
        version = self.store.version
        if token := query.get("continue"):
            version, items = self._lists.get(token) or _unknown(token)
        else:
            items = list(self._selected(request, self.store.all(kind, namespace)))
        limit = int(query.get("limit") or 0)
        metadata: Object = {"resourceVersion": str(version)}
        if limit and len(items) > limit:
            items, rest = items[:limit], items[limit:]
            # Tokens tell nothing to clients; a real one names the version and the next key.
            last = items[-1]["metadata"]
            mark = {"v": "meta.k8s.io/v1", "rv": version, "start": f"{last['name']}/{last['uid']}/{namespace}/{limit}"}
            metadata["continue"] = base64.urlsafe_b64encode(json.dumps(mark).encode()).decode().rstrip("=")
            self._lists[metadata["continue"]] = (version, rest)
            if not (query.get("labelSelector") or query.get("fieldSelector")):
                metadata["remainingItemCount"] = len(rest)
        items = (
            items if kind.custom else [{k: v for k, v in i.items() if k not in {"apiVersion", "kind"}} for i in items]
        )
        return {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}

    def _selected(self, request: web.Request, items: list[Object]) -> Iterator[Object]:
        labels = selectors.labels(request.query.get("labelSelector", ""))
        fields = selectors.fields(request.query.get("fieldSelector", ""))
        return (item for item in items if labels(item) and fields(item))

    async def _watch(self, request: web.Request, call: _Call, begin: float) -> web.StreamResponse:
        """Stream a kind's changes until its time is over, it is dropped, or the client leaves."""
        kind = call.kind
        assert kind is not None
        since = request.query.get("resourceVersion", "")
        seconds = float(request.query.get("timeoutSeconds") or _WATCH_SECONDS)
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        if since in {"", "0"}:
            items = self.store.all(kind, call.namespace)
            changes = [Change(0, kind, "ADDED", item, None) for item in items]
        elif since.isdigit():
            changes = self.store.since(kind, int(since))
        else:
            raise status.bad_request(f"Invalid value: {since!r}: resourceVersion")
        for former in changes:
            queue.put_nowait(former)
        self.watches[queue] = kind
        self._note(request, call, begin, 200)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        try:
            await response.prepare(request)
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        change = await queue.get()
                except TimeoutError:
                    break
                if change is None:
                    break
                event = self._event(request, call, change)
                if event is not None:
                    await response.write(_line(*event))
        except ConnectionError:
            pass  # the client left
        finally:
            del self.watches[queue]
            self._pulse()
        return response

    def _event(self, request: web.Request, call: _Call, change: Change) -> tuple[str, Object] | None:
        """Return what a watch with these selectors sees of a change."""
        item = change.item
        if call.namespace not in {None, item["metadata"].get("namespace")}:
            return None
        now = change.type != "DELETED" and any(self._selected(request, [item]))
        before = change.former is not None and any(self._selected(request, [change.former]))
        if now:
            return ("MODIFIED" if before else "ADDED"), item
        if not before:
            return None
        version = {"resourceVersion": item["metadata"]["resourceVersion"]}
        last = item if change.type == "DELETED" else change.former
        assert last is not None
        return "DELETED", last | {"metadata": last["metadata"] | version}

    async def _refuse_watch(
        self, request: web.Request, call: _Call, begin: float, refusal: Refusal
    ) -> web.StreamResponse:
        self._note(request, call, begin, refusal.code)
        if refusal.code not in {410, 504}:  # versions are found too old, or too new, when the stream has begun
            return web.json_response(refusal.status, status=refusal.code)
        return web.Response(body=_line("ERROR", refusal.status), content_type="application/json")


async def _body(request: web.Request) -> Any:
    data = await request.read()
    if not data:
        return {}
    try:
        body = json.loads(data)
    except ValueError:
        raise status.bad_request("couldn't get version/kind; json parse error") from None
    if not isinstance(body, dict):
        raise status.bad_request("the body of the request is no object")
    return body


def _injected(fault: Fault) -> Refusal:
    reasons = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired", 422: "Invalid"}
    reasons |= {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"}
    code = fault.code or 0
    details = {} if fault.retry_after is None else {"retryAfterSeconds": fault.retry_after}
    return Refusal(code, fault.reason or reasons.get(code, "Unknown"), fault.message, details)


def _unknown(token: str) -> tuple[int, list[Object]]:
    try:
        json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except ValueError:
        raise status.bad_request("continue key is not valid") from None
    raise status.expired("The provided continue parameter is too old to display a consistent list result.")


def _line(kind: str, item: Object) -> bytes:
    return written({"type": kind, "object": item}).encode() + b"\n"
