"""Batch norm over each virtual node's samples of a larger micro-batch: as if they had run one by one."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from virtualflow.errors import VirtualFlowError
from virtualflow.step.microbatch_fusion import GhostBatchNorm

SIZES = [
    pytest.param((4, 4, 4), id="equal"),
    pytest.param((5, 4, 3), id="of several sizes"),
    pytest.param((7,), id="one virtual node"),
    pytest.param((2,) * 6, id="many small ones"),
]

KINDS = {
    "vectors": (lambda: nn.BatchNorm1d(3), (3,)),
    "sequences": (lambda: nn.BatchNorm1d(3), (3, 5)),
    "images": (lambda: nn.BatchNorm2d(3), (3, 2, 4)),
    "volumes": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
    "without weights": (lambda: nn.BatchNorm1d(3, affine=False), (3,)),
    "a cumulative average": (lambda: nn.BatchNorm1d(3, momentum=None), (3,)),
    "only the latest statistics": (lambda: nn.BatchNorm1d(3, momentum=1.0), (3,)),
    "without running statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
}


def rows_of(shape: Sequence[int], samples: int) -> Tensor:
    return 3.0 * torch.randn(samples, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 1.0


def prepared(kind: str) -> nn.Module:
    """A batch norm that has seen something before."""
    build, shape = KINDS[kind]
    module: nn.Module = build().double()  # type: ignore[no-untyped-call]
    if module.weight is not None:
        torch.nn.init.uniform_(module.weight, generator=torch.Generator().manual_seed(1))
    module(torch.randn(6, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    return module


def one_by_one(kind: str, rows: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[nn.Module]]:
    """Outputs of virtual nodes by themselves, and the module of each."""
    modules = [prepared(kind) for _ in sizes]
    parts = rows.split(list(sizes))
    return torch.cat([module(part) for module, part in zip(modules, parts, strict=True)]), modules


def averaged(modules: Sequence[nn.Module], sizes: Sequence[int], name: str) -> Tensor:
    """A buffer, averaged by samples; of an integer one the first."""
    values = [dict(module.named_buffers())[name] for module in modules]
    if not values[0].is_floating_point():
        return values[0]
    return torch.stack([v * n for v, n in zip(values, sizes, strict=True)]).sum(0) / sum(sizes)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_micro_batch_gives_what_its_virtual_nodes_give(kind: str, sizes: tuple[int, ...]) -> None:
    rows = rows_of(KINDS[kind][1], sum(sizes))
    module = prepared(kind)
    expected_input = rows.clone().requires_grad_()
    expected, apart = one_by_one(kind, expected_input, sizes)
    given = rows.clone().requires_grad_()
    ghost = GhostBatchNorm(module)
    ghost.sizes = sizes
    found = module(given)
    assert ghost.obstacle is None
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    torch.testing.assert_close(given.grad, expected_input.grad)
    for mine, *others in zip(module.parameters(), *(each.parameters() for each in apart), strict=True):
        torch.testing.assert_close(mine.grad, sum(other.grad for other in others))
    for name, value in module.named_buffers():
        torch.testing.assert_close(value, averaged(apart, sizes, name))
    if len(sizes) > 1:
        assert not torch.allclose(found, prepared(kind)(rows))


def test_in_evaluation_mode_nothing_changes() -> None:
    rows = rows_of((3,), 12)
    expected = prepared("vectors").eval()(rows)
    module = prepared("vectors").eval()
    GhostBatchNorm(module).sizes = (4, 4, 4)
    assert torch.equal(module(rows), expected)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = [dict(vars(module)) for module in model]
    ghost = GhostBatchNorm(model)
    assert "forward" in vars(model[1])
    ghost.undo()
    for module, attributes in zip(model, before, strict=True):
        assert vars(module).keys() == attributes.keys()


def test_copies_made_meanwhile_have_batch_norms_of_their_own() -> None:
    model = nn.Sequential(prepared("vectors"))
    ghost = GhostBatchNorm(model)
    ghost.sizes = (2, 2)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    rows = rows_of((3,), 8)
    for copied in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        former = model.state_dict()["0.running_mean"].clone()
        expected = prepared("vectors")
        assert torch.equal(copied(rows), expected(rows))
        assert torch.equal(copied[0].running_mean, expected.running_mean)
        assert torch.equal(model.state_dict()["0.running_mean"], former)
        again = GhostBatchNorm(copied)
        assert again.obstacle is None
        again.sizes = (4, 4)
        assert not torch.allclose(copied(rows), expected(rows))


def test_kinds_with_a_forward_of_their_own_are_an_obstacle() -> None:
    class Peculiar(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
            return super().forward(input) + 1

    for module, name in ((Peculiar(3), "Peculiar"), (nn.SyncBatchNorm(3), "SyncBatchNorm")):
        model = nn.Sequential(nn.Linear(3, 3), module)
        ghost = GhostBatchNorm(model)
        assert ghost.obstacle == f"1 is a {name} with a forward of its own"
        assert "forward" not in vars(module)


def test_an_input_with_other_rows_than_samples_is_an_obstacle_before_it_can_be_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    ghost = GhostBatchNorm(model)
    ghost.sizes = (4,)
    model(rows_of((3,), 8).float())
    assert ghost.obstacle == "batch norm 0 gets 8 rows for 4 samples"
    ghost.sizes = (4, 4)
    with pytest.raises(VirtualFlowError, match=r"16 rows for a micro-batch of 8 samples.*max_fused=1"):
        model(rows_of((3,), 16).float())
