"""Who may read the metrics: whoever the API server knows by the token, and lets get ``/metrics``.

It is asked by a TokenReview and a SubjectAccessReview, as the components of Kubernetes ask for their own metrics, one
token at a time. What it said counts for a while. Strangers cannot make the operator ask often: beyond a few tokens that
were not let in before, they are sent away unasked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from virtualflow_operator.api import Object
from virtualflow_operator.k8s.client import ACCESS_REVIEWS, TOKEN_REVIEWS, ApiError, Resource
from virtualflow_operator.k8s.event_recorder import TokenBucket

logger = logging.getLogger(__name__)

FRESH = 60.0
"""Seconds for which an answer counts."""
REMEMBERED = 64
"""Tokens of which the answer is remembered; the longest unused go first."""
STRANGERS, STRANGERS_REFILL = 16.0, 1.0
"""Tokens that were not let in before and are asked about at once; so many more in a second."""
WAITING = 32
"""Requests that wait for an answer about their token; one more is sent away."""
LONGEST = 16_384
"""Characters of a token; no account's is longer."""


class Access(NamedTuple):
    """An answer to a reader: an HTTP status, and why."""

    status: int
    reason: str = ""


class ReviewApi(Protocol):
    """What of ``KubeApi`` is needed."""

    async def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        """Create an object."""


class Readers:
    """Judges who reads the metrics."""

    def __init__(self, api: ReviewApi, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._known: OrderedDict[bytes, tuple[float, Access]] = OrderedDict()
        self._strangers = TokenBucket(STRANGERS, STRANGERS_REFILL)
        self._one = asyncio.Lock()
        self._waiting = 0

    async def judge(self, authorization: str) -> Access:
        """Whether a request with that header may read."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or not token.isascii() or len(token) > LONGEST:
            return Access(401, "give the token of an account, as Authorization: Bearer TOKEN")
        key = hashlib.sha256(token.encode()).digest()
        if (verdict := self._fresh(key)) is not None:
            return verdict
        let_in = key in self._known and self._known[key][1].status == 200
        if self._waiting >= WAITING or (not let_in and self._strangers.wait(self._clock()) > 0):
            return Access(429, "too many ask at once, or with tokens that are not known; try again in a minute")
        if not let_in:
            self._strangers.spend(self._clock())
        self._waiting += 1
        try:
            async with self._one:
                # Another request with it may have been quicker.
                return self._fresh(key) or await self._learn(key, token)
        finally:
            self._waiting -= 1

    async def _learn(self, key: bytes, token: str) -> Access:
        try:
            verdict = await self._ask(token)
        except ApiError as error:
            logger.warning("a reader of the metrics cannot be judged: %s", error)
            return Access(503, f"the API server does not say who you are: {error}")
        self._known[key] = self._clock(), verdict
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return verdict

    def _fresh(self, key: bytes) -> Access | None:
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        at, verdict = self._known[key]
        return verdict if self._clock() - at < FRESH else None

    async def _ask(self, token: str) -> Access:
        asked = {"apiVersion": TOKEN_REVIEWS.api_version, "kind": "TokenReview", "spec": {"token": token}}
        told = (await self._api.create(TOKEN_REVIEWS, None, asked)).get("status") or {}
        if not told.get("authenticated"):
            return Access(401, "the API server does not know that token")
        user = told.get("user") or {}
        who = {"user": user.get("username"), "uid": user.get("uid"), "groups": user.get("groups")}
        access = {"nonResourceAttributes": {"path": "/metrics", "verb": "get"}, "extra": user.get("extra")}
        wish = {"apiVersion": ACCESS_REVIEWS.api_version, "kind": "SubjectAccessReview", "spec": who | access}
        if ((await self._api.create(ACCESS_REVIEWS, None, wish)).get("status") or {}).get("allowed"):
            return Access(200)
        return Access(
            403, f"{user.get('username')} may not get the nonResourceURL /metrics; bind it to a role that may"
        )
