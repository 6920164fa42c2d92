"""Checkpoints of parameters that are divided: written by all, read by any number, to the bits of one that has all."""

from __future__ import annotations

import errno
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import HASTY
from checkpoints import checkpoint_of, flip, steps_in
from divided_models import Tower, run_on_data
from elastic_jobs import ElasticJob, Trained, alone, die_here
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tiers import nightly, slow
from virtualflow.integrations import export
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS, ENV_WORKER, Redundancy
from virtualflow.state import SavedPiece, ShareFiles, checkpoint_shares, digests, find_by_path, load

StartJob = Callable[..., ElasticJob]
STEPS = 6


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.02),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
}


AVERAGES: dict[str, dict[str, Any]] = {
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa": {"use_buffers": True},
    "own": {"avg_fn": lambda averaged, current, count: averaged + (current - averaged) / (count + 2)},
}


def train(
    shard: str | None = "parameters",
    redundancy: Redundancy = "peer",
    make: str = "AdamW",
    steps: int = STEPS,
    victim: str = "",
    number: int = 0,
    how: str = "",
    average: str = "",
) -> Trained:
    """Two epochs and a bit; ``victim`` is ``killed`` or meets a full disk where it writes its share ``number``.

    ``average``: which kind of average of weights is kept beside.
    """
    if os.environ.get(ENV_WORKER) == victim:
        break_share(victim, number, how)
    torch.manual_seed(1)
    model = Tower()
    optimizer = MAKERS[make](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    options: dict[str, Any] = {} if shard is None else {"shard": shard, "redundancy": redundancy}
    beside = {"average": AveragedModel(model, **AVERAGES[average])} if average else {}
    seen: list[int] = []
    with run_on_data(
        model,
        optimizer,
        steps,
        scheduler=scheduler,
        clip_grad_norm=0.5,
        state=beside,
        **options,
    ) as run:
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x), y)
                step.log(loss=loss)
                loss.backward()
            seen.append(step.number)
            for each in beside.values() if step.number > 1 else ():
                each.update_parameters(model)
        training = run._context.training
        digest = training.digest or digests.digest(model.state_dict())
        averages = "" if training.digest else digests.digest({n: each.state_dict() for n, each in beside.items()})
        return Trained(digest, averages, run.metrics["loss"], tuple(seen))


