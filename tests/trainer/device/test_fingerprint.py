"""Which workers may compute together: what must be equal on all of them, whatever their devices are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from simulated import Worker, World

from virtualflow.device import determinism
from virtualflow.device.determinism import fingerprint
from virtualflow.launcher.registry import JobAccess, RunningJob
from virtualflow.launcher.workforce import WorkerCommand, worker_environment
from virtualflow.protocol import versions
from virtualflow.protocol.settings import ENV_CUBLAS_WORKSPACE, ENV_HASH_SEED, Reproducibility

ACCESS = JobAccess(RunningJob("job", "", "", 0, 0), None)
TORCH = torch.__version__.split("+")[0]


def admitted(one: str, other: str, reproducibility: Reproducibility) -> bool:
    """Whether a worker with the one fingerprint is admitted beside one with the other."""
    world = World(wanted=2)
    refusals = []
    for name, told in (("a", one), ("b", other)):
        hello = Worker(name, f"{name}.0").hello(0.0)
        refusals.append(world.admit(msgspec.structs.replace(hello, fingerprint=told, reproducibility=reproducibility)))
    assert refusals[0] is None
    assert refusals[1] is None or f"b runs [{other}] and the job [{one}]" in refusals[1]
    return refusals[1] is None


@pytest.mark.parametrize(
    ("number", "reproducibility", "together"),
    [
        pytest.param("PROTOCOL", "bitwise", False, id="another protocol"),
        pytest.param("PROTOCOL", "statistical", False, id="another protocol, statistical"),
        pytest.param("NUMERICS", "bitwise", False, id="other numerics"),
        pytest.param("NUMERICS", "statistical", True, id="other numerics, statistical"),
        pytest.param("__version__", "bitwise", True, id="another version with the same numbers"),
    ],
)
def test_a_joiner_of_another_version_needs_the_same_numbers(
    number: str, reproducibility: Reproducibility, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = fingerprint(1, reproducibility)
    newer = "99.0.0" if number == "__version__" else getattr(versions, number) + 1
    monkeypatch.setattr(versions, number, newer)
    if number != "__version__":
        monkeypatch.setattr(determinism, number, newer)
    assert admitted(job, fingerprint(1, reproducibility), reproducibility) is together


def test_workers_that_hash_strings_differently_do_not_train_together_bit_for_bit() -> None:
    seeds = {
        seed: subprocess.run(
            [sys.executable, "-c", "print(f'{hash(\"virtualflow\") & 0xFFFF:04x}')"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("0", "7")
    }
    ours = fingerprint(1, "bitwise")
    fixed, other = (f"{ours.rpartition(' ')[0]} {seeds[seed]}" for seed in ("0", "7"))
    assert admitted(fixed, fixed, "bitwise")
    assert not admitted(fixed, other, "bitwise")


def test_whoever_starts_workers_gives_all_one_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    command = WorkerCommand(
        command=(), environment={}, coordinator="http://127.0.0.1:1", access=ACCESS, logs=Path(), audit=None
    )
    monkeypatch.delenv(ENV_HASH_SEED, raising=False)
    assert worker_environment(command, "worker-0", "0")[ENV_HASH_SEED] == "0"
    monkeypatch.setenv(ENV_HASH_SEED, "7")
    assert worker_environment(command, "worker-0", "0")[ENV_HASH_SEED] == "7", "the user's counts"


def test_whoever_starts_workers_gives_them_what_makes_cublas_repeat_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads it once, at the first product on a GPU: when ``vf.elastic`` is called, that may be over."""
    command = WorkerCommand(
        command=(), environment={}, coordinator="http://127.0.0.1:1", access=ACCESS, logs=Path(), audit=None
    )
    for users, given in ((None, ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.delenv(ENV_CUBLAS_WORKSPACE, raising=False)
        if users is not None:
            monkeypatch.setenv(ENV_CUBLAS_WORKSPACE, users)
        assert worker_environment(command, "worker-0", "0")[ENV_CUBLAS_WORKSPACE] == given


def test_people_can_read_what_must_be_equal() -> None:
    numbers = f"protocol {versions.PROTOCOL}, numerics {versions.NUMERICS}"
    assert (
        fingerprint(2, "bitwise") == f"torch {TORCH}, {numbers}, 2 threads, hashes {hash('virtualflow') & 0xFFFF:04x}"
    )
    assert fingerprint(2, "statistical") == f"torch {TORCH}, protocol {versions.PROTOCOL}"
