"""A worker that comes to wrong gradients is found by a spot check and evicted, and the bits are the same in the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import Counting, regression
from elastic_jobs import BEGUN_EARLY, EXCHANGE, PATIENCE, ElasticJob, Trained, alone, die_here, trained
from jobs import check_audit, run_job
from torch import Tensor

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_REPRODUCIBILITY, ENV_VERIFY, ENV_WORKER
from virtualflow.step.spot_checks import SpotCheck, choose_check

NODES, STEPS = 6, 12


def train(victim: str, at: int, flips: int, dies: str = "", marker: str = "") -> Trained:
    """Train with dropout; in step ``at`` the victim's first ``flips`` gradients of a weight have a bit flipped.

    In the same step ``dies`` is killed, when there is a file ``marker``: the victim has computed so many.
    """
    torch.manual_seed(0)
    model, dropout = Counting(), torch.nn.Dropout(0.2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    computed = {"step": 0, "count": 0}

    def flip(gradient: Tensor) -> Tensor:
        computed["count"] += 1
        if os.environ.get(ENV_WORKER) != victim or computed["step"] != at or computed["count"] > flips:
            return gradient
        if marker and computed["count"] == flips:
            Path(marker).touch()
        changed = gradient.clone()
        changed.view(torch.int32)[1, 2] ^= 1 << 3
        return changed

    model.linear.weight.register_hook(flip)
    with vf.elastic(model, optimizer, regression(), batch_size=12, steps=STEPS, virtual_nodes=NODES) as run:
        for step in run:
            computed.update(step=step.number, count=0)
            for x, y in step:
                if step.number == at and os.environ.get(ENV_WORKER) == dies:
                    await_file(marker)
                    die_here(dies)
                loss = F.mse_loss(model(dropout(x)), y)
                loss.backward()
                step.log(loss=loss)
    return trained(run, model, optimizer, dict(step.metrics))


def await_file(path: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while path and not Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def find_check(workers: int, holds: Callable[[SpotCheck], bool]) -> SpotCheck:
    """The first check behind the second step of which that is so."""
    held = [range(NODES * rank // workers, NODES * (rank + 1) // workers) for rank in range(workers)]
    checks = [choose_check(0, step, NODES, 1.0, held) for step in range(3, STEPS)]
    return next(check for check in checks if check is not None and holds(check))


@pytest.fixture(scope="module")
def undisturbed() -> Trained:
    value: Trained = alone(train, "", 0, 0)
    return value


@pytest.mark.parametrize("exchange", ["early", nightly("behind"), nightly("")])
def test_a_clean_job_is_not_disturbed_by_checks(
    exchange: str, start_job: Callable[..., ElasticJob], undisturbed: Trained
) -> None:
    job = start_job(train, "", 0, 0, workers=3, environment={ENV_VERIFY: "1.0", EXCHANGE: exchange})
    outcomes = job.finish()
    assert [outcome.value for outcome in outcomes.values()] == [undisturbed] * 3, outcomes
    assert all(BEGUN_EARLY in outcome.log for outcome in outcomes.values()) == bool(exchange)
    assert job.status().lost == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "exchange"), [("holder", "early"), ("checker", ""), nightly("checker", "early"), nightly("holder", "")]
)
def test_a_wrong_worker_of_three_is_evicted_and_the_step_repeated(
    role: str, exchange: str, start_job: Callable[..., ElasticJob], undisturbed: Trained
) -> None:
    check = find_check(3, lambda check: getattr(check, role) == 1)
    environment = {ENV_VERIFY: "1", EXCHANGE: exchange}
    job = start_job(train, "worker-1", check.step, 99, workers=3, environment=environment)
    outcomes = job.finish()
    evicted = outcomes.pop("worker-1")
    assert evicted.kind == "Evicted", evicted
    told = f"it came to other gradients of virtual node {check.virtual_node} in step {check.step} than worker-"
    assert told in evicted.text
    assert [outcome.value for outcome in outcomes.values()] == [undisturbed] * 2, outcomes
    status = job.status()
    assert [(lost.worker, lost.convicted) for lost in status.lost] == [("worker-1", True)]
    assert any(event.kind == "lost" and f"worker-1 lost: {told}" in event.text for event in status.events)
    assert status.last_change is not None
    assert (status.last_change.cause, status.last_change.repeated_steps) == ("lost", 1)


@pytest.mark.parametrize(("role", "flips"), [("holder", 3), ("checker", 1)])
def test_of_two_the_one_that_changes_its_word_is_evicted(
    role: str, flips: int, start_job: Callable[..., ElasticJob], undisturbed: Trained
) -> None:
    check = find_check(2, lambda check: getattr(check, role) == 1)
    job = start_job(train, "worker-1", check.step, flips, workers=2, environment={ENV_VERIFY: "1"})
    outcomes = job.finish()
    assert outcomes["worker-1"].kind == "Evicted", outcomes
    assert "when it computed it once more, and worker-0 to the same" in outcomes["worker-1"].text
    assert outcomes["worker-0"].value == undisturbed, outcomes


def test_if_nobody_can_tell_who_of_two_is_wrong_the_job_ends(start_job: Callable[..., ElasticJob]) -> None:
    check = find_check(2, lambda check: check.holder == 1)
    outcomes = start_job(train, "worker-1", check.step, 99, workers=2, environment={ENV_VERIFY: "1"}).finish()
    assert {outcome.kind for outcome in outcomes.values()} <= {"VirtualFlowError", "JobFailed"}, outcomes
    told = (
        f"worker-1 and worker-0 came to different gradients of virtual node {check.virtual_node} in step {check.step}"
    )
    for outcome in outcomes.values():
        assert told in outcome.text, outcomes


@pytest.mark.slow
def test_a_step_that_is_repaired_after_a_kill_is_checked_as_well(
    start_job: Callable[..., ElasticJob], undisturbed: Trained
) -> None:
    job = start_job(train, "", 5, 0, "worker-2", workers=3, environment={ENV_VERIFY: "1"})
    outcomes = job.finish()
    assert outcomes.pop("worker-2").kind == "killed"
    assert [outcome.value for outcome in outcomes.values()] == [undisturbed] * 2, outcomes
    assert [lost.worker for lost in job.status().lost] == ["worker-2"]


@pytest.mark.slow
def test_what_was_kept_of_an_attempt_that_broke_is_doubted_in_the_next(
    start_job: Callable[..., ElasticJob], undisturbed: Trained, tmp_path: Path
) -> None:
    """The victim computes its two virtual nodes once only, and wrongly; the third worker dies before it is found."""
    check = find_check(3, lambda check: check.pair in ((1, 0),))
    arguments = ("worker-1", check.step, 2, "worker-2", str(tmp_path / "computed"))
    job = start_job(train, *arguments, workers=3, environment={ENV_VERIFY: "1"})
    outcomes = job.finish()
    assert outcomes["worker-2"].kind == "killed", outcomes
    assert outcomes["worker-1"].kind == "Evicted", outcomes
    assert "when it computed it once more, and worker-0 to the same" in outcomes["worker-1"].text
    assert outcomes["worker-0"].value == undisturbed, outcomes


def test_workers_of_a_statistical_job_are_not_compared() -> None:
    with pytest.raises(vf.ConfigurationError, match="verify compares gradients bit for bit"):
        alone(train, "", 0, 0, environment={ENV_VERIFY: "0.5", ENV_REPRODUCIBILITY: "Statistical"})


def test_workers_that_verify_differently_are_refused(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train, "", 0, 0, workers=1, hold=2, environment={ENV_VERIFY: "0.5"})
    job._environment[ENV_VERIFY] = "0.25"
    job.join()
    outcomes = job.finish()
    assert any("verify is 0.5 here and 0.25 there" in outcome.text for outcome in outcomes.values()), outcomes


# --- through the command line -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_evicted_worker_is_replaced_and_every_sample_counts_once(tmp_path: Path) -> None:
    quiet, noisy = tmp_path / "quiet", tmp_path / "noisy"
    quiet.mkdir()
    noisy.mkdir()
    options = ("--virtual-nodes", 6, "--workers", 3, "--rebalance-gain", 1)
    script, length = "tests/trainer/digits_flipping.py", ("--batch-size", 48, "--steps", 40)
    wanted = run_job(quiet, *options, script, "", *length)
    found = run_job(noisy, *options, "--verify", 1, script, noisy / "flipped", *length)
    assert found.bits == wanted.bits
    check_audit(found, 1437, 6)
    (change,) = [change for change in found.report["changes"] if change["cause"] == "lost"]
    assert "lost: it came to other gradients of virtual node" in change["reason"]
    assert change["repeated_steps"] == 1
    assert len(found.report["pids"]["worker-1"]) == 2, found.errors
