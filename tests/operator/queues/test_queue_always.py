"""The work-queue as a whole: whatever is added, fails, is forgotten or stopped, one run a key, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from virtual_time import VirtualLoop
from work_queues import SETTINGS, Away

from tiers import examples
from virtualflow_operator.controllers.workqueue import RetryLater, WorkQueue


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


QueueMachine.TestCase.settings = hypothesis_settings(max_examples=examples(25), stateful_step_count=40, deadline=None)
TestQueueMachine = QueueMachine.TestCase
