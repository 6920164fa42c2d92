"""The work-queue, in virtual time: when a key runs, in which order, and beside which others."""

from __future__ import annotations

import asyncio
import contextlib
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
            assert queue.stalled() == 0.0
            await asyncio.sleep(0.25)
            assert queue.stalled() == pytest.approx(0.25)
            await asyncio.sleep(5)
            assert queue.stalled() == 0.0

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


def namespace(key: str) -> str:
    return key.partition("/")[0]


def test_ten_thousand_keys_of_one_tenant_do_not_delay_another() -> None:
    async def story() -> None:
        queue = WorkQueue[str](replace(SETTINGS, concurrency=16), tenant_of=namespace)
        diary, begin = Diary(takes=0.5), now()
        async with running(queue, diary):
            for number in range(10_000):
                queue.add(f"junk/{number}")
            for second in range(20):
                queue.add(f"ml/{second % 3}")
                await asyncio.sleep(1.0)
            ours = [at - begin for key, at in diary.begun if namespace(key) == "ml"]
            assert ours == pytest.approx([float(second) for second in range(20)]), "each at once"
            assert len(diary.begun) > 20 * 2 * 14, "the other's go on meanwhile"
            assert queue.stalled() < 1.0
            for number in range(10_000):
                queue.forget(f"junk/{number}")

    run(story())


def test_tenants_that_all_have_many_keys_take_turns() -> None:
    async def story() -> None:
        queue, diary = WorkQueue[str](replace(SETTINGS, concurrency=1), tenant_of=namespace), Diary(takes=0.1)
        async with running(queue, diary):
            for key in ("a/1", "a/2", "a/3", "a/4", "b/1", "b/2", "c/1"):
                queue.add(key)
            queue.forget("a/3")
            await asyncio.sleep(5)
        assert [key for key, _ in diary.begun] == ["a/1", "b/1", "c/1", "a/2", "b/2", "a/4"]

    run(story())


def test_one_tenants_runs_that_hang_leave_places_to_others() -> None:
    async def story() -> None:
        settings = replace(SETTINGS, concurrency=16, slow_after=1.0, slow_most=20, run_limit=300.0)
        queue, served, hanging = WorkQueue[str](settings, tenant_of=namespace), list[float](), 0

        async def process(key: str) -> float | None:
            nonlocal hanging
            if namespace(key) == "junk":
                hanging += 1
                try:
                    await asyncio.sleep(10_000)
                finally:
                    hanging -= 1
            served.append(now())
            await asyncio.sleep(2.0)
            return None

        task, begin = asyncio.create_task(queue.run(process)), now()
        for number in range(1_000):
            queue.add(f"junk/{number}")
        await asyncio.sleep(250)
        assert hanging == 14 + 10, "its places, and those lent to it"
        assert queue.stalled() == 0.0, "the others could have one"
        for number in range(12):
            queue.add(f"ml/{number}")
        await asyncio.sleep(20)
        waits = [at - begin - 250 for at in served]
        assert waits == pytest.approx([second for second in range(6) for _ in "ab"]), "those that are slow lend theirs"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run(story())
