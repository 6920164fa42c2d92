"""A sharded optimizer: each worker keeps its share, and perhaps one other's, and the bits are those of a whole one."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from broken_collectives import HASTY, Counting, break_collective, regression, train_steps
from elastic_jobs import EXCHANGE, ElasticJob, Trained, alone, die_here
from injected import injected
from own_optimizers import BlockwiseMomentum, Lion
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import needs_newer, nightly, slow
from virtualflow.errors import CommunicatorBroken, ConfigurationError
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS, ENV_WORKER, Redundancy
from virtualflow.state import digests, transfer
from virtualflow.step.share_states import ShareStates
from virtualflow.transport.channel import Lane
from virtualflow.transport.communicator import Communicator
from virtualflow.worker.options import check_redundancy
from virtualflow.worker.resharding import Resharding


class Deep(nn.Module):
    """Parameters of many sizes, one of which is frozen and one tied, and buffers that are averaged and copied."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.counting = Counting()
        self.layers = nn.ModuleList(nn.Linear(width, 1) for width in (1, 7, 3, 16, last))
        self.layers[1].weight.requires_grad_(False)
        self.tied = nn.Linear(last, 1, bias=False)
        self.tied.weight = self.layers[4].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [*self.layers, self.tied]
        return self.counting(x) + sum(layer(x[:, :1].expand(-1, layer.in_features)).sum(1) for layer in layers)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, and biases do not."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
    ]


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(groups(model), 0.1),
    "Lion": lambda model: Lion(model.parameters(), 0.01, betas=(0.9, 0.99)),
    "blocks": lambda model: BlockwiseMomentum(model.parameters(), 1e-3, block=8),
}


def train(
    victim: str = "",
    number: int = 0,
    how: str = "",
    clip: float | None = None,
    sharded: bool = True,
    steps: int = 4,
    last: int = 5,
    make: str = "AdamW",
    redundancy: Redundancy = "peer",
) -> Trained:
    """Some steps with an evaluation between; the learning rate is changed by hand, which no checkpoint would see.

    The ``last`` layer's width may be so large that it is cut. ``make`` names the optimizer.
    """
    torch.manual_seed(1)
    break_collective(victim, number, how)
    model = Deep(last)
    optimizer = MAKERS[make](model)
    kept = []

    def after_step() -> None:
        kept.append(len(optimizer.state))
        if ENV_CHECKPOINT_DIR not in os.environ:
            optimizer.param_groups[0]["lr"] *= 0.7

    with (
        patch.multiple(transfer, STRIPE=16, PIECE=64),
        injected(reduction={"norm_block": 4}),
        vf.elastic(
            model,
            optimizer,
            regression(),
            batch_size=12,
            steps=steps,
            virtual_nodes=6,
            clip_grad_norm=clip,
            clip_grad_value=None if clip is None else 0.9,
            shard_optimizer=sharded,
            redundancy=redundancy,
        ) as run,
    ):
        told = train_steps(run, model, optimizer, after_step)
    whole = digests.optimizer_digest(optimizer) if run.leader else ""
    return Trained(digests.digest(model.state_dict()), whole, told, kept)


def check(results: list[Trained], reference: Trained) -> None:
    """All have the reference's weights and metrics, and one of them its optimizer."""
    for result in results:
        (metrics, rates), (wanted, rates_of_all) = result.metrics, reference.metrics
        assert (result.digest, metrics) == (reference.digest, wanted)
        assert rates == rates_of_all[len(rates_of_all) - len(rates) :], "a joiner has seen the last of them"
    assert [result.optimizer for result in results if result.optimizer] == [reference.optimizer]


