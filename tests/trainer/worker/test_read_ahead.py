"""Micro-batches that were fetched before their turn are a cache: what a step computes on, and how often, stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_samples import BATCH, NODES, SIZE, Augmented, opened, plan_of
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import examples
from virtualflow.data import MicroBatch, Source, chunks
from virtualflow.worker.loading import Loading, Staging

EPOCHS = 2
STEPS_PER_EPOCH = -(-SIZE // BATCH)


@dataclass
class Width:
    """Stands for the fusion of virtual nodes."""

    width: int = 1

    def assign(self, assigned: range) -> None:
        """Take note of nothing."""


@dataclass
class Position:
    """Stands for the training."""

    position: tuple[int, int] = (0, 0)
    completed_steps: int = 0
    last_step: int | None = None

    @property
    def is_over(self) -> bool:
        """See there."""
        return self.position[0] >= EPOCHS

    def advance(self) -> None:
        """A step is committed."""
        epoch, step = self.position
        self.completed_steps += 1
        self.position = (epoch, step + 1) if step + 1 < STEPS_PER_EPOCH else (epoch + 1, 0)


class Beside(Staging):
    """Sends ahead as for a device that computes by itself."""

    beside = True  # type: ignore[assignment]


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(float(SIZE)), torch.randn(SIZE, 16, generator=torch.Generator().manual_seed(1)))


class Counted:
    """A source that counts what it is asked for."""

    def __init__(self, source: Source) -> None:
        self.source, self.fetched = source, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def fetch(self, *place: int) -> MicroBatch:
        """Count."""
        self.fetched += 1
        return self.source.fetch(*place)


def loading(source: Any, staging: Staging | None, width: int = 1) -> tuple[Loading, Position]:
    position = Position()
    return Loading(source, Width(width), position, staging), position  # type: ignore[arg-type]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([1, 2, 3]))
def test_each_fetch_gives_what_the_samples_are_now_whatever_was_fetched_before(
    script: int, beside: bool, width: int
) -> None:
    """Resizes, aborted attempts, other workers' virtual nodes in between, and a script that writes to its samples."""
    draw, data, plan = random.Random(script), rows(), plan_of()
    with opened(data, epochs=EPOCHS) as source:
        read, training = loading(source, Beside(None) if beside else None, width)

        def some_range() -> range:
            first = draw.randrange(NODES)
            return range(first, draw.randint(first + 1, NODES))

        def compute(nodes: range) -> None:
            epoch, step = training.position
            batch = read.fetch(nodes)
            wanted = plan.indices(epoch, step, nodes.start, NODES, len(nodes))
            assert batch.samples == tuple(wanted.tolist())
            if len(wanted):
                assert all(torch.equal(got, of[wanted]) for got, of in zip(batch.data, data.tensors, strict=True))
                for tensor in batch.data:
                    tensor.zero_()  # it is the script's
            if read.copies_beside:
                read.send_ahead(nodes)

        assigned = range(NODES)
        read.enter(assigned)
        while not training.is_over:
            while draw.random() < 0.3:
                for nodes in chunks(assigned, width)[: draw.randint(0, NODES)]:
                    compute(nodes)
                if draw.random() < 0.5:
                    read.read_ahead()
                if draw.random() < 0.5:
                    assigned = some_range()
                read.enter(assigned)
            if draw.random() < 0.2:
                compute(range(draw.randrange(NODES), NODES)[:1])  # of another worker, to check it
            for nodes in chunks(assigned, width):
                compute(nodes)
            read.read_ahead()
            training.advance()
            if draw.random() < 0.2:
                data.tensors[1].add_(1.0)
            if draw.random() < 0.1:
                data.tensors = (data.tensors[0], data.tensors[1] * 2.0)


@pytest.mark.parametrize("beside", [True, False], ids=["to a device", "on the host"])
def test_the_first_micro_batch_of_a_step_is_there_before_the_step(beside: bool) -> None:
    with opened(rows()) as source:
        counted = Counted(source)
        read, training = loading(counted, Beside(None) if beside else None)
        read.enter(range(2))
        for node in range(2):
            read.fetch(range(node, node + 1))
            if read.copies_beside:
                read.send_ahead(range(node, node + 1))
        read.read_ahead()
        before = counted.fetched
        training.advance()
        read.fetch(range(1))
        assert counted.fetched == before == 3


