"""The promise, on real jobs of real processes: the same bits, every sample once, survivors that never restart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from jobs import ROOT, Finished, check_audit, check_changes, check_survivors, run_job

from tiers import nightly, slow

DIGITS = 1_437
"""Training samples of examples/digits.py."""
STEPS = 60


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("undisturbed")
    finished = run_job(directory, "--virtual-nodes", "8", "--workers", "1", "examples/digits.py", "--steps", STEPS)
    check_audit(finished, DIGITS, 8)
    assert finished.report["changes"] == []
    assert finished.report["metrics"]["test_accuracy"] >= 0.97
    return finished


@pytest.mark.parametrize("workers", [3, nightly(8)])
@pytest.mark.slow
def test_digits_gives_the_same_bits_on_any_number_of_workers(
    workers: int, undisturbed: Finished, tmp_path: Path
) -> None:
    finished = run_job(tmp_path, "--virtual-nodes", "8", "--workers", workers, "examples/digits.py", "--steps", STEPS)
    assert finished.bits == undisturbed.bits
    assert finished.report["metrics"] == undisturbed.report["metrics"]
    check_audit(finished, DIGITS, 8)


@pytest.mark.parametrize(
    ("workers", "schedule", "started"),
    [
        slow(2, "10:=4,20:=1,30:=3", 6, id="resized up and down"),
        nightly(3, "10:kill,25:kill,40:kill", 6, id="killed three times"),
        pytest.param(3, "7:term,15:=3,22:kill:2,30:coordinator,37:hang,45:=2", 7, id="all that can happen"),
    ],
)
def test_digits_gives_the_same_bits_through_a_schedule(
    workers: int, schedule: str, started: int, undisturbed: Finished, tmp_path: Path
) -> None:
    finished = run_job(
        tmp_path, "--virtual-nodes", "8", "--workers", workers, "--schedule", schedule,
        "examples/digits.py", "--steps", STEPS,
    )  # fmt: skip
    assert finished.bits == undisturbed.bits
    check_audit(finished, DIGITS, 8)
    check_changes(finished)
    check_survivors(finished, started)
    assert len([change for change in finished.report["changes"] if change["cause"] != "rebalance"]) >= 3


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [2, 4, 5])
def test_interpreters_of_their_own_give_the_same_bits(workers: int, undisturbed: Finished, tmp_path: Path) -> None:
    """By day one job proves it, that of the manifest; all others are forks, in which texts have the same hashes."""
    script = ["examples/digits.py", "--steps", STEPS]
    finished = run_job(tmp_path, "--virtual-nodes", "8", "--workers", workers, *script, interpreters=True)
    assert finished.bits == undisturbed.bits
    check_audit(finished, DIGITS, 8)


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        pytest.param([], "10:=4,25:kill,40:=3", id="each share twice"),
        slow(["--redundancy", "none"], "10:=4,40:=2", id="each share once"),
    ],
)
def test_digits_has_the_same_digest_where_the_command_line_divides_its_parameters(
    options: list[str], schedule: str, undisturbed: Finished, tmp_path: Path
) -> None:
    finished = run_job(
        tmp_path, "--virtual-nodes", "8", "--workers", 3, "--schedule", schedule, "--shard", "parameters", *options,
        "examples/digits.py", "--steps", STEPS,
    )  # fmt: skip
    model, optimizer = finished.bits
    assert model == undisturbed.bits[0]
    assert not optimizer, "no worker has all of its state"
    check_audit(finished, DIGITS, 8)
    check_changes(finished)


@pytest.mark.nightly
def test_a_worker_that_comes_much_later_than_others_does_not_stop_a_schedule(tmp_path: Path) -> None:
    """The first one's change is ready while the job is held for both, and the second one's waits for it."""
    finished = run_job(
        tmp_path, "--insecure-plaintext", "--workers", "2", "--schedule", "4:=4,6:=2",
        "tests/trainer/digits_late.py", "--steps", "20",
    )  # fmt: skip
    sizes = [change["to"] for change in finished.report["changes"] if change["cause"] != "rebalance"]
    assert sizes == [3, 4, 2]


@pytest.mark.slow
def test_digits_gives_the_same_bits_while_all_certificates_change_every_second(
    undisturbed: Finished, tmp_path: Path
) -> None:
    finished = run_job(
        tmp_path, "--virtual-nodes", "8", "--workers", "2", "--schedule", "10:=3,20:kill,30:coordinator,40:=2",
        "examples/digits.py", "--steps", STEPS, program="tests/trainer/cases/renewing.py",
    )  # fmt: skip
    assert finished.bits == undisturbed.bits
    check_audit(finished, DIGITS, 8)
    check_changes(finished)
    check_survivors(finished, 4)
    renewed = re.search(r"certificates were renewed (\d+) times", finished.errors)
    assert renewed is not None
    assert int(renewed[1]) >= 2


@pytest.mark.slow
def test_digits_gives_the_same_bits_after_the_loss_of_all_workers(undisturbed: Finished, tmp_path: Path) -> None:
    finished = run_job(
        tmp_path, "--virtual-nodes", "8", "--workers", "3", "--schedule", "25:all",
        "--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-steps", "10",
        "examples/digits.py", "--steps", STEPS,
    )  # fmt: skip
    assert finished.bits == undisturbed.bits
    check_audit(finished, DIGITS, 8)
    (change,) = [change for change in finished.report["changes"] if change["cause"] != "rebalance"]
    assert change["cause"] == "restart"
    assert 0 < change["step"] <= 36
    assert change["pause_ms"] is None


@pytest.mark.slow
def test_a_job_without_checkpoints_that_loses_all_workers_begins_anew_and_says_so(
    undisturbed: Finished, tmp_path: Path
) -> None:
    finished = run_job(
        tmp_path, "--virtual-nodes", "8", "--workers", "2", "--schedule", "8:all",
        "examples/digits.py", "--steps", STEPS,
    )  # fmt: skip
    assert finished.bits == undisturbed.bits
    (change,) = [change for change in finished.report["changes"] if change["cause"] != "rebalance"]
    assert (change["cause"], change["from"], change["to"], change["step"]) == ("restart", 0, 2, 1)
    assert change["repeated_steps"] >= 7
    assert change["pause_ms"] is None


@pytest.mark.slow
def test_an_odd_number_of_virtual_nodes_is_ordinary(tmp_path: Path) -> None:
    script = ["examples/digits.py", "--steps", "15", "--batch-size", "168"]
    alone = run_job(tmp_path, "--virtual-nodes", "7", "--workers", "1", *script)
    finished = run_job(tmp_path, "--virtual-nodes", "7", "--workers", "3", "--schedule", "5:kill,9:=4", *script)
    assert finished.bits == alone.bits
    check_audit(finished, DIGITS, 7)
    check_changes(finished)


@pytest.mark.slow
def test_a_transformer_with_a_scheduler_gives_the_same_bits(tmp_path: Path) -> None:
    script = ["examples/charlm.py", "--steps", "9"]
    alone = run_job(tmp_path, "--virtual-nodes", "8", "--workers", "1", *script)
    schedule = "2:term,4:=3,6:kill:2,8:coordinator"
    disturbed = run_job(tmp_path, "--virtual-nodes", "8", "--workers", "3", "--schedule", schedule, *script)
    assert alone.bits == disturbed.bits
    assert len(disturbed.audit) == 9 * 8
    check_changes(disturbed)


@pytest.mark.slow
def test_a_manifest_trains_like_the_script(undisturbed: Finished, tmp_path: Path) -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text())
    (container,) = manifest["spec"]["workerGroups"][0]["template"]["spec"]["containers"]
    container["args"] = ["--steps", str(STEPS)]
    shorter = tmp_path / "digits.yaml"
    shorter.write_text(yaml.safe_dump(manifest))
    assert run_job(tmp_path, "-f", shorter).bits == undisturbed.bits
