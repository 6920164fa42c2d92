"""``kubectl vf ui`` without a job: a page of this machine with all jobs that its user may see.

One list and then a watch, by the user's own rights, tell what changes; browsers ask this process and never the cluster.
A job's live page is reached as ``kubectl vf ui JOB`` reaches it, once somebody follows its link.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
from kubernetes import client as kubernetes
from kubernetes import watch

from virtualflow.cluster.api import GROUP, PLURAL, REQUEST_SECONDS, VERSION, said
from virtualflow.cluster.client import Client
from virtualflow.cluster.job import Job
from virtualflow.cluster.tables import JobLine, job_line
from virtualflow.cluster.tunnel import PortForward
from virtualflow.coordinator.page.files import jobs_page
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.messages import Base, encode
from virtualflow.protocol.wording import counted

MOST = 2_000
"""Jobs that are shown."""
CHUNK = 500
"""Jobs in one answer of the API server."""
FIRST_WAIT, LAST_WAIT = 1.0, 30.0
"""Seconds until the API server is asked again when something was wrong; they double."""
HOLD = 10.0
"""Seconds for which the answer to a page waits for a change."""
VIEWERS = 32
"""Requests of pages at a time."""
PAGES = 16
"""Live pages to which port-forwards are open at a time."""


class JobsView(Base, frozen=True, tag=False):
    """What the page shows."""

    have: int
    """Another number when it has changed."""
    time: float
    trouble: str
    """Why it may be out of date; empty: it is not."""
    where: str
    namespaces: bool
    """Whether to name them."""
    counted: str
    jobs: tuple[JobLine, ...]
    """Those that are not over first, then by name."""


class JobsSeen:
    """The jobs that a user may see, kept up to date by :meth:`follow`."""

    def __init__(self, client: Client, everywhere: bool) -> None:
        self._api = kubernetes.CustomObjectsApi(client.api)
        self._scope: tuple[str, ...] = (GROUP, VERSION) if everywhere else (GROUP, VERSION, client.namespace)
        self._everywhere = everywhere
        self._where = "all namespaces" if everywhere else f"the namespace {client.namespace}"
        self._changed = threading.Condition()
        self._lines: dict[tuple[str, str], JobLine] = {}
        self._version, self._trouble, self._more = 0, "", False

    def look(self) -> str:
        """List them anew; the version from which on to watch.

        Raises:
            ConfigurationError: the user may not list them; one sentence says so, and what else there is to ask for.
            VirtualFlowError: the API server does not answer.
        """
        lines: dict[tuple[str, str], JobLine] = {}
        rest, hint = "", "; -n NAMESPACE shows those of one" if self._everywhere else ""
        while True:
            with said(f"list the jobs of {self._where}", forbidden=hint):
                found = self._list(limit=CHUNK, _continue=rest, _request_timeout=REQUEST_SECONDS)
            lines |= {_key(body): job_line(body) for body in found["items"][: MOST - len(lines)]}
            rest = found["metadata"].get("continue") or ""
            if not rest or len(lines) == MOST:
                break
        with self._changed:
            self._lines, self._more = lines, bool(rest)
            self._tell("")
        return str(found["metadata"]["resourceVersion"])

    def follow(self, version: str) -> NoReturn:
        """Watch from ``version`` on for ever; what is wrong is shown, and the jobs are listed anew after a while."""
        wait = FIRST_WAIT
        while True:
            try:
                version = self._watch(version or self.look())
                wait = FIRST_WAIT
                if not version:
                    time.sleep(FIRST_WAIT)
            except VirtualFlowError as error:
                self._complain(str(error))
                version = ""
                time.sleep(wait)
                wait = min(2 * wait, LAST_WAIT)

    def view(self, have: str) -> JobsView:
        """What to show, as soon as it is not ``have`` any more, or after :data:`HOLD` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: str(self._version) != have, HOLD)
            jobs = sorted(self._lines.values(), key=lambda line: (line.over, line.namespace, line.name))
            phases = Counter(line.phase for line in jobs)
            told = [f"{number} {phase}" for phase, number in sorted(phases.items())]
            words = f"{'the first ' * self._more}{counted(len(jobs), 'job')} of {self._where}"
            return JobsView(
                self._version,
                time.time(),
                self._trouble,
                self._where,
                self._everywhere,
                f"{words}{': ' * bool(told)}{', '.join(told)}",
                tuple(jobs),
            )

    def _watch(self, version: str) -> str:
        """Take changes for a while; the version from which on to watch, empty if the API server knows it no more."""
        with said("watch jobs"):
            events: Iterable[Any] = watch.Watch().stream(
                self._list,
                resource_version=version,
                timeout_seconds=int(REQUEST_SECONDS),
                _request_timeout=2 * REQUEST_SECONDS,
            )
            try:
                for event in filter(None, events):
                    version = self._take(event["type"], event["raw_object"])
            except kubernetes.ApiException as error:
                if error.status != HTTPStatus.GONE:
                    raise
                return ""
        return version

    def _take(self, what: str, body: dict[str, Any]) -> str:
        with self._changed:
            if what == "DELETED":
                self._lines.pop(_key(body), None)
            elif len(self._lines) < MOST or _key(body) in self._lines:
                self._lines[_key(body)] = job_line(body)
            self._tell("")
        return str(body["metadata"]["resourceVersion"])

    def _list(self, **options: Any) -> Any:
        ask = self._api.list_cluster_custom_object if self._everywhere else self._api.list_namespaced_custom_object
        return ask(*self._scope, PLURAL, **options)

    def _complain(self, trouble: str) -> None:
        with self._changed:
            if trouble != self._trouble:
                self._tell(f"{trouble[:1].upper()}{trouble[1:]}. What you see may be out of date.")

    def _tell(self, trouble: str) -> None:
        self._trouble = trouble
        self._version += 1
        self._changed.notify_all()


