"""What a coordinator records for its successor is taken up, once, and whatever else is handed over changes nothing."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from coordinator_server import RIGHT, SETTINGS, Server, hello, told, with_server
from hypothesis import given
from hypothesis import strategies as st
from large_job import fill, happen, train

from virtualflow.coordinator.history import Goodput, History
from virtualflow.coordinator.memory_copies import take_up, write_record
from virtualflow.coordinator.page.live_page import compose
from virtualflow.coordinator.series import Series
from virtualflow.coordinator.settings import SERIES_POINTS, MembershipSettings
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import WorkerSeconds
from virtualflow.protocol.job_record import PATH, GoodputRecord, JobRecord, SeriesRecord
from virtualflow.protocol.settings import MAX_CHANGES, MAX_MESSAGE


def fresh_job(incarnation: int = 1) -> JobState:
    return JobState(incarnation, 2, MembershipSettings(), 0.0)


def recorded(steps: int = 30, writer: str = "the former") -> JobRecord:
    """The record of a job that has trained so many steps, a second each."""
    job = fresh_job()
    fill(job, 2, 8, 3)
    for step in range(1, steps + 1):
        train(job, step)
        job.count_goodput(float(step))
    job.history.tell("info", f"what {writer} has told")
    return through_json(write_record(job, writer))


def through_json(record: JobRecord) -> JobRecord:
    return msgspec.json.decode(m.encode(record), type=JobRecord)


def replaced(record: JobRecord, **facts: Any) -> JobRecord:
    return msgspec.structs.replace(record, **facts)


# --- taking one up ----------------------------------------------------------------------------------------------------


def test_the_page_goes_on_where_the_former_coordinator_was() -> None:
    record, job = recorded(), fresh_job(2)
    fill(job, 2, 8, 3)  # workers have told it of the changes again
    job.history.tell("info", "what this one has told")
    train(job, 31)
    assert take_up(job, record, age=4.0, now=100.0)
    train(job, 32)
    shown = job.history.series.columns()
    assert shown.steps == tuple(range(1, 32))
    assert job.history.goodput.paid == pytest.approx(2 * 29 + 2 * 4)
    log = compose(job).log
    assert [event.text for event in log.events][-2:] == ["what the former has told", "what this one has told"]
    assert [event.kind for event in log.events].count("change") == len(log.changes) == 3


def test_an_older_or_a_known_record_changes_nothing() -> None:
    newer, job = recorded(30), fresh_job(2)
    older = replaced(recorded(10), number=newer.number - 1)
    newer = replaced(newer, number=newer.number + 5)
    assert take_up(job, newer, 0.0, 1.0)
    before = m.encode(write_record(job, "this"))
    assert not take_up(job, older, 0.0, 1.0)
    assert not take_up(job, newer, 0.0, 1.0)
    assert msgspec.json.decode(before)["series"] == msgspec.json.decode(m.encode(write_record(job, "this")))["series"]


def test_a_newer_record_takes_the_place_of_the_one_before() -> None:
    job = fresh_job(2)
    fill(job, 2, 8, 0)
    assert take_up(job, replaced(recorded(10), number=7), 3.0, 50.0)
    train(job, 13)
    assert take_up(job, replaced(recorded(12), number=8), 1.0, 50.0)
    train(job, 14)
    train(job, 15)
    assert job.history.series.columns().steps == tuple(range(1, 15))
    assert job.history.goodput.paid == pytest.approx(2 * 11 + 2 * 1)


def test_numbers_go_on_across_coordinators() -> None:
    job = fresh_job(2)
    write_record(job, "this")
    take_up(job, replaced(recorded(), number=500), 0.0, 1.0)
    assert write_record(job, "this").number == 501


def test_what_is_only_counted_stays_counted() -> None:
    former = fresh_job()
    fill(former, 2, 8, MAX_CHANGES + 60)
    total, repeated = former.history.changes_total, former.history.repeated_steps
    job = fresh_job(2)
    for number in range(30, MAX_CHANGES + 61):  # a worker remembers other ones than the coordinator
        if number > 60:
            happen(job, number, 10 * number, 2)
    job.history.changes = {
        msgspec.structs.replace(known, incarnation=former.incarnation): change
        for known, change in job.history.changes.items()
    }
    take_up(job, through_json(write_record(former, "former")), 0.0, 1.0)
    assert (job.history.changes_total, job.history.repeated_steps) == (total, repeated)


def test_changes_that_the_former_only_counts_are_not_counted_twice() -> None:
    history = History()
    job = fresh_job()
    job.history = history
    for number in range(1, 6):
        happen(job, number, number, 2)
    history.resume_forgotten(m.Generation(1, 3), 3, 7)
    assert history.changes_total == 5
    happen(job, 2, 2, 2)
    assert history.changes_total == 5, "a worker that tells it again"
    history.resume_forgotten(m.Generation(1, 2), 2, 7)
    assert history.forgotten == (m.Generation(1, 3), 3, 7)


# --- goodput ----------------------------------------------------------------------------------------------------------


def test_the_time_without_a_coordinator_is_paid_and_its_steps_count() -> None:
    goodput = Goodput()
    goodput.look(1.0, 2, 2, None, None)  # this coordinator has counted already
    goodput.look(3.0, 2, 2, None, None)
    goodput.resume(GoodputRecord(paid=100.0, used=80.0, step=50, present=2), age=10.0, now=1_000.0)
    assert (goodput.paid, goodput.used) == (120.0, 80.0)
    goodput.look(1_000.5, 2, 2, 58, 1.0)
    assert goodput.paid == 121.0
    assert goodput.used == 80.0 + 8 * 2, "eight steps, of two workers"


def test_steps_that_were_counted_before_are_not_counted_again() -> None:
    goodput = Goodput()
    goodput.resume(GoodputRecord(paid=100.0, used=80.0, step=50, present=2), age=1.0, now=10.0)
    goodput.look(11.0, 2, 2, 40, 1.0)
    assert goodput.used == 80.0
    goodput.look(12.0, 2, 2, 51, 1.0)
    assert goodput.used == 82.0


def test_what_is_scraped_begins_at_nothing_with_a_new_coordinator_and_has_the_time_without_one() -> None:
    goodput = Goodput()
    goodput.look(1.0, 2, 2, None, None)
    goodput.look(2.0, 2, 2, None, None)
    assert goodput.own == WorkerSeconds(2.0, 0.0)
    goodput.resume(GoodputRecord(paid=100.0, used=80.0, step=50, present=2), age=10.0, now=1_000.0)
    goodput.look(1_000.5, 2, 2, 58, 1.0)
    assert goodput.own == WorkerSeconds(10.0 * 2 + 1.0, 8.0 * 2)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e3), st.integers(0, 8), st.none() | st.integers(0, 99), st.booleans()), max_size=12
    )
)
def test_what_is_scraped_never_becomes_less_also_where_newer_records_come(
    facts: list[tuple[float, int, int | None, bool]],
) -> None:
    goodput, now, before = Goodput(), 0.0, WorkerSeconds(0.0, 0.0)
    for seconds, present, step, recorded in facts:
        now += seconds
        if recorded:
            goodput.resume(GoodputRecord(7.0 * seconds, seconds, step, present), seconds / 2, now)
        else:
            goodput.look(now, present, present, step, None)
        assert goodput.own.paid >= before.paid - 0.01
        assert goodput.own.committed >= before.committed - 0.01
        before = goodput.own


@given(
    st.floats(0, 1e6), st.floats(0, 1), st.floats(0, 1e5), st.integers(0, 64), st.lists(st.floats(0, 10), max_size=8)
)
def test_goodput_is_never_more_than_all(
    paid: float, share: float, age: float, present: int, pauses: list[float]
) -> None:
    goodput, now = Goodput(), 0.0
    goodput.resume(GoodputRecord(paid, share * paid, 5, present), age, now)
    for number, pause in enumerate(pauses):
        now += pause
        goodput.look(now, present, present, 5 + number, None)
    share_of_all = goodput.total.share
    assert share_of_all is None or 0 <= share_of_all <= 1
    assert goodput.paid == pytest.approx(paid + present * (age + now))


# --- figures over the steps -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300), max_size=120), st.integers(0, 120), st.integers(2, 12), st.integers(2, 12))
def test_a_series_that_is_handed_over_is_as_if_one_had_gone_on(
    steps: list[int], cut: int, most: int, then: int
) -> None:
    forward = sorted(set(steps))
    former, later = Series(most), Series(then)
    for step in forward[:cut]:
        former.add(step, 2.0, 3, {"loss": float(step)}, step / 1_000)
    record = msgspec.json.decode(m.encode(former.record()), type=SeriesRecord)
    later.resume(record)
    for step in forward[cut:]:
        later.add(step, 2.0, 3, {"loss": float(step)}, step / 1_000)
    assert len(later) <= then
    shown = later.columns()
    assert list(shown.steps) == sorted(set(shown.steps))
    assert set(shown.steps) <= set(forward)
    if most == then:
        one = Series(most)
        for step in forward:
            one.add(step, 2.0, 3, {"loss": float(step)}, step / 1_000)
        assert shown == one.columns()


def test_a_sum_that_json_has_no_number_for_leaves_a_gap() -> None:
    series = Series()
    for step in (1, 1, 2, 3):
        series.add(step, 1.0, 1, {"loss": 1.7e308}, 1.0)
    later = Series()
    later.resume(msgspec.json.decode(m.encode(series.record()), type=SeriesRecord))
    assert later.columns().metrics["loss"] == (None, 1.7e308)


# --- over HTTP --------------------------------------------------------------------------------------------------------


async def hand_over(server: Server, body: bytes, age: str | None = "1.5") -> tuple[int, str]:
    params = {} if age is None else {"age": age}
    async with server.client.put(f"{server.url}{PATH}", params=params, data=body, headers=RIGHT) as answer:
        return answer.status, (await answer.json())["message"]


def test_a_record_goes_from_one_coordinator_to_the_next() -> None:
    found: list[bytes] = []

    async def first(server: Server) -> None:
        fill(server.state, 2, 8, 3)
        for step in range(1, 20):
            train(server.state, step)
        async with server.client.get(f"{server.url}{PATH}", headers=RIGHT) as answer:
            assert answer.status == 200
            found.append(await answer.read())
        assert await hand_over(server, found[0]) == (200, "that record is known, or a newer one is"), "its own"

    async def second(server: Server) -> None:
        assert await hand_over(server, found[0]) == (200, "the job goes on with that record")
        assert await hand_over(server, found[0]) == (200, "that record is known, or a newer one is")
        train_on = server.state.history.series.columns().steps
        assert train_on == tuple(range(1, 19))

    with_server(first)
    with_server(second)


def test_workers_are_told_how_often_to_fetch() -> None:
    async def story(server: Server) -> None:
        stream = await server.client.ws_connect(f"{server.url}/v1/worker", headers=RIGHT)
        await stream.send_bytes(m.encode(hello("worker-0")))
        welcome = await told(stream)
        assert isinstance(welcome, m.Welcome)
        assert welcome.record == SETTINGS.live_page.record_interval > 0

    with_server(story)


@pytest.mark.parametrize(
    ("facts", "age", "sentence"),
    [
        pytest.param({}, None, "Expected `float`", id="without an age"),
        pytest.param({}, "-1", "Expected `float` >= 0.0", id="from the future"),
        pytest.param({}, "long ago", "Expected `float`", id="of a nonsensical age"),
        pytest.param({"number": -1}, "1", "Expected `int` >= 0", id="of no number"),
        pytest.param({"steps": (5, 4)}, "1", "its steps do not go forward", id="backwards"),
        pytest.param({"steps": (1, 2, 3)}, "1", "its columns differ in length", id="of unequal columns"),
        pytest.param({"steps": tuple(range(5_000))}, "1", "of length <= 4096", id="too long"),
    ],
)
def test_what_is_no_record_changes_nothing(facts: dict[str, Any], age: str | None, sentence: str) -> None:
    record = recorded(2)
    if "steps" in facts:
        record = replaced(record, series=msgspec.structs.replace(record.series, **facts))
    else:
        record = replaced(record, **facts)

    async def story(server: Server) -> None:
        code, said = await hand_over(server, m.encode(record), age)
        assert code == 400
        assert said.startswith("this is no record of a job: ")
        assert sentence in said
        assert (await hand_over(server, b"{"))[0] == 400
        assert (await hand_over(server, b" " * (MAX_MESSAGE + 1)))[0] == 413
        assert server.state.inherited == 0
        assert len(server.state.history.series) == 0

    with_server(story)


def test_without_the_jobs_token_nobody_gets_or_gives_one() -> None:
    async def story(server: Server) -> None:
        for method in ("GET", "PUT"):
            async with server.client.request(method, f"{server.url}{PATH}") as answer:
                assert answer.status == 401

    with_server(story)


def test_however_long_a_job_trains_its_record_is_small_and_quick() -> None:
    job = fresh_job()
    fill(job, 64, 1_000, 10_000)
    for step in range(1, 50_000, 6):
        train(job, step, metrics=50)
    began = time.process_time()
    body = m.encode(write_record(job, "this"))
    print(f"{len(body)} bytes in {1_000 * (time.process_time() - began):.1f} ms")
    assert len(body) < 256 * 1024
    assert len(job.history.series) <= SERIES_POINTS
