"""The job as a whole: whatever happens to its workers and its coordinator, all come together again."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated import Worker, World, assert_together

from tiers import examples
from virtualflow.coordinator.roster import UnknownWorker
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m


class Jobs(RuleBasedStateMachine):
    """Anything may happen at any moment; then it stops, and one generation holds all who live."""

    @initialize(
        wanted=st.integers(1, 4),
        minimum=st.sampled_from([1, 1, 2, 3]),
        workers=st.integers(1, 4),
        head_start=st.booleans(),
        patient=st.booleans(),
    )
    def begin(self, wanted: int, minimum: int, workers: int, head_start: bool, patient: bool) -> None:
        self.world = World(wanted, minimum, patient)
        for number in range(workers):
            self.world.start_worker(f"worker-{number}").ready = True
        if head_start:
            self.world.settle(5.0)

    def pick(self, data: st.DataObject) -> Worker | None:
        living = [worker for worker in self.world.workers.values() if worker.alive and worker.over is None]
        return data.draw(st.sampled_from(living)) if living else None

    @precondition(lambda self: len(self.world.workers) < 12)
    @rule(name=st.integers(0, 5), ready=st.booleans())
    def a_worker_starts(self, name: int, ready: bool) -> None:
        self.world.start_worker(f"worker-{name}").ready = ready

    @rule(data=st.data())
    def a_worker_is_ready(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        if worker is not None and not worker.hung and not worker.ready:
            worker.ready = True
            worker.say(m.Ready())

    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        if worker is not None:
            self.world.kill(worker)

    @rule(data=st.data())
    def a_worker_hangs_or_wakes_up(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        if worker is not None:
            worker.hung = not worker.hung

    @rule(data=st.data(), tell=st.booleans())
    def a_connection_breaks(self, data: st.DataObject, tell: bool) -> None:
        worker = self.pick(data)
        if worker is not None and not worker.hung:
            self.world.disconnect(worker, tell=tell)

    @rule(data=st.data())
    def a_worker_gets_a_signal(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        if worker is not None and not worker.hung:
            self.world.drain(worker)

    @rule(data=st.data(), deadline=st.sampled_from([None, 2.0, 20.0]))
    def a_drain_is_announced(self, data: st.DataObject, deadline: float | None) -> None:
        worker = self.pick(data)
        if worker is not None:
            try:
                self.world.call(http_api.DrainCall((worker.name,), deadline))
            except UnknownWorker:
                return
            self.world.turn()

    @rule(data=st.data(), true=st.booleans())
    def a_loss_is_reported(self, data: st.DataObject, true: bool) -> None:
        """Whoever reports it may be wrong: the process lives, and is ended by being told so."""
        worker = self.pick(data)
        if worker is not None:
            if true:
                self.world.kill(worker)
            try:
                self.world.call(http_api.GoneCall(worker.name, worker.incarnation))
            except UnknownWorker:
                return
            self.world.turn()

    @rule(data=st.data(), seconds=st.sampled_from([0.01, 0.03, 0.2]))
    def a_worker_is_measured(self, data: st.DataObject, seconds: float) -> None:
        worker = self.pick(data)
        if worker is not None and not worker.hung:
            self.world.measure(worker, seconds)

    @rule()
    def the_coordinator_starts_again(self) -> None:
        self.world.start_coordinator()

    @rule(data=st.data(), times=st.integers(1, 6))
    def a_worker_goes_on(self, data: st.DataObject, times: int) -> None:
        worker = self.pick(data)
        for _ in range(times):
            if worker is not None:
                self.world.advance(worker)

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def all_go_on(self, seconds: float) -> None:
        self.world.settle(seconds)

    @rule()
    def a_step_is_made(self) -> None:
        self.world.train()

    @invariant()
    def the_status_can_be_shown(self) -> None:
        if hasattr(self, "world"):
            status = self.world.status()
            m.encode(status)
            lost = {worker.incarnation for worker in status.lost}
            assert not lost & {worker.incarnation for worker in status.workers}

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for worker in world.workers.values():
            if worker.alive and worker.hung:
                world.kill(worker)
            worker.ready = True
            worker.say(m.Ready())
        world.settle(45.0)
        # All others may have had to go; then those who come now must find each other.
        for number in range(2):
            world.start_worker(f"late-{number}").ready = True
        world.wanted = world.minimum = 2
        world.call(http_api.ScaleCall(2, 2))
        world.settle(60.0)
        living = [worker for worker in world.workers.values() if worker.runs]
        assert_together(world, living)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(
    max_examples=examples(40), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
