"""The state of a job and a clock that stands still: what a coordinator does, without its server."""

from __future__ import annotations

from coordinator_server import hello

from virtualflow.coordinator.admission import admit
from virtualflow.coordinator.calls import carry_out
from virtualflow.coordinator.decisions import decide
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_view import describe
from virtualflow.coordinator.worker_messages import disconnect, handle
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m


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


def large_job(size: int) -> tuple[Driven, list[str]]:
    """So many workers train, each by one virtual node."""
    job, workers = Driven(1, size, MembershipSettings()), [f"w{number}" for number in range(size)]
    first, *others = (m.Member(name, f"i{name}", "127.0.0.1", n, n + 1) for n, name in enumerate(workers))
    plan = m.Plan(m.Generation(1, 1), "recovery", (first, *others), tuple(workers), "start", "")
    assert job.admit(hello("w0", "iw0", plan=plan, virtual_nodes=size, fingerprint="f")) is None
    for incarnation in list(job.state.roster.workers):
        job.state.roster.update(incarnation, connected=True, known_in_person=True, entered=plan.generation)
    job.hear("iw0", m.Progress(plan.generation, 5, 0, 100, {}, 1.0, "training"))
    return job, workers
