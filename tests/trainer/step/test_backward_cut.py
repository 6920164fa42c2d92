"""Backward passes that end early: the gradients of plain PyTorch with a detach at the cut, for less memory and work.

The reference computes each virtual node by itself, on a model without hooks. Workers are threads over collectives in
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from activation_models import FAMILIES
from counted_memory import CountedMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_collectives import take_seats, together
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import virtualflow as vf
from tiers import examples, nightly
from virtualflow.data import MicroBatch, seed_virtual_node
from virtualflow.memory.activations import find_blocks
from virtualflow.protocol.messages import NO_GENERATION
from virtualflow.reduction import choose_summation
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.state import digests
from virtualflow.step import Attempt, BackwardCut, OptimizerOptions, Update

WIDTH, BLOCKS, NODES, MICRO_BATCH = 6, 4, 6, 2
RANGES = {1: [6], 2: [4, 6], 3: [1, 3, 6], 5: [1, 2, 4, 5, 6]}
"""Where the range of each worker ends."""


class Net(nn.Module):
    """A stem, blocks with something between two of them, and a head that shares the stem's weight if it is ``tied``."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.first = nn.ModuleList(self._block() for _ in range(BLOCKS - 1))
        self.between = nn.LayerNorm(WIDTH)
        self.last = nn.Sequential(self._block(), self._block())[:1]
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.stem.weight

    @staticmethod
    def _block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.first, *self.last]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.first:
            x = block(x)
        return self.head(self.last(self.between(x)))  # type: ignore[no-any-return]


def build(*, tied: bool = False) -> Net:
    torch.manual_seed(1)
    return Net(tied=tied)


@contextmanager
def within(cut: BackwardCut, node: int, step: int) -> Iterator[None]:
    """A virtual node runs, to its end or not."""
    attempt = Attempt(step, batch=MicroBatch(node, None, ()))
    cut.before_pass(attempt)
    try:
        yield
        cut.after_pass(attempt)
    finally:
        cut.abandon()


def cut_for(model: Net, backward: vf.PartialBackward, nodes: int = NODES) -> BackwardCut:
    names = {id(module): name for name, module in model.named_modules()}
    return BackwardCut(model, [(names[id(block)], block) for block in model.blocks], backward, nodes)


def test_which_virtual_nodes_reach_what_follows_from_the_step() -> None:
    cut = cut_for(build(), vf.PartialBackward((1, 0.5), full_every=4), nodes=4)
    names, found = [name for name, _ in build().named_parameters()], {}
    for step in (1, 2, 3, 4):
        cut.begin(Attempt(step))
        found[step] = cut.reach()
    assert found[4] is None, "all passes are whole"
    assert found[1] is found[3]
    for step, deep in ((1, {1, 3}), (2, {0, 2})):
        reach = dict(zip(names, found[step] or (), strict=True))
        assert reach["stem.weight"] == reach["first.0.0.weight"] == reach["first.1.1.bias"] == deep
        assert reach["first.2.0.weight"] == reach["between.weight"] == reach["head.bias"] == {0, 1, 2, 3}


def test_work_is_by_blocks_until_they_were_measured() -> None:
    cut = cut_for(build(), vf.PartialBackward((1, 0.5), rotate=False), nodes=4)
    assert cut.work(range(4), 1) == pytest.approx(2 + 2 * 2 / 3)
    cut.costs = replace(cut.costs, seconds=[(1e-3, 5e-3), (1e-3, 1e-3), (1e-3, 1e-3), (1e-3, 1e-3)])
    assert cut.work(range(4), 1) == pytest.approx(2 + 2 * 0.5)
    assert [one.cost for one in cut.classes()] == pytest.approx([1, 0.5])


def batch(step: int, node: int, samples: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(100 * step + node))


# --- gradients --------------------------------------------------------------------------------------------------------


