"""With a sampler, each position of its order is used exactly once, by whatever workers, and the bits are the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, Trained, alone, trained
from habit_scripts import data, loop, mlp, sgd, start
from torch.utils.data import TensorDataset, WeightedRandomSampler

import virtualflow as vf
from virtualflow.data import open_orders
from virtualflow.errors import ConfigurationError
from virtualflow.launcher.report import merge_audit
from virtualflow.protocol.settings import ENV_AUDIT_DIR, ENV_WORKER

LENGTH = 64
"""Samples of an epoch: two batches of 24 and one of 16."""


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([float(1 + n % 5) for n in range(44)], LENGTH)


def train(sampler: Any, **options: Any) -> Trained:
    model = mlp(torch.nn.Dropout(0.1))
    optimizer = sgd(model)
    with start(model, optimizer, sampler=sampler, **options) as run:
        loop(run, model)
    return trained(run, model, optimizer)


def with_a_weighted_sampler() -> Trained:
    return train(weighted())


def with_another_sampler_each() -> Trained:
    return train([0, 1, 2] if os.environ.get(ENV_WORKER) == "worker-1" else [0, 1, 3])


def test_each_position_of_an_order_is_used_once_through_changes(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    reference, audit = alone(with_a_weighted_sampler), tmp_path / "audit"
    job = start_job(with_a_weighted_sampler, workers=2, hold=2, environment={ENV_AUDIT_DIR: str(audit)})
    job.reach(2)
    job.join()
    assert job.results() == [reference, reference], "worker-1 is killed in step 6"
    used: dict[int, list[int]] = {}
    for row in merge_audit(path.read_text().splitlines() for path in audit.iterdir()):
        used.setdefault(row["epoch"], []).extend(row["samples"])  # type: ignore[call-overload]
    orders = open_orders(weighted(), data(), seed=3)
    assert orders is not None
    assert used == {
        0: orders.order(0).tolist(),
        1: orders.order(1).tolist(),
        2: orders.order(2).tolist()[: 2 * 24],  # the last two of eight steps
    }


def test_loader_processes_load_what_the_sampler_says() -> None:
    assert train(weighted(), num_workers=1) == train(weighted())


def test_a_checkpoint_goes_on_in_the_order_of_its_sampler(tmp_path: Path) -> None:
    policy = vf.CheckpointPolicy(tmp_path, every_steps=1)
    train(weighted(), steps=4, checkpoint=policy)
    with pytest.raises(ConfigurationError, match="another job: the sampler gives another order here than there"):
        train([1] * LENGTH, checkpoint=policy)
    with pytest.raises(ConfigurationError, match="another job: there is no sampler here and one there"):
        train(None, checkpoint=policy)
    assert train(weighted(), checkpoint=policy) == train(weighted())


def test_workers_with_different_samplers_are_refused(start_job: Callable[..., ElasticJob]) -> None:
    outcomes = start_job(with_another_sampler_each, workers=2).finish().values()
    told = [outcome.text for outcome in outcomes if outcome.kind == "ConfigurationError"]
    assert told
    assert all("the sampler gives another order here than there" in text for text in told)


def test_an_epoch_of_another_length_ends_the_training_with_a_sentence() -> None:
    with pytest.raises(
        ConfigurationError, match="gives 45 samples in epoch 1 and 44 in epoch 0; give as many in each, or"
    ):
        train(lambda seed, epoch: [n % 44 for n in range(44 + epoch)])


class Growing(TensorDataset):
    """Has more samples from the second epoch on."""

    def __len__(self) -> int:
        return super().__len__() - (4 if self.epoch == 0 else 0)

    epoch = 0


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"num_workers": 1}], ids=["shuffled", "in order", "ahead"])
def test_a_dataset_that_grows_ends_the_training_with_a_sentence(options: dict[str, Any]) -> None:
    dataset, model = Growing(*data().tensors), mlp()
    with (
        pytest.raises(ConfigurationError, match="has 44 samples in epoch 1 and had 40 at the start; let its length"),
        vf.elastic(model, sgd(model), dataset, batch_size=20, epochs=3, virtual_nodes=4, **options) as run,
    ):
        loop(run, model, after=lambda step: setattr(dataset, "epoch", 1))


def with_fewer_samples_in_one() -> Trained:
    model = mlp()
    optimizer = sgd(model)
    dataset = data()
    if os.environ.get(ENV_WORKER) == "worker-1":
        dataset = TensorDataset(*(tensor[:36] for tensor in dataset.tensors))
    with vf.elastic(model, optimizer, dataset, batch_size=12, steps=8, virtual_nodes=4) as run:
        loop(run, model)
    return trained(run, model, optimizer)


def with_a_seed_of_its_own() -> Trained:
    return train(None, seed=4 if os.environ.get(ENV_WORKER) == "worker-1" else 3)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            with_fewer_samples_in_one,
            "the number of samples in the dataset is (36|44) here and (44|36) there; start all",
        ),
        (with_a_seed_of_its_own, "the seed is [34] here and [34] there; start all"),
    ],
)
def test_workers_that_would_use_other_samples_are_refused(
    script: Callable[[], Trained], told: str, start_job: Callable[..., ElasticJob]
) -> None:
    job = start_job(script, workers=1, hold=2)
    job.reach(2)
    job.join()
    outcomes = job.finish().values()
    assert [outcome.kind for outcome in outcomes if outcome.kind not in ("ConfigurationError", "JobFailed")] == []
    assert re.search(told, job.status().error or ""), job.status().error