@pytest.mark.parametrize(
    ("workers", "clip", "exchange"),
    [
        (2, None, "late"),
        (3, 0.5, "early"),
        nightly(4, None, "early"),
        slow(4, 0.5, "late"),
        *(nightly(2, *rest) for rest in [(None, "early"), (0.5, "late"), (0.5, "early")]),
        *(nightly(3, *rest) for rest in [(None, "late"), (None, "early"), (0.5, "late")]),
        *(nightly(4, *rest) for rest in [(None, "late"), (0.5, "early")]),
    ],
)
def test_shares_make_the_bits_of_a_whole(
    workers: int, clip: float | None, exchange: str, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, "", 0, "", clip, False)
    results = start_job(train, "", 0, "", clip, workers=workers, environment={EXCHANGE: exchange}).results()
    check(results, reference)
    trained = max(reference.more)
    for result in results:
        assert max(result.more) == trained if workers == 2 else max(result.more) < trained


COLLECTIVES = pytest.mark.parametrize(
    ("exchange", "numbers"),
    [
        pytest.param("late", range(12, 13), id="late"),
        pytest.param("early", range(10, 54, 42), id="early"),
        nightly("behind", range(26, 27), id="behind"),
        nightly("late", range(2, 36, 5), id="late, more"),
        nightly("early", range(3, 54, 7), id="early, more"),
        nightly("behind", range(4, 50, 11), id="behind, more"),
    ],
)


@pytest.mark.slow
@COLLECTIVES
def test_one_worker_is_told_that_a_collective_broke_after_it_had_worked_for_the_others(
    exchange: str, numbers: range, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, "", 0, "", 0.5)
    for number in numbers:
        environment = {EXCHANGE: exchange}
        job = start_job(train, "worker-1", number, "broke", 0.5, workers=3, membership=HASTY, environment=environment)
        check(job.results(), reference)


@pytest.mark.slow
@COLLECTIVES
def test_a_worker_is_killed_at_any_collective(
    exchange: str, numbers: range, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train)
    for number in numbers:
        job = start_job(train, "worker-1", number, "killed", workers=3, environment={EXCHANGE: exchange})
        check(job.results(), reference)


Change = Callable[[ElasticJob], object]

CHANGES: list[Any] = [
    nightly(1, [lambda job: job.join(1), lambda job: job.join(2)], id="grows from one to two to four"),
    pytest.param(4, [lambda job: job.drain("worker-1"), lambda job: job.join(1)], id="one leaves and another comes"),
    nightly(4, [lambda job: job.drain("worker-1", "worker-2")], id="both owners of a parameter leave at once"),
    nightly(4, [lambda job: job.drain("worker-0", "worker-1", "worker-3")], id="all but one leave"),
    nightly(3, [lambda job: job.kill("worker-2"), lambda job: job.kill("worker-0")], id="one is lost after another"),
    pytest.param(2, [lambda job: job.kill("worker-0"), lambda job: job.join(2)], id="a lone worker gets company again"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "changes"), CHANGES)
def test_shares_move_when_members_change(
    workers: int, changes: list[Change], start_job: Callable[..., ElasticJob]
) -> None:
    steps = 2 * len(changes) + 2
    reference = alone(train, "", 0, "", None, False, steps)
    job = start_job(train, "", 0, "", None, True, steps, workers=workers, hold=1)
    for number, change in enumerate(changes):
        job.reach(2 * number + 1)
        change(job)
    check(job.results(), reference)


DOMINANT = 500
"""Elements of the last layer: cut at multiples of 16, it is spread over all workers."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "clip", "exchange", "make", "changes"),
    [
        nightly(4, 0.5, "early", "AdamW", [], id="clipped by norm"),
        nightly(4, None, "late", "Lion", [lambda job: job.kill("worker-3")], id="a script's own optimizer"),
        pytest.param(
            2, None, "late", "blocks", [lambda job: job.join(2), lambda job: job.kill("worker-0")], id="one with blocks"
        ),
        pytest.param(
            3,
            0.5,
            "late",
            "AdamW",
            [lambda job: job.join(2), lambda job: job.drain("worker-1", "worker-2")],
            id="changes",
        ),
        nightly(4, 0.5, "early", "AdamW", [lambda job: job.kill("worker-1")], id="one is killed"),
    ],
)
def test_a_dominant_parameter_is_cut_and_makes_the_bits_of_a_whole(
    workers: int,
    clip: float | None,
    exchange: str,
    make: str,
    changes: list[Change],
    start_job: Callable[..., ElasticJob],
) -> None:
    steps = 2 * len(changes) + 2
    reference = alone(train, "", 0, "", clip, False, steps, DOMINANT, make)
    arguments = ("", 0, "", clip, True, steps, DOMINANT, make)
    hold = 1 if changes else None
    job = start_job(train, *arguments, workers=workers, hold=hold, environment={EXCHANGE: exchange})
    for number, change in enumerate(changes):
        job.reach(2 * number + 1)
        change(job)
    check(job.results(), reference)


@pytest.mark.slow
def test_a_collective_breaks_while_a_dominant_parameter_is_stepped(start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train, "", 0, "", 0.5, False, 4, DOMINANT)
    for number in (16, 32):
        arguments = ("worker-1", number, "killed", 0.5, True, 4, DOMINANT)
        check(start_job(train, *arguments, workers=3, environment={EXCHANGE: "late"}).results(), reference)


@pytest.mark.slow
def test_a_checkpoint_of_slices_is_read_by_another_number_of_workers(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints"), ENV_CHECKPOINT_STEPS: "4"}
    arguments = ("", 0, "", 0.5, True, 8, DOMINANT)
    job = start_job(train, *arguments, workers=4, hold=5, environment=environment)
    job.reach(5)
    job.await_checkpoint(4)
    for worker in job.workers.values():
        os.kill(worker.process.pid, signal.SIGKILL)
    assert {outcome.kind for outcome in job.finish().values()} == {"killed"}
    results = start_job(train, *arguments, workers=3, environment=environment).results()
    reference = alone(
        train, "", 0, "", 0.5, False, 8, DOMINANT, environment={ENV_CHECKPOINT_DIR: str(tmp_path / "others")}
    )
    assert {result.digest for result in results} == {reference.digest}
    assert [result.optimizer for result in results if result.optimizer] == [reference.optimizer]
    assert {len(result.more) for result in results} == {8 - 4}


@contextmanager
def dominated(virtual_nodes: int, **options: Any) -> Iterator[tuple[vf.Run, nn.Module, torch.optim.Optimizer]]:
    """A training of four steps in which nine tenths of all are one parameter's."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 16_384), nn.Linear(16_384, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    numbers = {"batch_size": 12, "steps": 4, "virtual_nodes": virtual_nodes}
    with vf.elastic(model, optimizer, regression(), **numbers, **options) as run:
        yield run, model, optimizer


def count_memory(redundancy: Redundancy = "peer") -> list[int]:
    """The bytes of the optimizer's states after each step."""
    counted: list[int] = []

    def count() -> None:
        states = [*optimizer.state.values()]
        for kept in (each for each in gc.get_objects() if type(each) is ShareStates):
            states += [state for slices in kept._slices.values() for state in slices.values()]
        counted.append(sum(each.numel() * each.itemsize for state in states for each in state.values()))

    with dominated(4, shard_optimizer=True, redundancy=redundancy) as (run, model, optimizer):
        train_steps(run, model, optimizer, count)
    return counted


@pytest.mark.parametrize(
    ("workers", "redundancy", "copies"),
    [nightly(2, "peer", 2), slow(4, "peer", 2), (3, "none", 1), nightly(2, "none", 1)],
)
def test_shares_are_kept_as_often_as_is_wanted_whatever_the_largest_parameter_is(
    workers: int, redundancy: Redundancy, copies: int, start_job: Callable[..., ElasticJob]
) -> None:
    whole = alone(count_memory)[-1]
    for counted in start_job(count_memory, redundancy, workers=workers).results():
        assert counted[-1] == pytest.approx(copies * whole / workers, rel=0.01)


def count_bytes(sharded: bool, redundancy: Redundancy = "peer") -> list[int]:
    """What this worker has sent to others in each step but the first, frames' heads left out."""
    sent = [0]
    counted: list[int] = []
    send = Lane.send

    def counting(self: Lane, peer: int, content: memoryview, *rest: Any) -> None:
        sent[0] += len(content)
        send(self, peer, content, *rest)

    with (
        patch.object(Lane, "send", counting),
        dominated(
            12, shard_optimizer=sharded, redundancy=redundancy, exchange=vf.Exchange(algorithm="reduce-scatter")
        ) as (run, model, optimizer),
    ):
        train_steps(run, model, optimizer, lambda: counted.append(sent[0]))
    return [after - before for before, after in pairwise(counted)]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, nightly(2), nightly(4), nightly(5)])
def test_a_step_sends_what_an_unsharded_one_does_and_a_second_keeper_its_share(
    workers: int, start_job: Callable[..., ElasticJob]
) -> None:
    def total(*arguments: Any) -> int:
        return sum(counted[-1] for counted in start_job(count_bytes, *arguments, workers=workers).results())

    size = 4 * (4 * 64 + 64 + 64 * 16_384 + 16_384 + 16_384 + 1)
    unsharded = total(False)
    assert total(True, "none") <= 1.03 * unsharded
    assert total(True, "peer") <= 1.03 * (unsharded + size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "changes"),
    [
        pytest.param(
            3, [lambda job: job.join(2), lambda job: job.drain("worker-0", "worker-2", "worker-3")], id="five, then two"
        ),
        nightly(2, [lambda job: job.drain("worker-0"), lambda job: job.join(2)], id="one, then three"),
    ],
)
def test_shares_that_are_kept_once_move_when_members_change(
    workers: int, changes: list[Change], start_job: Callable[..., ElasticJob]
) -> None:
    arguments = 0.5, True, 6, DOMINANT, "AdamW", "none"
    reference = alone(train, "", 0, "", 0.5, False, 6, DOMINANT)
    job = start_job(train, "", 0, "", *arguments, workers=workers, hold=1)
    for number, change in enumerate(changes):
        job.reach(2 * number + 1)
        change(job)
    check(job.results(), reference)


def test_the_loss_of_a_share_that_was_kept_once_goes_back_to_the_checkpoint(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints"), ENV_CHECKPOINT_STEPS: "4"}
    arguments = "", 0, "", None, True, 8, 5, "AdamW", "checkpoint"
    job = start_job(train, *arguments, workers=3, hold=5, environment=environment)
    job.reach(5)
    job.await_checkpoint(4)
    os.kill(job.workers["worker-1"].process.pid, signal.SIGKILL)
    outcomes = job.finish()
    assert [outcome.kind for outcome in outcomes.values()] == ["Evicted", "killed", "Evicted"]
    assert "the worker that kept the optimizer's state of" in outcomes["worker-0"].text
    results = start_job(train, *arguments, workers=2, environment=environment).results()
    reference = alone(train, "", 0, "", None, False, 8, environment={ENV_CHECKPOINT_DIR: str(tmp_path / "others")})
    assert {result.digest for result in results} == {reference.digest}
    assert [result.optimizer for result in results if result.optimizer] == [reference.optimizer]
    assert {len(result.more) for result in results} == {8 - 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"redundancy": "all", "shard_optimizer": True}, "redundancy is 'all'; it must be"),
        ({"redundancy": "none"}, "every worker keeps all of it; give shard="),
        ({"redundancy": "checkpoint", "shard_optimizer": True}, "none is written; give checkpoint="),
    ],
)
def test_a_redundancy_that_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_redundancy(options["redundancy"], sharded="shard_optimizer" in options, saves=False)


