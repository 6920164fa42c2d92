"""A one-off fault of one machine costs its worker; what is in the script or in the data ends the job at once."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children, connection
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, Trained, alone, trained
from jobs import run_job
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import programs
import virtualflow as vf
from virtualflow.errors import LoaderEnded, LoaderKilled, ScriptExited
from virtualflow.protocol.machine_faults import find_told_fault, is_machine_fault
from virtualflow.protocol.settings import ENV_WORKER

CASES = Path(__file__).resolve().parents[1] / "cases"


def after(cause: BaseException, *, suppressed: bool = False) -> BaseException:
    """An error that a script raises because of another one."""
    try:
        try:
            raise cause
        except (OSError, MemoryError):
            if suppressed:
                raise ValueError("a bad sample") from None
            raise ValueError("a bad sample")  # noqa: B904 - as scripts do
    except ValueError as error:
        return error


def from_loader(error: BaseException) -> Exception:
    """What comes of ``error`` when a loader process hands it over."""
    try:
        raise error
    except Exception:  # noqa: BLE001
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    try:
        wrapped.reraise()
    except Exception as raised:  # noqa: BLE001
        return raised
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        pytest.param(OSError(errno.EIO, "Input/output error"), True, id="a disk"),
        pytest.param(OSError(errno.ESTALE, "Stale file handle"), True, id="a file system on the network"),
        pytest.param(OSError(errno.ENOTCONN, "Transport endpoint is not connected"), True, id="a FUSE mount"),
        pytest.param(OSError("Can't read data (errno = 5, error message = 'Input/output error')"), True, id="HDF5"),
        pytest.param(MemoryError(), True, id="memory"),
        pytest.param(OSError(errno.ENOMEM, "Cannot allocate memory"), True, id="memory for a process"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), True),
        pytest.param(RuntimeError("CUDA error: uncorrectable ECC error encountered"), True, id="a card"),
        pytest.param(TimeoutError("timed out"), True, id="a slow store"),
        pytest.param(ConnectionResetError(errno.ECONNRESET, "reset"), True, id="a store that hangs up"),
        pytest.param(LoaderKilled("killed"), True, id="a loader process"),
        pytest.param(after(OSError(errno.EIO, "I/O")), True, id="what a script makes of a fault"),
        pytest.param(after(OSError(errno.EIO, "I/O"), suppressed=True), False, id="unless it says that it is another"),
        pytest.param(from_loader(OSError(errno.EIO, "Input/output error")), True, id="a disk, in a loader process"),
        pytest.param(from_loader(MemoryError("9 GiB")), True, id="memory, in a loader process"),
        pytest.param(from_loader(after(OSError(errno.EIO, "I/O"))), True, id="what a script makes of one there"),
        pytest.param(from_loader(FileNotFoundError(2, "No such file")), False, id="a missing file, there"),
        pytest.param(from_loader(ValueError("OSError: [Errno 5] is in no line of its own")), False, id="a text"),
        pytest.param(FileNotFoundError(errno.ENOENT, "No such file"), False, id="a missing file"),
        pytest.param(PermissionError(errno.EACCES, "Permission denied"), False, id="a permission"),
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), False, id="a full disk"),
        pytest.param(OSError(errno.EMFILE, "Too many open files"), False, id="a leak"),
        pytest.param(OSError("cannot identify image file"), False, id="a bad image"),
        pytest.param(RuntimeError("CUDA error: device-side assert triggered"), False, id="an index out of bounds"),
        pytest.param(torch.OutOfMemoryError("CUDA out of memory"), False, id="a device that is too small"),
        pytest.param(ValueError("a bad sample"), False, id="the script"),
        pytest.param(LoaderEnded("exit code 1"), False, id="a loader process that ends by itself"),
    ],
)
def test_what_is_a_fault_of_a_machine(error: BaseException, fault: bool) -> None:
    assert is_machine_fault(error) is fault


@pytest.mark.parametrize(
    ("end", "told"),
    [
        pytest.param("OSError: [Errno 5] Input/output error: '/data/a'", True, id="a disk"),
        pytest.param("FileNotFoundError: [Errno 2] No such file or directory: 'a'", False, id="a missing file"),
        pytest.param("OSError: Can't read data (errno = 5, error message = 'Input/output error')", True, id="HDF5"),
        pytest.param("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 TiB", True, id="numpy"),
        pytest.param("MemoryError", True, id="memory"),
        pytest.param("TimeoutError: The read operation timed out", True, id="a store"),
        pytest.param("TimeoutError: [Errno 110] Connection timed out", True, id="a mount"),
        pytest.param("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", True, id="a loader"),
        pytest.param(
            "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while "
            "the future was running or pending.",
            True,
            id="a pool",
        ),
        pytest.param(
            '  File "/usr/multiprocessing/connection.py", line 399, in _recv\n    raise EOFError\nEOFError',
            True,
            id="a loader whose connection broke",
        ),
        pytest.param("EOFError: Ran out of input", False, id="a file cut off"),
        pytest.param("ValueError: no OSError: [Errno 5] in the middle", False, id="a text"),
        pytest.param("ModuleNotFoundError: No module named 'datasets'", False, id="the script"),
    ],
)
def test_a_traceback_tells_of_it_as_well(end: str, told: bool) -> None:
    trace = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    load()\n{end}\n'
    assert find_told_fault(trace) == (end.strip().splitlines()[-1] if told else None)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random samples, one of which fails once: in the worker of that name."""

    def __init__(self, error: BaseException | None = None, marker: Path | None = None) -> None:
        self.error, self.marker = error, marker

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.error is not None and index == 29 and (self.marker is None or not self.marker.exists()):
            if self.marker is not None:
                self.marker.touch()
            raise self.error
        drawn = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return drawn, drawn.sum(0, keepdim=True)


