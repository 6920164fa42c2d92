"""Statistical jobs: what bitwise ones come to, but for rounding; every sample once, through whatever happens."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import BEGUN_EARLY, EXCHANGE, ElasticJob, Trained, alone, die_here, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.device.memory_gauge import MemoryUse
from virtualflow.launcher.report import merge_audit
from virtualflow.protocol.settings import ENV_AUDIT_DIR, ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS, ENV_MAX_FUSED
from virtualflow.step.fusion_tuner import Tuner

SAMPLES, BATCH, NODES, STEPS = 84, 32, 8, 12
"""The last of three steps of an epoch has 20 samples: four virtual nodes with three of them, four with two."""

StartJob = Callable[..., ElasticJob]


class Streamed:
    """Shards of several lengths, one of them empty."""

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = data().tensors
        for position in range(start, 0 if index == 3 else 5 + index):
            place = (index + position * count) % SAMPLES
            yield x[place] + 0.01 * torch.rand((), dtype=x.dtype), y[place]


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randn(SAMPLES, generator=draw, dtype=torch.float64))


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    norm = {"batch norm": lambda: nn.BatchNorm1d(7), "foreign": lambda: Foreign(7)}.get(kind, nn.Identity)
    return nn.Sequential(nn.Linear(6, 7), norm(), nn.Tanh(), nn.Linear(7, 1)).double()


class Foreign(nn.BatchNorm1d):
    """A batch norm that cannot be split."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input)


@contextmanager
def growing_at_once() -> Iterator[None]:
    """Let every size count as faster than smaller ones, after one step with it."""
    observe = Tuner.observe

    def faster(self: Tuner, seconds: float, usage: MemoryUse | None) -> None:
        observe(self, 1.0 / self.width, usage)

    Tuner.observe = faster  # type: ignore[method-assign]
    try:
        with patch.multiple("virtualflow.step.fusion_tuner", WARM_UP=0, ATTEMPTS=1, ROUNDS=1):
            yield
    finally:
        Tuner.observe = observe  # type: ignore[method-assign]


def train(kind: str, victim: str = "", **options: Any) -> Trained:
    """Train one of several kinds; tells the metrics of all steps, the weights, and the micro-batches' sizes."""
    with growing_at_once():
        return _train(kind, victim, options)


def _train(kind: str, victim: str, options: dict[str, Any]) -> Trained:
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    dataset: Any = Streamed() if kind == "stream" else data()
    told, sizes = [], []
    fixed = {"batch_size": BATCH, "steps": STEPS, "virtual_nodes": NODES, "seed": 2}
    with vf.elastic(model, optimizer, dataset, scheduler=scheduler, **fixed, **options) as run:
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x).flatten(), y)
                loss.backward()
                step.log(loss=loss, rows=float(len(x)), positive=(y > 0).double().mean())
                sizes.append(len(x))
                if step.number == 8 and victim:
                    die_here(victim)
            told.append((step.metrics["loss"], step.metrics["positive"]))
        assert "forward" not in vars(model[1]) or kind != "batch norm" or run._request.reproducibility == "statistical"
    assert "forward" not in vars(model[1])
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return trained(run, model, optimizer, told, {"weights": weights, "sizes": sizes})


def statistical(kind: str, victim: str, loaders: int = 0, batch_norm: str = "virtual-node") -> Trained:
    options: dict[str, Any] = {"num_workers": loaders} if loaders else {}
    return train(kind, victim, reproducibility="statistical", batch_norm=batch_norm, **options)


def assert_close(found: Trained, expected: Trained) -> None:
    for name, value in expected.more["weights"].items():
        torch.testing.assert_close(found.more["weights"][name], value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        torch.tensor(found.metrics, dtype=torch.float64),
        torch.tensor(expected.metrics[-len(found.metrics) :], dtype=torch.float64),
        rtol=1e-9,
        atol=1e-12,
    )


