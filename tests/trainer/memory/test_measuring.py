"""What is measured of a block: its own time, and apart from it what computing it again takes beside that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from virtualflow.memory import Action, BlockPlan
from virtualflow.memory.activations import ActivationSettings, ChainMeasurement, visits
from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.executor import Executor
from virtualflow.memory.activations.ledger import Kept
from virtualflow.memory.activations.measuring import Probe
from virtualflow.reduction import Precision

CPU = torch.device("cpu")
SETTINGS = ActivationSettings(probe=1 << 16, copies=1)


class Watch:
    """A clock that stands still but for what is said to take time."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def take(self, seconds: float) -> None:
        self.seconds += seconds


class Slow(nn.Module):
    """A second forward, two backward."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.watch = [watch]

    def forward(self, x: Tensor) -> Tensor:
        self.watch[0].take(1.0)
        made = self.linear(x)
        made.register_hook(lambda gradient: self.watch[0].take(2.0))
        return torch.sin(made)


@pytest.mark.parametrize(
    ("actions", "overhead"),
    [
        # To note what the block finds, to put it back, and to put away what it saves.
        pytest.param("rrr", [0.25 + 0.5 + 0.125] * 3, id="recomputed"),
        pytest.param("rkr", [0.25 + 0.5 + 0.125, 0.0, 0.25 + 0.5 + 0.125], id="one of them is kept"),
    ],
)
def test_time_beside_computing_is_the_overhead_of_what_is_computed_again(
    actions: str, overhead: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()

    class Surroundings(visits.Surroundings):
        def __init__(self, module: nn.Module, device: torch.device) -> None:
            super().__init__(module, device)
            watch.take(0.25)

        @contextmanager
        def again(self) -> Iterator[None]:
            watch.take(0.5)
            with super().again():
                yield

    class Slot(visits.Slot):
        def __init__(self, segment: visits.Segment, visit: visits.Visit, kept: Kept | None) -> None:
            super().__init__(segment, visit, kept)
            watch.take(0.125 / SAVED)

    monkeypatch.setattr(visits, "Surroundings", Surroundings)
    monkeypatch.setattr(visits, "Slot", Slot)
    model = nn.Sequential(nn.Linear(8, 8), *(Slow(watch) for _ in range(3)))
    blocks, _ = find_blocks(model, ["1", "2", "3"])
    executor = Executor(model, blocks, CPU)
    probe = executor.observer = Probe(model, blocks, CPU, watch, again=False)
    plans = {"r": Action.RECOMPUTE, "k": Action.KEEP}
    executor.follow([BlockPlan(plans[each], block if each == "r" else None) for block, each in enumerate(actions)])
    for _ in range(3):
        executor.begin()
        model(torch.randn(4, 8)).sum().backward()
        probe.end_micro_batch()
    executor.close()
    found = probe.size(4, 1).blocks
    assert [block.forward_seconds for block in found] == pytest.approx([1.0] * 3)
    assert [block.backward_seconds for block in found] == pytest.approx([2.0] * 3)
    assert [block.overhead_seconds for block in found] == pytest.approx(overhead)


SAVED = 2
"""Tensors that a block saves and computes again: what enters its linear layer, and its sine."""


class Spoiling(nn.Module):
    """Changes its input in place, so that it cannot be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu_(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("dtype", "sums", "come"), [(None, 144, None), (torch.float32, 288, 144)], ids=str)
def test_sums_count_in_the_type_that_they_have(dtype: torch.dtype | None, sums: int, come: int | None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    model[0].requires_grad_(False)
    measurement = ChainMeasurement(model, CPU, None, SETTINGS, precision=Precision(dtype))
    with measurement.size(4) as done:
        for _ in range(3):
            model(torch.randn(4, 8).bfloat16()).square().sum().backward()
            done()
    chain = measurement.finish(lambda: 0)
    assert chain is not None
    assert (chain.sum_bytes, chain.gradient_bytes) == (sums, come)


def test_a_profile_is_made_of_a_model_that_cannot_be_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    def gradients(measured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Spoiling(), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        x = torch.randn(4, 8)
        if not measured:
            model(x).square().sum().backward()
        else:
            measurement = ChainMeasurement(model, CPU, None, SETTINGS)
            with measurement.size(4) as done:
                for _ in range(3):
                    model.zero_grad()
                    model(x).square().sum().backward()
                    done()
            chain = measurement.finish(lambda: 0)
            assert chain is not None
            _, spoiling, _ = chain.sizes[0].blocks
            assert spoiling.boundary_bytes > 0
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    with caplog.at_level(logging.WARNING):
        assert all(map(torch.equal, gradients(True), gradients(False)))
    assert [record.message for record in caplog.records] == [
        "memory: block 1 changes its input in place, so it cannot be computed again; build it with inplace=False, or "
        "name larger blocks: vf.Memory(..., blocks=[...])"
    ]
