"""Who leads, who follows and how soon: candidates that die, retire, restart or lose the lease to others."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from leases import A, B, Candidate, Store, first_leads, never_two_at_once
from virtual_time import now, run

from tiers import examples


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


def test_one_that_stands_by_says_who_leads_and_when_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        store = Store()
        first, second = await first_leads(store)
        third = Candidate(store, replace(A, identity="operator-c"))
        await asyncio.sleep(20)
        await first.die()
        await asyncio.sleep(60)
        leader = "operator-b" if second.elector.leads() else "operator-c"
        told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("standing by")]
        said = "standing by: the lease is held by"
        assert sorted(told) == sorted([f"{said} operator-a", f"{said} operator-a", f"{said} {leader}"])
        await second.die()
        await third.die()

    with caplog.at_level("INFO"):
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
        body["spec"] |= {"holderIdentity": "someone", "acquireTime": "2026-01-01T00:00:00.000002Z"}
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


@hypothesis_settings(max_examples=examples(60), deadline=None)
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
