"""What a worker tells of its training thread: what it does, for how long, and where it is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from virtualflow.protocol.settings import MAX_REASON
from virtualflow.transport import activity
from virtualflow.transport.activity import Activity


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("virtualflow.transport.activity.time", found)
    return found


def test_the_age_of_what_it_does_begins_anew_with_each_mark(clock: Clock) -> None:
    activity = Activity()
    for _ in range(3):
        clock.now += 1.0
        told = activity.report(2.0)
    assert (told.stage, told.step, told.seconds, told.waits) == ("starting", 0, 3.0, False)
    activity.mark("computing", 7)
    clock.now += 0.5
    told = activity.report(2.0)
    assert (told.stage, told.step, told.seconds) == ("computing", 7, 0.5)


def test_a_process_that_did_not_run_has_not_hung(clock: Clock) -> None:
    """As after SIGSTOP and SIGCONT: only what the asking thread has seen counts."""
    activity = Activity()
    activity.mark("computing", 7)
    clock.now += 3_600.0
    assert activity.report(2.0).seconds == 2.0
    clock.now += 3_600.0
    assert activity.report(2.0).seconds == 4.0


def test_who_waits_says_so_and_comes_on_afterwards(clock: Clock) -> None:
    activity = Activity()
    activity.mark("synchronizing", 7)
    clock.now += 1.0
    with activity.waiting:
        clock.now += 1.0
        told = activity.report(2.0)
        assert (told.stage, told.seconds, told.waits) == ("synchronizing", 1.0, True)
        assert activity.stuck == 0.0
    clock.now += 0.25
    told = activity.report(2.0)
    assert (told.seconds, told.waits) == (0.25, False)
    assert activity.stuck == 0.25


def test_that_another_thread_waits_says_nothing_of_the_training_thread(clock: Clock) -> None:
    activity = Activity()
    inside, enough = threading.Event(), threading.Event()

    def wait() -> None:
        with activity.waiting:
            inside.set()
            assert enough.wait(60.0)

    thread = threading.Thread(target=wait)
    thread.start()
    assert inside.wait(60.0)
    clock.now += 1.0
    assert not activity.report(2.0).waits
    enough.set()
    thread.join()
    clock.now += 1.0
    assert activity.report(2.0).seconds == 2.0


# --- where it is ------------------------------------------------------------------------------------------------------


def stuck_in_a_lock(lock: threading.Lock, depth: int = 0) -> None:
    if depth:
        stuck_in_a_lock(lock, depth - 1)
    else:
        lock.acquire()


@contextmanager
def hanging(target: Callable[..., None], *arguments: object) -> Iterator[Activity]:
    """The activity of a thread that runs ``target``."""
    made: list[Activity] = []
    ready = threading.Event()

    def run() -> None:
        made.append(Activity())
        ready.set()
        target(*arguments)

    thread = threading.Thread(target=run, name="training", daemon=True)
    thread.start()
    assert ready.wait(60.0)
    yield made[0]
    thread.join(60.0)
    assert not thread.is_alive()


def wait_for_place(activity: Activity, part: str) -> str:
    for _ in range(600):
        place = activity.stacks().place
        if part in place:
            return place
        threading.Event().wait(0.05)
    raise AssertionError(f"{part} is not in {activity.stacks()}")


@pytest.mark.parametrize("depth", [1, 200])
def test_the_place_is_where_the_training_thread_is(depth: int) -> None:
    lock = threading.Lock()
    lock.acquire()
    with hanging(stuck_in_a_lock, lock, depth) as activity:
        place = wait_for_place(activity, "in stuck_in_a_lock, called from")
        told = activity.stacks()
        assert place.startswith("test_activity.py:")
        assert len(place) <= MAX_REASON
        assert told.text.startswith("the training thread is at test_activity.py:")
        assert told.text.count("in stuck_in_a_lock") in (4, 22)
        assert "thread MainThread:" not in told.text, "the one that asks is of no interest"
        lock.release()


def test_all_threads_fit_into_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_TEXT", 400)
    assert len(Activity().stacks().text) == 400


def read_one(batches: Iterator[object]) -> None:
    next(batches)


@pytest.mark.parametrize("stopped", [False, True])
def test_it_says_which_loader_process_is_waited_for(stopped: bool, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    loader = DataLoader(
        TensorDataset(torch.zeros(4)), num_workers=2, collate_fn=_Slow(go_on), multiprocessing_context="fork"
    )
    batches = iter(loader)
    process = psutil.Process(batches._workers[0].pid)  # type: ignore[attr-defined]
    if stopped:
        process.suspend()
    with hanging(read_one, batches) as activity:
        state = "stopped by a signal (state T)" if stopped else "sleeping"
        wait_for_place(activity, f"; it waits for loader process {process.pid}, which is {state}")
        go_on.touch()
        os.kill(process.pid, signal.SIGCONT)


class _Slow:
    """A collate function that waits for a file."""

    def __init__(self, go_on: Path) -> None:
        self.go_on = go_on

    def __call__(self, samples: list[object]) -> object:
        for _ in range(1_200):
            if self.go_on.exists():
                return samples
            threading.Event().wait(0.05)
        raise AssertionError("nobody lets it go on")
