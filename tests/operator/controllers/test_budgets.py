"""What one job, one namespace and all together may cost: as tables, and turns on a clock of their own."""

from __future__ import annotations

import asyncio

import pytest

from virtualflow_operator.controllers.coordinator_links import Holdings, Turns
from virtualflow_operator.k8s import TokenBucket

ONE, OTHER, HONEST = ("hostile", "one"), ("hostile", "other"), ("honest", "digits")


def test_a_bucket_gives_its_burst_and_then_what_comes_back() -> None:
    bucket = TokenBucket(2.0, 0.5)
    assert [bucket.wait(10.0), bucket.spend(10.0), bucket.spend(10.0)] == [0.0, 0.0, 0.0]
    assert bucket.wait(10.0) == 2.0
    assert bucket.wait(11.0) == 1.0
    assert bucket.spend(11.0, 2.0) == 3.0, "on credit"
    assert (bucket.wait(14.0), bucket.wait(1_000.0), bucket.spent(1_000.0)) == (2.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("held", "losers"),
    [
        pytest.param([(ONE, 60), (HONEST, 40)], [], id="all fits"),
        pytest.param([(ONE, 60), (OTHER, 40), (HONEST, 10)], [ONE], id="the largest of the namespace with most"),
        pytest.param([(ONE, 50), (OTHER, 45), (HONEST, 50)], [ONE], id="not the newest"),
        pytest.param([(ONE, 30), (HONEST, 101)], [HONEST], id="one that holds more than there is"),
        pytest.param([(ONE, 90), (ONE, 20), (HONEST, 80)], [], id="what is given back"),
        pytest.param([(ONE, 100), (OTHER, 90), (HONEST, 90)], [ONE, OTHER], id="again and again"),
    ],
)
def test_where_too_much_is_held_the_namespace_with_most_gives_up(
    held: list[tuple[tuple[str, str], int]], losers: list[tuple[str, str]]
) -> None:
    holdings = Holdings(100)
    assert [loser for key, size in held for loser in holdings.hold(key, size)] == losers


def test_namespaces_have_even_shares_of_the_turns_however_many_jobs_wait() -> None:
    order: list[str] = []

    async def story() -> None:
        turns = Turns(1_000.0, 1.0)

        async def work(namespace: str, number: int, units: float) -> None:
            await turns.take((namespace, str(number)), units)
            order.append(namespace)

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(work("hostile", number, 4.0))
            await asyncio.sleep(0)
            for number in range(8):
                group.create_task(work("honest", number, 2.0))

    asyncio.run(story())
    assert len(order) == 48
    # A turn of the hostile namespace is as large as two of the honest one.
    assert order[: order.index("honest") + 12].count("honest") == 8


def test_a_job_that_waits_no_longer_takes_no_turn() -> None:
    async def story() -> None:
        turns = Turns(1_000.0, 1.0)
        await turns.take(ONE, 20.0)
        given_up = asyncio.create_task(turns.take(OTHER, 1e9))
        await asyncio.sleep(0)
        given_up.cancel()
        async with asyncio.timeout(10.0):
            await turns.take(HONEST, 1.0)
            await turns.take(ONE, 1.0)

    asyncio.run(story())
