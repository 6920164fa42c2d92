"""A model of four times the memory trains block by block, to the bits of a run that has all of it, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import BEGUN_EARLY, EXCHANGE, ElasticJob, Trained, alone, die_here, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.memory.activations import layer_major
from virtualflow.memory.activations.chain import Carrier
from virtualflow.memory.activations.live_bytes import LiveBytes
from virtualflow.protocol.settings import ENV_WORKER

BLOCKS, WIDTH, STEPS = 24, 16, 6
BUDGET = 8_000


def build() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2))
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*inner, nn.Linear(WIDTH, 3))


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(44, WIDTH, generator=draw), torch.randint(0, 3, (44,), generator=draw))


def train(layers_on: str, victim: str = "", steps: int = STEPS) -> Trained:
    """The script; ``layers_on`` names the workers in layer-major order, and ``victim`` kills itself in step 5."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    by_layers = os.environ.get(ENV_WORKER, "worker-0") in layers_on
    memory = vf.Memory(BUDGET, order="layer-major") if by_layers else None
    arguments: dict[str, Any] = {"batch_size": 16, "steps": steps, "virtual_nodes": 8, "seed": 3, "memory": memory}
    with vf.elastic(model, optimizer, dataset(), **arguments, drop_last=True) as run:
        for step in run:

            def loss(output: Tensor, y: Tensor) -> Tensor:
                if step.number == 5:  # noqa: B023
                    die_here(victim)
                return F.cross_entropy(output, y)

            if by_layers:
                step.layer_major(loss)
                continue
            for x, y in step:
                value = loss(model(x), y)
                value.backward()
                step.log(loss=value)
    return trained(run, model, optimizer, repr(run.metrics))


@pytest.mark.slow
def test_the_device_never_holds_more_than_a_quarter_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    whole = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    last = sum(parameter.nbytes for parameter in model[-1].parameters())
    assert whole >= 4 * BUDGET
    carriers: list[Carrier] = []
    peaks: list[int] = []
    run = layer_major.LayerMajor.run
    read = layer_major.read_streams

    def counting(layers: layer_major.LayerMajor, *arguments: Any, **options: Any) -> Any:
        live = LiveBytes()

        def read_on_the_host(device: torch.device) -> Any:
            with live.pause():
                return read(device)

        monkeypatch.setattr(layer_major, "read_streams", read_on_the_host)
        with layers.carrier.seen_by(live):
            found = run(layers, *arguments, **options)
        carriers.append(layers.carrier)
        peaks.append(live.peak)
        return found

    reference = train("", steps=2)
    monkeypatch.setattr(layer_major.LayerMajor, "run", counting)
    assert train("worker-0", steps=2) == reference
    assert len(carriers) == 2
    assert max(peaks) <= BUDGET
    assert carriers[0].weight_bytes == 2 * (2 * whole - last)


@pytest.mark.slow
def test_it_is_the_same_through_a_kill_and_a_join_beside_workers_in_the_ordinary_order(
    start_job: Callable[..., ElasticJob],
) -> None:
    reference = alone(train, "")
    job = start_job(train, "worker-0 worker-1 worker-3", "worker-1", workers=3, hold=2, environment={EXCHANGE: "early"})
    job.reach(2)
    job.join()  # worker-3
    job.reach(4)
    outcomes = job.finish()
    results = {name: outcome.value for name, outcome in outcomes.items() if outcome.kind == "returned"}
    assert set(results) == {"worker-0", "worker-2", "worker-3"}, outcomes
    assert all(result == reference for result in results.values()), results
    assert all(BEGUN_EARLY in outcomes[name].log for name in ("worker-0", "worker-2"))
    assert "25 blocks run layer by layer" in outcomes["worker-3"].log


@pytest.mark.parametrize(
    ("order", "use", "sentence"),
    [
        ("layer-major", list, "has no micro-batches to iterate over"),
        ("node-major", lambda step: step.layer_major(F.cross_entropy), "belongs to a run with"),
        ("layer-major", lambda step: step.layer_major(lambda output, y: output), "must return a tensor of one number"),
    ],
    ids=["iterated over", "in the ordinary order", "no loss"],
)
def test_what_does_not_go_together_is_refused(order: Any, use: Callable[[Any], object], sentence: str) -> None:
    model = build()

    def script() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        memory = vf.Memory("1GiB", order=order)
        with vf.elastic(model, optimizer, dataset(), batch_size=16, steps=1, memory=memory) as run:
            for step in run:
                use(step)

    with pytest.raises(vf.ConfigurationError, match=sentence):
        script()
    assert torch.equal(model[0][1].running_mean, torch.zeros(WIDTH))  # type: ignore[index, union-attr]