def plain_gradients(model: Net, x: Tensor, depth: int | None) -> dict[str, Tensor | None]:
    """One virtual node's, whose backward pass reaches so many blocks, ``None`` for everything."""
    model.zero_grad()
    cut = 0 if depth is None else BLOCKS - depth
    with torch.set_grad_enabled(depth is None):
        x = model.stem(x)
    for index, block in enumerate(model.blocks):
        with torch.set_grad_enabled(depth is None or index >= cut):
            x = block(x.detach() if depth is not None and index == cut else x)
            if index == BLOCKS - 2:
                x = model.between(x)
    model.head(x).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_mean_over_those_that_reach_a_parameter_goes_by_what_they_weigh() -> None:
    model = build()
    cut = cut_for(model, vf.PartialBackward((1, 0.5), rotate=False))
    cut.begin(Attempt(1))
    factors = cut.factors({0: 0.5, 1: 3.0, 2: 0.0, 3: 7.25, 4: 1.0, 5: 2.0})
    names = [name for name, _ in model.named_parameters()]
    assert factors[names.index("stem.weight")] == 13.75 / 3.5
    assert names.index("head.weight") not in factors


def depth_of(fraction: float) -> int | None:
    return None if fraction == 1 else max(1, int(fraction * BLOCKS + 0.5))


def expected(
    backward: vf.PartialBackward, step: int, samples: Sequence[int], *, tied: bool
) -> dict[str, Tensor | None]:
    """The reduced gradients of a step by the definition: sums in the order of the tree, over whom they are means of."""
    model, of_node = build(tied=tied), []
    for node, count in enumerate(samples):
        depth = depth_of(backward.fraction(step, node, len(samples)))
        grads = plain_gradients(model, batch(step, node, count), depth) if count else {}
        of_node.append({name: None if g is None else g.clone() for name, g in grads.items()})
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        terms: dict[tuple[int, int], Tensor] = {}
        for node, count in enumerate(samples):
            grad = of_node[node].get(name)
            term = torch.zeros_like(parameter) if grad is None else grad * (count / MICRO_BATCH)
            terms[node, node + 1] = term
        total = choose_summation(len(samples), "bitwise").add_up(terms, torch.add) * (MICRO_BATCH / sum(samples))
        reached = sum(n for n, grads in zip(samples, of_node, strict=True) if grads.get(name) is not None)
        if backward.scale == "mean" and reached not in (0, sum(samples)):
            total = total * (sum(samples) / reached)
        found[name] = total if reached else None
    return found


def update_of(model: Net, backward: vf.PartialBackward, reduction: ReductionSettings, **options: Any) -> Update:
    return Update(
        model,
        OptimizerOptions(torch.optim.SGD(model.parameters(), 0.1), **options),
        choose_summation(NODES, "bitwise"),
        micro_batch=MICRO_BATCH,
        reduction=reduction,
        cut=cut_for(model, backward),
    )


