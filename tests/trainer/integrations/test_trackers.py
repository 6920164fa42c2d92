"""Trackers have one run with every step once, whoever writes it and whenever that one is killed."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from elastic_jobs import ElasticJob, alone
from jobs import run_job
from tracked import BACKENDS, KINDS, check, train
from wandb_server import Uploaded

from tiers import nightly
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.http_api import Status
from virtualflow.worker.options import check_trackers
from virtualflow.worker.tracker import Entry, NotWritten

pytestmark = pytest.mark.parametrize("kind", KINDS)
StartJob = Callable[..., ElasticJob]


def leader_of(status: Status) -> str | None:
    return next((worker.worker for worker in status.workers if worker.first == 0 < worker.last), None)


def whole(status: Status) -> bool:
    """Whether three workers train."""
    return sum(worker.first < worker.last for worker in status.workers) == 3


def test_a_run_alone_has_each_step_once_and_the_digest_of_one_without_a_tracker(kind: str, tmp_path: Path) -> None:
    found = alone(train, kind, str(tmp_path / "runs"), 12)
    untracked = alone(train, "", "", 12)
    assert (found.digest, found.optimizer) == (untracked.digest, untracked.optimizer)
    (history,) = BACKENDS[kind].read(tmp_path / "runs").values()
    assert list(BACKENDS[kind].read(tmp_path / "runs")) == [found.more]
    steps = list(range(1, 13))
    assert [step for step, _ in history["loss"]] == steps
    assert [step for step, _ in history["fifth"]] == [5, 10]
    assert [step for step, _ in history["end"]] == [12]
    assert history["virtualflow/workers"] == [(step, 1.0) for step in steps]
    # Four steps an epoch; the rate is that with which a step was made.
    assert [epoch for _, epoch in history["virtualflow/epoch"]] == [0] * 4 + [1] * 4 + [2] * 4
    rates = [rate for _, rate in history["virtualflow/learning_rate"]]
    assert rates == pytest.approx([0.01 * (1 / 3 + 2 / 3 * step / 12) for step in range(12)])


@pytest.mark.parametrize("when", ["before", "within", "behind"])
def test_leaders_that_are_killed_one_after_the_other_around_a_write_leave_no_gap_and_nothing_twice(
    when: str, kind: str, tmp_path: Path, start_job: StartJob
) -> None:
    alone(train, kind, str(tmp_path / "alone"), 12)
    job = start_job(train, kind, str(tmp_path / "runs"), 12, "", 0.0, f"{when} 6", workers=3)
    outcomes = job.finish()
    assert [outcome.kind for outcome in outcomes.values()] == ["killed", "killed", "returned"], outcomes
    history = check(kind, tmp_path / "runs", tmp_path / "alone", 12)
    workers = [count for _, count in history["virtualflow/workers"]]
    assert workers[0] == 3
    assert workers[-1] == 1
    assert sorted(workers, reverse=True) == workers
    marks = history["virtualflow/changes"]
    assert [step for step, _ in marks] == [n + 2 for n in range(11) if workers[n] != workers[n + 1]]
    assert all("lost: from " in mark for _, mark in marks)


@pytest.mark.parametrize("often", [True, nightly(False)], ids=["often", "seldom"])
def test_the_last_step_is_written_though_its_leader_was_killed_before_it_could(
    often: bool, kind: str, tmp_path: Path, start_job: StartJob
) -> None:
    alone(train, kind, str(tmp_path / "alone"), 12)
    job = start_job(train, kind, str(tmp_path / "runs"), 12, "", 0.0, "before 12", often, workers=3)
    assert [outcome.kind for outcome in job.finish().values()] == ["killed", "killed", "returned"]
    check(kind, tmp_path / "runs", tmp_path / "alone", 12)


def test_a_run_goes_on_from_a_checkpoint_when_all_have_been_killed(
    kind: str, tmp_path: Path, start_job: StartJob
) -> None:
    alone(train, kind, str(tmp_path / "alone"), 16)
    job = start_job(train, kind, str(tmp_path / "runs"), 16, str(tmp_path / "checkpoints"), workers=2, hold=10)
    job.reach(10)
    job.kill_all()
    job.start_worker()
    job.start_worker()
    values = job.results()
    assert len(values) == 2
    history = check(kind, tmp_path / "runs", tmp_path / "alone", 16)
    assert [mark.split(":")[0] for _, mark in history["virtualflow/changes"]] == ["restart"]
    assert list(BACKENDS[kind].read(tmp_path / "runs")) == [values[0].more]


def test_the_run_goes_on_with_a_joiner_when_all_who_began_it_have_left(
    kind: str, tmp_path: Path, start_job: StartJob
) -> None:
    alone(train, kind, str(tmp_path / "alone"), 12)
    job = start_job(train, kind, str(tmp_path / "runs"), 12, workers=1, hold=4)
    job.reach(4)
    job.join()
    job.reach(7)
    job.drain("worker-0")
    (value,) = job.results()
    history = check(kind, tmp_path / "runs", tmp_path / "alone", 12)
    assert list(BACKENDS[kind].read(tmp_path / "runs")) == [value.more]
    assert history["virtualflow/workers"] == [(n, 2.0 if 5 < n < 9 else 1.0) for n in range(1, 13)]
    assert [(step, mark.split(":")[0]) for step, mark in history["virtualflow/changes"]] == [(6, "join"), (9, "drain")]


@pytest.mark.parametrize("kills", [4, nightly(20)])
def test_a_run_has_each_step_once_after_kills_at_random_moments(
    kills: int, kind: str, tmp_path: Path, start_job: StartJob
) -> None:
    draw, steps = random.Random(20_261_124 + kills), 15 * kills + 20
    alone(train, kind, str(tmp_path / "alone"), steps)
    job = start_job(
        train, kind, str(tmp_path / "runs"), steps, str(tmp_path / "checkpoints"), 0.002, workers=3, hold=12
    )
    leaders = 0
    for kill in range(kills):
        start = 15 * kill
        job.hold(start + 12)
        job.wait_for(lambda status: status.step >= start + 3 and whole(status), f"all workers at step {start + 3}")  # noqa: B023
        time.sleep(draw.uniform(0, 0.1))
        status = job.status()
        leader = leader_of(status)
        alive = [name for name, worker in job.workers.items() if worker.process.exitcode is None]
        victim = leader if leader in alive and draw.random() < 0.6 else draw.choice(alive)
        assert victim is not None
        leaders += victim == leader
        if kill == kills // 2:
            job.kill_all()
            for _ in range(3):
                job.start_worker()
        else:
            job.kill(victim)
            job.join()
    values = job.results()
    history = check(kind, tmp_path / "runs", tmp_path / "alone", steps)
    assert {value.more for value in values} == set(BACKENDS[kind].read(tmp_path / "runs"))
    assert leaders >= kills // 3
    causes = [mark.split(":")[0] for _, mark in history["virtualflow/changes"]]
    print(f"\n{kind}: {kills} kills, {leaders} of them of the leader; marks: {causes}")
    assert causes.count("lost") + causes.count("restart") >= kills // 2


def test_wandb_itself_uploads_each_step_once_also_of_a_long_run(kind: str, tmp_path: Path) -> None:
    if kind != "wandb":
        pytest.skip("another one's file")
    tracker = BACKENDS[kind].make(tmp_path)
    long = {f"metric_{n}": float(n) for n in range(300)}  # longer than a block of the file
    entries = [msgspec.structs.replace(entry(n), metrics={"loss": 1 / n, **long}) for n in range(1, 60)]
    for fence, first, last in ((1, 0, 20), (2, 12, 33), (3, 33, 50), (5, 41, 59)):
        tracker.open("run", (7, fence))
        tracker.write(entries[first:last])
        if fence != 2:  # a leader that goes on in the next generation
            tracker.close()
    tracker.open("run", (7, 6))
    tracker.write([msgspec.structs.replace(entry(60), metrics={"loss": math.nan})])
    tracker.end()
    tracker.close()
    (folder,) = (tmp_path / "wandb").iterdir()
    server = Uploaded()
    server.sync(folder)
    assert (server.names, server.exit_code) == ({"run"}, 0)
    assert [line["_step"] for line in server.history] == list(range(1, 61))
    assert [line["loss"] for line in server.history[:-1]] == [1 / n for n in range(1, 60)]
    assert math.isnan(server.history[-1]["loss"])
    tracker.open("run", (8, 1))
    with pytest.raises(NotWritten, match=r"another leader, of generation 0*8\.0*1, writes"):
        BACKENDS[kind].make(tmp_path).open("run", (7, 9))


def test_digits_through_the_command_line_with_all_that_can_happen(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "tensorboard":
        pytest.skip("one will do")
    bits = []
    for name, options in (
        ("alone", ["--workers", 1]),
        ("changed", ["--workers", 3, "--schedule", "8:kill,16:=2,22:coordinator,28:all,36:term,44:=1,50:kill"]),
    ):
        monkeypatch.setenv("RUNS", str(tmp_path / name))
        checkpoints = ["--checkpoint-dir", tmp_path / f"{name}-kept", "--checkpoint-steps", 7]
        finished = run_job(tmp_path, *options, *checkpoints, "tests/trainer/digits_tracked.py", "--steps", 60)
        bits.append(finished.bits)
    assert bits[0] == bits[1]
    (wanted,), (found,) = (BACKENDS[kind].read(tmp_path / name).values() for name in ("alone", "changed"))
    assert [step for step, _ in found["loss"]] == list(range(1, 61))
    for name in ("loss", "test_accuracy", "virtualflow/learning_rate"):
        assert found[name] == wanted[name]
    causes = {mark.split(":")[0] for _, mark in found["virtualflow/changes"]}
    assert {"lost", "restart", "resize"} & causes


@pytest.mark.parametrize("given", ["runs", object()], ids=["a path", "anything"])
def test_what_is_no_tracker_is_refused(given: object, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r'TensorBoard\("runs"\), or a list'):
        check_trackers([given])
    with pytest.raises(ConfigurationError):
        check_trackers([type(BACKENDS[kind].make)])


def test_what_a_replaced_leader_writes_late_and_a_write_that_failed_do_no_harm(kind: str, tmp_path: Path) -> None:
    if kind != "tensorboard":
        pytest.skip("only the leader that holds its lease writes there")
    backend = BACKENDS[kind]
    late, next_one = backend.make(tmp_path), backend.make(tmp_path)
    late.open("run", (5, 1))
    late.write([entry(n) for n in range(1, 6)])
    next_one.open("run", (5, 2))
    next_one.write([entry(n) for n in range(4, 7)])
    late.write([entry(n, 9.0) for n in range(6, 9)])
    (torn,) = (tmp_path / "run").glob("*0000005.*0000002.*")
    torn.write_bytes(torn.read_bytes() + b"\x10\0\0\0\0\0\0\0torn")
    for tracker in (next_one, late):
        tracker.close()
    next_one.open("run", (5, 2))  # again: as after an error
    next_one.write([entry(n) for n in range(6, 9)])
    next_one.close()
    assert backend.read(tmp_path)["run"]["loss"] == [(n, float(n)) for n in range(1, 9)]


def entry(step: int, loss: float | None = None) -> Entry:
    metrics = {"loss": float(step) if loss is None else loss}
    return Entry(step, 0, 1e9 + step, None, 1, (0.1,), metrics, None)
