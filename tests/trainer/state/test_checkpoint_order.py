"""Which checkpoint counts where workers of several generations write to one directory, however late one of them is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import IDENTITY, assert_holds, checkpoint_of, newest, steps_in, tree_of, writer_to
from hypothesis import given, settings
from hypothesis import strategies as st

import virtualflow as vf
from virtualflow.errors import Evicted
from virtualflow.protocol.lineage import LAST_COUNTER, LAST_INCARNATION
from virtualflow.protocol.messages import NO_GENERATION, CheckpointState, Generation
from virtualflow.state import Checkpointer
from virtualflow.state.checkpoint_format import adopt, find_newest
from virtualflow.state.checkpoint_order import Mark, choose_doomed, complete, highest_fence
from virtualflow.state.checkpoint_writer import CheckpointWriter

OLD, BETWEEN, NEW = (Generation(1_764_000_000_000, counter) for counter in (7, 8, 9))
NEWEST = Generation(1_764_000_999_999, 9)


@pytest.mark.parametrize(
    "mark",
    [
        Mark(OLD, 120),
        Mark(NEWEST, 120_000_000),
        Mark(NO_GENERATION, 3),
        Mark(Generation(LAST_INCARNATION, LAST_COUNTER), 3),
    ],
    ids=str,
)
def test_a_name_says_step_and_generation(mark: Mark) -> None:
    assert Mark.read(mark.name) == mark


@pytest.mark.parametrize(
    "name",
    ["step-1.2.3", "step-00000001.2", "step-00000001.2.3.4", "step-00000001.-2.3", ".step-00000001.0123abcd", "fence"]
    + [Mark(Generation(*numbers), 1).name for numbers in [(999_999_999_999_999, 1), (LAST_INCARNATION + 1, 1)]]
    + [Mark(Generation(*numbers), 1).name for numbers in [(5, LAST_COUNTER + 1), (2**53, 2**53), (5, 0), (0, 5)]],
)
def test_another_name_is_none_of_a_checkpoint(name: str) -> None:
    assert Mark.read(name) is None


@pytest.mark.parametrize(
    ("there", "written", "keep", "doomed"),
    [
        pytest.param([(OLD, 1), (OLD, 2), (OLD, 3)], (OLD, 3), 2, [(OLD, 1)], id="all but the last K"),
        pytest.param([(OLD, 1), (OLD, 2), (NEW, 3)], (NEW, 3), 2, [(OLD, 1)], id="across generations"),
        pytest.param([(OLD, 1), (OLD, 9), (NEW, 3)], (NEW, 3), 2, [], id="of higher steps only when they are reached"),
        pytest.param(
            [(OLD, 1), (NEW, 3), (OLD, 9), (NEW, 9)], (NEW, 9), 3, [(OLD, 9)], id="the job has got there again"
        ),
        pytest.param([(OLD, 3), (NEW, 2), (NEW, 4)], (NEW, 4), 3, [(OLD, 3)], id="behind which the job went back"),
        pytest.param([(OLD, 1), (NEW, 2), (OLD, 3)], (OLD, 3), 1, [], id="a newer generation judges"),
    ],
)
def test_what_may_go(there: list[Mark], written: Mark, keep: int, doomed: list[Mark]) -> None:
    marks = [Mark(*mark) for mark in there]
    assert choose_doomed(marks, Mark(*written), keep, lambda mark: True) == doomed


# -- any order of events ------------------------------------------------------------


def worker(disk: set[Mark], generation: Generation, from_memory: int | None, keep: int) -> Iterator[bool]:
    """A leader that begins and writes, stopped at each ``yield`` for as long as you like.

    It yields whether it is now that the disk was told of its generation.
    """
    step = from_memory
    while step is None:
        listed = sorted(disk, reverse=True)
        yield False
        if listed[0].fence > generation:
            return
        if listed[0] in disk:  # a rename succeeds or not
            disk.remove(listed[0])
            step = listed[0].step
            disk.add(Mark(generation, step))
            yield True
    while True:
        step += 1
        highest = max(mark.fence for mark in disk)
        yield False
        if highest > generation:
            return
        written = Mark(generation, step)
        disk.add(written)
        yield True
        listed = list(disk)
        yield False
        for mark in choose_doomed(listed, written, keep, lambda mark: True):
            disk.discard(mark)
            yield False


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    starts=st.lists(st.one_of(st.none(), st.integers(0, 6)), min_size=2, max_size=4),
    schedule=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=4, max_size=16),
    keep=st.integers(1, 2),
)
def test_in_any_order_nothing_older_comes_before_what_a_newer_generation_has_begun_or_written(
    starts: list[int | None], schedule: list[tuple[int, int]], keep: int
) -> None:
    disk, newest_told = {Mark(OLD, 4)}, OLD
    generations = [Generation(OLD.incarnation, OLD.counter + 1 + n) for n in range(len(starts))]
    workers = [worker(disk, g, start, keep) for g, start in zip(generations, starts, strict=True)]
    for chosen, turns in schedule:
        which = chosen % len(workers)
        for _ in range(turns):
            before = max(disk)
            if next(workers[which], False):
                newest_told = max(newest_told, generations[which])
            assert max(disk) >= before, "what counts is replaced by what comes after it"
            assert max(disk).fence == newest_told


# -- on a disk ------------------------------------------------------------


def writer_of(generation: Generation, directory: Path, events: list[str], **policy: int) -> CheckpointWriter:
    writer = writer_to(directory, events, **policy)
    writer.generation = generation
    return writer


def test_a_late_checkpoint_of_an_older_generation_does_not_appear(tmp_path: Path, events: list[str]) -> None:
    old, new = writer_of(OLD, tmp_path, events), writer_of(NEW, tmp_path, events)
    assert old.save_now(1, tree_of(1))
    assert new.save_now(2, tree_of(2))
    assert not old.save_now(3, tree_of(3))
    assert (old.newest, old.failure, old.fenced_by) == (1, None, NEW)
    assert events == [
        f"the checkpoint of step 3 was not written to {tmp_path}: generation 9 has gone on without this worker, which "
        "is of 7"
    ]
    assert steps_in(tmp_path) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2, "nothing of it stays"


def test_one_that_appears_all_the_same_comes_before_and_removes_nothing(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = writer_of(OLD, tmp_path, events, keep=1), writer_of(NEW, tmp_path, events)
    check = old._check_fence

    def be_stopped_after_the_check() -> None:
        check()
        assert new.save_now(2, tree_of(2))

    monkeypatch.setattr(old, "_check_fence", be_stopped_after_the_check)
    assert old.save_now(3, tree_of(3))
    assert steps_in(tmp_path) == [2, 3]
    found = newest(tmp_path, events)
    assert found.mark == Mark(NEW, 2)
    assert_holds(found, 2)


def checkpointer(directory: Path, generation: Generation, told: list[CheckpointState] | None = None) -> Checkpointer:
    report = [] if told is None else told
    made = Checkpointer(vf.CheckpointPolicy(directory, keep=1), IDENTITY, lambda kind, text: None, report.append)
    made.enter(generation)
    return made


def test_who_begins_from_a_checkpoint_makes_it_its_own(tmp_path: Path, events: list[str]) -> None:
    writer_of(OLD, tmp_path, events).save_now(1, tree_of(1))
    one = checkpointer(tmp_path, NEW)
    assert one.find() == Mark(OLD, 1)
    assert one.read()
    assert [mark for mark, _ in complete(tmp_path)] == [Mark(NEW, 1)]
    assert one.find() == Mark(NEW, 1)
    assert one.floor == highest_fence(tmp_path) == NEW
    assert_holds(newest(tmp_path, events), 1)


def test_a_checkpoint_that_another_generation_has_begun_from_is_looked_for_again(
    tmp_path: Path, events: list[str]
) -> None:
    writer_of(OLD, tmp_path, events).save_now(1, tree_of(1))
    one = checkpointer(tmp_path, NEW)
    assert one.find() == Mark(OLD, 1)
    found = find_newest(tmp_path, events.append)
    assert found is not None
    adopt(found, BETWEEN)
    assert not one.read(), "its name is gone"
    one.enter(NEWEST)
    assert one.find().step == 1


def test_a_worker_of_an_older_generation_does_not_begin(tmp_path: Path, events: list[str]) -> None:
    writer_of(NEW, tmp_path, events).save_now(1, tree_of(1))
    with pytest.raises(Evicted) as raised:
        checkpointer(tmp_path, OLD).find()
    assert raised.value.reason == f"this worker leaves: a newer generation of the job writes to {tmp_path}"
    assert checkpoint_of(tmp_path, 1).name == Mark(NEW, 1).name


class Counted:
    """A training of which nothing matters but the step."""

    completed_steps = 5

    def capture(self) -> dict[str, object]:
        return tree_of(self.completed_steps)

    def restore(self, tree: dict[str, object]) -> None:
        """It is not restored here."""


def test_a_fenced_worker_leaves_and_reports_no_trouble_of_the_job(tmp_path: Path, events: list[str]) -> None:
    told: list[CheckpointState] = []
    old = checkpointer(tmp_path, OLD, told)
    writer_of(NEW, tmp_path, events).save_now(1, tree_of(1))
    with pytest.raises(Evicted):
        old.save_final(Counted())
    assert told == []
    assert steps_in(tmp_path) == [1]
