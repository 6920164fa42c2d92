"""When a checkpoint is due, how many remain, and how it is written beside the training."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from checkpoints import IDENTITY, Clock, assert_holds, flip, newest, steps_in, tree_of, truncate, writer_to
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.errors import ConfigurationError
from virtualflow.state import checkpoint_format
from virtualflow.state.checkpoint_order import retained
from virtualflow.state.checkpoint_writer import CheckpointPolicy, CheckpointWriter


def test_checkpoints_are_due_every_n_steps(tmp_path: Path, events: list[str]) -> None:
    writer = writer_to(tmp_path, events, every_steps=3)
    due = []
    for step in range(1, 11):
        if writer.due(step):
            due.append(step)
            writer.save_now(step, tree_of(step))
            assert not writer.due(step)
    assert due == [3, 6, 9]


def test_checkpoints_are_due_every_t_seconds(tmp_path: Path, events: list[str]) -> None:
    clock = Clock()
    policy = CheckpointPolicy(tmp_path, every_steps=None, every_seconds=10.0, keep=1)
    writer = CheckpointWriter(policy, IDENTITY, events.append, clock, lambda step, failure: None)
    due = []
    for step in range(1, 30):
        clock.now += 3.0
        if writer.due(step):
            due.append(step)
            writer.save_now(step, tree_of(step))
    assert due == [4, 8, 12, 16, 20, 24, 28]


def test_without_an_interval_none_is_due(tmp_path: Path, events: list[str]) -> None:
    writer = writer_to(tmp_path, events)
    assert not any(writer.due(step) for step in range(1, 1000))


def test_the_last_k_remain(tmp_path: Path, events: list[str]) -> None:
    writer = writer_to(tmp_path, events, keep=2)
    for step in (1, 5, 120_000_000):
        writer.save_now(step, tree_of(step))
    assert steps_in(tmp_path) == [5, 120_000_000]
    assert len(list(tmp_path.iterdir())) == 2
    assert_holds(newest(tmp_path, events), 120_000_000)


def test_damaged_checkpoints_do_not_count_among_those_that_are_kept(tmp_path: Path, events: list[str]) -> None:
    writer = writer_to(tmp_path, events, keep=2)
    for step in (1, 2):
        writer.save_now(step, tree_of(step))
    truncate(tmp_path / "step-00000002" / "state.safetensors", 10)
    writer_to(tmp_path, events, keep=10).save_now(9, tree_of(9))
    flip(tmp_path / "step-00000009" / "state.safetensors", 3000)
    # A job resumed from step 1: neither the torn step 2 nor the corrupt step 9 may push out what is good.
    writer_to(tmp_path, events, keep=2).save_now(3, tree_of(3))
    assert steps_in(tmp_path) == [1, 3, 9]
    assert_holds(newest(tmp_path, events), 3)
    # And when the job gets there again, the corrupt one is replaced.
    writer_to(tmp_path, events, keep=1).save_now(9, tree_of(9))
    assert_holds(newest(tmp_path, events), 9)
    assert steps_in(tmp_path) == [9]


def test_a_valid_checkpoint_of_the_same_step_is_left_as_it_is(tmp_path: Path, events: list[str]) -> None:
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    inode = (tmp_path / "step-00000001").stat().st_ino
    assert writer_to(tmp_path, events).save_now(1, tree_of(1))
    assert (tmp_path / "step-00000001").stat().st_ino == inode
    assert events == []


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    gate: tuple[threading.Event, threading.Event], tmp_path: Path, events: list[str]
) -> None:
    started, go_on = gate
    writer = writer_to(tmp_path, events)
    tree = tree_of(1)
    assert writer.save(1, tree)
    assert started.wait(60)
    # The writer is in the middle of its work, and this thread has come back from save(): it trains on.
    tree["weight"] += 1
    tree["extra"]["step"] = 99
    assert not writer.flush(0.0)
    assert steps_in(tmp_path) == []
    assert writer.newest is None
    # The next one is due too early: it is skipped, said, and blocks nobody either.
    assert not writer.save(2, tree)
    assert events == [
        "skipped the checkpoint of step 2, because that of step 1 is still being written; if this goes on, "
        "write them less often or to a faster disk"
    ]
    go_on.set()
    assert writer.flush(60)
    assert writer.newest == 1
    assert writer.failure is None
    assert_holds(newest(tmp_path, events), 1)
    assert writer.save(3, tree_of(3))
    assert writer.flush(60)
    assert steps_in(tmp_path) == [1, 3]


def test_the_last_checkpoint_waits_for_the_one_that_is_being_written(
    writing: tuple[CheckpointWriter, threading.Event], tmp_path: Path, events: list[str]
) -> None:
    writer, go_on = writing
    opener = threading.Timer(0.05, go_on.set)
    opener.start()
    assert writer.save_now(2, tree_of(2))
    opener.join()
    assert steps_in(tmp_path) == [1, 2]
    assert events == []


def test_what_cannot_be_saved_is_an_error_in_the_training_thread(tmp_path: Path, events: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"^optimizer\.foo holds a set"):
        writer_to(tmp_path, events).save(1, {"optimizer": {"foo": {1}}})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_the_writing_thread_is_not_silent(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_format, "save_file", None)
    writer = writer_to(tmp_path, events)
    writer.save(1, tree_of(1))
    assert writer.flush(60)
    assert writer.newest is None
    assert writer.failure is not None
    assert "see its traceback" in writer.failure
    assert events == [writer.failure]


@pytest.mark.parametrize(
    ("steps", "keep", "doubt", "kept"),
    [
        pytest.param([10, 20, 30], 2, 0, {20, 30}, id="nobody compares: the last ones"),
        pytest.param([10, 20, 30], 2, 64, {10, 20, 30}, id="none is certain: the oldest will be first"),
        pytest.param([10, 60, 70, 80], 2, 64, {10, 60, 70, 80}, id="one is certain, and the next one to be stays"),
        pytest.param([10, 60, 120, 130], 2, 64, {60, 120, 130}, id="the next one has become certain"),
        pytest.param([100, 200, 300], 1, 64, {200, 300}, id="far apart: one more than wanted"),
        pytest.param([100, 200, 300, 400], 3, 64, {200, 300, 400}, id="far apart: no more than wanted"),
    ],
)
def test_one_that_is_not_in_doubt_remains(steps: list[int], keep: int, doubt: int, kept: set[int]) -> None:
    assert retained(steps, keep, doubt) == kept


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 100), st.integers(1, 60))
def test_after_the_first_sweep_there_is_always_one_that_is_not_in_doubt(
    every: int, keep: int, doubt: int, count: int
) -> None:
    there: list[int] = []
    for step in range(every, every * (count + 1), every):
        there = sorted(retained([*there, step], keep, doubt))
        assert len(there) <= keep + 2
        certain = [known for known in there if known <= step - doubt]
        # It is at most as old as the doubt lasts, and the way from one checkpoint to the next, twice.
        assert step < every + doubt or (certain and certain[-1] > step - 2 * doubt - 2 * every)
