"""What gradients take beside the model and the optimizer, counted in bytes of living tensors.

The formulas are those of docs/explanation/performance.md, "Memory": while a range of n virtual nodes is computed, one
gradient for each level of its subtree, and for the exchange one per sum that the worker sends and its slice of those of
all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import log2

import pytest
import torch
from elastic_jobs import ElasticJob, alone
from injected import inject, injected
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.reduction.settings import Exchange

WIDTH = 384
"""So that a quarter of the gradient is no small message, which travels in a copy."""
GRADIENT = 4 * WIDTH * WIDTH
SLACK = 24_000
"""Bytes of everything else: the samples of a step, losses, step headers, the ends of messages."""


def living() -> int:
    """Bytes of the memory behind all tensors that Python can reach."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def train(virtual_nodes: int) -> list[list[int]]:
    """For each step: what lives beside the model before each micro-batch, and after the last."""
    inject(reduction={"exchange": Exchange("reduce-scatter", overlap=True)})
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    dataset = TensorDataset(torch.zeros(2 * virtual_nodes, WIDTH))
    steps = []
    gc.collect()
    with vf.elastic(model, optimizer, dataset, batch_size=virtual_nodes, steps=6, virtual_nodes=virtual_nodes) as run:
        before = living()
        for step in run:
            seen = []
            for (x,) in step:
                optimizer.zero_grad()  # what the last step has left to look at
                seen.append(living() - before)
                model(x).square().mean().backward()
            seen.append(living() - before)
            if step.number > 3:
                steps.append(seen)
    return steps


def gradients(count: float) -> pytest.approx:  # type: ignore[valid-type]
    return pytest.approx(count * GRADIENT, abs=SLACK)


@pytest.mark.nightly
def test_alone_there_is_one_gradient_for_each_level_of_the_tree() -> None:
    with injected():
        steps = alone(train, 8)
    for seen in steps:
        # Before virtual node v there are as many sums as v has binary digits that are one; in the end there is one.
        assert seen == [gradients(v.bit_count()) for v in range(8)] + [gradients(1)]
        assert max(v.bit_count() for v in range(8)) == log2(8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "sums"), [(2, [1, 1]), (4, [1, 1, 1, 1]), (3, [2, 2, 1])], ids=["halves", "quarters", "unaligned"]
)
def test_an_exchange_takes_what_is_sent_and_what_is_received(
    workers: int, sums: list[int], start_job: Callable[..., ElasticJob]
) -> None:
    # Three workers move_state 0-2, 3-5 and 6-7: [0, 2) [2, 3), [3, 4) [4, 6), [6, 8).
    outcomes = start_job(train, 8, workers=workers).finish()
    counts = [8 // workers + (rank < 8 % workers) for rank in range(workers)]
    for rank in range(workers):
        for seen in outcomes[f"worker-{rank}"].value:
            buffers = sums[rank] + sum(sums) / workers
            levels = 2 * max(1, log2(counts[rank]))
            assert seen[-1] == gradients(buffers)
            assert max(seen) <= (buffers + levels) * GRADIENT + SLACK
