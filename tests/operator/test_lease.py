"""Leader election: the decision as a table, and candidates in virtual time on a small store with faults."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from virtual_time import now, run

from virtualflow_operator.kube import LEASES, AlreadyExists, Conflict, Forbidden, NotFound, Resource, Unavailable
from virtualflow_operator.lease import Elector, Observation, Record, decide, micro_time, observe, steady_clock
from virtualflow_operator.settings import LeaseSettings

A = LeaseSettings(namespace="system", identity="operator-a")
B = replace(A, identity="operator-b")
MINE = "2026-01-01T00:00:00.000001Z"
OTHER = "2026-01-01T00:00:00.000002Z"


def record(holder: str, acquired: str = OTHER, duration: float | None = 10.0) -> Record:
    return Record(holder, duration, 3, acquired, "2026-01-01T00:00:05.000000Z")


@pytest.mark.parametrize(
    ("seen", "age", "action", "wait"),
    [
        pytest.param(record(""), 0.0, "take", 0.0, id="released"),
        pytest.param(record("operator-b"), 0.0, "wait", 2.0, id="another leads"),
        pytest.param(record("operator-b"), 8.5, "wait", 1.5, id="another's runs out before the next look"),
        pytest.param(record("operator-b"), 10.0, "take", 0.0, id="another's has run out"),
        pytest.param(record("operator-b", duration=30.0), 12.0, "wait", 2.0, id="another promised a longer duration"),
        pytest.param(record("operator-b", duration=None), 9.0, "wait", 1.0, id="no duration in the record"),
        pytest.param(record("operator-a", MINE), 0.0, "renew", 0.0, id="ours"),
        pytest.param(record("operator-a", MINE), 99.0, "renew", 0.0, id="ours, late"),
        pytest.param(record("operator-a"), 1.0, "wait", 2.0, id="a namesake's, seen just now"),
        pytest.param(record("operator-a"), 3.0, "take", 0.0, id="a namesake's that stands still: our predecessor"),
        pytest.param(record("operator-b", MINE), 0.0, "wait", 2.0, id="another's of the same moment"),
    ],
)
def test_what_a_candidate_does(seen: Record | None, age: float, action: str, wait: float) -> None:
    decision = decide(Observation(seen, 100.0), MINE, 100.0 + age, A)
    assert (decision.action, decision.wait) == (action, pytest.approx(wait))
    assert decision.reason


def lease(holder: str = "x", renewed: str = "1", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "7"}, "spec": {"holderIdentity": holder, "renewTime": renewed, **spec}}


def test_only_a_change_of_the_record_counts_as_a_renewal() -> None:
    first = observe(None, lease(), 5.0)
    labelled = lease()
    labelled["metadata"] = {"resourceVersion": "8", "labels": {"a": "b"}}
    assert observe(first, labelled, 9.0) == first
    assert observe(first, lease(renewed="2"), 9.0).since == 9.0
    gone = observe(first, None, 9.0)
    assert gone == Observation(None, 9.0)
    assert decide(gone, None, 12.0, A).action == "wait", "its holder may live"
    assert decide(gone, None, 19.0, A).action == "create"
    assert decide(observe(None, None, 9.0), None, 9.0, A).action == "create"


@pytest.mark.parametrize(
    "spec",
    [None, 5, {}, {"holderIdentity": None, "leaseDurationSeconds": "ten", "leaseTransitions": -3, "renewTime": 5}],
    ids=["null", "a number", "empty", "wrong types"],
)
def test_a_malformed_lease_counts_as_free(spec: object) -> None:
    seen = observe(None, {"spec": spec}, 0.0)
    assert decide(seen, None, 0.0, A).action == "take"


def test_times_are_written_as_the_api_writes_them() -> None:
    assert micro_time(datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)) == "2026-01-02T03:04:05.000006Z"
    assert steady_clock() <= steady_clock()


@dataclass
class Store:
    """The API server's leases with their resourceVersions, and its faults."""

    lease: dict[str, Any] | None = None
    versions: Any = field(default_factory=lambda: itertools.count(1))
    latency: Callable[[str], float] = lambda _: 0.01
    answer_latency: float = 0.0
    """Between a write and its answer."""
    writes: list[tuple[float, str]] = field(default_factory=list)

    def store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.lease = copy.deepcopy(body)
        self.lease["metadata"] |= {"resourceVersion": str(next(self.versions)), "uid": "u"}
        self.writes.append((now(), body["spec"]["holderIdentity"]))
        return copy.deepcopy(self.lease)


