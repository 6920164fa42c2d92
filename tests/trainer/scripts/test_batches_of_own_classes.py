"""Micro-batches of a script's own class: the first step computes one twice, each time as it was read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf


@dataclass
class Batch:
    x: Tensor
    y: Tensor

    def normalise(self) -> Batch:
        self.x = self.x / 2 + 0.1
        return self


class Uncopied(Batch):
    def __deepcopy__(self, memo: object) -> Batch:
        raise TypeError("it holds an open file")


def changes_in_place(kind: type[Batch], in_place: bool) -> Trained:
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))

    def collate(samples: list[tuple[Tensor, Tensor]]) -> Batch:
        return kind(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))

    with vf.elastic(model, optimizer, data, batch_size=12, steps=4, virtual_nodes=4, collate_fn=collate) as run:
        for step in run:
            for batch in step:
                x = batch.normalise().x if in_place else batch.x
                F.mse_loss(model(x), batch.y).backward()
    return trained(run, model, optimizer)


@pytest.mark.parametrize(("kind", "in_place"), [(Batch, True), (Uncopied, False)], ids=["changed", "not to be copied"])
def test_a_batch_of_the_scripts_own_class_is_given_twice_as_it_was(
    start_job: Callable[..., ElasticJob], kind: type[Batch], in_place: bool
) -> None:
    job = start_job(changes_in_place, kind, in_place, workers=2)
    assert job.results() == [alone(changes_in_place, kind, in_place)] * 2