def train(
    dataset: Dataset[Any], between: Callable[[int], None] = lambda number: None, steps: int = 12, **options: Any
) -> Trained:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, dataset, batch_size=16, steps=steps, **options) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            between(step.number)
    return trained(run, model, optimizer)


def train_on_flaky(error: BaseException, marker: Path | None) -> Trained:
    return train(Samples(error, marker))


def end_in_the_second(code: int) -> Trained:
    """A script that ends itself in one worker, as if all were done."""

    def between(number: int) -> None:
        if number == 5 and os.environ.get(ENV_WORKER) == "worker-1":
            sys.exit(code)

    return train(Samples(), between)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), MemoryError("3 GiB")], ids=["disk", "memory"]
)
def test_a_fault_in_one_worker_costs_one_repeated_step_and_no_bit(
    error: BaseException, start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    job = start_job(train_on_flaky, error, tmp_path / "marker", workers=2)
    outcomes = job.finish()
    kinds = sorted(outcome.kind for outcome in outcomes.values())
    assert kinds == sorted(["returned", type(error).__name__]), outcomes
    assert [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"] == [alone(train, Samples())]
    status = job.status()
    assert (status.phase, status.error) == ("done", None)
    (lost,) = status.lost
    assert (lost.machine_fault, lost.ended) == (True, True)
    assert str(error) in lost.reason
    assert status.repeated_steps <= 1


def test_a_fault_that_every_worker_meets_ends_the_job_with_its_traceback(
    start_job: Callable[..., ElasticJob],
) -> None:
    job = start_job(train_on_flaky, OSError(errno.EIO, "Input/output error"), None, workers=2)
    job.finish()
    status = job.status()
    assert (status.phase, status.error) == ("failed", "OSError: [Errno 5] Input/output error")
    assert "raise self.error" in (status.traceback or "")


def test_an_error_of_the_script_in_one_worker_ends_the_job_at_once(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    job = start_job(train_on_flaky, ValueError("a bad sample"), tmp_path / "marker", workers=2)
    job.finish()
    assert (job.status().phase, job.status().error, job.status().lost) == ("failed", "ValueError: a bad sample", ())


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_script_that_ends_itself_in_the_middle_has_not_trained(
    code: int, start_job: Callable[..., ElasticJob]
) -> None:
    job = start_job(_exit_as_error, code, workers=2)
    job.finish()
    status = job.status()
    assert status.phase == "failed"
    assert (status.error or "").startswith(f"the script ended itself by sys.exit({code}) after step 5 of 12 (")
    assert "test_machine_faults.py, line " in (status.error or "")
    assert ("SystemExit: 3" in (status.traceback or "")) is (code == 3)


def _exit_as_error(code: int) -> Any:
    try:
        return end_in_the_second(code)
    except SystemExit as exited:
        if not isinstance(exited, vf.Drained) and type(exited) is SystemExit:
            return exited.code
        raise


# --- loader processes -------------------------------------------------------------------------------------------------


def kill_and_see(process: Any) -> None:
    """SIGKILL a child of this process, and go on until the main thread has been told of its end."""
    heard: list[int] = []
    former = signal.getsignal(signal.SIGCHLD)

    def handle(number: int, frame: Any) -> None:
        heard.append(number)
        if callable(former):
            former(number, frame)

    signal.signal(signal.SIGCHLD, handle)
    try:
        os.kill(process.pid, signal.SIGKILL)
        connection.wait([process.sentinel], 30)
        while not heard:
            time.sleep(0.001)  # between two bytecodes, Python calls the handlers of signals that have come
    finally:
        signal.signal(signal.SIGCHLD, former)


def test_a_loader_process_that_is_killed_is_told_of_where_its_samples_are_read() -> None:
    reached: list[int] = []

    def between(number: int) -> None:
        if number == 3:
            (process,) = active_children()
            kill_and_see(process)
        reached.append(number)

    with pytest.raises(LoaderKilled, match=r"a loader process \(pid \d+\) was killed by SIGKILL, most likely because"):
        train(Samples(), between, num_workers=1)
    assert reached[:3] == [1, 2, 3]


class Shards(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Any:
        return self.shard(0, 1, 0, 0)

    def shard(self, index: int, count: int, epoch: int, start: int) -> Any:
        return iter([Samples()[position] for position in range(index, 64, count)][start:])


def test_so_it_is_with_streams() -> None:
    def between(number: int) -> None:
        if number == 1:
            kill_and_see(active_children()[0])

    with pytest.raises(LoaderKilled, match="was killed by SIGKILL"):
        train(Shards(), between, num_workers=1, virtual_nodes=2)


def test_the_end_of_any_other_process_is_nothing_to_the_training() -> None:
    def between(number: int) -> None:
        if number == 3:
            subprocess.run(["sh", "-c", "kill -9 $$"], check=False)

    assert train(Samples(), between, num_workers=1) == train(Samples())


def test_a_killed_process_of_the_scripts_own_loader_ends_only_its_reading() -> None:
    reached: list[int] = []

    def between(number: int) -> None:
        if number == 3:
            own = iter(DataLoader(Samples(), num_workers=1))
            next(own)
            kill_and_see(next(child for child in active_children() if child in own._workers))  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="DataLoader worker"):
                list(own)
        reached.append(number)

    assert train(Samples(), between, num_workers=1) == train(Samples())
    assert reached == list(range(1, 13))


class Exiting(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 29:
            sys.exit(0)
        return super().__getitem__(index)


def test_a_data_set_that_ends_its_loader_process_is_named() -> None:
    with pytest.raises(LoaderEnded, match=r"ended by itself with exit code 0: .* a dataset must not call sys.exit"):
        train(Exiting(), num_workers=1)


@pytest.mark.slow
def test_a_worker_whose_loader_was_killed_is_replaced(tmp_path: Path) -> None:
    script = str(CASES / "transient.py")
    # The job waits before its end until both workers are there again.
    finished = run_job(tmp_path, "--workers", 2, "--schedule", "20:=2", script, "loader", tmp_path / "marker")
    assert sorted(len(pids) for pids in finished.report["pids"].values()) == [1, 2]
    assert "was killed by SIGKILL, most likely because memory ran out" in finished.errors
    assert [change["cause"] for change in finished.report["changes"]] == ["lost", "join"]
    undisturbed = run_job(tmp_path, "--workers", 1, script, "loader", tmp_path / "marker")
    assert finished.bits == undisturbed.bits


@pytest.mark.slow
def test_so_is_one_whose_loader_was_killed_before_it_could_join(tmp_path: Path) -> None:
    script = str(CASES / "transient.py")
    finished = run_job(tmp_path, "--workers", 2, "--schedule", "20:=2", script, "building", tmp_path / "marker")
    assert sorted(len(pids) for pids in finished.report["pids"].values()) == [1, 2]
    # Its connection may be found broken before its end is known.
    kinds = r"RuntimeError: DataLoader worker .* killed by signal|EOFError|ConnectionResetError|ConnectionRefusedError"
    assert re.search(rf"ended before it joined: ({kinds})", finished.errors), finished.errors


def test_a_fault_that_every_worker_meets_before_it_joins_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('import virtualflow as vf\n\nraise OSError(5, "Input/output error")\n')
    failed = programs.run(
        [sys.executable, "-m", "virtualflow", "run", "--plain", "--workers", "2", str(script)],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        timeout=120,
    )
    assert failed.returncode == 1
    assert "ended before it could join: OSError: [Errno 5] Input/output error" in failed.stderr
    assert 'raise OSError(5, "Input/output error")' in failed.stderr


def test_only_a_run_that_fails_by_itself_is_one_that_the_script_ended() -> None:
    with pytest.raises(SystemExit) as raised:
        train(Samples(), lambda number: sys.exit(4))
    assert not isinstance(raised.value, ScriptExited)
    assert raised.value.code == 4
