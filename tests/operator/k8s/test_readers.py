"""Who may read the metrics, and how often the API server is asked about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from virtualflow_operator.k8s.client import TOKEN_REVIEWS, Resource, Unavailable
from virtualflow_operator.k8s.readers import FRESH, REMEMBERED, STRANGERS, WAITING, Readers


class Reviews:
    """An API server that knows the tokens ``prometheus``, who may read, and ``somebody``."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now = 0.0
        self.away = False

    async def create(self, resource: Resource, namespace: str | None, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable(0, "Timeout", "The API server did not answer within 10 s.")
        if resource is TOKEN_REVIEWS:
            token = body["spec"]["token"]
            self.asked.append(token)
            known = token in ("prometheus", "somebody")
            user = {"username": token, "uid": "1", "groups": ["all"], "extra": {"pod": ["p"]}}
            return {"status": {"authenticated": True, "user": user} if known else {"error": "no"}}
        assert body["spec"]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        assert (body["spec"]["groups"], body["spec"]["extra"]) == (["all"], {"pod": ["p"]})
        return {"status": {"allowed": body["spec"]["user"] == "prometheus"}}

    def readers(self) -> Readers:
        return Readers(self, lambda: self.now)


@pytest.mark.parametrize(
    ("header", "status", "says"),
    [
        ("Bearer prometheus", 200, ""),
        ("bearer  prometheus ", 200, ""),
        ("Bearer somebody", 403, "somebody may not get the nonResourceURL /metrics"),
        ("Bearer thief", 401, "does not know that token"),
        ("", 401, "give the token"),
        ("Bearer ", 401, "give the token"),
        ("Basic cHJvbWV0aGV1cw==", 401, "give the token"),
        ("Bearer " + "x" * 20_000, 401, "give the token"),
        ("Bearer t\udc80", 401, "give the token"),
    ],
)
def test_a_reader_is_whom_the_api_server_lets(header: str, status: int, says: str) -> None:
    verdict = asyncio.run(Reviews().readers().judge(header))
    assert verdict.status == status
    assert says in verdict.reason


def test_a_token_is_asked_about_once_a_minute_however_often_it_reads() -> None:
    async def story() -> None:
        api = Reviews()
        readers = api.readers()
        await asyncio.gather(*(readers.judge("Bearer prometheus") for _ in range(WAITING // 2)))
        api.now = FRESH - 1
        assert (await readers.judge("Bearer prometheus")).status == 200
        assert api.asked == ["prometheus"]
        api.now = FRESH
        assert (await readers.judge("Bearer prometheus")).status == 200
        assert len(api.asked) == 2

    asyncio.run(story())


def test_a_flood_of_strangers_asks_little_and_keeps_no_reader_out() -> None:
    async def story() -> None:
        api = Reviews()
        readers = api.readers()
        assert (await readers.judge("Bearer prometheus")).status == 200
        verdicts = [await readers.judge(f"Bearer thief-{number}") for number in range(500)]
        assert [verdict.status for verdict in verdicts] == [401] * int(STRANGERS - 1) + [429] * (501 - int(STRANGERS))
        api.now = FRESH
        assert (await readers.judge("Bearer prometheus")).status == 200, "it was let in before"
        assert len(readers._known) <= REMEMBERED
        api.now = 2 * FRESH
        answers = await asyncio.gather(*(readers.judge("Bearer prometheus") for _ in range(2 * WAITING)))
        assert [answer.status for answer in answers] == [200] * WAITING + [429] * WAITING

    asyncio.run(story())


def test_a_reader_is_sent_away_while_nobody_can_say_who_it_is() -> None:
    async def story() -> None:
        api = Reviews()
        readers, api.away = api.readers(), True
        verdict = await readers.judge("Bearer prometheus")
        assert (verdict.status, "did not answer" in verdict.reason) == (503, True)
        api.away = False
        assert (await readers.judge("Bearer prometheus")).status == 200

    asyncio.run(story())
