"""A leader is stopped in the middle of a checkpoint, and its job goes on without it: it does no harm when it wakes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from broken_collectives import HASTY, regression
from checkpoints import checkpoint_of, steps_in
from elastic_jobs import ElasticJob, Trained, alone, trained

import virtualflow as vf
from tiers import nightly, slow
from virtualflow.protocol import http_api
from virtualflow.protocol.messages import Generation
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.state.checkpoint_order import highest_fence
from virtualflow.state.checkpoint_writer import CheckpointPolicy, CheckpointWriter

STOPPED_AT = 6


def stop_at_checkpoint(when: str) -> None:
    """SIGSTOP this process right before or right after it has looked whether it may let a checkpoint appear."""
    check = CheckpointWriter._check_fence

    def stop() -> None:
        # This very thread at once: another one that took the signal would let it run on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def stopping(writer: CheckpointWriter) -> None:
        last = writer._attempted_step == STOPPED_AT
        if last and when == "before":
            stop()
        check(writer)
        if last and when == "after":
            stop()

    CheckpointWriter._check_fence = stopping  # type: ignore[method-assign]


def train(directory: str = "", when: str = "") -> Trained:
    """Eight steps, with a note of each in which this worker was leader, and under which number."""
    torch.manual_seed(1)
    if when and os.environ[ENV_WORKER] == "worker-0":
        stop_at_checkpoint(when)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    policy = CheckpointPolicy(directory, every_steps=2, keep=1) if directory else None
    led = []
    with vf.elastic(model, optimizer, regression(), batch_size=12, steps=8, virtual_nodes=6, checkpoint=policy) as run:
        for step in run:
            for x, y in step:
                torch.nn.functional.mse_loss(model(x).squeeze(1), y).backward()
            if directory:
                run._context.checkpointer.flush(60.0)  # every checkpoint that is due is written
            if run.leader:
                led.append((*run.fence, step.number))
                print("led", *led[-1], flush=True)
    return trained(run, model, optimizer, more=tuple(led))


@pytest.mark.parametrize("when", [slow("after"), nightly("before")])
def test_what_a_leader_writes_that_was_stopped_and_replaced_does_not_count(
    when: str, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    directory = tmp_path / "kept"
    hasty = replace(HASTY, heartbeat_limit=2.0, silence_patience=1.0)
    job = start_job(train, str(directory), when, workers=1, membership=hasty)
    stopped = job.workers["worker-0"]
    (lost,) = job.wait_for(lambda status: bool(status.lost), "the stopped leader is declared lost").lost
    assert [path.name for path in directory.glob(f".step-{STOPPED_AT:08d}*")], "it is in the middle of a checkpoint"

    # Another one begins from the checkpoint before, and is behind the stopped one when that wakes.
    job.call("gone", worker=lost.worker, incarnation=lost.incarnation, reason="cut off, and deleted by whoever runs it")
    job.hold(5)
    job.start_worker()
    job.wait_for(lambda status: len(restored(status)) == 1 and status.step == 5, "the other one is behind it")
    began_from = checkpoint_of(directory, 4)
    os.kill(stopped.process.pid, signal.SIGCONT)
    job.await_end("worker-0")
    assert steps_in(directory) == ([2, 4, STOPPED_AT] if when == "after" else [2, 4])
    assert began_from.is_dir(), "the late one keeps only its last, and has removed nothing of a newer generation"
    assert highest_fence(directory) == Generation(*map(int, began_from.name.split(".")[1:]))

    # All die: the next one begins from what counts, not from the late one of a higher step.
    os.kill(job.workers["worker-1"].process.pid, signal.SIGKILL)
    job.await_end("worker-1")
    job.call("gone", worker="worker-1", reason="killed by SIGKILL")
    job.start_worker()
    outcomes = job.finish()
    assert restored(job.status()) == ["resumed from the checkpoint of step 4"] * 2
    late, other, last = (outcomes[f"worker-{n}"] for n in range(3))
    assert (late.kind, other.kind, last.kind) == ("Evicted", "killed", "returned"), late
    wanted = alone(train)
    assert (last.value.digest, last.value.optimizer) == (wanted.digest, wanted.optimizer)

    # Each of them led under a number of its own, and the late one not any more when it woke.
    fences, steps = zip(*(told_to_lead(outcome.log) for outcome in outcomes.values()), strict=True)
    assert [len(of_one) for of_one in fences] == [1, 1, 1]
    assert max(fences[0]) < max(fences[1]) < max(fences[2])
    assert steps == ([1, 2, 3, 4, 5, 6], [5], [5, 6, 7, 8])


def restored(status: http_api.Status) -> list[str]:
    return [event.text for event in status.events if event.kind == "restored"]


def told_to_lead(log: str) -> tuple[set[tuple[int, int]], list[int]]:
    """Under which numbers a worker led, and in which steps."""
    told = [[int(number) for number in line.split()[1:]] for line in log.splitlines() if line.startswith("led ")]
    return {(incarnation, counter) for incarnation, counter, _ in told}, [step for _, _, step in told]