def break_share(victim: str, number: int, how: str) -> None:
    calls, save = 0, checkpoint_shares.save_file

    def failing(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number and how == "killed":
            die_here(victim)
        if calls == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(*arguments, **options)

    checkpoint_shares.save_file = failing


def saving(directory: Path, every: int = 2) -> dict[str, str]:
    return {ENV_CHECKPOINT_DIR: str(directory), ENV_CHECKPOINT_STEPS: str(every)}


def whole(tmp_path: Path, make: str = "AdamW", steps: int = STEPS, average: str = "") -> Trained:
    arguments = None, "peer", make, steps, "", 0, "", average
    found: Trained = alone(train, *arguments, environment=saving(tmp_path / "whole"))
    return found


def content(directory: Path) -> dict[str, Any]:
    """The newest checkpoint's, as one that has all would hold it, without what differs from run to run."""
    found = find_by_path(directory, print)
    assert found is not None
    tree = load(found)
    flat: dict[str, Any] = {f"parameter {name}": raw(value) for name, value in tree["parameters"].items()}
    flat |= {f"buffer {name}": raw(value) for name, value in tree["buffers"].items()}
    for name, state in tree.get("state", {}).items():
        flat |= {f"{name} {key}": raw(value) for key, value in state.items()}
    for number, state in tree["optimizer"]["state"].items():
        flat |= {f"state {number} {key}": raw(value) for key, value in state.items()}
    return flat | {"groups": tree["optimizer"]["param_groups"], "scheduler": tree["scheduler"]}


def raw(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_what_two_have_written_three_go_on_from(tmp_path: Path, start_job: StartJob) -> None:
    reference, directory = whole(tmp_path), tmp_path / "divided"
    job = start_job(train, workers=2, hold=3, environment=saving(directory))
    job.reach(3)
    job.await_checkpoint(2)
    job.kill_all()
    assert {outcome.kind for outcome in job.finish().values()} == {"killed"}
    results = start_job(train, workers=3, environment=saving(directory)).results()
    assert {(result.digest, result.metrics) for result in results} == {(reference.digest, reference.metrics)}
    assert {result.more for result in results} == {(3, 4, 5, 6)}
    assert content(directory) == content(tmp_path / "whole")
    assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("make", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("written", "read", "redundancy"),
    [
        ((3, "parameters"), (5, "parameters"), "none"),
        ((5, "parameters"), (2, "parameters"), "peer"),
        ((1, "parameters"), (3, "parameters"), "peer"),
        ((3, "parameters"), (1, "parameters"), "none"),
        ((3, "parameters"), (2, None), "peer"),
        ((2, None), (3, "parameters"), "peer"),
    ],
    ids=["more", "fewer", "from one", "to one", "divided to whole", "whole to divided"],
)
def test_any_number_goes_on_from_what_any_number_has_written(
    tmp_path: Path,
    start_job: StartJob,
    written: tuple[int, str | None],
    read: tuple[int, str | None],
    redundancy: Redundancy,
    make: str,
) -> None:
    reference, directory = whole(tmp_path, make), tmp_path / "divided"
    job = start_job(train, written[1], redundancy, make, workers=written[0], hold=3, environment=saving(directory))
    job.reach(3)
    job.await_checkpoint(2)
    job.kill_all()
    job.finish()
    results = start_job(train, read[1], redundancy, make, workers=read[0], environment=saving(directory)).results()
    assert {(result.digest, result.metrics, result.more) for result in results} == {
        (reference.digest, reference.metrics, (3, 4, 5, 6))
    }
    assert content(directory) == content(tmp_path / "whole")


@pytest.mark.parametrize("redundancy", ["checkpoint", slow("none")])
def test_the_loss_of_an_only_keeper_goes_back_to_the_checkpoint(
    tmp_path: Path, start_job: StartJob, redundancy: Redundancy
) -> None:
    reference, directory = whole(tmp_path), tmp_path / "divided"
    job = start_job(train, "parameters", redundancy, workers=3, hold=3, environment=saving(directory))
    job.reach(3)
    job.await_checkpoint(2)
    os.kill(job.workers["worker-1"].process.pid, signal.SIGKILL)
    outcomes = job.finish()
    assert [outcome.kind for outcome in outcomes.values()] == ["Evicted", "killed", "Evicted"]
    assert "the job goes on from its newest checkpoint" in outcomes["worker-0"].text
    results = start_job(train, "parameters", redundancy, workers=2, environment=saving(directory)).results()
    assert {(result.digest, result.more) for result in results} == {(reference.digest, (3, 4, 5, 6))}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker-0", "worker-1"])
def test_a_worker_that_dies_while_it_writes_its_share_takes_only_that_checkpoint_with_it(
    tmp_path: Path, start_job: StartJob, victim: str
) -> None:
    directory = tmp_path / "divided"
    arguments = ("parameters", "peer", "AdamW", STEPS, victim, 2, "killed")
    job = start_job(train, *arguments, workers=3, membership=HASTY, environment=saving(directory))
    outcomes = job.finish()
    assert outcomes.pop(victim).kind == "killed"
    reference = whole(tmp_path)
    assert {outcome.value.digest for outcome in outcomes.values()} == {reference.digest}
    assert 4 not in steps_in(directory)
    assert steps_in(directory)[-1] == STEPS
    assert content(directory) == content(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_of_one_worker_is_told_and_the_next_checkpoint_tries_again(
    tmp_path: Path, start_job: StartJob
) -> None:
    directory = tmp_path / "divided"
    arguments = ("parameters", "peer", "AdamW", STEPS, "worker-1", 1, "full")
    job = start_job(train, *arguments, workers=2, hold=2, environment=saving(directory))
    job.reach(2)
    job.wait_for(lambda status: status.checkpoint is not None and status.checkpoint.failure is not None, "a failure")
    job.reach(4)
    job.await_checkpoint(4)
    assert job.status().checkpoint is not None
    job.results()
    assert steps_in(directory) == [4, STEPS]


@pytest.mark.slow
def test_members_that_change_while_a_checkpoint_is_written(tmp_path: Path, start_job: StartJob) -> None:
    reference, directory = whole(tmp_path, steps=12), tmp_path / "divided"
    job = start_job(train, "parameters", "none", "AdamW", 12, workers=2, hold=3, environment=saving(directory, every=1))
    job.reach(3)
    job.join(2)
    job.reach(6)
    job.drain("worker-0", "worker-2")
    job.reach(9)
    job.drain("worker-1")
    results = job.results()
    assert {result.digest for result in results} == {reference.digest}
    assert steps_in(directory)[-1] == 12
    assert content(directory) == content(tmp_path / "whole")


@pytest.mark.slow
def test_a_damaged_share_is_found_by_its_reader_and_all_begin_from_an_older_checkpoint(
    tmp_path: Path, start_job: StartJob
) -> None:
    reference, directory = whole(tmp_path), tmp_path / "divided"
    job = start_job(train, workers=3, hold=5, environment=saving(directory))
    job.reach(3)
    job.await_checkpoint(2)
    job.reach(5)
    job.await_checkpoint(4)
    job.kill_all()
    job.finish()
    flip(max(checkpoint_of(directory, 4).glob("share-*"), key=lambda path: path.stat().st_size), -1)
    results = start_job(train, workers=3, environment=saving(directory)).results()
    assert {(result.digest, result.more) for result in results} == {(reference.digest, (3, 4, 5, 6))}


@pytest.mark.slow
def test_all_leave_together_and_come_back(tmp_path: Path, start_job: StartJob) -> None:
    reference, directory = whole(tmp_path), tmp_path / "divided"
    job = start_job(train, workers=3, hold=3, environment=saving(directory, every=100))
    job.reach(3)
    job.call("stop", reason="the test is over")
    assert {outcome.kind for outcome in job.finish().values()} == {"Drained"}
    assert steps_in(directory) == [4]
    results = start_job(train, workers=2, environment=saving(directory)).results()
    assert {(result.digest, result.more) for result in results} == {(reference.digest, (5, 6))}


@pytest.mark.parametrize("form", ["safetensors", "hf", "dcp"])
def test_what_is_exported_is_what_is_exported_of_a_whole_one(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    alone(train, environment=saving(tmp_path / "divided"))
    whole(tmp_path)
    held: list[weakref.ref[torch.Tensor]] = []
    read = ShareFiles.read_whole

    def counting(self: ShareFiles, name: str) -> SavedPiece:
        assert sum(each() is not None for each in held) <= 1, "one parameter is held while the next one is read"
        piece = read(self, name)
        held.append(weakref.ref(piece.value))
        return piece

    monkeypatch.setattr(ShareFiles, "read_whole", counting)
    for kind in ("whole", "divided"):
        arguments = ["--format", form, "--config", str(tmp_path / "config"), "--output", str(tmp_path / f"{kind}.out")]
        assert export.main([str(tmp_path / kind), *arguments]) == 0
    assert len(held) > 20
    one, other = tmp_path / "whole.out", tmp_path / "divided.out"
    files = {path.relative_to(one) for path in [one, *one.rglob("*")] if path.is_file()}
    assert files == {path.relative_to(other) for path in [other, *other.rglob("*")] if path.is_file()}
    for name in files - {Path(".metadata")}:
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_one_worker_alone_goes_on_from_what_it_has_divided(tmp_path: Path) -> None:
    reference = whole(tmp_path)
    environment = saving(tmp_path / "divided")
    assert alone(train, "parameters", "none", "AdamW", 3, environment=environment).more == (1, 2, 3)
    again = alone(train, "parameters", "none", environment=environment)
    assert (again.digest, again.more) == (reference.digest, (4, 5, 6))
    assert content(tmp_path / "divided") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("average", "written", "read"),
    [
        ("ema", (3, "parameters"), (2, "parameters")),
        slow("swa", (2, "parameters"), (3, "parameters")),
        slow("own", (2, "parameters"), (1, None)),
        slow("ema", (2, None), (3, "parameters")),
        nightly("ema", (1, "parameters"), (2, "parameters")),
    ],
)
def test_an_average_of_weights_is_divided_with_them(
    tmp_path: Path,
    start_job: StartJob,
    average: str,
    written: tuple[int, str | None],
    read: tuple[int, str | None],
) -> None:
    reference, directory = whole(tmp_path, steps=8, average=average), tmp_path / "divided"
    rest = "peer", "AdamW", 8, "", 0, "", average
    job = start_job(train, written[1], *rest, workers=written[0], hold=3, environment=saving(directory))
    job.reach(3)
    job.await_checkpoint(2)
    job.kill_all()
    job.finish()
    job = start_job(train, read[1], *rest, workers=read[0], hold=5, environment=saving(directory))
    job.reach(5)
    if read[0] > 1:
        job.kill("worker-1")
    job.join()
    job.reach(7)
    job.drain("worker-0")
    results = job.results()
    assert {(result.digest, result.metrics) for result in results} == {(reference.digest, reference.metrics)}
    assert content(directory) == content(tmp_path / "whole")
    again = alone(train, "parameters", *rest, environment=saving(directory))
    assert (again.digest, again.optimizer, again.more) == (reference.digest, reference.optimizer, ()), "it has all"
