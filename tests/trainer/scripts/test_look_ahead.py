"""A script that asks for the next micro-batch before it has run backward for the one before is told so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.step import LOOKS_AHEAD

Compute = Callable[[Tensor, Tensor], Any]


def train(loop: Callable[[Any, Compute], Any], **options: Any) -> nn.Module:
    """Train a small model by a loop over each step's micro-batches, of which there are eight."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    with vf.elastic(model, torch.optim.SGD(model.parameters(), 0.05), data, batch_size=16, steps=3, **options) as run:
        for step in run:
            loop(step, lambda x, y: F.mse_loss(model(x), y).backward())
    return model


def early(batches: Iterable[Any], depth: int = 1) -> Iterator[Any]:
    """A prefetcher: some micro-batches are in hand when the first one is handed out."""
    source = iter(batches)
    waiting = list(islice(source, depth))
    while waiting:
        waiting += islice(source, 1)
        yield waiting.pop(0)


def a_prefetcher(step: Any, compute: Compute) -> None:
    for batch in early(step):
        compute(*batch)


def a_deep_prefetcher(step: Any, compute: Compute) -> None:
    for batch in early(step, 5):
        compute(*batch)


def the_last_one_marked(step: Any, compute: Compute) -> None:
    now = None
    for following in step:
        if now is not None:
            compute(*now)
        now = following
    if now is not None:
        compute(*now)


def a_prefetcher_behind_the_first_one(step: Any, compute: Compute) -> None:
    batches = iter(step)
    compute(*next(batches))
    for batch in early(batches):
        compute(*batch)


def pairs(step: Any, compute: Compute) -> None:
    for one, other in pairwise(step):
        compute(*map(torch.cat, zip(one, other, strict=True)))


def pairs_of_one_iterator(step: Any, compute: Compute) -> None:
    batches = iter(step)
    for one, other in zip(batches, batches, strict=True):
        compute(*map(torch.cat, zip(one, other, strict=True)))


LOOPS = [
    a_prefetcher,
    a_deep_prefetcher,
    the_last_one_marked,
    a_prefetcher_behind_the_first_one,
    pairs,
    pairs_of_one_iterator,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_is_found_in_the_first_step(loop: Callable[[Any, Compute], None]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        train(loop)
    assert str(caught.value) == LOOKS_AHEAD


def test_it_is_found_where_loader_processes_load() -> None:
    with pytest.raises(ConfigurationError, match="asks for the next micro-batch"):
        train(a_prefetcher, num_workers=1)


def over_all_steps() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data, optimizer = TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), torch.optim.SGD(model.parameters(), 0.05)
    with vf.elastic(model, optimizer, data, batch_size=16, steps=3, virtual_nodes=1) as run:
        for x, y in early(batch for step in run for batch in step):
            F.mse_loss(model(x), y).backward()


def test_it_is_found_across_the_end_of_a_step() -> None:
    with pytest.raises(ConfigurationError, match="asks for the next micro-batch"):
        over_all_steps()


def everything_first(step: Any, compute: Compute) -> None:
    for batch in list(step):
        compute(*batch)


def two_loops(step: Any, compute: Compute) -> None:
    for one, _ in zip(step, step, strict=True):
        compute(*one)


def another_thread(step: Any, compute: Compute) -> None:
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            next(iter(step))
        except VirtualFlowError as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    raise failed[0]


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        pytest.param(everything_first, r"no parameter got a gradient.*list\(step\)", id="a list of all"),
        pytest.param(two_loops, r"two loops iterate over one step.*zip\(step, step\)", id="two loops"),
        pytest.param(another_thread, "another thread than .* as prefetchers do", id="a thread"),
    ],
)
def test_what_cannot_be_right_is_refused_at_once(loop: Callable[[Any, Compute], None], sentence: str) -> None:
    with pytest.raises(VirtualFlowError, match=sentence):
        train(loop)


@pytest.mark.parametrize("skipped", [lambda y: y.mean() > 0.2, lambda y: y.mean() < -0.5], ids=["most", "few"])
def test_a_script_that_skips_micro_batches_trains_on_the_others(skipped: Callable[[Tensor], Tensor]) -> None:
    seen: list[int] = []

    def leave_out(step: Any, compute: Compute) -> None:
        for x, y in step:
            seen.append(bool(skipped(y)))
            if not skipped(y):
                compute(x, y)

    def weigh_as_nothing(step: Any, compute: Compute) -> None:
        for x, y in step:
            compute(x, y)
            if skipped(y):
                for parameter in model.parameters():
                    parameter.grad = None

    model = nn.Linear(8, 1)
    left_out = train(leave_out)
    assert any(seen)
    assert not all(seen)
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    with vf.elastic(model, torch.optim.SGD(model.parameters(), 0.05), data, batch_size=16, steps=3) as run:
        for step in run:
            weigh_as_nothing(step, lambda x, y: F.mse_loss(model(x), y).backward())
    assert torch.equal(left_out.get_parameter("weight"), model.weight)


def test_peeking_at_a_micro_batch_and_beginning_again_is_no_look_ahead() -> None:
    def peek(step: Any, compute: Compute) -> None:
        shape = next(iter(step))[0].shape
        for x, y in step:
            assert x.shape == shape
            compute(x, y)

    def plain(step: Any, compute: Compute) -> None:
        for batch in step:
            compute(*batch)

    assert torch.equal(train(peek).get_parameter("weight"), train(plain).get_parameter("weight"))


def test_several_workers_name_it_too(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train, a_prefetcher, workers=2)
    told = [outcome.text for outcome in job.finish().values() if outcome.kind == "ConfigurationError"]
    assert told
    assert set(told) == {LOOKS_AHEAD}
