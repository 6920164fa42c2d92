"""A defect in a thread behind the training ends the worker with its traceback, and the coordinator is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob
from meshes import mesh
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol import messages as m
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import ENV_COORDINATOR, ENV_TOKEN, ENV_WORKER
from virtualflow.transport import Communicator, Link
from virtualflow.worker.member_state import MemberState
from virtualflow.worker.session import Session
from virtualflow.worker.settings import WorkerSettings


def train() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    dataset = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, dataset, batch_size=8, steps=6, virtual_nodes=4) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()


def spoil(part: str) -> None:
    """Let something behind the training thread of ``worker-1`` fail when the second generation is planned."""
    if os.environ[ENV_WORKER] != "worker-1":
        return
    told: list[m.Generation] = []

    def defect(plan: m.Plan) -> None:
        told.append(plan.generation)
        if len(told) == 2:
            raise ZeroDivisionError("a defect behind the training")

    if part == "the builder of communicators":
        build = Communicator.open

        def broken_open(plan: m.Plan, *arguments: Any, **options: Any) -> Communicator:
            defect(plan)
            return build(plan, *arguments, **options)

        Communicator.open = broken_open  # type: ignore[method-assign, assignment]
    else:
        take = Link._take

        def broken_take(self: Link, message: m.ToWorker) -> None:
            take(self, message)
            if isinstance(message, m.Plan):
                defect(message)

        Link._take = broken_take  # type: ignore[method-assign]


def spoiled(part: str) -> None:
    spoil(part)
    train()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["the builder of communicators", "the connection"])
def test_a_defect_behind_the_training_ends_it(part: str, start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(spoiled, part, workers=2, hold=2)
    job.reach(2)
    job.call("scale", workers=3)
    job.start_worker()
    job.wait_for(lambda status: status.phase == "failed", "the defect to be told")
    outcomes = job.finish()
    assert outcomes["worker-1"].kind == "ZeroDivisionError", outcomes
    assert "defect(" in outcomes["worker-1"].trace
    assert {outcomes[name].kind for name in ("worker-0", "worker-2")} == {"JobFailed"}, outcomes
    status = job.status()
    assert status.phase == "failed"
    assert "a defect behind the training" in (status.error or "")


class Watched(dict[m.Generation, Any]):
    """Communicators that are ready, which one thread adds to while another takes."""

    def __init__(self, lock: threading.Condition) -> None:
        super().__init__()
        self._lock = lock

    def pop(self, *arguments: Any) -> Any:
        assert self._lock._is_owned()  # type: ignore[attr-defined]
        return super().pop(*arguments)


def test_a_communicator_is_taken_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_COORDINATOR, "http://127.0.0.1:9")
    monkeypatch.setenv(ENV_TOKEN, "any")
    session = Session(WorkerEnvironment.read(), MemberState(8, "any"), WorkerSettings())
    session.communicators._prepared = Watched(session.link.changed)
    with pytest.raises(CommunicatorBroken, match="is not there"):
        session.enter(m.Plan(m.Generation(1, 1), "planned", (), (), "stop", ""))


@pytest.mark.parametrize("has_state", [False, True], ids=["without a state", "with a state"])
def test_a_worker_that_is_called_elsewhere_lets_go_of_those_who_wait_for_it(
    has_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joiner enters the newest plan only, and others may have agreed on the one before: they waited for ever."""
    monkeypatch.setenv(ENV_COORDINATOR, "http://127.0.0.1:9")
    monkeypatch.setenv(ENV_TOKEN, "any")
    session = Session(WorkerEnvironment.read(), MemberState(8, "any", has_state=has_state), WorkerSettings())
    news: list[str] = []
    waiting, called = mesh(2, {0: lambda: news[0] if news else None})
    session.communicators._prepared[called.plan.generation] = called
    session._on_plan(m.Plan(m.Generation(1, 2), "planned", (), (), "drain", "the last worker leaves"))
    if has_state:
        news.append("nobody has let go")
    with pytest.raises(CommunicatorBroken, match="nobody has let go" if has_state else "(?i)connection|closed|peer"):
        waiting.all_gather(torch.zeros(4, dtype=torch.uint8))
    assert (called.plan.generation in session.communicators) == has_state
    for communicator in (waiting, called):
        communicator.close()