def check_audit(directory: Path) -> None:
    rows = list(merge_audit(path.read_text().splitlines() for path in directory.iterdir()))
    carried = Counter((row["step"], row["virtual_node"]) for row in rows)
    assert carried == Counter((step, node) for step in range(1, STEPS + 1) for node in range(NODES))
    for epoch in range(STEPS // 3):
        seen = [sample for row in rows if row["epoch"] == epoch for sample in row["samples"]]  # type: ignore[attr-defined]
        assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("plain", 2),
        ("batch norm", 3),
        ("stream", 3),
        *(nightly("plain", workers) for workers in (1, 3)),
        *(nightly(kind, workers) for kind in ("batch norm", "stream") for workers in (1, 2)),
    ],
)
def test_the_result_is_that_of_a_bitwise_job_but_for_rounding(
    kind: str, workers: int, tmp_path: Path, start_job: StartJob
) -> None:
    expected = alone(train, kind)
    job = start_job(statistical, kind, "", workers=workers, environment={ENV_AUDIT_DIR: str(tmp_path / "audit")})
    results = job.results()
    assert len(results) == workers
    assert len({(result.digest, result.optimizer) for result in results}) == 1
    assert_close(results[0], expected)
    assert max(expected.more["sizes"]) == 4
    if kind != "stream":
        # All that a worker carries, in the end.
        carried = {1: [32], 2: [16, 16], 3: [8, 12, 12]}[workers]
        assert sorted(max(result.more["sizes"]) for result in results) == carried
    if kind != "stream":
        check_audit(tmp_path / "audit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loaders", "exchange"),
    [
        ("batch norm", 0, "late"),
        ("stream", 1, "early"),
        nightly("plain", 0, "late"),
        nightly("stream", 0, "late"),
        nightly("plain", 1, "early"),
        nightly("batch norm", 1, "early"),
    ],
)
def test_a_resize_a_drain_and_a_kill_change_nothing_but_rounding(
    kind: str, loaders: int, exchange: str, tmp_path: Path, start_job: StartJob
) -> None:
    expected = alone(train, kind)
    environment = {ENV_AUDIT_DIR: str(tmp_path / "audit"), EXCHANGE: exchange}
    job = start_job(statistical, kind, "worker-1", loaders, workers=2, hold=3, environment=environment)
    job.reach(3)
    job.join()
    job.reach(5)
    job.drain("worker-0")
    job.reach(7)
    outcomes = job.finish()
    results = [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"]
    assert len(results) == 1, outcomes
    assert (exchange == "early") == any(BEGUN_EARLY in outcome.log for outcome in outcomes.values())
    assert_close(results[0], expected)
    assert max(results[0].more["sizes"]) > 8
    if kind != "stream":
        check_audit(tmp_path / "audit")


@pytest.mark.parametrize(("script", "kind"), [(train, "bitwise"), (statistical, "statistical")])
def test_the_status_says_which_of_the_two_a_job_is(
    script: Callable[..., Trained], kind: str, start_job: StartJob
) -> None:
    job = start_job(script, "plain", "", workers=1, hold=2)
    assert job.reach(2).reproducibility == kind
    job.results()


@pytest.mark.slow
def test_a_checkpoint_is_resumed_after_the_loss_of_all(tmp_path: Path, start_job: StartJob) -> None:
    expected = alone(train, "batch norm")
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints"), ENV_CHECKPOINT_STEPS: "4"}
    job = start_job(statistical, "batch norm", "", workers=2, hold=6, environment=environment)
    job.reach(6)
    job.await_checkpoint(4)
    job.kill_all()
    for _ in range(2):
        job.start_worker()
    results = job.results()
    assert len({result.digest for result in results}) == 1
    assert_close(results[0], expected)


def test_batch_norm_may_see_the_whole_micro_batch(start_job: StartJob) -> None:
    expected = alone(train, "batch norm")
    [result] = start_job(statistical, "batch norm", "", 0, "micro-batch", workers=1).results()
    difference = result.more["weights"]["0.weight"] - expected.more["weights"]["0.weight"]
    assert difference.abs().max() > 1e-6
    assert max(result.more["sizes"]) == 32


def test_a_batch_norm_that_cannot_be_split_keeps_virtual_nodes_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = alone(train, "foreign")
    result = alone(statistical, "foreign", "")
    assert_close(result, expected)
    assert max(result.more["sizes"]) == 4
    assert "1 is a Foreign with a forward of its own" in caplog.text
    assert 'pass batch_norm="micro-batch"' in caplog.text


@pytest.mark.parametrize(
    ("option", "environment", "most"),
    [
        pytest.param(None, None, 32, id="no cap"),
        pytest.param(3, None, 12, id="by the script"),
        pytest.param(4, "2", 8, id="by the environment"),
        pytest.param(1, None, 4, id="one by one"),
    ],
)
def test_a_cap_is_kept(option: int | None, environment: str | None, most: int) -> None:
    told = {} if environment is None else {ENV_MAX_FUSED: environment}
    result = alone(capped, option, environment=told)
    assert max(result.more["sizes"]) == most
    assert_close(result, alone(train, "plain"))


def capped(most: int | None) -> Trained:
    return train("plain", reproducibility="statistical", max_fused=most)


def test_a_collate_function_of_a_stream_keeps_virtual_nodes_apart() -> None:
    assert max(alone(collated).more["sizes"]) == 4


def collated() -> Trained:
    return train("stream", reproducibility="statistical", collate_fn=stacked)


def stacked(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reproducibility": "exact"}, 'reproducibility is \'exact\'; it must be "bitwise" or "statistical"'),
        ({"max_fused": 0}, "max_fused is 0; use 1 to run virtual nodes one by one"),
        ({"batch_norm": "ghost"}, 'batch_norm is \'ghost\'; it must be "virtual-node" or "micro-batch"'),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(vf.ConfigurationError, match=sentence):
        train("plain", **options)


def test_out_of_memory_says_what_to_do() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        alone(exhausted)
    assert caught.value.__notes__ == [
        "8 virtual nodes ran as one micro-batch; pass max_fused=4 to vf.elastic or set VIRTUALFLOW_MAX_FUSED=4"
    ]


def exhausted() -> None:
    model = model_of("plain")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"batch_size": BATCH, "steps": STEPS, "virtual_nodes": NODES}
    with growing_at_once(), vf.elastic(model, optimizer, data(), reproducibility="statistical", **options) as run:
        for step in run:
            for x, y in step:
                if len(x) > 16:
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory")
                F.mse_loss(model(x).flatten(), y).backward()


def test_the_process_is_left_without_a_trace_of_it() -> None:
    assert os.environ.get(ENV_MAX_FUSED) is None
