"""A checkpoint is there as a whole or not at all, whatever happens to its writer, its disk or its content."""

from __future__ import annotations

import dataclasses
import json
import os
import re
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
import torch
from safetensors import safe_open

from virtualflow import checkpoint_files, trees
from virtualflow.checkpoint import CheckpointPolicy, CheckpointWriter
from virtualflow.checkpoint_files import Found, JobIdentity, find_newest, load
from virtualflow.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

WEIGHT = {"shape": [10, 64], "dtype": "float32", "trained": True}
SIGNATURE = {
    "parameters": {"fc.weight": WEIGHT},
    "optimizer": "SGD",
    "groups": [["fc.weight"]],
}
IDENTITY = JobIdentity(virtual_nodes=8, seed=0, batch_size=64, dataset_size=1000, signature=SIGNATURE)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tree_of(step: int, size: int = 1000) -> dict[str, Any]:
    """A state that tells which step it is of, in every byte."""
    return {"weight": torch.full((size,), float(step)), "extra": {"step": step, "loss": 0.1 * step}}


@pytest.fixture
def events() -> list[str]:
    return []


def writer_to(directory: Path, events: list[str], **policy: Any) -> CheckpointWriter:
    options = {"every_steps": None, "every_seconds": None, "keep": 3, **policy}
    return CheckpointWriter(CheckpointPolicy(directory, **options), IDENTITY, events.append, Clock())


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


def newest(directory: Path, events: list[str]) -> Found:
    found = find_newest(directory, events.append, IDENTITY)
    assert found is not None
    return found


def assert_holds(found: Found, step: int, size: int = 1000) -> None:
    tree = load(found)
    assert found.step == step
    assert tree["extra"] == {"step": step, "loss": 0.1 * step}
    assert torch.equal(tree["weight"], torch.full((size,), float(step)))


