"""Workers of several processes: the same bits, and each comes, leaves and is lost as one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from jobs import Finished, check_audit, check_changes, run_job

from tiers import slow
from virtualflow.launcher import registry
from virtualflow.protocol.http_api import HoldCall, Status
from virtualflow.protocol.http_client import CoordinatorClient
from virtualflow.protocol.settings import SignalSettings

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


async def kill_one_process(client: CoordinatorClient, killed: list[psutil.Process]) -> None:
    """Kill the second process of the second worker; go on to the end when both workers are to be whole again."""

    async def seen(condition: Callable[[Status], bool]) -> Status:
        async with asyncio.timeout(120):
            async for status in client.watch():
                if condition(status):
                    return status
        raise AssertionError("the coordinator has ended")

    def train(status: Status) -> bool:
        return [worker.state for worker in status.workers] == ["training", "training"]

    await seen(lambda status: bool(status.workers))
    await client.send(HoldCall(15))
    before = await seen(lambda status: train(status) and status.step >= 10)
    worker = next(worker for worker in before.workers if worker.worker == "worker-1")
    killed += [psutil.Process(process.pid) for process in worker.processes]
    killed[1].kill()
    await client.send(HoldCall(30))

    def comes(status: Status) -> bool:
        """Whether its replacement has entered, or enters by the step that follows: it may come before the hold."""
        causes = [change.cause for change in status.changes]
        return "join" in causes or ("lost" in causes and status.proposed is not None and status.prepared)

    await seen(comes)


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that has may wait for its parent, or for process 1, to take note of that."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("script", [pytest.param(WHOLE, id="whole"), slow(DIVIDED, id="divided parameters")])
def test_a_killed_process_is_the_loss_of_its_worker_and_one_change(
    script: str, undisturbed: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    killed: list[psutil.Process] = []
    trouble: list[BaseException] = []

    async def disturb() -> None:
        job = None
        async with asyncio.timeout(120):
            while job is None or not job.url:
                await asyncio.sleep(0.05)
                job = next(iter(registry.running_jobs()), None)
        async with CoordinatorClient(job.url, job.credential, SignalSettings()) as client:
            try:
                await kill_one_process(client, killed)
            finally:
                await client.send(HoldCall(None))  # also after trouble: the job goes on to its end

    def beside() -> None:
        try:
            asyncio.run(disturb())
        except BaseException as error:  # noqa: BLE001 - told by the test
            trouble.append(error)

    disturbing = threading.Thread(target=beside)
    disturbing.start()
    finished = run_job(
        tmp_path, "--virtual-nodes", "8", "--workers", "2", "--processes-per-worker", "2", script, "--steps", STEPS
    )
    disturbing.join()
    assert not trouble, trouble
    assert finished.report["digest"] == undisturbed.report["digest"]
    check_audit(finished, DIGITS, 8)
    check_changes(finished)
    assert changes_of(finished) == [("lost", 2, 1), ("join", 1, 2)]
    assert finished.errors.count(" s] worker-1 lost: ") == 1
    assert len(killed) == 2
    assert not any(runs(process) for process in killed)  # its sibling went with it
    assert {name: len(pids) for name, pids in finished.report["pids"].items()} == {"worker-0": 1, "worker-1": 2}