def _key(body: dict[str, Any]) -> tuple[str, str]:
    return str(body["metadata"]["namespace"]), str(body["metadata"]["name"])


class PortForwards:
    """Port-forwards to live pages, each opened when it is asked for first."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock, self._forwards = threading.Lock(), dict[tuple[str, str], PortForward]()

    def answer(self, namespace: str, name: str) -> dict[str, str]:
        """The ``address`` of a job's live page, or a ``sentence`` why there is none."""
        key = (namespace, name)
        with self._lock:
            self._forwards = {key: forward for key, forward in self._forwards.items() if forward.thread.is_alive()}
            if key not in self._forwards and len(self._forwards) >= PAGES:
                return {"sentence": f"{PAGES} live pages are open already; kubectl vf ui {name} opens another one."}
            if key not in self._forwards:
                job = Job(self._client.api, {"metadata": {"namespace": namespace, "name": name}})
                self._forwards[key] = PortForward(job, self._client.kubectl)
            forward = self._forwards[key]
        try:
            return {"address": forward.address()}
        except VirtualFlowError as error:
            return {"sentence": f"{error}."}


class JobsServer(ThreadingHTTPServer):
    """Serves the page to browsers of this machine that have its token.

    Args:
        jobs: what it shows.
        forwards: to live pages.
        port: of this machine; 0: any that is free.
    """

    daemon_threads = True

    def __init__(self, jobs: JobsSeen, forwards: PortForwards, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Answers)
        self.jobs, self.forwards, self.page = jobs, forwards, jobs_page()
        self.token = secrets.token_urlsafe(24)
        self.places = threading.BoundedSemaphore(VIEWERS)

    @property
    def address(self) -> str:
        """Of the page, with its token where browsers keep it to themselves."""
        return f"http://127.0.0.1:{self.server_port}/#{urlencode({'token': self.token})}"


class _Answers(BaseHTTPRequestHandler):
    server: JobsServer
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer one request."""
        asked, given = urlsplit(self.path), self.headers.get("Authorization", "")
        if asked.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.html)
        elif asked.path not in ("/v1/jobs", "/v1/page"):
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.")
        elif not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            self._send(HTTPStatus.UNAUTHORIZED, "text/plain", b"The token is wrong.")
        elif not self.server.places.acquire(blocking=False):
            self._send(HTTPStatus.TOO_MANY_REQUESTS, "text/plain", b"Too many pages look; try again in a moment.")
        else:
            try:
                said_of = {name: values[0] for name, values in parse_qs(asked.query).items()}
                if asked.path == "/v1/jobs":
                    body = encode(self.server.jobs.view(said_of.get("have", "")))
                else:
                    namespace, _, name = said_of.get("job", "").partition("/")
                    body = msgspec.json.encode(self.server.forwards.answer(namespace, name))
            finally:
                self.server.places.release()
            self._send(HTTPStatus.OK, "application/json", body)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.server.page.policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # the browser has gone meanwhile

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - http.server names it so
        """Say nothing of requests on the terminal."""


def serve(
    client: Client, everywhere: bool, forwards: PortForwards, port: int, opened: Callable[[str], None]
) -> NoReturn:
    """Show all jobs until this process is interrupted.

    Args:
        client: its cluster and namespace.
        everywhere: jobs of all namespaces.
        forwards: to live pages.
        port: of this machine; 0: any that is free.
        opened: told the address of the page.

    Raises:
        ConfigurationError: the user may not list jobs, or the port is taken.
        VirtualFlowError: the API server does not answer.
    """
    jobs = JobsSeen(client, everywhere)
    version = jobs.look()
    try:
        server = JobsServer(jobs, forwards, port)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at port {port} of 127.0.0.1: {error.strerror}") from None
    threading.Thread(target=server.serve_forever, name="pages", daemon=True).start()
    opened(server.address)
    jobs.follow(version)
