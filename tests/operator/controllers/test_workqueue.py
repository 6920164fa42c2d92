"""The work-queue, in virtual time: when a key runs, in which order, and beside which others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from virtual_time import VirtualLoop, now, run
from work_queues import SETTINGS, Diary, running

from virtualflow_operator.controllers.workqueue import QueueHooks, WorkQueue


def test_keys_that_are_added_often_before_they_run_run_once() -> None:
    async def story() -> None:
        queue, diary, begin = WorkQueue[str](SETTINGS), Diary(), now()
        async with running(queue, diary):
            for after in (0.5, 0.02, 3.0, 0.02):
                queue.add("a", after)
            await asyncio.sleep(10)
        assert diary.begun == [("a", pytest.approx(begin + 0.02))]

    run(story())


def test_a_key_added_while_it_runs_runs_again_after_and_never_beside() -> None:
    async def story() -> None:
        queue, diary, begin = WorkQueue[str](SETTINGS), Diary(takes=1.0), now()
        async with running(queue, diary):
            queue.add("a")
            await asyncio.sleep(0.5)
            queue.add("a")
            queue.add("a", 7)
            await asyncio.sleep(20)
        assert diary.times("a") == [pytest.approx(begin), pytest.approx(begin + 1.0)]

    run(story())


def test_what_is_added_before_the_queue_runs_is_not_lost() -> None:
    async def story() -> None:
        queue, diary = WorkQueue[str](SETTINGS), Diary()
        queue.add("a")
        queue.add("b", 1.0)
        await asyncio.sleep(5)
        async with running(queue, diary):
            await asyncio.sleep(1)
        assert [key for key, _ in diary.begun] == ["a", "b"]

    run(story())


def test_keys_run_in_the_order_in_which_they_became_due() -> None:
    async def story() -> None:
        queue, diary = WorkQueue[str](replace(SETTINGS, concurrency=1)), Diary(takes=0.1)
        async with running(queue, diary):
            queue.add("first")
            for key, after in (("d", 0.04), ("b", 0.02), ("c", 0.03), ("a", 0.01)):
                queue.add(key, after)
            await asyncio.sleep(0.05)
            queue.add("e")
            await asyncio.sleep(5)
        assert [key for key, _ in diary.begun] == ["first", "a", "b", "c", "d", "e"]

    run(story())


def test_no_more_keys_run_at_once_than_there_are_places() -> None:
    async def story() -> None:
        queue, diary, begin = WorkQueue[str](SETTINGS), Diary(takes=0.5), now()
        async with running(queue, diary):
            for key in "abcde":
                queue.add(key)
            await asyncio.sleep(5)
        assert [round(at - begin, 3) for _, at in diary.begun] == [0, 0, 0.5, 0.5, 1.0]

    run(story())


def test_slow_keys_lend_their_places_and_delay_others_by_a_second_at_most() -> None:
    async def story() -> None:
        queue, begin, began = WorkQueue[str](SETTINGS), now(), dict[str, float]()

        async def process(key: str) -> None:
            began[key] = now() - begin
            await asyncio.sleep(100 if key.startswith("slow") else 0.0)

        async with running(queue, process):
            for key in ("slow 1", "slow 2", "quick 1", "quick 2", "quick 3"):
                queue.add(key)
            await asyncio.sleep(2)
            queue.add("quick 4")
            await asyncio.sleep(150)
        assert began["quick 3"] == pytest.approx(1.0)
        assert began["quick 4"] == pytest.approx(2.0)

    run(story())


def test_the_places_that_slow_keys_lend_are_limited() -> None:
    async def story() -> None:
        queue, running_now, most = WorkQueue[str](replace(SETTINGS, slow_most=3)), set[str](), 0

        async def process(key: str) -> None:
            nonlocal most
            running_now.add(key)
            most = max(most, len(running_now))
            await asyncio.sleep(50)
            running_now.discard(key)

        async with running(queue, process):
            for number in range(20):
                queue.add(f"{number}")
            await asyncio.sleep(400)
        assert most == SETTINGS.concurrency + 3
        assert not running_now

    run(story())


def test_a_run_says_itself_when_it_wants_to_be_repeated() -> None:
    async def story() -> None:
        queue, diary, begin = WorkQueue[str](SETTINGS), Diary(answer=30.0), now()
        async with running(queue, diary):
            queue.add("a")
            await asyncio.sleep(100)
        assert [at - begin for at in diary.times("a")] == pytest.approx([0, 30, 60, 90])

    run(story())


def test_a_forgotten_key_does_not_come_back_unless_it_is_added() -> None:
    async def story() -> None:
        queue, begin, begun = WorkQueue[str](SETTINGS), now(), list[float]()

        async def process(key: str) -> float:
            begun.append(now() - begin)
            await asyncio.sleep(1)
            queue.forget(key)
            return 5.0

        async with running(queue, process):
            queue.add("a")
            await asyncio.sleep(50)
            assert len(queue) == 0
            queue.add("a")
            await asyncio.sleep(0.5)
            queue.add("a")  # a successor of the same name, while the run that forgets its predecessor goes on
            await asyncio.sleep(50)
            queue.add("a", 10)
            queue.forget("a")
            await asyncio.sleep(50)
        assert begun == pytest.approx([0, 50, 51])

    run(story())


def test_the_hooks_tell_depth_waits_and_durations() -> None:
    depths: list[int] = []
    waits: list[float] = []
    durations: list[float] = []

    async def story() -> None:
        hooks = QueueHooks(depth=depths.append, waited=waits.append, ran=durations.append)
        queue, diary = WorkQueue[str](replace(SETTINGS, concurrency=1), hooks=hooks), Diary(takes=0.5)
        async with running(queue, diary):
            for key in "abc":
                queue.add(key)
            assert queue.overdue() == 0.0
            await asyncio.sleep(0.25)
            assert queue.overdue() == pytest.approx(0.25)
            await asyncio.sleep(5)
            assert queue.overdue() == 0.0

    run(story())
    assert depths == [1, 2, 3, 2, 1, 0]
    assert waits == pytest.approx([0, 0.5, 1.0])
    assert durations == pytest.approx([0.5, 0.5, 0.5])


def test_an_idle_queue_sets_no_timer_but_the_next_due_time() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        queue, diary = WorkQueue[str](SETTINGS), Diary(answer=300.0)
        async with running(queue, diary):
            queue.add("a")
            await asyncio.sleep(0)
            calls = 0
            original = queue._pump

            def counted() -> None:
                nonlocal calls
                calls += 1
                original()

            queue._pump = counted  # type: ignore[method-assign]
            await asyncio.sleep(3_001)
            assert len(diary.begun) == 11
            assert calls <= 2 * 11  # one when it becomes due, one when it has ended

    run(story())
