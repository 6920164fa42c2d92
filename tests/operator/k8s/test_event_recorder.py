"""Events on jobs: counted up, limited, and never in the way."""

from __future__ import annotations

import asyncio
import copy
import logging
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from virtualflow_operator.k8s.client import (
    EVENTS,
    AlreadyExists,
    ApiError,
    Forbidden,
    Invalid,
    NotFound,
    Resource,
    Unavailable,
)
from virtualflow_operator.k8s.event_recorder import EventRecorder, event_name

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def job(name: str = "digits", uid: str = "uid-1") -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name, "uid": uid, "resourceVersion": "5"}, "spec": {}}


class Server:
    """The API server's events, and a clock."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.error: ApiError | None = None
        self.seconds = 0.0
        self.requests = 0

    def recorder(self, **limits: Any) -> EventRecorder:
        return EventRecorder(
            self,
            **limits,
            instance="operator-a",
            clock=lambda: self.seconds,
            wall=lambda: BEGIN + timedelta(seconds=self.seconds),
        )

    def _arrive(self, resource: Resource, namespace: str | None) -> None:
        self.requests += 1
        assert (resource, namespace) == (EVENTS, "team")
        if self.error is not None:
            raise self.error

    async def create(self, resource: Resource, namespace: str | None, body: dict[str, Any]) -> dict[str, Any]:
        self._arrive(resource, namespace)
        if body["metadata"]["name"] in self.events:
            raise AlreadyExists(409, "AlreadyExists", "it is there")
        self.events[body["metadata"]["name"]] = copy.deepcopy(body)
        return copy.deepcopy(body)

    async def patch(self, resource: Resource, namespace: str | None, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self._arrive(resource, namespace)
        if name not in self.events:
            raise NotFound(404, "NotFound", "no such event")
        self.events[name] |= body
        return copy.deepcopy(self.events[name])

    @property
    def only(self) -> dict[str, Any]:
        (event,) = self.events.values()
        return event


def record(recorder: EventRecorder, message: str = "worker-1 is there", reason: str = "Scaled", **about: str) -> None:
    asyncio.run(recorder.record(job(**about), "Normal", reason, message))


def test_an_event_says_what_happened_to_which_job_and_who_says_so() -> None:
    server = Server()
    asyncio.run(server.recorder().record(job(), "Warning", "Failed", "the script raised ValueError"))
    name = server.only["metadata"]["name"]
    assert re.fullmatch(r"digits\.[0-9a-f]{16}", name)
    assert server.only == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "team"},
        "involvedObject": {
            "apiVersion": "virtualflow.dev/v1alpha1",
            "kind": "VirtualFlowJob",
            "namespace": "team",
            "name": "digits",
            "uid": "uid-1",
            "resourceVersion": "5",
        },
        "type": "Warning",
        "reason": "Failed",
        "message": "the script raised ValueError",
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
        "count": 1,
        "source": {"component": "virtualflow.dev/operator"},
        "reportingComponent": "virtualflow.dev/operator",
        "reportingInstance": "operator-a",
    }


def test_what_is_said_again_is_counted_up_by_one_patch() -> None:
    server = Server()
    recorder = server.recorder()
    for seconds in (0, 100, 650):
        server.seconds = seconds
        record(recorder)
    assert server.only["count"] == 3
    assert server.only["firstTimestamp"] == "2026-01-01T00:00:00Z"
    assert server.only["lastTimestamp"] == "2026-01-01T00:10:50Z"
    assert server.requests == 3


@pytest.mark.parametrize("how", ["a restart", "a long silence"])
def test_an_event_of_before_is_found_again_and_its_count_goes_on(how: str) -> None:
    server = Server()
    recorder = server.recorder()
    record(recorder)
    record(recorder)
    server.seconds = 1200
    record(server.recorder() if how == "a restart" else recorder)
    assert server.only["count"] == 3


def test_an_event_that_the_api_server_has_dropped_is_made_anew() -> None:
    server = Server()
    recorder = server.recorder()
    record(recorder)
    server.events.clear()
    record(recorder)
    assert server.only["count"] == 1


@pytest.mark.parametrize(
    "other",
    [
        {"message": "worker-2 is there"},
        {"reason": "Resized"},
        {"uid": "uid-2"},
    ],
    ids=["message", "reason", "job of the same name"],
)
def test_what_differs_is_an_event_of_its_own(other: dict[str, str]) -> None:
    server = Server()
    recorder = server.recorder()
    record(recorder)
    record(recorder, **other)
    assert [event["count"] for event in server.events.values()] == [1, 1]


def test_a_flood_ends_in_the_log_and_other_jobs_keep_their_events(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    recorder = server.recorder()
    with caplog.at_level(logging.INFO):
        for number in range(100):
            record(recorder, f"event {number}")
        assert len(server.events) == 25
        assert len([line for line in caplog.messages if "too many events on digits" in line]) == 1
        record(recorder, uid="uid-2", name="other")
        assert len(server.events) == 26
        server.seconds = 61
        for number in range(100, 110):
            record(recorder, f"event {number}")
        assert len(server.events) == 28, "one event in 30 seconds"
        assert "75 events on digits were only logged" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        Unavailable(0, "Timeout", "The API server did not answer within 10 s."),
        Forbidden(403, "Forbidden", "the namespace is being terminated"),
        Invalid(422, "Invalid", "no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_event_that_cannot_be_written_is_logged_and_stops_nothing(
    error: ApiError, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    recorder = server.recorder()
    record(recorder)
    server.error = error
    record(recorder)
    record(recorder, "something else")
    assert [error.message in entry.getMessage() for entry in caplog.records] == [True, True]
    server.error = None
    record(recorder)
    assert [event["count"] for event in server.events.values()] == [2]


def test_long_words_are_cut_where_the_api_server_s_limit_is() -> None:
    server = Server()
    record(server.recorder(), "ä" * 3000, reason="R" * 500)
    assert len(server.only["message"].encode()) <= 1024
    assert server.only["message"].endswith("ä…")
    assert len(server.only["reason"]) == 128


@pytest.mark.parametrize("name", ["a" * 253, "a" * 199 + "-" + "b" * 53, "a" * 199 + ".b"])
def test_names_of_events_are_valid_for_every_name_of_a_job(name: str) -> None:
    made = event_name(name, "uid", "Reason", "message \ud800")
    assert len(made) <= 253
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", made)


def test_memory_is_bounded() -> None:
    server = Server()
    recorder = server.recorder(remembered=10)
    for number in range(100):
        record(recorder, f"event {number}", uid=f"uid-{number}")
    assert len(recorder._allowances._entries) == len(recorder._written._entries) == 10
    assert len(server.events) == 100