def reduced_gradients(
    backward: vf.PartialBackward,
    samples: Mapping[int, Sequence[int]],
    workers: int,
    *,
    tied: bool = False,
    reduction: ReductionSettings | None = None,
) -> list[dict[int, dict[str, Tensor | None]]]:
    """What each worker comes to in each step; the weights stay as they are."""
    stops = RANGES[workers]
    holdings = [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    seats, models = take_seats(workers), [build(tied=tied) for _ in stops]

    def work(rank: int) -> dict[int, dict[str, Tensor | None]]:
        model, found = models[rank], {}
        update = update_of(model, backward, reduction or ReductionSettings())
        cut = update.cut
        assert cut is not None
        update.enter()
        before = copy.deepcopy(model.state_dict())
        for step, counts in samples.items():
            update.begin(holdings[rank], max(map(len, holdings)))
            cut.begin(Attempt(step))
            for node in holdings[rank]:
                count = counts[node]
                if node == holdings[rank][-1]:
                    update.sync.expect_last(seats[rank], holdings, count, sum(counts))
                else:
                    update.sync.expect(count)
                if count:
                    with within(cut, node, step):
                        model(batch(step, node, count)).square().mean().backward()
                update.sync.take(count, {})
            reduced = update.synchronize(seats[rank], holdings, step, NO_GENERATION, more=True)
            names = [name for name, _ in model.named_parameters()]
            gradients = zip(names, reduced.gradients, strict=True)
            found[step] = {name: None if g is None else g.clone() for name, g in gradients}
            update.apply(reduced, epoch_ends=False)
            model.load_state_dict(before)
        update.close()
        return found

    told = together(seats, work)
    return [each for each in told if each is not None]


def assert_equal(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        other = found[name]
        assert (other is None) == (value is None), name
        if value is not None and other is not None:
            assert torch.equal(other, value), name


FRACTIONS = st.lists(st.sampled_from([1, 0.75, 0.5, 0.25, 0.1]), min_size=1, max_size=5)
COUNTS = st.lists(st.sampled_from([0, 2, 2, 2, 3]), min_size=NODES, max_size=NODES).filter(any)


@settings(max_examples=examples(40), deadline=None)
@given(
    fractions=FRACTIONS,
    rotate=st.booleans(),
    scale=st.sampled_from(["mean", "sum"]),
    full_every=st.sampled_from([None, 2]),
    counts=st.lists(COUNTS, min_size=2, max_size=2),
    workers=st.sampled_from(list(RANGES)),
    tied=st.booleans(),
)
def test_gradients_are_those_of_plain_pytorch_that_detaches_at_the_cut(
    fractions: list[float],
    rotate: bool,
    scale: Any,
    full_every: int | None,
    counts: list[list[int]],
    workers: int,
    tied: bool,
) -> None:
    if full_every is None and 1 not in fractions:
        fractions = [*fractions, 1]
    backward = vf.PartialBackward(fractions, rotate=rotate, scale=scale, full_every=full_every)
    samples = dict(enumerate(counts, start=1))
    wanted = {step: expected(backward, step, of_step, tied=tied) for step, of_step in samples.items()}
    for found in reduced_gradients(backward, samples, workers, tied=tied):
        for step in samples:
            assert_equal(found[step], wanted[step])


@pytest.mark.parametrize("one_by_one", [0, 1 << 30], ids=["one by one", "in buckets"])
@pytest.mark.parametrize("workers", [2, nightly(3), nightly(5)])
def test_gradients_that_set_out_early_are_the_same(workers: int, one_by_one: int) -> None:
    """In the third step the reduction begins with what the second one had, and some of that does not come."""
    early = ReductionSettings(exchange=Exchange("reduce-scatter", overlap=True), bucket=64, one_by_one=one_by_one)
    backward = vf.PartialBackward((1, 0.5, 0.25, 0.25), full_every=2)
    samples = {step: [MICRO_BATCH] * NODES for step in range(1, 6)}
    wanted = {step: expected(backward, step, counts, tied=False) for step, counts in samples.items()}
    for found in reduced_gradients(backward, samples, workers, reduction=early):
        for step in samples:
            assert_equal(found[step], wanted[step])


@contextmanager
def detached_outputs(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Another way to the same cut: whatever these return has no graph."""

    def detach(module: nn.Module, arguments: Any, output: Any) -> Any:
        return (output[0].detach(), *output[1:]) if isinstance(output, tuple) else output.detach()

    handles = [module.register_forward_hook(detach) for module in modules]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_models_of_all_families_end_where_they_should(name: str, recomputed: bool) -> None:
    """Masks, tuples, skips over blocks, parametrized weights; some recompute what they run."""
    if recomputed and name == "drawing":
        pytest.skip("its buffers do not allow for it")
    model, family = FAMILIES[name].build(), FAMILIES[name]
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    blocks, _ = find_blocks(model, family.blocks)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        model.load_state_dict(state)
        model.zero_grad()
        seed_virtual_node(3, 1, 0)
        run(x).square().mean().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    stem = [module for module in (getattr(model, "stem", None), getattr(model, "embed", None)) if module is not None]
    for fraction in (0.2, 0.6, 1.0):
        reached = len(blocks) if fraction == 1 else int(fraction * len(blocks) + 0.5)
        before = [] if fraction == 1 else [*stem, *(block for _, block in blocks[: len(blocks) - reached])]
        with detached_outputs(model, before):
            wanted = gradients(model)
        cut = BackwardCut(model, blocks, vf.PartialBackward((1, fraction)), 2)
        node = 0 if fraction == 1 else 1
        with within(cut, node, 2):
            through = partial(checkpoint, model, use_reentrant=False) if recomputed else model
            found = gradients(through)
        cut.check([gradient is not None for gradient in found])
        cut.close()
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)


# --- memory and work --------------------------------------------------------------------------------------------------


def counted(fraction: float, rows: int = 32, width: int = 16, length: int = 8) -> tuple[int, int]:
    """Bytes that autograd has saved beside parameters and the samples, and multiplications of the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(length)))
    blocks, _ = find_blocks(model, None)
    cut = BackwardCut(model, blocks, vf.PartialBackward((1, fraction)), 2)
    x = torch.randn(rows, width)
    kept = {tensor.untyped_storage().data_ptr() for tensor in [x, *model.parameters()]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with within(cut, 0 if fraction == 1 else 1, 2), saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).sum()
        with FlopCounterMode(display=False) as flops:
            loss.backward()
    cut.close()
    return sum(size for storage, size in saved.items() if storage not in kept), flops.get_total_flops()


@pytest.mark.parametrize(("fraction", "reached"), [(1, 8), (0.75, 6), (0.5, 4), (0.25, 2), (0.1, 1)])
def test_memory_and_work_are_what_the_reached_blocks_take(fraction: float, reached: int) -> None:
    """A block saves what it returns, which enters the next one; the first that is reached saves what enters it, too.

    A linear layer multiplies twice in the backward pass, and that first one only once: nobody wants to know the
    gradient of what entered it.
    """
    rows, width, length = 32, 16, 8
    boundary, product = rows * width * 4, 2 * rows * width * width
    entering = 0 if reached == length else 1
    assert counted(fraction) == ((reached + entering) * boundary, (2 * reached - 1) * product)


# --- in a training ----------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "whole": dict,
    "clipped": lambda: {"clip_norm": 0.01},
    "sharded and clipped": lambda: {"shard_copies": 2, "clip_norm": 0.01},
    "on the host": lambda: {"host": CountedMemory()},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_all_ways_to_step_come_to_one_model(options: Callable[[], dict[str, Any]]) -> None:
    """Of five steps, with exchanges that begin early; on the host gradients are nothing before they have arrived."""
    backward = vf.PartialBackward((1, 0.25, 0.5), full_every=4)
    early = ReductionSettings(exchange=Exchange("reduce-scatter", overlap=True), bucket=64, one_by_one=0, norm_block=16)

    def train(workers: int) -> list[str | None]:
        stops = RANGES[workers]
        holdings = [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
        seats, models = take_seats(workers), [build() for _ in stops]

        def work(rank: int) -> str:
            update = update_of(models[rank], backward, early, **options())
            cut = update.cut
            assert cut is not None
            if update.shards is not None:
                update.shards.enter(rank, workers)
            update.enter()
            for step in range(1, 6):
                update.begin(holdings[rank], max(map(len, holdings)))
                cut.begin(Attempt(step))
                for node in holdings[rank]:
                    if node == holdings[rank][-1]:
                        update.sync.expect_last(seats[rank], holdings, MICRO_BATCH, NODES * MICRO_BATCH)
                    else:
                        update.sync.expect(MICRO_BATCH)
                    with within(cut, node, step):
                        models[rank](batch(step, node, MICRO_BATCH)).square().mean().backward()
                    update.sync.take(MICRO_BATCH, {})
                reduced = update.synchronize(seats[rank], holdings, step, NO_GENERATION, more=True)
                update.apply(reduced, epoch_ends=False)
            update.close()
            return digests.digest(models[rank].state_dict())

        return together(seats, work)

    found = {workers: train(workers) for workers in (1, 2, 3)}
    assert {digest for of in found.values() for digest in of} == {found[1][0]}
    assert None not in found[1]
