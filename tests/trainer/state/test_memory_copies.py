"""Copies in the coordinator's memory from the worker's side: what is sent comes back, or is told to be unusable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import IDENTITY, Counted, flip, tree_of

import virtualflow as vf
from virtualflow.protocol.http_api import CopyHeader
from virtualflow.protocol.messages import Generation
from virtualflow.state import Checkpointer, JobIdentity, MemoryCopies
from virtualflow.state.checkpoint_order import Mark
from virtualflow.state.memory_copies import MemoryCopySettings

ONE = Generation(1, 1)
OFTEN = MemoryCopySettings(share=1e9, interval=0.0, retry_first=0.0)


class Place:
    """Keeps the newest copy, and can be made to damage or refuse it."""

    def __init__(self) -> None:
        self.kept: tuple[CopyHeader, bytearray] | None = None
        self.failing = 0
        self.asked = 0
        self.sent = 0

    def _ask(self) -> None:
        self.asked += 1
        if self.failing:
            self.failing -= 1
            raise ConnectionRefusedError("nobody there")

    def put(self, header: CopyHeader, parts: Sequence[memoryview]) -> None:
        self._ask()
        self.sent += 1
        self.kept = header, bytearray(b"".join(parts))

    def head(self) -> CopyHeader | None:
        self._ask()
        return None if self.kept is None else self.kept[0]

    def get(self) -> tuple[CopyHeader, bytearray] | None:
        self._ask()
        return self.kept

    def close(self) -> None:
        """Nothing goes on."""


def copies_to(
    place: Place,
    told: list[str],
    settings: MemoryCopySettings = OFTEN,
    limit: Callable[[], int] = lambda: 1 << 30,
    identity: JobIdentity = IDENTITY,
) -> MemoryCopies:
    return MemoryCopies(place, limit, "w.0", identity, told.append, settings)


def send(copies: MemoryCopies, *steps: int) -> None:
    for step in steps:
        copies.copy_if_due(step, ONE, lambda step=step: tree_of(step))  # type: ignore[misc]
        copies.wait()


def checkpointer(directory: Path | None, copies: MemoryCopies, told: list[str]) -> Checkpointer:
    policy = None if directory is None else vf.CheckpointPolicy(directory)
    made = Checkpointer(policy, IDENTITY, lambda kind, text: told.append(text), lambda state: None, copies=copies)
    made.enter(ONE)
    return made


@pytest.mark.parametrize("saved", [None, 5, 20], ids=["no disk", "an older disk", "a newer disk"])
def test_the_newest_of_disk_and_memory_is_restored(saved: int | None, tmp_path: Path) -> None:
    place, told = Place(), list[str]()
    send(copies_to(place, told), 9, 10)
    one = checkpointer(tmp_path, copies_to(place, told), told)
    if saved is not None:
        one.save_final(Counted(saved))
    told.clear()
    newest, training = max(10, saved or 0), Counted(0)
    assert one.find().step == newest
    assert one.read()
    one.restore(training)
    assert training.completed_steps == newest
    assert told == (["the state of step 10 came from the coordinator's memory"] if newest == 10 else [])


@pytest.mark.parametrize("place_of_damage", [100, -100], ids=["the state", "the manifest"])
def test_a_damaged_copy_is_told_and_the_disk_counts(place_of_damage: int, tmp_path: Path) -> None:
    place, told = Place(), list[str]()
    send(copies_to(place, told), 10)
    assert place.kept is not None
    place.kept[1][place_of_damage] ^= 1
    one, training = checkpointer(tmp_path, copies_to(place, told), told), Counted(0)
    one.save_final(Counted(5))
    told.clear()
    assert one.find().step == 10
    assert not one.read()
    why = "it is not what was sent (its SHA-256 differs); what is older counts"
    assert told == [f"the copy of step 10 in the coordinator's memory cannot be used: {why}"]
    one.discard(10)
    assert one.find().step == 5
    assert one.read()
    one.restore(training)
    assert training.completed_steps == 5


def test_a_damaged_checkpoint_of_the_same_step_is_no_reason_to_doubt_the_copy(tmp_path: Path) -> None:
    place, told = Place(), list[str]()
    send(copies_to(place, told), 10)
    one, training = checkpointer(tmp_path, copies_to(place, told), told), Counted(0)
    one.save_final(Counted(10))
    flip(tmp_path / Mark(ONE, 10).name / "state.safetensors", 3000)
    assert one.find().step == 10
    assert not one.read()
    one.discard(10)
    assert one.find().step == 10
    assert one.read()
    one.restore(training)
    assert training.completed_steps == 10


def test_the_copy_of_another_job_is_one_sentence() -> None:
    place, told = Place(), list[str]()
    send(copies_to(place, told), 10)
    other = copies_to(place, told, identity=replace(IDENTITY, seed=1))
    assert other.find().step == 10
    with pytest.raises(
        vf.ConfigurationError, match="belongs to another job: the seed is 1 here and 0 there; make a new"
    ):
        other.read()


def test_a_coordinator_that_does_not_answer_is_asked_a_few_times(tmp_path: Path) -> None:
    place, told = Place(), list[str]()
    send(copies_to(place, told), 10)
    copies = copies_to(place, told)
    place.failing = 2
    assert copies.find().step == 10
    place.failing, place.asked = 99, 0
    assert copies.find().step == -1
    assert place.asked == OFTEN.attempts
    assert told == [
        "the coordinator does not say whether it has a copy of the state (nobody there); what is older counts"
    ]


def test_a_state_that_is_too_large_is_told_once_for_each_limit() -> None:
    place, told, limit = Place(), list[str](), [1_000]
    copies = copies_to(place, told, limit=lambda: limit[0])
    send(copies, 1, 2, 3)
    assert place.sent == 0
    (said,) = told
    assert said.startswith(
        "the state has 0 MiB and the coordinator memory for copies of at most 0 MiB, so there is none"
    )
    limit[0] = 1 << 20
    send(copies, 4)
    assert place.kept is not None
    assert place.kept[0].step == 4


def test_nothing_is_sent_where_nothing_is_kept() -> None:
    place, told = Place(), list[str]()
    send(copies_to(place, told, limit=lambda: 0), 1)
    assert (place.asked, told) == (0, [])


def test_copies_keep_their_share_of_the_time() -> None:
    place, told = Place(), list[str]()
    copies = copies_to(place, told, replace(OFTEN, interval=3_600.0))
    send(copies, 1, 2, 3)
    assert place.kept is not None
    assert (place.sent, place.kept[0].step) == (1, 1)
    copies = copies_to(place, told, replace(OFTEN, share=1e-9))
    send(copies, 4, 5)
    assert (place.sent, place.kept[0].step) == (2, 4)


def test_one_that_did_not_get_there_is_followed_by_the_next() -> None:
    place, told = Place(), list[str]()
    copies = copies_to(place, told)
    place.failing = 1
    send(copies, 1)
    assert place.kept is None
    send(copies, 2)
    assert place.kept is not None
    assert place.kept[0].step == 2
    assert told == []


def test_a_copy_is_not_changed_by_the_steps_after_it() -> None:
    place, told = Place(), list[str]()
    tree = tree_of(1)
    copies = copies_to(place, told)
    copies.copy_if_due(1, ONE, lambda: tree)
    tree["weight"].fill_(7.0)
    copies.wait()
    reader = copies_to(place, told)
    assert reader.find().step == 1
    found = reader.read()
    assert found is not None
    assert torch.equal(found["weight"], tree_of(1)["weight"])
