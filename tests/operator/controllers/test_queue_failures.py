"""Runs of the work-queue that fail, hang or are stopped, in virtual time: what backs off, and what is cancelled."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from virtual_time import now, run
from work_queues import SETTINGS, Away, Diary, running

from virtualflow_operator.controllers.workqueue import QueueHooks, RetryLater, WorkQueue


def test_failures_back_off_up_to_the_cap_and_a_success_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        queue, diary = WorkQueue[str](SETTINGS, expected=(Away,)), Diary()
        diary.errors["a"] = [Away("the API server is away") for _ in range(9)]
        async with running(queue, diary):
            queue.add("a")
            await asyncio.sleep(1000)
            waits = [second - first for first, second in zip(diary.times("a"), diary.times("a")[1:], strict=False)]
            assert waits == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60])
            assert queue.failures("a") == 0
            diary.errors["a"] = [Away("again")]
            queue.add("a")
            await asyncio.sleep(1000)
            assert diary.times("a")[-1] - diary.times("a")[-2] == pytest.approx(0.5)

    run(story())
    assert "a failed (9 in a row), next try in 60 s: the API server is away" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_back_off_of_a_key_that_has_failed_for_weeks_does_not_overflow() -> None:
    async def story() -> None:
        queue, diary = WorkQueue[str](SETTINGS, expected=(Away,)), Diary()
        diary.errors["a"] = [Away("still") for _ in range(1200)]
        async with running(queue, diary):
            queue.add("a")
            await asyncio.sleep(90_000)
        assert len(diary.begun) == 1201

    run(story())


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), asyncio.CancelledError()], ids=["defect", "cancel"])
def test_what_nobody_expected_backs_off_its_key_and_leaves_the_others_alone(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[str] = []

    async def story() -> None:
        queue, diary = WorkQueue[str](SETTINGS, hooks=QueueHooks(failed=failed.append)), Diary()
        diary.errors["bad"] = [error]
        begin = now()
        async with running(queue, diary):
            queue.add("bad")
            queue.add("good", 0.1)
            await asyncio.sleep(5)
        assert diary.times("bad") == [pytest.approx(begin), pytest.approx(begin + 0.5)]
        assert diary.times("good") == [pytest.approx(begin + 0.1)]

    run(story())
    assert failed == [type(error).__name__]
    if isinstance(error, ZeroDivisionError):
        assert "Traceback" in caplog.text
        assert "a defect" in caplog.text


def test_retry_later_is_no_failure() -> None:
    failed: list[str] = []

    async def story() -> None:
        queue, diary = WorkQueue[str](SETTINGS, hooks=QueueHooks(failed=failed.append)), Diary()
        diary.errors["a"] = [RetryLater(7, "the cache is behind"), RetryLater(3, "still")]
        async with running(queue, diary):
            queue.add("a")
            await asyncio.sleep(100)
        begin = diary.times("a")[0]
        assert [at - begin for at in diary.times("a")] == pytest.approx([0, 7, 10])

    run(story())
    assert failed == []


def test_an_event_does_not_wait_for_the_back_off_nor_for_the_relist() -> None:
    async def story() -> None:
        queue, diary, begin = WorkQueue[str](SETTINGS, expected=(Away,)), Diary(answer=300.0), now()
        diary.errors["a"] = [Away("once")]
        async with running(queue, diary):
            queue.add("a")
            await asyncio.sleep(0.1)
            queue.add("a", 0.02)
            await asyncio.sleep(100)
            queue.add("a", 0.02)
            await asyncio.sleep(100)
        assert [at - begin for at in diary.times("a")] == pytest.approx([0, 0.12, 100.12])

    run(story())


def test_a_run_that_never_ends_is_cancelled_and_tried_again() -> None:
    async def story() -> None:
        queue, begun = WorkQueue[str](replace(SETTINGS, run_limit=20.0)), list[float]()

        async def process(_: str) -> None:
            begun.append(now())
            if len(begun) == 1:
                await asyncio.Event().wait()

        async with running(queue, process):
            queue.add("a")
            await asyncio.sleep(100)
        assert begun[1] - begun[0] == pytest.approx(20.5)

    run(story())


def test_stopping_begins_nothing_and_waits_for_what_runs() -> None:
    async def story() -> None:
        queue, diary = WorkQueue[str](SETTINGS), Diary(takes=3.0)
        task = asyncio.create_task(queue.run(diary))
        queue.add("a")
        await asyncio.sleep(1)
        queue.add("a")
        queue.add("b", 0.5)
        queue.stop()
        begin = now()
        await task
        assert now() - begin == pytest.approx(2.0)
        assert [key for key, _ in diary.begun] == ["a"]

    run(story())


async def endless() -> tuple[WorkQueue[str], asyncio.Task[None], list[str]]:
    """A queue with a run that does not end by itself, its task, and the list that it is put on when it is cancelled."""
    queue, ended = WorkQueue[str](SETTINGS), list[str]()

    async def process(key: str) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(key)

    task = asyncio.create_task(queue.run(process))
    queue.add("a")
    await asyncio.sleep(1)
    return queue, task, ended


def test_what_does_not_end_in_time_at_the_stop_is_cancelled() -> None:
    async def story() -> None:
        queue, task, ended = await endless()
        queue.stop()
        begin = now()
        await task
        assert now() - begin == pytest.approx(SETTINGS.stop_limit)
        assert ended == ["a"]

    run(story())


def test_cancelling_the_queue_cancels_its_runs() -> None:
    async def story() -> None:
        _, task, ended = await endless()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["a"]

    run(story())