def test_who_begins_again_fetches_again() -> None:
    with opened(rows()) as source:
        counted = Counted(source)
        read, _ = loading(counted, Beside(None))
        for before in (0, 2):
            read.enter(range(2))
            assert counted.fetched == before
            read.fetch(range(1))
            read.send_ahead(range(1))
        assert counted.fetched == 4


@pytest.mark.parametrize(
    ("dataset", "options", "fetched"),
    [
        pytest.param(Augmented, {}, 2, id="the user's code in this process: nothing"),
        pytest.param(Augmented, {"num_workers": 1}, 2, id="loader processes: the rest of the step"),
        pytest.param(rows, {}, 3, id="rows of tensors: the next step, too"),
    ],
)
def test_only_what_runs_none_of_the_users_code_here_is_fetched_before_its_turn(
    dataset: Callable[[], Any], options: dict[str, Any], fetched: int
) -> None:
    with opened(dataset(), **options) as source:
        counted = Counted(source)
        read, _ = loading(counted, Beside(None))
        read.enter(range(2))
        early = []
        for node in range(2):
            read.fetch(range(node, node + 1))
            before = counted.fetched
            read.send_ahead(range(node, node + 1))
            early.append(counted.fetched - before)
        assert counted.fetched == fetched
        assert early[0] == (0 if source.early == "nothing" else 1)


def test_nothing_is_fetched_beyond_the_end_of_an_epoch() -> None:
    with opened(rows()) as source:
        counted = Counted(source)
        read, training = loading(counted, None)
        training.position = (0, STEPS_PER_EPOCH - 1)
        read.enter(range(1))
        read.fetch(range(1))
        read.read_ahead()
        assert counted.fetched == 1


# --- a job ------------------------------------------------------------------------------------------------------------


def relabelling(kill_at: int = 0, victim: str = "") -> Trained:
    """A script that writes to its samples after each step, as one that labels them anew does."""
    torch.manual_seed(0)
    data = TensorDataset(*(torch.randn(44, 6, generator=torch.Generator().manual_seed(n)) for n in range(2)))
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 6))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with vf.elastic(
        model, optimizer, data, batch_size=12, steps=12, virtual_nodes=6, device="cpu", state={"labels": Labels(data)}
    ) as run:
        for step in run:
            for place, (x, y) in enumerate(step):
                F.mse_loss(model(x), y).backward()
                if place == 1 and step.number == kill_at:
                    die_here(victim)
            if step.number % 3 == 0:
                data.tensors[1].mul_(0.5)
    return trained(run, model, optimizer)


class Labels:
    """Lets a joiner have the labels that the others have."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def state_dict(self) -> dict[str, Any]:
        """The labels."""
        return {"labels": self.data.tensors[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        self.data.tensors[1].copy_(state["labels"])


@pytest.mark.slow
def test_a_job_that_grows_and_loses_a_worker_comes_to_the_bits_of_one_worker(
    start_job: Callable[..., ElasticJob],
) -> None:
    reference = alone(relabelling)
    job = start_job(relabelling, 7, "worker-1", workers=2, hold=3)
    job.reach(3)
    job.join()
    outcomes = job.finish()
    results = [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"]
    assert results == [reference, reference], outcomes


def test_a_device_that_the_model_is_not_on_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(vf.ConfigurationError, match="the model is on cpu; move the model there"):
        vf.elastic(model, optimizer, rows(), batch_size=2, steps=1, virtual_nodes=2, device="meta").__enter__()
    with pytest.raises(vf.ConfigurationError, match=r"device is 'cdua'; pass a device of torch"):
        vf.elastic(model, optimizer, rows(), batch_size=2, steps=1, device="cdua")


def test_a_default_device_is_refused_and_a_context_for_the_model_is_not() -> None:
    with torch.device("meta"):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(
            vf.ConfigurationError, match=r"make the model under 'with torch\.device\('meta'\):' instead"
        ):
            vf.elastic(model, optimizer, rows(), batch_size=2, steps=1, virtual_nodes=2).__enter__()
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, rows(), batch_size=2, steps=1, virtual_nodes=2) as run:
        for step in run:
            for _, x in step:
                model(x).sum().backward()
