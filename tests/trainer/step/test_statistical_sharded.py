"""Statistical jobs with a sharded optimizer, or with parameters that are divided, too.

All workers end with one model, which is a bitwise job's but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import HASTY, break_collective
from elastic_jobs import BEGUN_EARLY, EXCHANGE, ElasticJob, Trained, alone, die_here, trained
from injected import injected
from test_statistical import BATCH, NODES, STEPS, assert_close, check_audit, data, growing_at_once, model_of

import virtualflow as vf
from tiers import nightly, slow
from virtualflow.protocol.settings import ENV_AUDIT_DIR, ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS
from virtualflow.state import find_by_path, load

StartJob = Callable[..., ElasticJob]


def train(clip: float | None, victim: str = "", **options: Any) -> Trained:
    """Some epochs with batch norm; tells the metrics, the weights, the micro-batches' sizes and the states kept."""
    model = model_of("batch norm")
    # A bias before a batch norm has a gradient of rounding errors alone, which a small eps would make a step of.
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    told, sizes, kept = [], [], []
    fixed = {"batch_size": BATCH, "steps": STEPS, "virtual_nodes": NODES, "seed": 2, "clip_grad_norm": clip}
    with vf.elastic(model, optimizer, data(), scheduler=scheduler, **fixed, **options) as run:
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x).flatten(), y)
                loss.backward()
                step.log(loss=loss)
                sizes.append(len(x))
                if step.number == 10 and victim:
                    die_here(victim)
            told.append((step.metrics["loss"],))
            kept.append(len(optimizer.state))
        if "shard" in options:  # no worker has the weights
            return Trained(run._context.training.digest, "", told, {"weights": {}, "sizes": sizes})
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {names[parameter]: state["exp_avg_sq"].clone() for parameter, state in optimizer.state.items()}
    return trained(run, model, optimizer, told, {"weights": weights, "sizes": sizes, "kept": kept, "moments": moments})


def sharded(clip: float | None, victim: str = "", number: int = 0, how: str = "") -> Trained:
    if number:
        break_collective(victim, number, how)
        victim = ""
    with growing_at_once():
        return train(clip, victim, reproducibility="statistical", shard_optimizer=True)


def check(results: list[Trained], clip: float | None) -> None:
    reference = alone(train, clip)
    assert len({result.digest for result in results}) == 1
    for result in results:
        assert_close(result, reference)
        for name, moment in result.more["moments"].items():
            torch.testing.assert_close(moment, reference.more["moments"][name], rtol=1e-9, atol=1e-12)
    assert any(result.more["moments"].keys() == reference.more["moments"].keys() for result in results), "the leader"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "clip", "exchange"),
    [
        (3, 0.5, "late"),
        (4, None, "early"),
        *(nightly(3, *rest) for rest in [(0.5, "early"), (None, "late"), (None, "early")]),
        *(nightly(4, *rest) for rest in [(0.5, "late"), (0.5, "early"), (None, "late")]),
    ],
)
def test_all_end_with_one_model_that_is_a_bitwise_jobs_but_for_rounding(
    workers: int, clip: float | None, exchange: str, start_job: StartJob
) -> None:
    job = start_job(sharded, clip, workers=workers, environment={EXCHANGE: exchange})
    outcomes = job.finish()
    results = [outcome.value for outcome in outcomes.values()]
    assert len(results) == workers
    check(results, clip)
    assert (exchange == "early") == any(BEGUN_EARLY in outcome.log for outcome in outcomes.values())
    for result in results:
        assert max(result.more["sizes"]) > BATCH // NODES, "virtual nodes were put together"
        assert min(result.more["kept"]) < len(list(model_of("batch norm").parameters())), "states were shared out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "exchange"), [(0.5, "early"), nightly(None, "late"), nightly(None, "early"), nightly(0.5, "late")]
)
def test_a_drain_a_kill_and_a_join_change_nothing_but_rounding(
    clip: float | None, exchange: str, tmp_path: Path, start_job: StartJob
) -> None:
    environment = {EXCHANGE: exchange, ENV_AUDIT_DIR: str(tmp_path / "audit")}
    job = start_job(sharded, clip, "worker-3", workers=4, hold=2, environment=environment)
    job.reach(2)
    job.drain("worker-1")
    job.reach(4)
    job.kill("worker-0")
    job.reach(6)
    job.join(2)
    results = job.results()
    assert len(results) == 3
    check(results, clip)
    check_audit(tmp_path / "audit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "numbers"),
    [("killed", (11,)), ("broke", (16,)), nightly("killed", (7, 16, 22, 29)), nightly("broke", (7, 11, 22, 29))],
)
def test_a_collective_breaks_anywhere(how: str, numbers: tuple[int, ...], start_job: StartJob) -> None:
    membership = HASTY if how == "broke" else None
    for number in numbers:
        job = start_job(sharded, 0.5, "worker-1", number, how, workers=3, membership=membership)
        check(job.results(), 0.5)


@pytest.mark.slow
def test_after_the_loss_of_all_other_workers_resume_from_the_checkpoint(tmp_path: Path, start_job: StartJob) -> None:
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints"), ENV_CHECKPOINT_STEPS: "4"}
    job = start_job(sharded, None, workers=4, hold=7, environment=environment)
    job.reach(7)
    job.await_checkpoint(4)
    job.kill_all()
    for _ in range(4):
        job.start_worker()
    check(job.results(), None)


def divided(clip: float | None, victim: str = "") -> Trained:
    with growing_at_once(), injected(reduction={"norm_block": 4, "bucket": 256}):
        return train(clip, victim, reproducibility="statistical", shard="parameters")


@pytest.mark.parametrize(
    ("workers", "clip", "changes"),
    [slow(2, 0.5, False), (3, 0.5, True), nightly(1, None, False), nightly(5, None, True)],
)
def test_divided_parameters_are_those_of_a_bitwise_job_but_for_rounding(
    workers: int, clip: float | None, changes: bool, tmp_path: Path, start_job: StartJob
) -> None:
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints"), ENV_AUDIT_DIR: str(tmp_path / "audit")}
    victim = "worker-1" if changes else ""
    job = start_job(divided, clip, victim, workers=workers, hold=2 * changes, environment=environment)
    if changes:
        job.reach(3)
        job.join()
        job.reach(6)
        job.drain("worker-0")
        job.reach(8)
    results = job.results()
    assert len({result.digest for result in results}) == 1
    reference = alone(train, clip)
    for result in results:
        assert_close(result, replace(reference, more={"weights": {}}))
        assert max(result.more["sizes"]) > BATCH // NODES, "virtual nodes were put together"
    found = find_by_path(tmp_path / "checkpoints", print)
    assert found is not None
    for name, value in load(found)["parameters"].items():
        torch.testing.assert_close(value, reference.more["weights"][name], rtol=1e-9, atol=1e-12)
    check_audit(tmp_path / "audit")
