"""Leaders whose API server is away, slow or refuses, whose clocks jump, or whose renewal has a defect."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any

import pytest
from leases import A, Candidate, Store, first_leads
from virtual_time import now, run

from virtualflow_operator.k8s.client import Forbidden


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
