"""What is said of a membership change is what a survivor measured, and steps are timed without changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from virtualflow.protocol.messages import Change, Generation, Member, Plan
from virtualflow.protocol.settings import MAX_TEXT
from virtualflow.worker import reporter
from virtualflow.worker.member_state import MemberState
from virtualflow.worker.reporter import UsageMeter
from virtualflow.worker.settings import MAX_STEP_TIMES
from virtualflow.worker.stopwatch import Stopwatch


class NvmlError(Exception):
    """As of ``pynvml``."""


def failing(error: Exception) -> Callable[[torch.device], NoReturn]:
    def ask(device: torch.device) -> NoReturn:
        raise error

    return ask


def plan(counter: int, cause: Any, workers: int, reason: str = "") -> Plan:
    members = tuple(Member(f"worker-{n}", f"process-{n}", "127.0.0.1", n, n + 1) for n in range(workers))
    mode = "planned" if cause in ("join", "drain", "resize", "stop") else "recovery"
    return Plan(Generation(1, counter), mode, members, (), cause, reason or f"{cause} {counter}")


def change(plans: list[Plan], before: int | None = 3, **facts: Any) -> Change | None:
    """Two steps at 10.0 and 10.5 s, ``plans`` entered between them."""
    watch = Stopwatch()
    watch.attempt(6)
    watch.commit(10.0, 6, None, Generation(1, 1))
    watch.attempt(7)
    for _ in range(facts.get("failed", 0)):
        watch.fail()
        watch.attempt(7)
    for seconds in facts.get("held", ()):
        watch.hold(seconds)
    for entered in plans:
        watch.enter(entered, has_state=True)
    return watch.commit(10.5, 7, before, plans[-1].generation if plans else Generation(1, 1))


def test_samples_a_second_follow_from_the_steps_and_the_virtual_nodes_of_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0, spent=7.0)
    played = SimpleNamespace(monotonic=lambda: clock.now, process_time=lambda: clock.spent)
    monkeypatch.setattr(reporter, "time", played)
    state = MemberState(8, "one machine", assigned=range(4))
    meter = UsageMeter(torch.device("cpu"), state, batch_size=64)
    clock.now, clock.spent, state.step = 102.0, 8.5, 10
    usage = meter.read()
    assert (usage.samples, usage.processors) == (10 * 64 / 2 / 2.0, 0.75)
    assert (usage.memory or 0) > 10 << 20
    assert (usage.device_memory, usage.device_share) == (None, None)
    state.step = 5
    assert meter.read().samples is None, "a restart from a checkpoint"


def test_a_joiner_has_made_none_of_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=count().__next__, process_time=lambda: 0.0))
    state = MemberState(8, "one machine")
    meter = UsageMeter(torch.device("cpu"), state, batch_size=64)
    state.step, state.assigned = 5_000, range(4)
    assert meter.read().samples is None
    state.step = 5_003
    assert meter.read().samples == 3 * 64 / 2


@pytest.mark.parametrize(
    ("busy", "share"),
    [
        pytest.param(lambda device: 37, 0.37, id="its driver tells"),
        pytest.param(failing(RuntimeError("NVML_SUCCESS == driver_api")), None, id="its driver fails"),
        pytest.param(failing(NvmlError()), None, id="its driver does not tell"),
        pytest.param(None, None, id="without the module that asks it"),
    ],
)
def test_how_busy_a_gpu_is_comes_from_its_driver_where_that_tells(
    busy: Callable[[torch.device], int] | None, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "find_spec", lambda name: busy)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NvmlError))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "utilization", busy)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 << 30)
    usage = UsageMeter(torch.device("cuda"), MemberState(8, "one machine"), batch_size=64).read()
    assert (usage.device_memory, usage.device_share) == (5 << 30, share)


@pytest.mark.parametrize(
    ("plans", "facts", "wanted"),
    [
        pytest.param([], {}, None, id="no plan is no change"),
        pytest.param([plan(1, "start", 3)], {}, None, id="nor is the start"),
        pytest.param([plan(1, "start", 3), plan(2, "start", 3)], {}, None, id="nor a start in two attempts"),
        pytest.param([plan(2, "join", 4)], {"before": None}, None, id="nor what precedes the first step"),
        pytest.param(
            [plan(2, "restart", 3)],
            {"before": None},
            ("restart", 0, 3, "restart 2", 500.0, 0),
            id="but that all is lost, and no checkpoint, is one",
        ),
        pytest.param([plan(2, "join", 4)], {}, ("join", 3, 4, "join 2", 500.0, 0), id="a join"),
        pytest.param([plan(2, "drain", 1)], {}, ("drain", 3, 1, "drain 2", 500.0, 0), id="a drain"),
        pytest.param([plan(2, "resize", 5)], {}, ("resize", 3, 5, "resize 2", 500.0, 0), id="a resize"),
        pytest.param(
            [plan(2, "lost", 2)], {"failed": 1}, ("lost", 3, 2, "lost 2", 500.0, 1), id="a loss repeats its step"
        ),
        pytest.param(
            [plan(2, "lost", 2), plan(3, "lost", 1)],
            {"failed": 2},
            ("lost", 3, 1, "lost 2; lost 3", 500.0, 2),
            id="two losses in a row",
        ),
        pytest.param(
            [plan(2, "join", 4), plan(3, "lost", 3)],
            {"failed": 1},
            ("lost", 3, 3, "join 2; lost 3", 500.0, 1),
            id="the gravest cause counts, and the last members",
        ),
        pytest.param(
            [plan(2, "broken", 3), plan(3, "restart", 3)],
            {"failed": 1},
            ("restart", 3, 3, "broken 2; restart 3", 500.0, 1),
            id="a restart goes before a break",
        ),
        pytest.param(
            [plan(2, "join", 4)],
            {"held": (0.125, 0.25)},
            ("join", 3, 4, "join 2", 125.0, 0),
            id="time that was held on purpose is no pause",
        ),
    ],
)
def test_a_change_is_told_as_it_was(plans: list[Plan], facts: dict[str, Any], wanted: Any) -> None:
    told = change(plans, **facts)
    if wanted is None:
        assert told is None
    else:
        assert told is not None
        assert (told.generation, told.step) == (plans[-1].generation, 7)
        assert (told.cause, told.from_, told.to, told.reason, told.pause_ms, told.repeated_steps) == wanted


def test_a_worker_that_has_made_no_step_before_knows_no_pause() -> None:
    watch = Stopwatch()
    watch.enter(plan(2, "join", 4), has_state=True)
    watch.attempt(7)
    told = watch.commit(10.0, 7, 3, Generation(1, 2))
    assert told is not None
    assert told.pause_ms is None


def test_a_joiner_says_once_that_it_joins_when_another_plan_takes_over_from_the_first() -> None:
    watch = Stopwatch()
    watch.enter(plan(2, "join", 4, "worker-3 joins"), has_state=False)
    watch.enter(plan(3, "resize", 4, "worker-3 joins; worker-1 drains"), has_state=False)
    told = watch.commit(10.0, 7, 4, Generation(1, 3))
    assert told is not None
    assert (told.cause, told.reason) == ("resize", "worker-3 joins; worker-1 drains")


def test_a_joiner_tells_of_the_loss_that_its_state_came_after() -> None:
    watch = Stopwatch()
    watch.enter(plan(2, "join", 4, "worker-3 joins"), has_state=False)
    watch.enter(plan(3, "lost", 3, "worker-1 lost"), has_state=False)
    told = watch.commit(10.0, 7, 3, Generation(1, 3))
    assert told is not None
    assert (told.cause, told.reason) == ("lost", "worker-3 joins; worker-1 lost")


def test_virtual_nodes_that_are_computed_again_count_with_the_attempt_that_was_aborted() -> None:
    watch = Stopwatch()
    watch.commit(10.0, 6, None, Generation(1, 1))
    watch.attempt(7)
    watch.repeat(5)  # a plan took over between two steps
    for again in (2, 3):
        watch.fail()
        watch.enter(plan(again, "lost", 4 - again), has_state=True)
        watch.repeat(again)
        watch.attempt(7)
    told = watch.commit(10.5, 7, 3, Generation(1, 3))
    assert told is not None
    assert (told.repeated_steps, told.repeated_virtual_nodes) == (2, 5)
    watch.attempt(8)
    watch.enter(plan(4, "join", 2), has_state=True)
    later = watch.commit(11.0, 8, 1, Generation(1, 4))
    assert later is not None
    assert (later.repeated_steps, later.repeated_virtual_nodes) == (0, 0)


def test_survivors_tell_of_every_planned_change_between_two_steps() -> None:
    """An evaluation lies between: it lets members leave, and commits no step."""
    told = change([plan(2, "drain", 2, "worker-1 drains"), plan(3, "drain", 1, "worker-2 drains")])
    assert told is not None
    assert told.reason == "worker-1 drains; worker-2 drains"


def test_a_state_that_was_given_is_told_with_its_change_and_with_no_other() -> None:
    watch = Stopwatch()
    watch.commit(1.0, 1, None, Generation(1, 1))
    watch.enter(plan(2, "join", 3), has_state=True)
    watch.moved = 600, 0.25, 2
    told = watch.commit(2.0, 2, 2, Generation(1, 2))
    watch.enter(plan(3, "drain", 2), has_state=True)
    later = watch.commit(3.0, 3, 3, Generation(1, 3))
    assert told is not None
    assert (told.state_bytes, told.state_ms, told.state_donors) == (600, 250.0, 2)
    assert later is not None
    assert (later.state_bytes, later.state_ms, later.state_donors) == (None, None, None)


def test_a_change_is_told_once() -> None:
    watch = Stopwatch()
    watch.commit(1.0, 1, None, Generation(1, 1))
    watch.enter(plan(2, "join", 4), has_state=True)
    watch.fail()
    watch.hold(0.5)
    assert watch.commit(2.0, 2, 3, Generation(1, 2)) is not None
    watch.attempt(3)
    assert watch.commit(2.25, 3, 4, Generation(1, 2)) is None
    watch.enter(plan(3, "drain", 3), has_state=True)
    watch.attempt(4)
    told = watch.commit(2.5, 4, 4, Generation(1, 3))
    assert told is not None
    assert (told.pause_ms, told.repeated_steps) == (250.0, 0)


def test_a_failed_attempt_at_a_step_that_others_have_made_repeats_nothing() -> None:
    """A donor has brought that step: the next one to be committed here is another one."""
    watch = Stopwatch()
    watch.commit(1.0, 6, None, Generation(1, 1))
    watch.attempt(7)
    watch.fail()
    watch.enter(plan(2, "lost", 2), has_state=True)
    watch.attempt(8)
    told = watch.commit(2.0, 8, 3, Generation(1, 2))
    assert told is not None
    assert (told.step, told.repeated_steps) == (8, 0)


def test_a_reason_that_grows_and_grows_is_cut() -> None:
    told = change([plan(number, "lost", 2, "x" * 1_000) for number in range(2, 9)])
    assert told is not None
    assert len(told.reason) == MAX_TEXT


def test_the_median_is_over_steps_without_a_change() -> None:
    watch = Stopwatch()
    assert (watch.median_ms, watch.timed_steps, watch.steps_per_second) == (None, 0, 0.0)
    now = 0.0
    for step, seconds in enumerate([9.0, 1.0, 2.0, 8.0, 4.0], 1):
        now += seconds
        if seconds == 8.0:
            watch.enter(plan(2, "join", 4), has_state=True)
        watch.commit(now, step, 3, Generation(1, 1))
    # The first commit has none before it, and the one of 8 s stands for a change.
    assert watch.timed_steps == 3
    assert watch.median_ms == 2_000.0
    assert watch.steps_per_second == pytest.approx(1 / 4), "those before the change took another time"


def test_the_median_leaves_out_what_was_held_and_forgets_what_is_long_past() -> None:
    watch = Stopwatch()
    watch.commit(0.0, 1, 3, Generation(1, 1))
    watch.hold(3.0)
    watch.commit(4.0, 2, 3, Generation(1, 1))
    assert watch.median_ms == 1_000.0
    for step in range(MAX_STEP_TIMES):
        watch.commit(4.0 + (step + 1) * 0.5, step + 3, 3, Generation(1, 1))
    assert watch.timed_steps == MAX_STEP_TIMES
    assert watch.median_ms == 500.0
    assert watch.steps_per_second == 2.0
