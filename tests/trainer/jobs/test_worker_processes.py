"""Workers of several processes: the same bits, and each comes, leaves and is lost as one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from jobs import Finished, check_audit, check_changes, run_job

from tiers import slow

DIGITS = 1_437
STEPS = 40
WHOLE, DIVIDED = "examples/digits.py", "tests/trainer/digits_divided.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One worker of one process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return run_job(directory, "--virtual-nodes", "8", "--workers", "1", WHOLE, "--steps", STEPS)


def changes_of(finished: Finished) -> list[tuple[str, int, int]]:
    changes = finished.report["changes"]
    return [(one["cause"], one["from"], one["to"]) for one in changes if one["cause"] != "rebalance"]


@pytest.mark.parametrize(
    ("workers", "processes", "script"),
    [
        pytest.param(2, 2, [WHOLE], id="2 of 2"),
        pytest.param(2, 2, [DIVIDED], id="2 of 2, divided parameters"),
        slow(2, 3, [WHOLE], id="2 of 3"),
        slow(2, 3, [DIVIDED], id="2 of 3, divided parameters"),
        slow(2, 3, ["--shard", "hybrid", DIVIDED], id="2 of 3, which have all parameters among them"),
    ],
)
def test_workers_of_several_processes_come_to_the_bits_of_one_process(
    workers: int, processes: int, script: list[str], undisturbed: Finished, tmp_path: Path
) -> None:
    finished = run_job(
        tmp_path, "--virtual-nodes", "8", "--workers", workers, "--processes-per-worker", processes,
        *script, "--steps", STEPS,
    )  # fmt: skip
    assert finished.report["digest"] == undisturbed.report["digest"]
    assert finished.report["metrics"] == undisturbed.report["metrics"]
    check_audit(finished, DIGITS, 8)
    computed: dict[tuple[int, str], set[int]] = {}
    for line in finished.audit:
        computed.setdefault((line["step"], line["worker"]), set()).add(line["virtual_node"])
    assert {worker for _, worker in computed} == {f"worker-{n}" for n in range(workers)}
    assert {name: len(pids) for name, pids in finished.report["pids"].items()} == dict.fromkeys(
        (f"worker-{n}" for n in range(workers)), 1
    )


@pytest.mark.parametrize("script", [pytest.param(WHOLE, id="whole"), pytest.param(DIVIDED, id="divided")])
@pytest.mark.slow
def test_workers_of_two_processes_are_scaled_drained_and_killed_as_one(
    script: str, undisturbed: Finished, tmp_path: Path
) -> None:
    finished = run_job(
        tmp_path, "--virtual-nodes", "8", "--workers", "1", "--processes-per-worker", "2",
        "--schedule", "5:=2,12:term,18:=2,21:fast,24:kill,32:=1", script, "--steps", STEPS,
    )  # fmt: skip
    assert finished.report["digest"] == undisturbed.report["digest"]
    check_audit(finished, DIGITS, 8)
    check_changes(finished)
    assert changes_of(finished) == [
        ("join", 1, 2), ("drain", 2, 1), ("join", 1, 2), ("lost", 2, 1), ("join", 1, 2), ("drain", 2, 1),
    ]  # fmt: skip


def runs(pid: int) -> bool:
    """Whether a process has not ended; one that has may wait for its parent, or for process 1, to take note of that."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("script", [pytest.param(WHOLE, id="whole"), slow(DIVIDED, id="divided parameters")])
def test_a_killed_process_is_the_loss_of_its_worker_and_one_change(
    script: str, undisturbed: Finished, tmp_path: Path
) -> None:
    marker = tmp_path / "killed"
    finished = run_job(
        # What is asked for at step 20 is in effect when there are two workers again; so long the last steps wait.
        tmp_path, "--virtual-nodes", "8", "--workers", "2", "--processes-per-worker", "2", "--schedule", "20:fast",
        "tests/trainer/digits_losing.py", marker, script, "--steps", STEPS,
    )  # fmt: skip
    assert finished.report["digest"] == undisturbed.report["digest"]
    check_audit(finished, DIGITS, 8)
    check_changes(finished)
    assert changes_of(finished) == [("lost", 2, 1), ("join", 1, 2)]
    assert finished.errors.count(" s] worker-1 lost: ") == 1
    assert {name: len(pids) for name, pids in finished.report["pids"].items()} == {"worker-0": 1, "worker-1": 2}
    killed, sibling = int(marker.read_text()), finished.report["pids"]["worker-1"][0]
    assert killed != sibling
    assert not any(runs(pid) for pid in (killed, sibling))
