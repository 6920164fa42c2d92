"""What the library computes is what plain PyTorch computes: independent loops, written here, are the judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, alone
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import slow
from virtualflow.data.sampling import SamplePlan, split

SEED = 11
EPOCHS = 3
VIRTUAL_NODES = 8
BATCH = 16
SIZES = [32, 20, 37]
"""Samples: whole batches; a last one of 4, which four of eight virtual nodes get nothing of; and one of 5."""
RATE = 0.05


def data(size: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(size, 6, generator=draw)
    return TensorDataset(x, torch.randn(size, generator=draw))


def build(kind: str) -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(6, 1) if kind == "linear" else nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=0.01)


def copied(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def elastic(kind: str, size: int, shuffle: bool = True) -> list[tuple[float, list[Tensor]]]:
    """The script: the loss and the weights after each step."""
    model = build(kind)
    optimizer = build_optimizer(model)
    history = []
    with vf.elastic(
        model,
        optimizer,
        data(size),
        batch_size=BATCH,
        epochs=EPOCHS,
        virtual_nodes=VIRTUAL_NODES,
        seed=SEED,
        shuffle=shuffle,
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x).squeeze(1), y)
                loss.backward()
                step.log(loss=loss)
            history.append((step.metrics["loss"], copied(model)))
    return history


def batches(size: int, shuffle: bool) -> Iterator[list[int]]:
    """The samples of each global batch, in order."""
    plan = SamplePlan(size, BATCH, SEED, shuffle, False)
    for epoch in range(EPOCHS):
        for epoch_step in range(plan.steps_per_epoch):
            yield [
                index
                for node in range(VIRTUAL_NODES)
                for index in plan.indices(epoch, epoch_step, node, VIRTUAL_NODES).tolist()
            ]


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def full_batches(kind: str, size: int, shuffle: bool) -> list[tuple[float, list[Tensor]]]:
    """Whole global batches in one pass, as one process would without virtual nodes."""
    model = build(kind)
    optimizer = build_optimizer(model)
    x, y = data(size).tensors
    history = []
    for indices in batches(size, shuffle):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[indices]).squeeze(1), y[indices])
        loss.backward()
        optimizer.step()
        history.append((loss.item(), copied(model)))
    return history


def accumulated(kind: str, size: int, shuffle: bool) -> list[list[Tensor]]:
    """Gradient accumulation in the documented order; SGD is written out, too."""
    model = build(kind)
    x, y = data(size).tensors
    micro = BATCH // VIRTUAL_NODES
    velocity: list[Tensor] | None = None
    history = []
    for indices in batches(size, shuffle):
        nodes: list[list[Tensor]] = []
        for part in torch.tensor(indices).split(split(len(indices), VIRTUAL_NODES)):
            if not len(part):
                nodes.append([torch.zeros_like(parameter) for parameter in model.parameters()])
                continue
            loss = F.mse_loss(model(x[part]).squeeze(1), y[part])
            nodes.append([gradient * (len(part) / micro) for gradient in torch.autograd.grad(loss, model.parameters())])
        total = [gradient * (micro / len(indices)) for gradient in tree(nodes, 0, VIRTUAL_NODES)]
        with torch.no_grad():
            gradients = [g.add(p, alpha=0.01) for g, p in zip(total, model.parameters(), strict=True)]
            velocity = (
                gradients if velocity is None else [v * 0.9 + g for v, g in zip(velocity, gradients, strict=True)]
            )
            for parameter, change in zip(model.parameters(), velocity, strict=True):
                parameter.add_(change, alpha=-RATE)
        history.append(copied(model))
    return history


def tree(nodes: list[list[Tensor]], left: int, right: int) -> list[Tensor]:
    if right - left == 1:
        return nodes[left]
    middle = (left + right) // 2
    return [a + b for a, b in zip(tree(nodes, left, middle), tree(nodes, middle, right), strict=True)]


def assert_close(found: list[tuple[float, list[Tensor]]], wanted: list[tuple[float, list[Tensor]]]) -> None:
    assert len(found) == len(wanted)
    for (loss, weights), (reference_loss, reference) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(reference_loss, rel=1e-4)
        for tensor, other in zip(weights, reference, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-5)


def assert_equal(found: list[tuple[float, list[Tensor]]], wanted: list[list[Tensor]]) -> None:
    assert len(found) == len(wanted)
    for number, ((_, weights), reference) in enumerate(zip(found, wanted, strict=True), 1):
        for tensor, other in zip(weights, reference, strict=True):
            assert torch.equal(tensor.view(torch.int32), other.view(torch.int32)), f"step {number}"


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_alone_it_trains_like_full_batches_and_exactly_like_accumulation(kind: str, size: int, shuffle: bool) -> None:
    with one_thread():
        found = alone(elastic, kind, size, shuffle)
        assert_close(found, full_batches(kind, size, shuffle))
        assert_equal(found, accumulated(kind, size, shuffle))


@pytest.mark.parametrize("size", [*map(slow, SIZES[:-1]), SIZES[-1]], ids=str)
def test_three_workers_train_like_full_batches_and_exactly_like_accumulation(
    size: int, start_job: Callable[..., ElasticJob]
) -> None:
    results = start_job(elastic, "mlp", size, workers=3).results()
    assert len(results) == 3
    with one_thread():
        for found in results:
            assert_close(found, full_batches("mlp", size, True))
            assert_equal(found, accumulated("mlp", size, True))


def test_every_epoch_goes_through_all_samples_once_and_in_another_order() -> None:
    orders = list(batches(20, True))
    epochs = [orders[at] + orders[at + 1] for at in range(0, 2 * EPOCHS, 2)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS
