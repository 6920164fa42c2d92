"""Whoever has to begin from a checkpoint waits for a volume that fails just now, and begins from the newest one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import IDENTITY, Counted, flip

import virtualflow as vf
from virtualflow.protocol.messages import Generation, Member
from virtualflow.state import Checkpointer
from virtualflow.state.checkpointing import VolumeSettings
from virtualflow.step import Divergence
from virtualflow.worker.divergence import end_by_divergence

FIRST, NEXT = Generation(1, 1), Generation(2, 1)


class Volume:
    """Fails so often, in one method of paths that are called so or in ``os.open`` of them, and works again then."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str, name: str, number: int, times: int) -> None:
        self.refused = 0
        where: Any = os if method == "os.open" else Path
        method = method.removeprefix("os.")
        real: Callable[..., Any] = getattr(where, method)

        def act(path: Path | str, *arguments: Any, **options: Any) -> Any:
            if Path(path).name.startswith(name) and self.refused < times:
                self.refused += 1
                raise OSError(number, os.strerror(number))
            return real(path, *arguments, **options)

        patch.setattr(where, method, act)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def begin(tmp_path: Path, told: list[str]) -> Callable[..., Checkpointer]:
    """A worker of the next generation; in the directory are checkpoints of steps 10 and 20."""
    writer = Checkpointer(vf.CheckpointPolicy(tmp_path), IDENTITY, lambda kind, text: None, lambda state: None)
    writer.enter(FIRST)
    for step in (10, 20):
        writer.save_final(Counted(step))

    def make(patience: float = 60.0) -> Checkpointer:
        made = Checkpointer(
            vf.CheckpointPolicy(tmp_path),
            IDENTITY,
            lambda kind, text: told.append(text),
            lambda state: None,
            joins=True,
            volume=VolumeSettings(patience, retry_first=0.001, retry_most=0.001),
        )
        made.enter(NEXT)
        return made

    return make


def begun(checkpointer: Checkpointer) -> int:
    """Begin as a generation does in which nobody has the state: from which step."""
    training = Counted(0)
    assert checkpointer.find().step
    assert checkpointer.read()
    checkpointer.restore(training)
    return training.completed_steps


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS])
@pytest.mark.parametrize(
    ("method", "name", "begins"),
    [
        pytest.param("rename", "step-00000020", "the checkpoint {}/step-00000020.1.1 cannot be renamed", id="rename"),
        pytest.param("os.open", "manifest", "the checkpoint {}/step-00000020.1.1 cannot be read", id="manifest"),
        pytest.param("os.open", "state", "the checkpoint {}/step-00000020.1.1 cannot be read", id="state"),
        pytest.param("iterdir", "", "the checkpoint directory {} cannot be read", id="list"),
    ],
)
def test_a_volume_that_fails_for_a_moment_costs_no_step(
    begin: Callable[..., Checkpointer],
    tmp_path: Path,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    method: str,
    name: str,
    begins: str,
) -> None:
    """Found by a campaign of faults: all workers were killed, and the others that came ended the job."""
    checkpointer = begin()
    volume = Volume(monkeypatch, method, name or tmp_path.name, number, times=3)
    assert begun(checkpointer) == 20
    assert volume.refused == 3
    assert len(told) == 1
    assert told[0].startswith(begins.format(tmp_path) + f" ({os.strerror(number)})")
    assert told[0].endswith("; this worker tries again for 60 s")
    assert (tmp_path / "step-00000020.2.1").exists()


def test_who_comes_while_nothing_can_be_written_begins_when_it_can(
    begin: Callable[..., Checkpointer], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume(monkeypatch, "open", ".probe", errno.ENOSPC, times=3)
    assert begun(begin()) == 20
    assert volume.refused == 3
    assert all("(No space left on device); free some space there" in text for text in told)
    assert len(told) == 2  # when it came, and when it had to begin


def test_a_rename_that_failed_behind_the_change_of_the_name_is_known(
    begin: Callable[..., Checkpointer], tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        real(path, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpointer = begin()
    assert checkpointer.find().step == 20
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        assert checkpointer.read()
    assert (tmp_path / "step-00000020.2.1").exists()
    assert len(told) == 1


@pytest.mark.parametrize(
    ("number", "patience", "tries"),
    [
        pytest.param(errno.EIO, 0.05, None, id="a volume that does not recover"),
        pytest.param(errno.EACCES, 60.0, 1, id="what is for people to mend"),
    ],
)
def test_what_does_not_pass_is_an_error(
    begin: Callable[..., Checkpointer],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    patience: float,
    tries: int | None,
) -> None:
    checkpointer = begin(patience)
    assert checkpointer.find().step == 20
    volume = Volume(monkeypatch, "rename", "step-", number, times=1_000_000)
    with pytest.raises(vf.ConfigurationError, match=r"cannot be renamed .* make its directory writable"):
        checkpointer.read()
    assert volume.refused > 1 if tries is None else volume.refused == tries


def test_a_checkpoint_that_stays_unreadable_gives_way_to_an_older_one(
    begin: Callable[..., Checkpointer], tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_(path: Path | str, *arguments: Any, **options: Any) -> int:
        if Path(path).parent.name.startswith("step-00000020"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_)
    assert begun(begin(0.05)) == 10
    assert told[-1].startswith(f"skipped the damaged checkpoint {tmp_path}/step-00000020.1.1")


def test_a_damaged_checkpoint_is_not_waited_for(
    begin: Callable[..., Checkpointer], tmp_path: Path, told: list[str]
) -> None:
    flip(tmp_path / "step-00000020.1.1" / "manifest.json", 100)
    assert begun(begin()) == 10
    assert [text.split(":")[0] for text in told] == [f"skipped the damaged checkpoint {tmp_path}/step-00000020.1.1"]


def test_states_that_may_be_wrong_are_set_aside_when_the_volume_works_again(
    begin: Callable[..., Checkpointer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume(monkeypatch, "rename", "step-", errno.EIO, times=3)
    assert begin().distrust(10) == 10
    assert volume.refused == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["diverged-step-00000020.1.1", "step-00000010.1.1"]


def test_states_that_may_be_wrong_and_cannot_be_set_aside_are_named(
    begin: Callable[..., Checkpointer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is started again would go on from them."""
    checkpointer = begin(0.05)
    Volume(monkeypatch, "rename", "step-", errno.EIO, times=1_000_000)
    found = Divergence(step=21, tensor="model.weight", agreed=10, odd=(1,))
    members = [Member(f"worker-{rank}", f"{rank}", "127.0.0.1", rank, rank + 1) for rank in range(3)]
    error = end_by_divergence(found, members, checkpointer)
    assert str(error).endswith(
        f"the checkpoint {tmp_path}/step-00000020.1.1 cannot be renamed (Input/output error): remove all checkpoints "
        "of steps after 10 before the job is started again"
    )
