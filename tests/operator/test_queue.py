"""The work-queue, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from virtual_time import VirtualLoop, now, run

from virtualflow_operator.queue import QueueHooks, RetryLater, WorkQueue
from virtualflow_operator.settings import QueueSettings

SETTINGS = QueueSettings(concurrency=2, backoff_first=0.5, backoff_most=60.0, stop_limit=10.0)


class Away(Exception):
    """What a run may well raise."""


@asynccontextmanager
async def running(queue: WorkQueue[str], process: Callable[[str], Awaitable[float | None]]) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.run(process))
    try:
        yield
    finally:
        queue.stop()
        await task


class Diary:
    """Processes keys and remembers when each began."""

    def __init__(self, takes: float = 0.0, answer: float | None = None) -> None:
        self.begun: list[tuple[str, float]] = []
        self.takes = takes
        self.answer = answer
        self.errors: dict[str, list[BaseException]] = {}

    async def __call__(self, key: str) -> float | None:
        self.begun.append((key, now()))
        await asyncio.sleep(self.takes)
        if self.errors.get(key):
            raise self.errors[key].pop(0)
        return self.answer

    def times(self, key: str) -> list[float]:
        return [at for other, at in self.begun if other == key]


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


def test_a_run_says_itself_when_it_wants_to_be_repeated() -> None:
    async def story() -> None:
        queue, diary, begin = WorkQueue[str](SETTINGS), Diary(answer=30.0), now()
        async with running(queue, diary):
            queue.add("a")
            await asyncio.sleep(100)
        assert [at - begin for at in diary.times("a")] == pytest.approx([0, 30, 60, 90])

    run(story())


def test_an_event_does_not_wait_for_the_back_off_nor_for_the_resync() -> None:
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


class QueueMachine(RuleBasedStateMachine):
    """Whatever is added, failed, forgotten and stopped: one run a key at a time, never too many, nothing lost."""

    KEYS = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.loop = self.runner.get_loop()
        self.queue = WorkQueue[str](replace(SETTINGS, slow_after=1e9, run_limit=1e9), expected=(Away,))
        self.open: dict[str, asyncio.Future[float | None]] = {}
        self.news: dict[str, float] = {}
        """Keys that must begin a run at that time at the latest, if there is a place."""
        self.twice: list[str] = []
        self.task = self.loop.create_task(self.queue.run(self.process))
        self.pass_time(0.0)

    async def process(self, key: str) -> float | None:
        if key in self.open:
            self.twice.append(key)
        self.news.pop(key, None)
        future = self.open[key] = self.loop.create_future()
        try:
            return await future
        finally:
            del self.open[key]

    def pass_time(self, seconds: float) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            for _ in range(5):
                await asyncio.sleep(0)

        self.runner.run(wait())

    def call(self, function: Callable[[], None]) -> None:
        async def act() -> None:
            function()

        self.runner.run(act())
        self.pass_time(0.0)

    def must_begin(self, key: str, after: float) -> None:
        due = self.loop.time() + after
        self.news[key] = min(due, self.news.get(key, due))

    @rule(key=KEYS, after=st.sampled_from([0.0, 0.02, 1.0, 50.0]))
    def add(self, key: str, after: float) -> None:
        self.must_begin(key, after)
        self.call(lambda: self.queue.add(key, after))

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        if key not in self.open:
            self.news.pop(key, None)
        self.call(lambda: self.queue.forget(key))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), answer=st.sampled_from([None, 0.0, 5.0]))
    def succeed(self, data: st.DataObject, answer: float | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        if answer is not None and key not in self.queue._forgotten:
            self.must_begin(key, answer)
        self.call(lambda: self.open[key].set_result(answer))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), error=st.sampled_from([Away, ZeroDivisionError, RetryLater]))
    def fail(self, data: st.DataObject, error: type[Exception]) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        if key not in self.queue._forgotten:
            self.must_begin(key, 4.0 if error is RetryLater else SETTINGS.backoff_most)
        self.call(lambda: self.open[key].set_exception(RetryLater(4.0, "") if error is RetryLater else error("")))

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @invariant()
    def one_run_a_key(self) -> None:
        assert not self.twice

    @invariant()
    def never_too_many(self) -> None:
        assert len(self.open) <= SETTINGS.concurrency

    @invariant()
    def nothing_lost_and_no_place_idle(self) -> None:
        late = [key for key, due in self.news.items() if due < self.loop.time() - 1e-3 and key not in self.open]
        assert not late or len(self.open) == SETTINGS.concurrency

    def teardown(self) -> None:
        # Everything that was asked for does run once the places are free.
        for _ in range(100):
            for key in sorted(self.open):
                self.call(lambda key=key: self.open[key].set_result(None))  # type: ignore[misc]
            if not self.news:
                break
            self.pass_time(5.0)
        assert not self.news
        self.queue.stop()
        self.runner.run(asyncio.wait_for(self.task, 60))
        self.runner.close()


QueueMachine.TestCase.settings = hypothesis_settings(max_examples=25, stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase
