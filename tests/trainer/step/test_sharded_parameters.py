"""Parameters that are divided over the workers: the bits of a worker that has all of them, through each change."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import HASTY, break_collective
from divided_models import Tower, data, run_on_data
from elastic_jobs import ElasticJob, Trained, alone, die_here
from injected import injected
from own_optimizers import Lion
from torch import nn

import virtualflow as vf
from tiers import nightly, slow
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import ENV_REDUNDANCY, ENV_SHARD, Redundancy
from virtualflow.state import digests
from virtualflow.transport import Communicator, Message, Pending

StartJob = Callable[..., ElasticJob]
STEPS = 5


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.02),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), 0.02, foreach=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    "Lion": lambda model: Lion(model.parameters(), 0.01, betas=(0.9, 0.99)),
}


def train(
    victim: str = "",
    number: int = 0,
    how: str = "",
    make: str = "AdamW",
    clip: float | None = None,
    redundancy: Redundancy = "peer",
    steps: int = STEPS,
    shard: str = "parameters",
) -> Trained:
    """Two epochs and a bit with a last batch that is short, an evaluation, and a look at what the model says.

    ``how`` tells what becomes of the ``victim``; ``"whole"``: every worker has all parameters; ``"meta"``:
    nobody had them before.
    """
    torch.manual_seed(1)
    break_collective(victim, number, how)
    with torch.device("meta") if how == "meta" else contextlib.nullcontext():
        model = Tower()
    optimizer = MAKERS[make](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen: list[float] = []
    options: dict[str, Any] = {} if how == "whole" else {"shard": shard, "redundancy": redundancy}
    with run_on_data(
        model,
        optimizer,
        steps,
        scheduler=scheduler,
        clip_grad_norm=clip,
        **options,
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x), y)
                step.log(loss=loss)
                loss.backward()
                sharded = run._context.update.sharded
                if sharded is not None and not sharded._entered:  # a joiner warms up
                    assert all(parameter.grad is None for parameter in model.parameters())
                if how == "inside" and step.number == number:
                    die_here(victim)
            seen.append(step.metrics["loss"])
            if step.number == 2:
                seen.append(float(vf.evaluate(model, data(), lambda batch: model(batch[0]), batch_size=24).sum()))
            if step.number == 3 and run.leader:  # nobody else runs the model here
                model.eval()
                with torch.no_grad():
                    assert model(data()[:4][0]).isfinite().all()
                model.train()
        training = run._context.training
        return Trained(training.digest or digests.digest(model.state_dict()), "", seen[-1])


def whole(make: str = "AdamW", clip: float | None = None, steps: int = STEPS) -> Trained:
    found: Trained = alone(train, "", 0, "whole", make, clip, "peer", steps)
    return found


@pytest.mark.parametrize("workers", [3, slow(2), slow(5)])
@pytest.mark.parametrize("redundancy", ["none", slow("peer")])
@pytest.mark.parametrize(
    ("make", "clip"), [("AdamW", 0.5), slow("foreach", None), slow("SGD", 0.5), slow("Lion", None)]
)
def test_bits_are_those_of_one_worker_that_has_all(
    start_job: StartJob, workers: int, redundancy: Redundancy, make: str, clip: float | None
) -> None:
    job = start_job(train, "", 0, "", make, clip, redundancy, workers=workers)
    assert job.results() == [whole(make, clip)] * workers


def test_one_worker_that_shards_has_the_bits_of_one_that_does_not() -> None:
    assert alone(train) == whole()


@pytest.mark.parametrize(
    ("script", "job", "found"),
    [
        pytest.param({}, ("Parameters", ""), ("parameters", False, "peer"), id="given"),
        pytest.param({}, ("Optimizer", "None"), (None, True, "none"), id="the optimizer given"),
        pytest.param(
            {"shard_optimizer": True, "redundancy": "none"},
            ("Parameters", ""),
            ("parameters", False, "none"),
            id="more than the script says",
        ),
        pytest.param({"shard": "parameters"}, ("", "None"), ("parameters", False, "none"), id="with nobody else"),
        pytest.param(
            {"shard": "parameters", "redundancy": "none"}, ("None", ""), (None, False, "peer"), id="taken away"
        ),
        pytest.param({"shard": "parameters"}, ("", ""), ("parameters", False, "peer"), id="as the script says"),
        pytest.param({"shard": "parameters"}, ("Hybrid", ""), ("hybrid", False, "peer"), id="within each worker"),
        pytest.param({"shard": "hybrid"}, ("Parameters", ""), ("parameters", False, "peer"), id="over all workers"),
    ],
)
def test_what_the_job_says_of_shares_overrides_the_script(
    script: dict[str, Any], job: tuple[str, str], found: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in zip((ENV_SHARD, ENV_REDUNDANCY), job, strict=True):
        monkeypatch.setenv(name, word)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    with vf.elastic(model, torch.optim.SGD(model.parameters(), 0.1), data(), batch_size=8, steps=1, **script) as run:
        options, update = run._request.options, run._context.update
        assert (options.shard, options.shard_optimizer, options.redundancy) == found
        assert (update.shards is not None, update.sharded is not None) == (options.shards, options.shards_parameters)
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()


def weighing(shard: str | None) -> str:
    """Micro-batches count by what they hold, which is told before the backward pass; some count nothing."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    options: dict[str, Any] = {} if shard is None else {"shard": shard, "redundancy": "none"}
    with (
        injected(reduction={"norm_block": 4, "bucket": 256}),
        vf.elastic(model, optimizer, data(), batch_size=12, steps=7, virtual_nodes=6, **options) as run,
    ):
        for step in run:
            for x, y in step:
                step.weight(float((x[:, 0] > 0).sum()))
                F.mse_loss(model(x), y).backward()
        training = run._context.training
        return training.digest or digests.digest(model.state_dict())


@pytest.mark.parametrize("workers", [slow(2), slow(4)])
def test_micro_batches_may_weigh_what_they_like(start_job: StartJob, workers: int) -> None:
    assert start_job(weighing, "parameters", workers=workers).results() == [alone(weighing, None)] * workers


@pytest.mark.parametrize("workers", [slow(2), slow(5)])
def test_a_model_of_the_meta_device_is_made_alike_by_any_number_of_workers(start_job: StartJob, workers: int) -> None:
    wanted = alone(train, "", 0, "meta", "AdamW", 0.5, "peer", 9)
    assert wanted != whole("AdamW", 0.5, 9)
    job = start_job(train, "", 0, "meta", "AdamW", 0.5, "peer", 9, workers=workers, hold=2)
    job.drain("worker-0")
    job.reach(4)
    job.join()
    ended = [outcome.value for name, outcome in job.finish().items() if name != "worker-0"]
    assert ended == [wanted] * workers


@pytest.mark.parametrize("number", [3, *(slow(step) for step in (1, 2, 5))])
@pytest.mark.parametrize("victim", ["worker-1", slow("worker-0")])
def test_a_worker_is_killed_in_the_middle_of_a_pass(start_job: StartJob, victim: str, number: int) -> None:
    job = start_job(train, victim, number, "inside", workers=3, membership=HASTY)
    outcomes = job.finish()
    assert outcomes.pop(victim).kind == "killed"
    assert [outcome.value for outcome in outcomes.values()] == [whole()] * 2
    assert job.status().repeated_steps <= 1


@pytest.mark.parametrize("how", ["killed", "broke"])
@pytest.mark.parametrize("number", [slow(40), *(nightly(n) for n in range(1, 160, 7))])
def test_it_breaks_at_any_message(start_job: StartJob, number: int, how: str) -> None:
    job = start_job(train, "worker-1", number, how, workers=3, membership=HASTY)
    outcomes = job.finish()
    ended = [outcome.value for outcome in outcomes.values() if outcome.kind != "killed"]
    assert ended == [whole()] * len(ended)
    assert len(ended) == 3 - (outcomes["worker-1"].kind == "killed")


@pytest.mark.parametrize("seed", [slow(0), *(nightly(seed) for seed in range(1, 20))])
def test_any_history_of_joins_drains_and_kills(start_job: StartJob, seed: int) -> None:
    steps, draw = 24, random.Random(seed)
    redundancy: Redundancy = draw.choice(["peer", "none"])
    job = start_job(train, "", 0, "", "AdamW", 0.5, redundancy, steps, workers=draw.choice([1, 2, 3]), hold=2)
    gone: set[str] = set()
    for step in range(2, steps - 2, 3):
        job.reach(step)
        members = [worker.worker for worker in job.status().workers]
        kinds = ["join"] if len(members) < 2 else ["join", "drain", "drain both"] if len(members) < 5 else ["drain"]
        # Two workers have everything twice; of one that has it alone, nobody may be killed.
        kind = draw.choice([*kinds, "kill"] if redundancy == "peer" and len(members) > 1 else kinds)
        if kind == "join":
            job.join(draw.choice([1, 2]))
        elif kind == "kill":
            victim = draw.choice(members)
            gone.add(victim)
            job.kill(victim)
        else:
            leaving = draw.sample(members, 2 if kind == "drain both" and len(members) > 2 else 1)
            gone.update(leaving)
            job.drain(*leaving)
    outcomes = job.finish()
    ended = [outcome.value for name, outcome in outcomes.items() if name not in gone]
    assert ended == [whole("AdamW", 0.5, steps)] * len(ended)
    assert ended


@pytest.mark.parametrize(("workers", "processes"), [(2, 2), slow(2, 3), slow(3, 2), slow(3, 1), slow(1, 2)])
@pytest.mark.parametrize(("redundancy", "make"), [("none", "AdamW"), slow("peer", "SGD")])
def test_workers_that_have_all_parameters_among_their_processes_come_to_the_same_bits(
    start_job: StartJob, workers: int, processes: int, redundancy: Redundancy, make: str
) -> None:
    arguments = ("", 0, "", make, 0.5, redundancy, STEPS, "hybrid")
    job = start_job(train, *arguments, workers=workers, processes=processes)
    assert job.results() == [whole(make, 0.5)] * workers * processes


@pytest.mark.parametrize("victim", [slow("worker-1"), slow("worker-1.1")])
@pytest.mark.parametrize("number", [slow(2), slow(3)])
def test_a_process_of_a_worker_that_has_all_parameters_is_killed_in_the_middle_of_a_pass(
    start_job: StartJob, victim: str, number: int
) -> None:
    arguments = (victim, number, "inside", "AdamW", None, "peer", STEPS, "hybrid")
    outcomes = start_job(train, *arguments, workers=3, processes=2, membership=HASTY).finish()
    assert outcomes.pop(victim).kind == "killed"
    ended = [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"]
    assert ended == [whole()] * 4


@pytest.mark.parametrize("how", ["killed", "broke"])
@pytest.mark.parametrize("number", [slow(60), *(nightly(n) for n in range(1, 200, 13))])
def test_a_worker_that_has_all_parameters_breaks_at_any_message(start_job: StartJob, number: int, how: str) -> None:
    arguments = ("worker-1.1", number, how, "AdamW", None, "peer", STEPS, "hybrid")
    outcomes = start_job(train, *arguments, workers=2, processes=2, membership=HASTY).finish()
    ended = [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"]
    assert ended == [whole()] * len(ended)
    assert ended


@pytest.mark.parametrize("seed", [slow(0), *(nightly(seed) for seed in range(1, 20))])
def test_any_history_of_workers_that_have_all_parameters(start_job: StartJob, seed: int) -> None:
    steps, draw = 15, random.Random(seed)
    arguments = ("", 0, "", "AdamW", 0.5, "peer", steps, "hybrid")
    job = start_job(train, *arguments, workers=draw.choice([1, 2]), processes=2, hold=2)
    gone: set[str] = set()
    for step in range(2, steps - 2, 3):
        job.reach(step)
        members = [worker.worker for worker in job.status().workers]
        kind = draw.choice(
            ["join"] if len(members) < 2 else ["drain", "kill"] if len(members) > 2 else ["join", "kill"]
        )
        if kind == "join":
            job.join()
            continue
        victim = draw.choice(members)
        gone |= {victim, f"{victim}.1"}
        (job.kill if kind == "kill" else job.drain)(victim)
    outcomes = job.finish()
    ended = [outcome.value for name, outcome in outcomes.items() if name not in gone]
    assert ended == [whole("AdamW", 0.5, steps)] * len(ended)
    assert ended


def counting(shard: str) -> tuple[str, int, int, float]:
    """What five steps send to processes of other workers, and get of them, in bytes, and what is at rest, of all."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    samples = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
    moved = {True: 0, False: 0}
    start = Communicator.start_messages

    def counting_start(self: Communicator, messages: Sequence[Message]) -> Pending:
        for message in messages:
            members = self.plan.members
            across = members[message.peer].launch_id != members[self.rank].launch_id
            moved[message.incoming] += across * message.stretch.nbytes
        return start(self, messages)

    with (
        pytest.MonkeyPatch.context() as patch,
        injected(reduction={"norm_block": 4, "bucket": 4_096}),
        vf.elastic(
            model, optimizer, samples, batch_size=16, steps=6, virtual_nodes=8, shard=shard, redundancy="none"
        ) as run,
    ):
        patch.setattr(Communicator, "start_messages", counting_start)
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            if step.number == 5:
                sharded = run._context.update.sharded
                assert sharded is not None
                for news in sharded._news:
                    news.result(30)
                kept = sum(piece.end - piece.begin for piece in sharded._kept)
                held = sum(value.numel() for values in sharded._held.values() for value in values.values())
                at_rest = (kept + held) / sum(parameter.numel() for parameter in model.parameters())
                found = moved[False], moved[True], at_rest
        return run._context.training.digest, *found


def test_workers_that_have_all_parameters_send_each_other_what_changes_once_a_step(start_job: StartJob) -> None:
    hybrid = start_job(counting, "hybrid", workers=2, processes=2).results()
    divided = start_job(counting, "parameters", workers=2, processes=2).results()
    size, steps = 6 * (64 * 64 + 64) * 4, 5
    for _, sent, received, at_rest in hybrid:
        assert at_rest == pytest.approx(1 / 2, rel=0.05)
        # Half of what a process has is first here: the sums of the rest leave, in one part, and its values come, also
        # before the first step.
        assert sent == pytest.approx(steps * size / 4, rel=0.05)
        assert received == pytest.approx((steps + 1) * size / 4, rel=0.05)
    for _, sent, received, at_rest in divided:
        assert at_rest == pytest.approx(1 / 4, rel=0.05)
        assert sent == pytest.approx(steps * size, rel=0.05)  # half of the gradients of each of two virtual nodes
        assert received == pytest.approx(2 * steps * size, rel=0.1)  # asked for twice, but for the last block
    assert len({digest for digest, *_ in hybrid + divided}) == 1


class Outside(nn.Module):
    """Uses a block's parameter where the block does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 40), nn.Linear(40, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)) + self.blocks[0].bias.sum()


def misuse(how: str) -> None:
    """A script that does what divided parameters do not allow."""
    torch.manual_seed(1)
    model = Outside() if how == "outside" else nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        injected(reduction={"norm_block": 4, "bucket": 256}),
        vf.elastic(
            model, optimizer, data(), batch_size=12, steps=2, virtual_nodes=4, shard="parameters", redundancy="none"
        ) as run,
    ):
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x), y)
                loss.backward(retain_graph=how == "twice")
                if how == "twice":
                    F.mse_loss(model(x), y).backward()
                if how == "weight":
                    step.weight(2)
            if how == "saves":
                model.state_dict()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        slow("twice", "got a gradient by a second backward"),
        slow("outside", "parameter blocks.0.bias is used where blocks.0 does not run"),
        slow("weight", "step.weight came behind backward"),
        slow("saves", r"state_dict\(\) would have NaN"),
    ],
)
def test_what_divided_parameters_do_not_allow_is_refused_by_name(start_job: StartJob, how: str, sentence: str) -> None:
    outcomes = start_job(misuse, how, workers=2).finish().values()
    assert any(outcome.kind == "ConfigurationError" and re.search(sentence, outcome.text) for outcome in outcomes), [
        (outcome.kind, outcome.text, outcome.trace[-600:]) for outcome in outcomes
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"memory": vf.Memory(optimizer="host")}, 'optimizer="host", which needs the whole model'),
        (
            {"memory": vf.Memory("1GiB"), "shard": "hybrid"},
            "hybrid. does not go together with a plan of activations yet",
        ),
        ({"memory": vf.Memory("1GiB", order="layer-major")}, 'order="layer-major", which needs the whole model'),
        ({"backward": vf.PartialBackward((1, 0.5))}, "backward=, which needs the whole model"),
        ({"shard": "optimizer"}, 'it must be "parameters"'),
    ],
    ids=["optimizer on the host", "a plan and hybrid shares", "layer-major order", "partial backward", "another word"],
)
def test_what_needs_the_whole_model_is_refused_at_the_start(options: dict[str, Any], named: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fixed: dict[str, Any] = {"batch_size": 12, "steps": 1, "virtual_nodes": 4, "shard": "parameters"}
    with (
        pytest.raises(ConfigurationError, match=named),
        vf.elastic(model, optimizer, data(), **(fixed | options)),
    ):
        pass