def fail_at_the_hand_over(victim: str, when: str) -> Trained:
    """One worker is ``killed`` before or after it, or is told ``after`` it that the communicator broke."""
    hand_over = Resharding.hand_over
    seen: list[m.Plan] = []

    def failing(self: Resharding, communicator: Communicator, running: m.Plan, coming: m.Plan) -> None:
        first = not seen and len(coming.members) < len(running.members)
        if first and when == "killed before":
            die_here(victim)
        hand_over(self, communicator, running, coming)
        if first:
            seen.append(coming)
            if when == "killed after":
                die_here(victim)
            if when == "broke after":
                raise CommunicatorBroken("injected by the test")

    if os.environ.get(ENV_WORKER) == victim:
        Resharding.hand_over = failing  # type: ignore[method-assign]
    return train(steps=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "when"),
    [
        ("worker-0", "killed before"),
        ("worker-1", "broke after"),
        nightly("worker-1", "killed after"),
        nightly("worker-0", "broke after"),
        nightly("worker-1", "killed before"),
        nightly("worker-0", "killed after"),
    ],
)
def test_one_more_may_be_lost_where_others_leave(victim: str, when: str, start_job: Callable[..., ElasticJob]) -> None:
    """Worker 1 leaves and worker 0 stays; worker 2 leaves too, so that no state is with whoever kept it alone."""
    reference = alone(train, "", 0, "", None, False, 6)
    membership = HASTY if when == "broke after" else None
    job = start_job(fail_at_the_hand_over, victim, when, workers=4, hold=2, membership=membership)
    job.reach(2)
    job.drain("worker-1", "worker-2")
    check(job.results(), reference)


@pytest.mark.slow
def test_when_both_owners_are_lost_the_checkpoint_counts_which_needs_no_sharding(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints"), ENV_CHECKPOINT_STEPS: "4"}
    job = start_job(train, "", 0, "", None, True, 8, workers=4, hold=5, environment=environment)
    job.reach(5)
    job.await_checkpoint(4)
    for name in ("worker-1", "worker-2"):
        os.kill(job.workers[name].process.pid, signal.SIGKILL)
    outcomes = job.finish()
    assert [outcome.kind for outcome in outcomes.values()] == ["Evicted", "killed", "killed", "Evicted"]
    assert "both workers that kept the optimizer's state" in outcomes["worker-0"].text
    again = alone(train, "", 0, "", None, False, 8, environment=environment)
    reference = alone(train, "", 0, "", None, False, 8, environment={ENV_CHECKPOINT_DIR: str(tmp_path / "others")})
    assert (again.digest, again.optimizer) == (reference.digest, reference.optimizer)
    assert len(again.more) == 8 - 4


@pytest.mark.parametrize(
    ("optimizer", "scaler", "words"),
    [
        pytest.param("LBFGS", False, "closure", id="one with a closure"),
        pytest.param(
            "Adafactor",
            False,
            "Adafactor cannot be sharded, because it does not treat each",
            id="one that looks further",
            marks=needs_newer(torch.optim, "Adafactor"),
        ),
        pytest.param("AdamW", True, "a GradScaler looks at the whole gradient", id="a scaler"),
    ],
)
def test_what_cannot_be_sharded_is_refused(optimizer: str, scaler: bool, words: str) -> None:
    model = nn.Linear(2, 1)
    made = getattr(torch.optim, optimizer)(model.parameters())
    scales = torch.amp.GradScaler("cpu") if scaler else None
    options: dict[str, Any] = {"batch_size": 8, "steps": 1, "scaler": scales, "shard_optimizer": True}
    with (
        pytest.raises(ConfigurationError, match=words),
        vf.elastic(model, made, TensorDataset(torch.zeros(8, 2)), **options),
    ):
        pass


def test_parameters_that_lie_in_the_same_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.detach()[1:])
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(ConfigurationError, match=r"parameters 0\.weight and 1\.weight lie in the same memory"),
        vf.elastic(model, optimizer, TensorDataset(torch.zeros(8, 3)), batch_size=8, steps=1, shard_optimizer=True),
    ):
        pass


def test_workers_that_disagree_on_sharding_are_told(start_job: Callable[..., ElasticJob]) -> None:
    outcomes = start_job(disagree, workers=2).finish()
    assert any("AdamW, sharded" in outcome.text for outcome in outcomes.values())


def disagree() -> Trained:
    """One shards and the other does not."""
    return train(sharded=os.environ[ENV_WORKER] == "worker-0")
