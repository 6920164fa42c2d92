"""What a script may say of its checkpoints, and what becomes of it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import IDENTITY, Counted, flip

import virtualflow as vf
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.messages import CheckpointState
from virtualflow.protocol.settings import CHECKPOINT_KEEP, CHECKPOINT_SECONDS
from virtualflow.state import Checkpointer, checkpointing, choose_policy

HERE = Path("/checkpoints")


def test_a_directory_is_all_that_a_policy_needs() -> None:
    assert vf.CheckpointPolicy("/checkpoints") == vf.CheckpointPolicy(HERE, None, None, CHECKPOINT_KEEP)
    environment = WorkerEnvironment.read()
    for given in ("/checkpoints", HERE, vf.CheckpointPolicy("/checkpoints")):
        assert choose_policy(given, environment) == vf.CheckpointPolicy(HERE, None, CHECKPOINT_SECONDS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every_steps": 0}, "every_steps of checkpoints is 0; it must be a whole number of at least 1"),
        ({"every_steps": 2.5}, "every_steps of checkpoints is 2.5; it must be a whole number"),
        ({"every_steps": True}, "every_steps of checkpoints is True; it must be a whole number"),
        ({"every_seconds": -1.0}, "every_seconds of checkpoints is -1.0; it must be a number of at least 0"),
        ({"every_seconds": float("nan")}, "every_seconds of checkpoints is nan; it must be a number"),
        ({"every_seconds": "60"}, "every_seconds of checkpoints is '60'; it must be a number"),
        ({"keep": 0}, "keep of checkpoints is 0; it must be a whole number of at least 1"),
        ({"keep": None}, "keep of checkpoints is None; it must be a whole number"),
        ({"directory": 7}, "the directory of checkpoints is 7; it must be a path"),
        ({"directory": ""}, "the directory of checkpoints is empty; it must be a path"),
        ({"sign": 7}, "sign of checkpoints is 7; it must be a path"),
        ({"trust": ""}, "trust of checkpoints is empty; it must be a path"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(vf.ConfigurationError, match=sentence):
        vf.CheckpointPolicy(**{"directory": HERE, **options})


def test_something_else_than_a_policy_is_one_sentence() -> None:
    with pytest.raises(vf.ConfigurationError, match="checkpoint is 5; it must be a directory or"):
        choose_policy(5, WorkerEnvironment.read())  # type: ignore[arg-type]


def test_the_environment_goes_before_the_script() -> None:
    environment = replace(WorkerEnvironment.read(), checkpoint_dir=Path("/elsewhere"), checkpoint_steps=7)
    assert choose_policy(None, environment) == vf.CheckpointPolicy("/elsewhere", 7)
    given = vf.CheckpointPolicy(HERE, 2, 30.0, 5)
    assert choose_policy(given, environment) == vf.CheckpointPolicy("/elsewhere", 7, 30.0, 5)
    given = vf.CheckpointPolicy(HERE, 7, sign="mine.pem", trust="/ours.pem")
    assert choose_policy(given, environment) == vf.CheckpointPolicy("/elsewhere", 7, sign="mine.pem", trust="/ours.pem")
    environment = replace(environment, sign=Path("/its.pem"), trust=Path("/theirs.pem"))
    assert choose_policy(given, environment) == vf.CheckpointPolicy(
        "/elsewhere", 7, sign="/its.pem", trust="/theirs.pem"
    )


def test_each_checkpoint_is_reported_as_complete_or_with_what_to_do(tmp_path: Path) -> None:
    told: list[CheckpointState] = []
    directory = tmp_path / "checkpoints"
    checkpointer = Checkpointer(vf.CheckpointPolicy(directory), IDENTITY, lambda kind, text: None, told.append)
    before = time.time()
    checkpointer.save_final(Counted(20))
    assert told[0].failure is None
    assert (told[0].step, checkpointer.newest) == (20, 20)
    assert before <= (told[0].written or 0.0) == told[0].at <= time.time()

    directory.rename(tmp_path / "elsewhere")
    directory.write_text("no directory")
    checkpointer.save_final(Counted(30))
    assert (told[1].step, told[1].written, checkpointer.newest) == (20, told[0].written, 20)
    assert (told[1].failure or "").startswith("the checkpoint of step 30 was not written")

    directory.unlink()
    (tmp_path / "elsewhere").rename(directory)
    checkpointer.save_final(Counted(40))
    assert (told[2].step, told[2].failure) == (40, None)


def test_whoever_restores_a_checkpoint_tells_how_old_it_is(tmp_path: Path) -> None:
    told: list[CheckpointState] = []

    def checkpointer() -> Checkpointer:
        return Checkpointer(vf.CheckpointPolicy(tmp_path), IDENTITY, lambda kind, text: None, told.append)

    checkpointer().save_final(Counted(20))
    os.utime(tmp_path / "step-00000020" / "manifest.json", (1_000.0, 1_000.0))
    other, training = checkpointer(), Counted(0)
    assert other.find().step == 20
    assert other.read()
    other.restore(training)
    assert (training.completed_steps, told[-1].step, told[-1].written) == (20, 20, 1_000.0)


def test_a_checkpoint_that_rots_after_it_was_found_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    def checkpointer() -> Checkpointer:
        return Checkpointer(
            vf.CheckpointPolicy(tmp_path), IDENTITY, lambda *said: told.append(said), lambda state: None
        )

    writer = checkpointer()
    for step in (10, 20):
        writer.save_final(Counted(step))
    told.clear()
    other, training = checkpointer(), Counted(0)
    assert other.find().step == 20
    flip(tmp_path / "step-00000020" / "state.safetensors", 3000)
    assert not other.read()
    why = "the content of state.safetensors is not what was written (its SHA-256 differs)"
    assert told == [("warning", f"skipped the damaged checkpoint {tmp_path}/step-00000020: {why}")]
    other.discard(20)
    assert other.find().step == 10
    assert other.read()
    other.restore(training)
    assert training.completed_steps == 10


def test_to_find_a_checkpoint_its_state_is_not_read(tmp_path: Path) -> None:
    """A thousand workers look for it, and one reads it."""
    one = Checkpointer(vf.CheckpointPolicy(tmp_path), IDENTITY, lambda kind, text: None, lambda state: None)
    one.save_final(Counted(20))
    flip(tmp_path / "step-00000020" / "state.safetensors", 3000)
    assert one.find().step == 20


def test_one_that_is_still_being_written_when_states_are_doubted_does_not_appear(
    gate: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    started, go_on = gate
    policy = vf.CheckpointPolicy(tmp_path, every_steps=1)
    checkpointer = Checkpointer(policy, IDENTITY, lambda kind, text: told.append(text), lambda state: None)
    monkeypatch.setattr(checkpointing, "STOP_GRACE", 0.0)
    checkpointer.save_if_due(Counted(8))
    assert started.wait(60)
    assert checkpointer.distrust(7) == -1
    go_on.set()
    checkpointer.flush(60)
    assert list(tmp_path.iterdir()) == []
    assert "the checkpoint of step 8 was not written" in told[-1]
    assert "what came after step 7 may be wrong" in told[-1]
    checkpointer.save_final(Counted(7))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