class Client:
    """One candidate's way to the store; each has outages of its own."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.down = False
        self.answers_lost = False
        self.calls = 0

    async def _travel(self, method: str) -> None:
        self.calls += 1
        await asyncio.sleep(self.store.latency(method))
        if self.down:
            raise Unavailable(0, "ConnectionRefused", "The API server cannot be reached.")

    async def _arrive(self, answer: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(self.store.answer_latency)
        if self.answers_lost:
            raise Unavailable(0, "Timeout", "The API server did not answer.")
        return answer

    async def get(self, resource: Resource, namespace: str | None, name: str) -> dict[str, Any]:
        assert (resource, namespace, name) == (LEASES, A.namespace, A.name)
        await self._travel("GET")
        if self.store.lease is None:
            raise NotFound(404, "NotFound", "no such lease")
        return copy.deepcopy(self.store.lease)

    async def create(self, resource: Resource, namespace: str | None, body: dict[str, Any]) -> dict[str, Any]:
        await self._travel("POST")
        if self.store.lease is not None:
            raise AlreadyExists(409, "AlreadyExists", "the lease is there")
        return await self._arrive(self.store.store(body))

    async def replace(
        self, resource: Resource, namespace: str | None, name: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        await self._travel("PUT")
        if self.store.lease is None:
            raise NotFound(404, "NotFound", "no such lease")
        if body["metadata"].get("resourceVersion") != self.store.lease["metadata"]["resourceVersion"]:
            raise Conflict(409, "Conflict", "the lease was changed")
        return await self._arrive(self.store.store(body))


class Candidate:
    """A replica of the operator: leads when it may, and is gone when it has lost."""

    def __init__(self, store: Store, settings: LeaseSettings, shift: timedelta = timedelta()) -> None:
        self.client = Client(store)
        self.led: list[list[float]] = []
        """When it began and ceased to lead."""
        self.lost: str | None = None
        self.shift = shift
        self.elector = Elector(
            self.client,
            settings,
            on_lost=self._lose,
            clock=now,
            wall=lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=now()) + self.shift,
            uniform=lambda: 0.5,
        )
        self.task = asyncio.create_task(self._live())

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.led[-1].append(now())

    async def _live(self) -> None:
        await self.elector.acquire()
        self.led.append([now()])
        await self.elector.hold()

    async def die(self) -> None:
        """End without a word."""
        self.task.cancel()
        await asyncio.wait([self.task])
        if self.led and len(self.led[-1]) == 1:
            self.led[-1].append(now())

    async def retire(self) -> None:
        """End as at SIGTERM."""
        await self.die()
        await self.elector.release()


async def first_leads(store: Store) -> tuple[Candidate, Candidate]:
    first = Candidate(store, A)
    await asyncio.sleep(1)
    second = Candidate(store, B)
    await asyncio.sleep(20)
    assert first.elector.leads()
    assert not second.elector.leads()
    return first, second


def never_two_at_once(*candidates: Candidate) -> bool:
    spans = sorted((*span, float("inf"))[:2] for candidate in candidates for span in candidate.led)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_one_of_two_leads_and_renews_every_two_seconds() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        before, calls = len(store.writes), second.client.calls
        await asyncio.sleep(100)
        assert 45 <= len(store.writes) - before <= 50
        assert 45 <= second.client.calls - calls <= 50
        assert store.lease is not None
        spec = store.lease["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("operator-a", 10, 0)
        assert spec["acquireTime"] < spec["renewTime"]
        await first.die()
        await second.die()

    run(story())


def test_a_leader_that_dies_is_followed_within_15_seconds() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        await first.die()
        died = now()
        await asyncio.sleep(15)
        assert second.elector.leads()
        assert second.led[0][0] - died <= 13
        assert store.lease is not None
        assert store.lease["spec"]["leaseTransitions"] == 1
        await second.die()

    run(story())


def test_a_leader_that_retires_is_followed_at_the_next_look() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        await first.retire()
        retired = now()
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == ""
        await asyncio.sleep(3)
        assert second.elector.leads()
        assert second.led[0][0] - retired <= 2.5
        await second.retire()

    run(story())


def test_a_standby_that_retires_leaves_the_lease_alone() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        await second.retire()
        assert store.lease is not None
        assert store.lease["spec"]["holderIdentity"] == "operator-a"
        await asyncio.sleep(20)
        assert first.elector.leads()
        await first.die()

    run(story())


def test_an_outage_shorter_than_the_deadline_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        for candidate in (first, second):
            candidate.client.down = True
        await asyncio.sleep(4.5)
        assert first.elector.problem == "The API server cannot be reached."
        for candidate in (first, second):
            candidate.client.down = False
        await asyncio.sleep(60)
        assert first.elector.leads()
        assert first.elector.problem is None
        assert second.led == []
        await first.die()
        await second.die()

    with caplog.at_level(logging.WARNING):
        run(story())
    assert len([line for line in caplog.messages if "cannot be reached" in line]) == 2, "one line a candidate"


def test_a_leader_that_cannot_renew_is_gone_before_another_begins() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        first.client.down = True
        begin = now()
        await asyncio.sleep(15)
        assert first.lost is not None
        assert "could not be renewed for 7 s" in first.lost
        assert "cannot be reached" in first.lost
        assert first.led[0][1] - begin <= A.deadline
        assert second.elector.leads()
        assert second.led[0][0] - first.led[0][1] >= 2.9
        await second.die()

    run(story())


def test_a_call_that_hangs_ends_at_the_deadline_and_not_later() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        sent = store.writes[-1][0]
        store.latency = lambda method: 3_600.0 if method == "PUT" else 0.01
        await asyncio.sleep(12)
        assert first.lost is not None
        assert first.led[0][1] - sent <= A.deadline + 0.1
        await second.die()

    run(story())


@pytest.mark.parametrize("renewals", [0, 3], ids=["acquired just now", "renewed"])
def test_the_deadline_counts_from_before_the_write_and_not_from_its_answer(renewals: int) -> None:
    async def story() -> None:
        store = Store(answer_latency=2.4)
        candidate = Candidate(store, A)
        while len(store.writes) < 1 + renewals:  # noqa: ASYNC110 virtual time
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.45)
        assert candidate.elector.leads()
        candidate.client.down = True
        await asyncio.sleep(12)
        assert candidate.led[0][1] - store.writes[-1][0] <= A.deadline

    run(story())


def test_slow_calls_within_the_limit_do_no_harm() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        store.latency = lambda _: 2.0
        await asyncio.sleep(200)
        assert first.elector.leads()
        assert first.lost is None
        assert second.led == []
        await first.die()
        await second.die()

    run(story())


def test_a_write_whose_answer_is_lost_is_recognised_as_ours() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        first.client.answers_lost = True
        await asyncio.sleep(4)
        first.client.answers_lost = False
        await asyncio.sleep(30)
        assert first.elector.leads()
        assert first.lost is None
        await first.die()
        await asyncio.sleep(3)
        second.client.answers_lost = True
        await asyncio.sleep(9)
        second.client.answers_lost = False
        await asyncio.sleep(3)
        assert second.elector.leads()
        await second.die()

    run(story())


def test_wall_clocks_that_jump_and_differ_change_nothing() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        second.shift = timedelta(days=400)
        await asyncio.sleep(30)
        first.shift = timedelta(days=-30)
        await asyncio.sleep(30)
        assert first.elector.leads()
        assert second.led == []
        await first.die()
        await asyncio.sleep(14)
        assert second.elector.leads()
        await second.die()

    run(story())


def test_a_restarted_container_follows_itself_soon() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        await first.die()
        begin = now()
        again = Candidate(store, A)
        await asyncio.sleep(5)
        assert again.elector.leads()
        assert again.led[0][0] - begin < 4
        assert second.led == []
        await again.die()
        await second.die()

    run(story())


def test_of_two_candidates_by_the_same_name_one_leads() -> None:
    async def story() -> None:
        store = Store()
        first = Candidate(store, A)
        await asyncio.sleep(5)
        namesake = Candidate(store, A)
        await asyncio.sleep(200)
        assert first.elector.leads()
        assert namesake.led == []
        await first.die()
        await namesake.die()

    run(story())


def test_a_lease_that_was_taken_by_force_is_lost_at_once() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        assert store.lease is not None
        body = copy.deepcopy(store.lease)
        body["spec"] |= {"holderIdentity": "someone", "acquireTime": OTHER}
        store.store(body)
        await asyncio.sleep(3)
        assert first.lost == "the lease is held by someone"
        assert not first.elector.leads()
        await second.die()

    run(story())


def test_a_lease_that_was_deleted_or_labelled_stays_with_its_holder() -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        assert store.lease is not None
        body = copy.deepcopy(store.lease)
        body["metadata"]["labels"] = {"seen": "true"}
        store.store(body)
        await asyncio.sleep(5)
        assert first.elector.leads()
        assert store.lease["metadata"]["labels"] == {"seen": "true"}
        store.lease = None
        await asyncio.sleep(30)
        assert first.elector.leads()
        assert second.led == []
        await first.die()
        await second.die()

    run(story())


def test_an_account_that_may_not_read_leases_says_so_and_keeps_trying() -> None:
    async def story() -> None:
        store = Store()
        candidate = Candidate(store, A)
        good = candidate.client.get

        async def refuse(*_: object) -> dict[str, Any]:
            raise Forbidden(403, "Forbidden", "leases is forbidden")

        candidate.client.get = refuse  # type: ignore[method-assign]
        await asyncio.sleep(10)
        assert candidate.elector.problem == "leases is forbidden"
        candidate.client.get = good  # type: ignore[method-assign]
        await asyncio.sleep(3)
        assert candidate.elector.leads()
        await candidate.die()

    run(story())


def test_a_leader_that_was_asleep_knows_that_it_may_lead_no_more() -> None:
    async def story() -> None:
        store = Store()
        slept = 0.0
        candidate = Candidate(store, A)
        candidate.elector._clock = lambda: now() + slept
        await asyncio.sleep(5)
        assert candidate.elector.leads()
        slept = 60.0
        assert not candidate.elector.leads()
        await asyncio.sleep(3)
        assert candidate.lost is not None
        await asyncio.wait([candidate.task])

    run(story())


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["down", "up", "lose answers", "slow", "restart", "jump"]),
            st.integers(0, 2),
            st.sampled_from([0.3, 1.0, 4.0, 9.0, 20.0]),
        ),
        max_size=25,
    )
)
def test_whatever_happens_never_two_lead_and_in_the_end_one_does(events: list[tuple[str, int, float]]) -> None:
    async def story() -> None:
        store = Store()
        names = [A, B, replace(A, identity="operator-c")]
        present = [Candidate(store, settings) for settings in names]
        everyone = list(present)
        for event, which, seconds in events:
            candidate = present[which]
            match event:
                case "down":
                    candidate.client.down = True
                case "up":
                    candidate.client.down = candidate.client.answers_lost = False
                case "lose answers":
                    candidate.client.answers_lost = True
                case "slow":
                    store.latency = lambda _, seconds=seconds: min(seconds, 4.0)  # type: ignore[misc]
                case "jump":
                    candidate.shift -= timedelta(days=seconds)
                case "restart":
                    await candidate.die()
                    present[which] = Candidate(store, replace(names[which], identity=f"operator-{len(everyone)}"))
                    everyone.append(present[which])
            await asyncio.sleep(seconds)
            assert never_two_at_once(*everyone)
            assert sum(candidate.elector.leads() for candidate in everyone if not candidate.task.done()) <= 1
        store.latency = lambda _: 0.01
        for which, candidate in enumerate(present):
            candidate.client.down = candidate.client.answers_lost = False
            if candidate.task.done():
                present[which] = Candidate(store, replace(names[which], identity=f"operator-{len(everyone)}"))
                everyone.append(present[which])
        await asyncio.sleep(25)
        assert sum(candidate.elector.leads() for candidate in present) == 1
        assert never_two_at_once(*everyone)
        for candidate in present:
            await candidate.die()

    run(story())


def test_a_defect_in_the_renewal_ends_the_leadership() -> None:
    async def story() -> None:
        candidate = Candidate(Store(), A)
        await asyncio.sleep(5)

        async def fail(*_: object) -> dict[str, Any]:
            raise ZeroDivisionError

        candidate.client.replace = fail  # type: ignore[method-assign]
        await asyncio.wait([candidate.task])
        assert candidate.lost == "the renewal ended by a defect; please report it"
        assert not candidate.elector.leads()
        assert isinstance(candidate.task.exception(), ZeroDivisionError)

    run(story())


def test_leaving_at_once_says_why_and_cleans_up_nothing() -> None:
    script = (
        "import atexit, logging\n"
        "from virtualflow_operator.lease import leave_the_lease\n"
        "logging.basicConfig()\n"
        "atexit.register(print, 'cleaned up')\n"
        "try:\n"
        "    leave_the_lease('another leads')\n"
        "finally:\n"
        "    print('cleaned up')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "lost the lease: another leads; leaving at once" in ended.stderr
