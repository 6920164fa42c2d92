"""The state of a job and a clock that stands still: what a coordinator does, without its server."""

from __future__ import annotations

from virtualflow.coordinator.admission import admit
from virtualflow.coordinator.calls import carry_out
from virtualflow.coordinator.decisions import decide
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_view import describe
from virtualflow.coordinator.worker_messages import disconnect, handle
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.versions import PROTOCOL


class Driven:
    """A job; what is done to it happens at :attr:`now`."""

    def __init__(self, incarnation: int, wanted: int, settings: MembershipSettings, now: float = 0.0) -> None:
        self.now = now
        self.state = JobState(incarnation, wanted, settings, now)

    def admit(self, hello: m.Hello) -> str | None:
        return admit(self.state, hello, self.now)

    def hear(self, incarnation: str, message: m.FromWorker) -> None:
        handle(self.state, incarnation, message, self.now)

    def lose_connection(self, incarnation: str) -> None:
        disconnect(self.state, incarnation, self.now)

    def call(self, call: http_api.Call) -> str:
        return carry_out(self.state, call, self.now)

    def decide(self) -> float | None:
        return decide(self.state, self.now)

    def status(self, brief: bool = False) -> http_api.Status:
        return describe(self.state, brief)

    def take_outbox(self) -> list[tuple[str, m.ToWorker]]:
        outbox, self.state.outbox = self.state.outbox, []
        return outbox


def _hello(worker: str) -> m.Hello:
    return m.Hello(
        protocol=PROTOCOL, worker=worker, incarnation=f"i{worker}", address="127.0.0.1", pid=1, virtual_nodes=8,
        fingerprint="f", ready=True, draining=False, drain_deadline=None, plan=None, step=0, total_steps=100,
        done=False, changes=(),
    )  # fmt: skip


def first_job() -> tuple[Driven, m.Plan]:
    """A job in whose first generation a, b and c train."""
    job = Driven(incarnation=1, wanted=3, settings=MembershipSettings())
    for worker in "abc":
        assert job.admit(_hello(worker)) is None
    job.now = 3.0
    for worker in "abc":
        job.hear(f"i{worker}", m.Heartbeat())
    job.decide()
    first = job.state.proposed
    assert first is not None
    for worker in "abc":
        job.hear(f"i{worker}", m.Entered(first, 0, False))
    return job, first
