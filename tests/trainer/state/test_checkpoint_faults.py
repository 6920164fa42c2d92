"""A checkpoint is there as a whole or not at all: disks that are full or closed, and writers that die."""

from __future__ import annotations

import errno
import glob
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import assert_holds, newest, steps_in, tree_of, writer_to

from virtualflow.errors import ConfigurationError
from virtualflow.state.checkpoint_format import find_newest
from virtualflow.state.checkpoint_writer import CheckpointWriter


def assert_failed_once_then_recovers(
    writer: CheckpointWriter, directory: Path, events: list[str], reason: str, advice: str, relieve: Any
) -> None:
    assert writer.save(2, tree_of(2, 2_000_000))
    assert writer.flush(60)
    assert writer.failure == (
        f"the checkpoint of step 2 was not written to {directory} ({reason}): {advice} or use another "
        "--checkpoint-dir; the older ones are intact, and the next one that is due tries again"
    )
    assert events == [writer.failure]
    assert [path.name for path in directory.iterdir()] == ["step-00000001"]
    assert_holds(newest(directory, events), 1)
    relieve()
    assert writer.save_now(3, tree_of(3))
    assert writer.failure is None
    assert events[1:] == ["checkpoints are written again: that of step 3 is complete"]
    assert_holds(newest(directory, events), 3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("needs root: it mounts a small file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_costs_only_the_checkpoint_that_does_not_fit(small_disk: Path, events: list[str]) -> None:
    directory = small_disk / "checkpoints"
    writer = writer_to(directory, events)
    writer.save_now(1, tree_of(1))
    assert_failed_once_then_recovers(
        writer, directory, events, "No space left on device", "free some space there", lambda: None
    )


def test_a_volume_that_is_read_only_is_a_sentence(small_disk: Path, events: list[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ConfigurationError, match=r"Read-only file system\); mount it writable"):
        writer_to(small_disk, events).check_writable()


def test_a_limit_of_the_file_size_costs_only_the_checkpoint_that_is_too_large(
    tmp_path: Path, events: list[str]
) -> None:
    writer = writer_to(tmp_path, events)
    writer.save_now(1, tree_of(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        assert_failed_once_then_recovers(
            writer,
            tmp_path,
            events,
            "File too large",
            "raise the file size limit (ulimit -f)",
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_directory_that_vanished_is_made_again(tmp_path: Path, events: list[str]) -> None:
    directory = tmp_path / "checkpoints"
    writer = writer_to(directory, events)
    writer.save_now(1, tree_of(1))
    directory.rename(tmp_path / "elsewhere")
    assert writer.save_now(2, tree_of(2))
    assert steps_in(directory) == [2]


def test_a_directory_that_cannot_be_made_is_an_error_before_training(tmp_path: Path, events: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError) as caught:
        writer_to(tmp_path / "file" / "checkpoints", events).check_writable()
    assert str(caught.value) == (
        f"no checkpoint can be written to {tmp_path}/file/checkpoints (Not a directory); use another --checkpoint-dir"
    )
    with pytest.raises(ConfigurationError, match=r"cannot be read \(Not a directory\); use another --checkpoint-dir"):
        find_newest(tmp_path / "file", events.append)


def test_a_directory_that_cannot_be_written_is_an_error_before_training(events: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"^no checkpoint can be written to /proc/self .*--checkpoint-dir$"):
        writer_to(Path("/proc/self"), events).check_writable()


def test_a_good_directory_is_made_and_left_empty(tmp_path: Path, events: list[str]) -> None:
    writer_to(tmp_path / "a" / "b", events).check_writable()
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert events == []


WRITE_FOR_EVER = """
import sys, time
from pathlib import Path
import torch
from virtualflow.state.checkpoint_writer import CheckpointPolicy, CheckpointWriter
from virtualflow.state.checkpoint_format import JobIdentity, find_newest, load
sys.path.insert(0, sys.argv[2])
from checkpoints import IDENTITY, tree_of
directory = Path(sys.argv[1])
writer = CheckpointWriter(CheckpointPolicy(directory, 1, None, 2), IDENTITY, print, time.monotonic, lambda *_: None)
writer.check_writable()
assert not list(directory.glob(".*"))
found = find_newest(directory, print, IDENTITY)
step = found.step if found else 0
print("started", flush=True)
while True:
    step += 1
    writer.save(step, tree_of(step, 1_000_000))
    writer.flush(None)
"""
MOMENTS = {
    "when-a-write-begins": ".step-*",
    "when-the-state-is-being-written": ".step-*/[!m]*",
    "when-the-state-is-written": ".step-*/state.safetensors",
    "when-a-checkpoint-appears": "step-*",
}


@pytest.mark.slow
def test_whenever_the_writer_is_killed_the_newest_checkpoint_loads(tmp_path: Path, events: list[str]) -> None:
    reached = 0
    for pattern in MOMENTS.values():
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path), str(Path(__file__).parents[1])],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            complete = set(tmp_path.glob("step-*"))
            deadline = time.monotonic() + 60
            while len(set(tmp_path.glob("step-*")) - complete) < 2 or not glob.glob(str(tmp_path / pattern)):
                assert time.monotonic() < deadline
                assert process.poll() is None
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        found = newest(tmp_path, events)
        assert_holds(found, found.step, 1_000_000)
        assert found.step > reached
        assert events == []
        reached = found.step
    writer_to(tmp_path, events).check_writable()
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())


def test_the_work_of_a_living_writer_is_not_taken_for_a_leftover(
    writing: tuple[CheckpointWriter, threading.Event], tmp_path: Path, events: list[str]
) -> None:
    writer, go_on = writing
    abandoned = tmp_path / ".step-00000007.0123abcd"
    abandoned.mkdir()
    (abandoned / "manifest.json").write_text("")
    (abandoned / "state.safetensors").write_text("half of it")
    (tmp_path / ".hidden-by-the-user").mkdir()
    writer_to(tmp_path, events).check_writable()
    go_on.set()
    assert writer.flush(60)
    assert writer.failure is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden-by-the-user", "step-00000001"]


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        pytest.param(1, "the checkpoint of step 2 was not written: the checkpoint directory", id="before it appears"),
        pytest.param(
            2, "the checkpoint of step 2 is written, and no old one was removed: the", id="to remove old ones"
        ),
    ],
)
def test_a_directory_that_cannot_be_listed_is_told_and_tried_again(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch, looks: int, said: str
) -> None:
    writer = writer_to(tmp_path, events, keep=1)
    writer.save_now(1, tree_of(1))
    listed, real = 0, Path.iterdir

    def fail(path: Path) -> Iterator[Path]:
        nonlocal listed
        listed += 1
        if listed == looks:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        assert writer.save_now(2, tree_of(2)) is (looks == 2)
    assert [event[: len(said)] for event in events] == [said]
    assert "Stale file handle" in events[0]
    assert writer.save_now(3, tree_of(3))
    assert writer.failure is None
    assert steps_in(tmp_path) == [3]


def test_a_worker_starts_where_the_directory_cannot_be_listed_just_now(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a campaign of faults: a joiner ended with a traceback."""
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    left = next(tmp_path.glob("step-*")).rename(tmp_path / ".step-00000007.0123abcd")

    def stale(path: Path) -> Iterator[Path]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    writer = writer_to(tmp_path, events)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", stale)
        writer.check_writable()
    assert left.exists()
    assert writer.save_now(2, tree_of(2))
    assert (steps_in(tmp_path), left.exists(), events) == ([2], False, [])
