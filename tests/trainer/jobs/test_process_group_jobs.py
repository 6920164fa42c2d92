"""Jobs whose gradients travel over groups of torch's: the bits of own connections, through all that can happen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import MEMBERSHIP, ElasticJob, Trained, alone, is_here, trained
from identities import identities
from injected import inject
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import slow
from virtualflow.transport import GroupCollectives, Message, Pending

NODES, STEPS = 8, 10

Wish = dict[str, Any]
"""Of the exchange."""


def train(wish: Wish, victim: str = "", end: int = signal.SIGKILL, **options: Any) -> Trained:
    """The script: ``victim`` ends when it has begun to send the 20th of its messages, in one of the last steps."""
    inject(reduction={"bucket": 256, "one_by_one": 0})
    if is_here(victim):
        end_in_messages(20, end)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(96, 6, generator=draw), torch.randint(0, 3, (96,), generator=draw))
    exchange = vf.Exchange(**wish)
    with vf.elastic(
        model, optimizer, data, batch_size=32, steps=STEPS, virtual_nodes=NODES, exchange=exchange, **options
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
    return trained(run, model, optimizer, dict(run.metrics))


def end_in_messages(number: int, end: int) -> None:
    start, started = GroupCollectives.start_messages, [0]

    def starting(groups: GroupCollectives, messages: Sequence[Message]) -> Pending:
        started[0] += 1
        if started[0] == number:
            start(groups, messages[: len(messages) // 2])
            os.kill(os.getpid(), end)
        return start(groups, messages)

    GroupCollectives.start_messages = starting  # type: ignore[method-assign]


def train_with(wish: Wish, options: dict[str, Any]) -> Trained:
    return train(wish, **options)


WISHES: dict[str, Wish] = {
    "in slices": {"algorithm": "reduce-scatter", "overlap": False},
    "in slices, beside the backward pass": {"algorithm": "reduce-scatter", "overlap": True},
    "gathered": {"algorithm": "gather", "overlap": False},
    "gathered, beside the backward pass": {"algorithm": "gather", "overlap": True},
}
SOME = [*map(slow, list(WISHES)[:3]), list(WISHES)[3]]


@pytest.fixture(scope="module")
def undisturbed() -> Trained:
    found: Trained = alone(train, {})
    return found


@pytest.mark.parametrize(
    ("workers", "way"),
    [
        (1, "in slices"),
        slow(2, "in slices"),
        (3, "in slices, beside the backward pass"),
        (2, "gathered, beside the backward pass"),
        slow(3, "gathered"),
    ],
)
def test_gloo_gives_the_bits_of_one_worker_and_of_own_connections(
    workers: int, way: str, undisturbed: Trained, start_job: Callable[..., ElasticJob]
) -> None:
    wish = WISHES[way]
    assert start_job(train, wish | {"backend": "gloo"}, workers=workers).results() == [undisturbed] * workers
    if workers == 3:
        assert start_job(train, wish, workers=workers).results() == [undisturbed] * workers


def test_gloo_gives_the_same_bits_where_states_are_divided(
    undisturbed: Trained, start_job: Callable[..., ElasticJob]
) -> None:
    found = start_job(train_with, {"overlap": True, "backend": "gloo"}, {"shard_optimizer": True}, workers=3).results()
    assert [one.digest for one in found] == [undisturbed.digest] * 3


@pytest.mark.parametrize("way", SOME)
def test_workers_join_and_leave_over_gloo(way: str, undisturbed: Trained, start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train, WISHES[way] | {"backend": "gloo"}, workers=1, hold=2)
    job.reach(2)
    job.join(2)
    job.reach(5)
    job.drain("worker-0")
    assert job.results() == [undisturbed] * 2


@pytest.mark.parametrize("way", SOME)
@pytest.mark.parametrize("workers", [2, slow(3)])
def test_a_worker_is_killed_in_an_exchange_over_gloo(
    workers: int, way: str, undisturbed: Trained, start_job: Callable[..., ElasticJob]
) -> None:
    job = start_job(train, WISHES[way] | {"backend": "gloo"}, "worker-1", workers=workers)
    assert job.results() == [undisturbed] * (workers - 1)


@pytest.mark.parametrize("way", SOME)
def test_a_worker_is_stopped_in_an_exchange_over_gloo_and_no_other_hangs(
    way: str, undisturbed: Trained, start_job: Callable[..., ElasticJob]
) -> None:
    membership = replace(MEMBERSHIP, heartbeat_limit=1.0)
    wish = WISHES[way] | {"backend": "gloo"}
    job = start_job(train, wish, "worker-1", signal.SIGSTOP, workers=3, membership=membership)
    job.wait_for(lambda status: bool(status.lost), "the word that it is lost")
    os.kill(job.workers["worker-1"].process.pid, signal.SIGKILL)
    assert job.results() == [undisturbed] * 2


def test_the_wish_of_the_first_worker_holds_for_all(undisturbed: Trained, start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train_by_name, workers=2)
    found = job.results()
    assert [one.more for one in found] in (["gloo", "gloo"], [None, None])
    assert [replace(one, more=None) for one in found] == [undisturbed] * 2


def train_by_name() -> Trained:
    """One of the two asks for gloo, and both tell what they have come to."""
    found: list[Any] = []
    from virtualflow.reduction import Reducer

    agree = Reducer.agree

    def listening(reducer: Reducer, *arguments: Any, **options: Any) -> None:
        agree(reducer, *arguments, **options)
        found.append(reducer.terms.exchange.backend)

    Reducer.agree = listening  # type: ignore[method-assign]
    told = train({"backend": "gloo" if is_here("worker-0") else None})
    return replace(told, more=found[-1])


def test_a_job_that_seals_what_it_sends_refuses_before_it_trains(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    job = start_job(train, {"backend": "gloo"}, workers=1, parties=identities(tmp_path))
    (outcome,) = job.finish().values()
    assert outcome.kind == "ConfigurationError"
    assert "start the job in plaintext" in outcome.text


@pytest.mark.parametrize(
    ("wish", "options", "says"),
    [
        pytest.param({"backend": "mpi"}, {}, 'it must be "gloo", "nccl", or None', id="a name that is none"),
        pytest.param({"backend": "nccl"}, {}, "leave backend out", id="NCCL for a model on the CPU"),
        pytest.param({"backend": "gloo"}, {"shard": "parameters"}, "leave one of the two out", id="divided parameters"),
    ],
)
def test_what_cannot_be_is_refused_before_a_worker_takes_part(
    wish: Wish, options: dict[str, Any], says: str, start_job: Callable[..., ElasticJob]
) -> None:
    job = start_job(train_with, wish, options, workers=1)
    (outcome,) = job.finish().values()
    assert outcome.kind == "ConfigurationError"
    assert says in outcome.text
