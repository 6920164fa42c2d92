"""Events on jobs: what a person reads at the end of ``kubectl describe``, a sentence at a time and never a flood.

Names follow from what is said, so that a restarted operator finds the event that it made before. Only ``create`` and
``patch`` are needed: the answer to a patch tells the count that nobody may read. An event that cannot be written is
logged and counted; it never stops the work that it tells of.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar

from virtualflow.protocol.wording import printable
from virtualflow_operator.constants import API_VERSION, KIND, MANAGER
from virtualflow_operator.k8s.client import EVENTS, AlreadyExists, ApiError, KubeApi, NotFound

logger = logging.getLogger(__name__)

REMEMBERED = 4_096
"""Jobs and events that are remembered; the longest unused go first."""
REPEAT_WINDOW = 600.0
"""The same event within this time is counted up in the one that exists."""
BURST = 25
"""Events that one job may have at once."""
REFILL = 1 / 30
"""After a burst, one job gets so many in a second."""
NAMESPACE_BURST = 2_000
"""Events that the jobs of one namespace may have at once."""
NAMESPACE_REFILL = 10.0
"""After a burst, they get so many in a second."""
MESSAGE_BYTES = 1_024
"""What the API server takes in a message; a longer one is cut."""
EventType = Literal["Normal", "Warning"]

MAX_REASON = 128
MAX_PREFIX = 200
"""Characters of a job's name that go into an event's: with a dot and the hash it must stay within 253."""
MAX_INSTANCE = 128

V = TypeVar("V")


class TokenBucket:
    """Tokens that come back with time."""

    def __init__(self, burst: float, refill: float) -> None:
        self._burst, self._refill = burst, refill
        self._tokens, self._at = burst, 0.0

    def wait(self, now: float) -> float:
        """Seconds until there is a whole token; 0: there is one."""
        self._fill(now)
        return max(0.0, (1.0 - self._tokens) / self._refill)

    def spent(self, now: float) -> float:
        """Tokens that have not come back yet."""
        self._fill(now)
        return self._burst - self._tokens

    def spend(self, now: float, tokens: float = 1.0) -> float:
        """Take tokens, on credit if there are too few; seconds until the debt is paid."""
        self._fill(now)
        self._tokens -= tokens
        return max(0.0, -self._tokens / self._refill)

    def _fill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._refill)
        self._at = max(self._at, now)


@dataclass
class _Allowance:
    """The events that one job, or namespace, may still have."""

    bucket: TokenBucket
    dropped: int = 0


@dataclass(frozen=True)
class _Written:
    count: int
    at: float


class EventRecorder:
    """Writes events on jobs.

    Args:
        instance: which replica says it, usually the pod's name.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        remembered: int = REMEMBERED,
        instance: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._instance = (instance or MANAGER)[:MAX_INSTANCE]
        self._clock = clock
        self._wall = wall
        self._allowances: _Latest[_Allowance] = _Latest(remembered)
        self._written: _Latest[_Written] = _Latest(remembered)

    async def record(self, job: dict[str, Any], kind: EventType, reason: str, message: str) -> None:
        """Write an event on ``job``, or count up the one that says the same; raises nothing that the API server does.

        Args:
            kind: ``Warning`` for what somebody may have to act on.
            message: a sentence; it is cut where the API server's limit is.
        """
        metadata = job["metadata"]
        uid = str(metadata.get("uid") or "")
        if not self._admit(uid, metadata, reason, message):
            return
        name = event_name(metadata["name"], uid, reason, message)
        try:
            await self._write(metadata, name, kind, reason, message)
        except ApiError as error:
            self._written.pop(name)
            logger.warning("could not write the event %s on %s: %s", reason, metadata["name"], error)

    async def _write(self, metadata: dict[str, Any], name: str, kind: EventType, reason: str, message: str) -> None:
        namespace, now = metadata["namespace"], self._clock()
        known = self._written.get(name)
        if known is not None and now - known.at <= REPEAT_WINDOW:
            try:
                await self._count_up(namespace, name, known.count)
            except NotFound:
                pass  # it was deleted, or lived longer than the API server keeps events
            else:
                return
        try:
            await self._api.create(EVENTS, namespace, self._body(metadata, name, kind, reason, message))
        except AlreadyExists:
            event = await self._api.patch(EVENTS, namespace, name, {"lastTimestamp": self._now()})
            count = event.get("count")
            await self._count_up(namespace, name, count if isinstance(count, int) and count > 0 else 1)
        else:
            self._written.put(name, _Written(1, now))

    async def _count_up(self, namespace: str, name: str, count: int) -> None:
        body = {"count": count + 1, "lastTimestamp": self._now()}
        await self._api.patch(EVENTS, namespace, name, body)
        self._written.put(name, _Written(count + 1, self._clock()))

    def _body(self, metadata: dict[str, Any], name: str, kind: EventType, reason: str, message: str) -> dict[str, Any]:
        now = self._now()
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata.get("uid"),
                "resourceVersion": metadata.get("resourceVersion"),
            },
            "type": kind,
            "reason": reason[:MAX_REASON],
            "message": _cut(printable(message), MESSAGE_BYTES),
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._instance,
        }

    def _admit(self, uid: str, metadata: dict[str, Any], reason: str, message: str) -> bool:
        """Take a token of the job's bucket, and of its namespace's; without both the event goes to the log only."""
        name = metadata["name"]
        own = self._allowance(uid, BURST, REFILL)
        shared = self._allowance(f"namespace {metadata['namespace']}", NAMESPACE_BURST, NAMESPACE_REFILL)
        now = self._clock()
        if own.bucket.wait(now) or shared.bucket.wait(now):
            own.dropped += 1
            level = logging.WARNING if own.dropped == 1 else logging.DEBUG
            logger.log(level, "too many events on %s; this one is only logged: %s: %s", name, reason, message)
            return False
        if own.dropped:
            logger.info("%d events on %s were only logged", own.dropped, name)
            own.dropped = 0
        own.bucket.spend(now)
        shared.bucket.spend(now)
        return True

    def _allowance(self, whose: str, burst: float, refill: float) -> _Allowance:
        allowance = self._allowances.get(whose) or _Allowance(TokenBucket(burst, refill))
        self._allowances.put(whose, allowance)
        return allowance

    def _now(self) -> str:
        return self._wall().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Latest(Generic[V]):
    """The latest used entries; the longest unused go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[str, V] = OrderedDict()

    def get(self, key: str) -> V | None:
        return self._entries.get(key)

    def put(self, key: str, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def pop(self, key: str) -> None:
        self._entries.pop(key, None)


def event_name(job: str, uid: str, reason: str, message: str) -> str:
    digest = hashlib.sha256("\0".join((uid, reason, message)).encode("utf-8", "replace")).hexdigest()[:16]
    return f"{job[:MAX_PREFIX].rstrip('-.')}.{digest}"


def _cut(text: str, most: int) -> str:
    """Cut a text to so many bytes of UTF-8, at a whole character."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most:
        return encoded.decode()
    return encoded[: most - len("…".encode())].decode(errors="ignore") + "…"