# -- content -------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_every_dtype_bit_by_bit(tmp_path: Path, events: list[str]) -> None:
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors: dict[str, Any] = {name: raw.view(dtype) for name, dtype in trees.DTYPES.items() if name != "bool"}
    shared = torch.arange(6.0)
    tensors |= {
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(math_pi := 3.141592653589793, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "empty-complex": torch.zeros(0, 3, dtype=torch.complex128),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "views-of-one": [shared[:4], shared[2:], shared],
    }
    tree = {**tensors, "plain": {0: (1, None, float("inf")), "pi": math_pi}}
    writer = writer_to(tmp_path, events)
    assert writer.save_now(1, tree)
    assert writer.failure is None
    assert writer.newest == 1
    assert trees.pack(load(newest(tmp_path, events))).equal(trees.pack(tree))
    assert events == []


def test_the_files_are_what_they_say_and_readable_by_whom_the_umask_admits(tmp_path: Path, events: list[str]) -> None:
    before = os.umask(0o027)
    try:
        writer_to(tmp_path / "a" / "b", events).save_now(120, tree_of(120))
    finally:
        os.umask(before)
    path = tmp_path / "a" / "b" / "step-00000120"
    assert {entry.name: oct(entry.stat().st_mode & 0o777) for entry in path.iterdir()} == {
        "manifest.json": "0o640",
        "state.safetensors": "0o640",
    }
    assert path.stat().st_mode & 0o777 == 0o750
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    assert (manifest["format"], manifest["step"], manifest["identity"]["virtual_nodes"]) == (1, 120, 8)
    assert manifest["torch"] == torch.__version__
    with safe_open(path / "state.safetensors", "pt") as file:
        assert file.keys() == ["t0"]
        assert "skeleton" in file.metadata()


def test_a_loaded_state_outlives_its_checkpoint(tmp_path: Path, events: list[str]) -> None:
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    found = newest(tmp_path, events)
    tree = load(found)
    (found.path / "state.safetensors").write_bytes(b"")
    assert torch.equal(tree["weight"], torch.full((1000,), 1.0))
    with pytest.raises(ValueError, match="cannot be read"):
        load(found)


def test_where_nothing_is_nothing_is_found(tmp_path: Path, events: list[str]) -> None:
    assert find_newest(tmp_path / "nowhere", events.append) is None
    assert find_newest(tmp_path, events.append) is None
    (tmp_path / "step-12").mkdir()
    (tmp_path / ".step-00000012.0123abcd").mkdir()
    assert find_newest(tmp_path, events.append) is None
    assert events == []


# -- damage --------------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


DAMAGE = {
    "state-flipped-in-the-middle": lambda path: flip(path / "state.safetensors", 3000),
    "state-flipped-in-the-header": lambda path: flip(path / "state.safetensors", 20),
    "state-cut": lambda path: truncate(path / "state.safetensors", 3000),
    "state-empty": lambda path: truncate(path / "state.safetensors", 0),
    "state-missing": lambda path: (path / "state.safetensors").unlink(),
    "manifest-cut": lambda path: truncate(path / "manifest.json", 100),
    "manifest-empty": lambda path: truncate(path / "manifest.json", 0),
    "manifest-missing": lambda path: (path / "manifest.json").unlink(),
    "manifest-of-another-step": lambda path: path.rename(path.parent / "step-00000003"),
    "all-missing": lambda path: [entry.unlink() for entry in path.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_skipped_with_its_path_and_the_older_one_counts(
    damage: Any, tmp_path: Path, events: list[str]
) -> None:
    writer = writer_to(tmp_path, events)
    writer.save_now(1, tree_of(1))
    writer.save_now(2, tree_of(2))
    damage(tmp_path / "step-00000002")
    assert_holds(newest(tmp_path, events), 1)
    assert len(events) == 1
    assert re.match(rf"skipped the damaged checkpoint {re.escape(str(tmp_path))}/step-0000000[23]: .", events[0])


def test_no_single_flipped_bit_of_a_manifest_passes_for_another_job(tmp_path: Path, events: list[str]) -> None:
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    manifest = tmp_path / "step-00000001" / "manifest.json"
    intact = manifest.read_bytes()
    for position in range(len(intact)):
        for mask in (1, 2, 4, 16, 32):
            manifest.write_bytes(intact[:position] + bytes([intact[position] ^ mask]) + intact[position + 1 :])
            events.clear()
            assert find_newest(tmp_path, events.append, IDENTITY) is None
            assert len(events) == 1


def test_a_checkpoint_of_a_newer_format_is_refused_and_not_taken_for_damage(tmp_path: Path, events: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "FORMAT", 2)
        writer_to(tmp_path, events).save_now(1, tree_of(1))
    with pytest.raises(
        ConfigurationError, match="has format 2 and this version of VirtualFlow reads 1; use the version"
    ):
        find_newest(tmp_path, events.append)


def test_a_checkpoint_of_another_torch_counts_with_a_warning(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.0.0")
        writer_to(tmp_path, events).save_now(1, tree_of(1))
    assert_holds(newest(tmp_path, events), 1)
    assert len(events) == 1
    assert "was written by torch 2.0.0 and this is" in events[0]


# -- identity ------------------------------------------------------------------------------------------------

OTHERS = {
    "virtual-nodes": ({"virtual_nodes": 4}, "the number of virtual nodes is 4 here and 8 there"),
    "seed": ({"seed": 7}, "the seed is 7 here and 0 there"),
    "batch-size": ({"batch_size": 32}, "the batch size is 32 here and 64 there"),
    "dataset": (
        {"dataset_size": None},
        "the number of samples in the dataset is unknown (a stream) here and 1000 there",
    ),
    "model": (
        {
            "signature": {
                **SIGNATURE,
                "parameters": {"fc.weight": {**WEIGHT, "shape": [1]}},
            }
        },
        "parameter fc.weight is [1] here and [10, 64] there",
    ),
    "optimizer": (
        {"signature": {**SIGNATURE, "optimizer": "Adam"}},
        "the optimizer is Adam here and SGD there",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), OTHERS.values(), ids=OTHERS.keys())
def test_a_checkpoint_of_another_job_is_refused_with_what_differs_and_what_to_do(
    change: dict[str, Any], sentence: str, tmp_path: Path, events: list[str]
) -> None:
    writer_to(tmp_path, events).save_now(5, tree_of(5))
    other = dataclasses.replace(IDENTITY, **change)
    with pytest.raises(ConfigurationError) as caught:
        find_newest(tmp_path, events.append, other)
    assert str(caught.value) == (
        f"the checkpoint {tmp_path}/step-00000005 belongs to another job: {sentence}; use another "
        "--checkpoint-dir, or go back to the old value"
    )
    found = find_newest(tmp_path, events.append)
    assert found is not None
    assert found.identity == IDENTITY
    assert events == []


# -- when and how many ---------------------------------------------------------------------------------------


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
    writer = CheckpointWriter(policy, IDENTITY, events.append, clock)
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


# -- beside the training -------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A disk that is as slow as the test wants: (it has started to write, let it go on)."""
    started, go_on = threading.Event(), threading.Event()
    write = checkpoint_files.save_file

    def slow(*args: Any, **options: Any) -> None:
        started.set()
        assert go_on.wait(60)
        write(*args, **options)

    monkeypatch.setattr(checkpoint_files, "save_file", slow)
    yield started, go_on
    go_on.set()


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
    gate: tuple[threading.Event, threading.Event], tmp_path: Path, events: list[str]
) -> None:
    started, go_on = gate
    writer = writer_to(tmp_path, events)
    writer.save(1, tree_of(1))
    assert started.wait(60)
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
    monkeypatch.setattr(checkpoint_files, "save_file", None)
    writer = writer_to(tmp_path, events)
    writer.save(1, tree_of(1))
    assert writer.flush(60)
    assert writer.newest is None
    assert writer.failure is not None
    assert "see its traceback" in writer.failure
    assert events == [writer.failure]


# -- disks that are full or closed ---------------------------------------------------------------------------


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
        pytest.skip("only root may mount a small file system")
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


# -- writers that die ----------------------------------------------------------------------------------------

WRITE_FOR_EVER = """
import sys, time
from pathlib import Path
import torch
from virtualflow.checkpoint import CheckpointPolicy, CheckpointWriter
from virtualflow.checkpoint_files import JobIdentity, find_newest, load
sys.path.insert(0, sys.argv[2])
from test_checkpoint import IDENTITY, tree_of
directory = Path(sys.argv[1])
writer = CheckpointWriter(CheckpointPolicy(directory, 1, None, 2), IDENTITY, print, time.monotonic)
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


def test_whenever_the_writer_is_killed_the_newest_checkpoint_loads(tmp_path: Path, events: list[str]) -> None:
    reached = 0
    for pattern in MOMENTS.values():
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            complete = set(tmp_path.glob("step-*"))
            deadline = time.monotonic() + 60
            while len(set(tmp_path.glob("step-*")) - complete) < 2 or not list(tmp_path.glob(pattern)):
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
    gate: tuple[threading.Event, threading.Event], tmp_path: Path, events: list[str]
) -> None:
    started, go_on = gate
    writer = writer_to(tmp_path, events)
    writer.save(1, tree_of(1))
    assert started.wait(60)
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
