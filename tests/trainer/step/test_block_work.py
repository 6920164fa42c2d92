"""What fractions of backward passes are of: work that every worker counts alike, without computing anything."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import virtualflow as vf
from virtualflow.errors import ConfigurationError
from virtualflow.step import BackwardCut
from virtualflow.step.block_work import work_of


class Uneven(nn.Module):
    """Convolutions that become smaller and get more channels, with buffers, dropout and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4 * 2**number, 8 * 2**number, 3, 1 + number % 2, 1),
                nn.BatchNorm2d(8 * 2**number),
                nn.Dropout(0.5),
            )
            for number in range(4)
        )
        self.scale = torch.full((1,), 0.5)
        self.calls = 0

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x * self.scale)
        if twice:
            x = self.blocks[3][0](x[:, :32]) if x.shape[1] == 32 else self.blocks[3](x[:, :32])
        return x.mean() + torch.zeros(()) + torch.arange(3).sum()


def ratios(counted: Sequence[int]) -> list[float]:
    return [each / sum(counted) for each in counted]


def of_plain_run(model: nn.Module, blocks: Sequence[nn.Module], x: Tensor) -> list[int]:
    """By computing: a block's input is the former one's output."""
    counted = []
    for block in blocks:
        with FlopCounterMode(display=False) as flops:
            x = block(x)
        counted.append(flops.get_total_flops())
    return counted


@pytest.mark.parametrize("samples", [1, 3])
def test_operations_are_those_of_a_run(samples: int) -> None:
    model, x = Uneven(), torch.randn(samples, 4, 16, 16)
    blocks = list(model.blocks)
    found = work_of(model, blocks, x)
    assert ratios(found) == pytest.approx(ratios(of_plain_run(model, blocks, x)))
    assert len(set(found)) > 1
    assert found == work_of(model, blocks, (x,)) == work_of(model, blocks, {"x": x})
    assert found == work_of(model, blocks, torch.empty(7, 4, 16, 16, device="meta")), "the same of any batch"


def test_a_block_that_is_called_twice_counts_twice() -> None:
    model, x = Uneven(), torch.randn(1, 4, 16, 16)
    once, twice = (work_of(model, list(model.blocks), {"x": x, "twice": twice}) for twice in (False, True))
    assert twice[3] / twice[0] > once[3] / once[0]


def test_parameters_are_counted_and_blocks_are_alike() -> None:
    blocks = [nn.Linear(3, 4), nn.Linear(4, 8), nn.Linear(8, 12)]
    model = nn.Sequential(*blocks)
    assert work_of(model, blocks, "blocks") == (1, 1, 1)
    assert work_of(model, blocks, "parameters") == (4, 10, 27)  # of 16, 40 and 108
    assert work_of(model, blocks, torch.randn(2, 3)) == (3, 8, 24)


def test_counting_leaves_no_trace() -> None:
    model, x, called = Uneven(), torch.randn(2, 4, 16, 16), []
    model.blocks[1].register_forward_hook(lambda *_: called.append(1))
    before, hooks = copy.deepcopy(model.state_dict()), [len(block._forward_hooks) for block in model.blocks]
    torch.manual_seed(3)
    streams = torch.get_rng_state()
    work_of(model, list(model.blocks), x)
    assert torch.equal(torch.get_rng_state(), streams)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.calls, called) == (0, [])
    assert [len(block._forward_hooks) for block in model.blocks] == hooks
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("blocks", "of", "sentence"),
    [
        ([nn.Linear(3, 4), nn.Linear(4, 3)], torch.randn(2, 5), r"does not run with the example .* of=.parameters"),
        ([nn.Linear(3, 4), nn.Linear(4, 3)], {"y": torch.randn(2, 3)}, "does not run with the example"),
        ([nn.LayerNorm(3), nn.LayerNorm(3)], torch.randn(2, 3), "no matrix product and no convolution in the 2 blocks"),
    ],
    ids=["another width", "another name", "nothing that is counted"],
)
def test_an_example_that_says_nothing_is_refused(blocks: list[nn.Module], of: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        work_of(nn.Sequential(*blocks), blocks, of)


def layers_of(widths: Sequence[int]) -> list[nn.Module]:
    return [nn.Linear(one, other) for one, other in pairwise(widths)]


def cut_of(layers: Sequence[nn.Module], of: Any, fractions: Sequence[float] = (1, 0.67, 0.34)) -> BackwardCut:
    backward = vf.PartialBackward(fractions, of=of)
    return BackwardCut(
        nn.Sequential(*layers), [(str(n), each) for n, each in enumerate(layers)], backward, len(fractions)
    )


def test_a_job_is_another_one_only_if_its_passes_end_elsewhere() -> None:
    even, uneven = layers_of([8] * 7), layers_of([64, 64, 8, 8, 8, 8, 8])
    same = {cut_of(even, of).description for of in ("blocks", "parameters", torch.randn(2, 8))}
    assert same == {"rotating fractions 1.0, 0.67, 0.34, mean, of 0, 1, 2, 3, 4, 5"}
    assert cut_of(uneven, "blocks").description == same.pop()
    assert cut_of(uneven, "parameters").description.endswith(", of 0, 1, 2, 3, 4, 5, the last 6, 6, 5")
    assert cut_of(uneven, torch.randn(2, 64)).description == cut_of(uneven, "parameters").description


def convolutions(channels: Sequence[int]) -> list[nn.Module]:
    return [
        nn.Sequential(nn.Conv2d(one, other, 3, 1 if one == 3 else 2, 1), nn.ReLU(), nn.Conv2d(other, other, 3, 1, 1))
        for one, other in pairwise(channels)
    ]


@pytest.mark.parametrize(
    ("blocks", "example", "fraction", "shares"),
    [
        (layers_of([8] * 7), torch.zeros(1, 8), 0.67, [0.67, 0.67, 0.67]),
        (convolutions([3, 32, 64, 128, 256]), torch.zeros(1, 3, 32, 32), 0.67, [0.80, 0.27, 0.54]),
        (convolutions([3, 32, 64, 128, 256]), torch.zeros(1, 3, 32, 32), 0.34, [0.27, 0.27, 0.27]),
        (layers_of([1024, *(1024 >> n for n in range(7))]), torch.zeros(1, 1024), 0.67, [0.10, 0.40, 0.40]),
    ],
    ids=["alike", "convolutions", "convolutions, a third", "layers that become narrower"],
)
def test_the_work_that_a_pass_reaches_is_what_the_page_says(
    blocks: list[nn.Module], example: Tensor, fraction: float, shares: list[float]
) -> None:
    """The table of docs/how-to/partial-backward.md."""
    work = of_plain_run(nn.Sequential(*blocks), blocks, example)
    found = []
    for of in ("blocks", "parameters", example):
        cut = cut_of(blocks, of, (1, fraction))
        found.append(sum(work[cut.cut(1, 2) :]) / sum(work))
    assert found == pytest.approx(shares, abs=0.006)
