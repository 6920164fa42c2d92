"""Each worker may have a memory plan of its own: the result is that of a run without one, through kill and resize."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from activation_models import FAMILIES
from benchmarks.throttled_copies import Clock, ThrottledCopies
from elastic_jobs import EXCHANGE, ElasticJob, Trained, alone, die_here, trained
from injected import inject
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.memory.activations import planned
from virtualflow.protocol.http_api import MemoryReport
from virtualflow.protocol.settings import ENV_ACTIVATIONS, ENV_DEVICE_MEMORY, ENV_OPTIMIZER_PLACEMENT, ENV_WORKER

MEMORY: dict[str, dict[str, Any]] = {
    "worker-0": {"device": "1GiB", "activations": "swap"},
    "worker-1": {"device": "1GiB", "activations": "recompute"},
    "worker-2": {"device": 60_000, "host": "1GiB", "activations": "auto"},
    "worker-3": {"device": "1GiB", "activations": "keep"},
    "worker-4": {"device": 75_000, "host": "1GiB", "activations": "auto"},
    "worker-5": {"device": "1GiB", "activations": "swap"},
}
SMALL = {"worker-0": {"device": "1GiB"}, "worker-1": {"device": "10KiB"}}
"""The second worker's memory is too small for any plan."""


BANDWIDTH = 2e6
"""Of copies that take time, in bytes a second: those of a block then take longer than the block."""


def train(memory: vf.Memory | Literal["each", "small"] | None, victim: str = "", copying: str = "") -> Trained:
    """The script; ``victim`` kills itself in the middle of its micro-batches of step 7.

    ``copying``: ``slow``: copies take time beside the computation, in this process from now on.
    """
    copies = [ThrottledCopies(Clock(wall=True), BANDWIDTH)]
    if copying == "slow":
        inject(activations={"probe": 1 << 16, "copies": 1})
        planned.open_copies = lambda device: copies[0]
    torch.manual_seed(0)
    model = FAMILIES["convolutional"].build()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(64, 3, 8, 8, generator=draw), torch.randint(0, 3, (64,), generator=draw))
    if isinstance(memory, str):
        memory = vf.Memory(**{"each": MEMORY, "small": SMALL}[memory][os.environ.get(ENV_WORKER, "worker-0")])
    with vf.elastic(model, optimizer, data, batch_size=32, steps=10, virtual_nodes=8, seed=3, memory=memory) as run:
        for step in run:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
                if step.number == 7:
                    die_here(victim)
    lanes = tuple(sorted({each.lane for each in copies[0].carried}))
    return trained(run, model, optimizer, repr(run.metrics), lanes if copying else None)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [nightly("late"), "early"])
def test_four_workers_with_four_plans_come_to_the_bits_of_none(
    exchange: str, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, None)
    assert alone(train, "each") == reference
    job = start_job(train, "each", "worker-1", workers=4, hold=4, environment={EXCHANGE: exchange})
    job.reach(4)
    job.join()  # worker-4
    outcomes = job.finish()
    results = {name: outcome.value for name, outcome in outcomes.items() if outcome.kind == "returned"}
    assert set(results) == {"worker-0", "worker-2", "worker-3", "worker-4"}, outcomes
    assert all(result == reference for result in results.values())
    logs = {name: outcome.log for name, outcome in outcomes.items()}
    assert "every block: swap" in logs["worker-0"]
    assert "every block: keep" in logs["worker-3"]
    for name in ("worker-2", "worker-4"):
        assert re.search(r"the 5 modules in blocks; to keep everything takes .* [1-4] stay", logs[name])
    assert job.status().memory == MemoryReport(4, 4, 3, "worker-0", "every block: swap")


@pytest.mark.parametrize("exchange", [nightly("early")])
def test_four_plans_with_copies_that_take_time_come_to_the_bits_of_none(
    exchange: str, start_job: Callable[..., ElasticJob]
) -> None:
    """What a copy brings is no number until it is over: whoever used it before would not come to these bits."""
    reference = alone(train, None)
    job = start_job(train, "each", "worker-1", "slow", workers=4, hold=2, environment={EXCHANGE: exchange})
    job.reach(2)
    job.join()  # worker-4
    job.reach(4)
    job.drain("worker-3")
    job.reach(5)
    job.join()  # worker-5, which has the first one's plan
    job.reach(6)  # worker-1 kills itself in the step that follows
    outcomes = job.finish()
    results = {name: outcome.value for name, outcome in outcomes.items() if outcome.kind == "returned"}
    assert set(results) == {"worker-0", "worker-2", "worker-4", "worker-5"}, outcomes
    assert {replace(result, more=None) for result in results.values()} == {reference}
    assert results["worker-0"].more == results["worker-5"].more == ("in", "out")
    assert "every block: swap" in outcomes["worker-5"].log


@pytest.mark.parametrize(
    ("activations", "sentence"),
    [("auto", "the smallest budget that works is"), ("swap", "to swap every block takes .* of the device's memory")],
)
def test_a_budget_that_is_too_small_is_said_with_what_would_do(activations: str, sentence: str) -> None:
    with pytest.raises(vf.ConfigurationError, match=sentence):
        train(vf.Memory("10KiB", activations=activations))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "activations", "report"),
    [
        pytest.param("1000000000", "Swap", MemoryReport(1, 1, 1, "worker-0", "every block: swap"), id="swapped"),
        pytest.param("1000000000", "Auto", MemoryReport(1, 1, 0), id="kept"),
    ],
)
def test_a_job_tells_of_the_plan_that_its_environment_asks_for(
    budget: str, activations: str, report: MemoryReport, start_job: Callable[..., ElasticJob]
) -> None:
    environment = {ENV_DEVICE_MEMORY: budget, ENV_ACTIVATIONS: activations}
    job = start_job(train, None, workers=1, environment=environment)
    job.results()
    assert job.status().memory == report


@pytest.mark.slow
def test_a_job_that_does_not_fit_fails_with_what_would(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train, None, workers=1, environment={ENV_DEVICE_MEMORY: "10240"})
    job.finish()
    status = job.status()
    assert (status.phase, status.does_not_fit) == ("failed", True)
    assert re.match(r"the model does not fit into 10.0 KiB .*: the smallest budget that works is", status.error or "")


@pytest.mark.slow
def test_a_worker_whose_memory_is_too_small_is_refused_alone_and_the_others_come_to_the_same_bits(
    start_job: Callable[..., ElasticJob],
) -> None:
    job = start_job(train, "small", workers=2)
    outcomes = job.finish()
    assert outcomes["worker-1"].kind == "DoesNotFit", outcomes
    sentence = r"the model does not fit into 10.0 KiB .*: the smallest budget that works is"
    assert re.match(sentence, outcomes["worker-1"].text)
    assert outcomes["worker-0"].value == alone(train, None)
    status = job.status()
    assert (status.phase, status.does_not_fit) == ("done", False)
    assert status.repeated_steps <= 1
    assert [(lost.worker, lost.does_not_fit, lost.ended) for lost in status.lost] == [("worker-1", True, True)]
    assert re.match(sentence, status.lost[0].reason)


def test_an_optimizer_of_the_device_does_not_go_with_layer_major_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_OPTIMIZER_PLACEMENT, "Device")
    with pytest.raises(vf.ConfigurationError, match="in layer-major order the optimizer steps on the host"):
        train(vf.Memory("1GiB", order="layer-major"))
