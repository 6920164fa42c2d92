"""The job as a whole: whatever happens to its workers and its coordinator, all come together again."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated import SETTINGS, VIRTUAL_NODES, Worker, World

from virtualflow import messages as m
from virtualflow.roster import UnknownWorker
from virtualflow.settings import MAX_CHANGES, MAX_LOST


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
                self.world.job.drain(m.DrainCall((worker.name,), deadline))
            except UnknownWorker:
                return
            self.world.turn()

    @rule(data=st.data())
    def a_loss_is_reported(self, data: st.DataObject) -> None:
        worker = self.pick(data)
        if worker is not None:
            self.world.kill(worker)
            try:
                self.world.job.gone(m.GoneCall(worker.name, worker.incarnation))
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
            status = self.world.job.status()
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
        world.job.scale(2, minimum=2)
        world.settle(60.0)
        living = [worker for worker in world.workers.values() if worker.runs]
        together(world, living)


def together(world: World, living: list[Worker]) -> None:
    """All of ``living`` are in one generation, or wait for a place in it."""
    running = world.job.running
    assert running is not None, world.job.reason
    inside = [worker for worker in living if worker.plan == running]
    assert {worker.incarnation for worker in inside} == {x.incarnation for x in running.members}
    assert all(worker.synced and not worker.awaiting for worker in inside)
    assert len(inside) == min(len(living), VIRTUAL_NODES)
    assert not any(worker.draining for worker in living)
    assert len(world.job.roster.workers) <= len(living) + 1, "the dead are remembered for ever"
    before = inside[0].step
    world.settle(1.0)
    assert inside[0].step > before, "the training stands still"


TestJobs = Jobs.TestCase
TestJobs.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


# --- single stories ---------------------------------------------------------------------------------------------------


def running_world(workers: int = 2) -> World:
    world = World(wanted=workers)
    for number in range(workers):
        world.start_worker(f"worker-{number}").ready = True
    world.settle(5.0)
    assert world.job.phase == "training"
    return world


def counts(world: World) -> list[int]:
    assert world.job.running is not None
    return [len(member.virtual_nodes) for member in world.job.running.members]


def measure(world: World, *seconds: float) -> None:
    """Each worker measures its pace in the generation that it is in."""
    for worker, pace in zip(world.workers.values(), seconds, strict=True):
        world.measure(worker, pace)
    world.settle(SETTINGS.rebalance_interval + 1.0)


def test_a_straggler_loses_load_and_gets_it_back_when_it_recovers() -> None:
    world = running_world(2)
    before = world.job.running_generation
    measure(world, 0.01, 0.01)
    assert (counts(world), world.job.running_generation) == ([2, 2], before)
    measure(world, 0.01, 0.03)
    assert counts(world) == [3, 1]
    assert world.job.running is not None
    assert world.job.running.cause == "rebalance"
    status = world.job.status()
    assert [worker.pace_ms for worker in status.workers] == pytest.approx([10.0, 30.0])
    assert status.predicted_step_ms == pytest.approx(31.0)
    # Those paces were measured in the generation before: nothing is done until there are new ones.
    world.settle(10.0)
    assert counts(world) == [3, 1]
    measure(world, 0.01, 0.01)
    assert counts(world) == [2, 2]


def test_a_new_coordinator_is_told_the_paces_and_goes_on_from_the_present_split() -> None:
    world = running_world(2)
    measure(world, 0.01, 0.03)
    measure(world, 0.01, 0.03)
    world.start_coordinator()
    world.settle(5.0)
    assert counts(world) == [3, 1]
    assert [worker.pace_ms for worker in world.job.status().workers] == pytest.approx([10.0, 30.0])


def test_a_new_coordinator_carries_on_with_what_was_to_be_moved() -> None:
    world = running_world(2)
    for worker, seconds in zip(world.workers.values(), (0.01, 0.03), strict=True):
        world.measure(worker, seconds)
    world.start_coordinator()
    world.settle(SETTINGS.rebalance_interval + 3.0)
    assert counts(world) == [3, 1]


def test_joins_and_losses_use_what_was_measured() -> None:
    world = running_world(2)
    measure(world, 0.01, 0.03)
    world.start_worker("worker-2").ready = True
    world.settle(3.0)
    assert counts(world) == [2, 1, 1]
    world.kill(world.workers["worker-2.2"])
    world.settle(3.0)
    assert counts(world) == [3, 1]


def test_a_profile_makes_the_first_assignment_right() -> None:
    world = World(wanted=2)
    for number, guess in enumerate((0.01, 0.03)):
        worker = world.start_worker(f"worker-{number}")
        worker.ready, worker.guess = True, guess
    world.settle(5.0)
    assert counts(world) == [3, 1]


def test_a_joiner_is_not_kept_waiting_by_a_rebalance_that_nobody_can_enter() -> None:
    world = running_world(2)
    for worker, seconds in zip(world.workers.values(), (0.01, 0.03), strict=True):
        world.measure(worker, seconds)
    world.pass_time(SETTINGS.rebalance_interval + 1.0)  # no step is made: the job is held
    assert world.job.proposed is not None
    assert world.job.proposed.cause == "rebalance"
    world.start_worker("worker-2").ready = True
    world.pass_time(SETTINGS.admission_window + 1.0)
    assert world.job.proposed is not None
    assert (world.job.proposed.cause, len(world.job.proposed.members)) == ("join", 3)
    world.settle(2.0)
    assert len(counts(world)) == 3


@pytest.mark.parametrize("first", [True, False], ids=["before the others", "after them"])
def test_who_was_given_up_and_wakes_up_under_a_new_coordinator_never_meets_another_training(first: bool) -> None:
    world = running_world(2)
    asleep, other = world.workers.values()
    asleep.hung = True
    world.settle(SETTINGS.heartbeat_limit + 2.0)
    world.kill(other)  # nobody is left, so others begin anew
    others = [world.start_worker(f"new-{number}") for number in range(2)]
    for worker in others:
        worker.ready = True
    world.settle(8.0)
    assert [worker.lineage for worker in others] == [2, 2]
    world.start_coordinator()  # the word that it was given up is lost with its connection
    asleep.hung = False
    for worker in [asleep, *others] if first else [*others, asleep]:
        worker.reconnect_at = world.now
        world.connect(worker)
    world.settle(5.0)
    assert asleep.over is not None
    assert "went on in generation" in asleep.over
    together(world, others)


def test_a_lone_worker_that_drains_hands_its_state_to_its_replacement() -> None:
    world = running_world(1)
    [old] = world.workers.values()
    world.drain(old)
    new = world.start_worker("worker-1")
    new.ready = True
    world.settle(5.0)
    assert old.over == "left"
    assert new.lineage == old.lineage
    assert new.step >= old.step > 0


def test_a_lone_worker_without_a_replacement_leaves_in_time_and_the_job_waits() -> None:
    world = running_world(1)
    [old] = world.workers.values()
    world.drain(old)
    world.settle(SETTINGS.drain_grace)
    assert old.over == "left"
    assert world.job.phase == "waiting"


def test_a_joiner_that_never_builds_holds_up_nobody() -> None:
    world = running_world(2)
    hung = world.start_worker("hung")
    hung.ready, hung.builds = True, False
    world.settle(1.0)
    assert world.job.proposed is not None
    other = world.start_worker("other")
    other.ready = True
    world.settle(25.0)
    assert other.synced
    world.settle(40.0)
    assert hung.over is not None
    assert "could not be connected" in hung.over


def test_a_drain_takes_effect_before_its_deadline_though_a_joiner_hangs() -> None:
    world = running_world(2)
    hung = world.start_worker("hung")
    hung.ready, hung.builds = True, False
    world.settle(1.0)
    world.job.drain(m.DrainCall(("worker-1",), 8.0))
    world.turn()
    world.settle(8.0 - SETTINGS.drain_margin + 0.5)
    assert world.workers["worker-1.1"].over == "left"
    assert world.workers["worker-0.0"].synced


def test_nothing_begins_with_fewer_workers_than_the_minimum() -> None:
    world = World(wanted=3, minimum=2)
    first = world.start_worker("worker-0")
    first.ready = True
    world.settle(SETTINGS.startup_grace + 10.0)
    assert world.job.phase == "waiting"
    second = world.start_worker("worker-1")
    second.ready = True
    world.settle(SETTINGS.startup_grace - 5.0)
    assert world.job.phase == "waiting"
    world.settle(10.0)
    assert first.synced
    assert second.synced


def test_the_minimum_may_be_lowered_while_the_job_waits() -> None:
    world = World(wanted=2, minimum=2)
    worker = world.start_worker("worker-0")
    worker.ready = True
    world.settle(5.0)
    assert (world.job.status().minimum, world.job.phase) == (2, "waiting")
    world.job.scale(1, minimum=1)
    world.turn()
    world.settle(1.0)
    assert (world.job.status().minimum, world.job.phase) == (1, "training")
    world.job.scale(4)
    assert world.job.status().minimum == 1


def test_a_founding_that_loses_a_worker_it_needs_begins_anew_with_the_others() -> None:
    world = World(wanted=2, minimum=2)
    first, second = world.start_worker("worker-0"), world.start_worker("worker-1")
    first.ready = second.ready = True
    second.builds = False
    world.settle(3.0)
    assert world.job.proposed is not None
    world.kill(second)
    world.settle(3.0)
    assert world.job.proposed is None
    assert world.job.phase == "waiting"
    third = world.start_worker("worker-2")
    third.ready = True
    world.settle(5.0)
    assert first.over is None
    assert first.synced
    assert third.synced


def test_a_worker_that_hangs_while_the_job_is_founded_is_given_up() -> None:
    world = World(wanted=3)
    for number in range(3):
        worker = world.start_worker(f"worker-{number}")
        worker.ready, worker.builds = True, number != 1
    world.settle(60.0)
    assert world.workers["worker-1.1"].over is not None
    assert world.workers["worker-0.0"].synced
    assert world.workers["worker-2.2"].synced


def test_a_worker_that_was_given_up_is_refused_when_it_comes_back() -> None:
    world = running_world(3)
    lost = world.workers["worker-1.1"]
    lost.hung = True
    world.settle(10.0)
    lost.hung = False
    world.settle(1.0)
    assert lost.over is not None
    assert "no sign of life" in lost.over


def test_the_status_names_whom_the_job_has_given_up_also_when_they_are_forgotten() -> None:
    world = running_world(4)
    hung, gone, leaver = (world.workers[f"worker-{number}.{number}"] for number in (1, 2, 3))
    hung.hung = True
    world.drain(leaver)
    world.settle(10.0)
    world.kill(gone)
    world.job.gone(m.GoneCall("worker-2", gone.incarnation, "its node is lost"))
    world.settle(10.0)
    assert leaver.over == "left"
    assert list(world.job.roster.workers) == ["worker-0.0"]
    assert world.job.status().lost == (
        m.LostWorker("worker-1", "worker-1.1", "127.0.0.1", "no sign of life for 5 s"),
        m.LostWorker("worker-2", "worker-2.2", "127.0.0.1", "its node is lost"),
    )


def test_the_status_names_the_latest_of_many_who_were_given_up() -> None:
    world = running_world(1)
    for number in range(MAX_LOST + 3):
        worker = world.start_worker(f"spot-{number}")
        world.settle(0.5)
        world.kill(worker)
        world.job.gone(m.GoneCall(worker.name, worker.incarnation))
    lost = world.job.status().lost
    assert [worker.worker for worker in lost] == [f"spot-{number}" for number in range(3, MAX_LOST + 3)]


def test_a_worker_that_a_new_coordinator_leaves_behind_is_among_them() -> None:
    world = running_world(3)
    hung = world.workers["worker-1.1"]
    hung.hung = True
    world.settle(10.0)
    world.start_coordinator()
    world.settle(5.0)
    assert world.job.status().lost == ()
    hung.hung = False
    world.settle(2.0)
    assert [worker.incarnation for worker in world.job.status().lost] == ["worker-1.1"]


def test_a_process_that_was_never_in_the_job_is_not_among_them() -> None:
    world = running_world(2)
    stranger = msgspec.structs.replace(Worker("stranger", "stranger.9").hello(world.now), virtual_nodes=8)
    assert world.job.hello(stranger) is not None
    assert world.job.status().lost == ()


def change(counter: int, repeated: int = 1) -> m.Change:
    return m.Change(generation(counter), counter, 2, 1, "lost", "", 1.0, repeated)


def test_repeated_steps_are_counted_over_all_changes_that_there_ever_were() -> None:
    world = running_world(2)
    for counter in range(2, MAX_CHANGES + 12):
        world.job.receive("worker-0.0", m.Resumed(change(counter)))
    # The oldest are told of again, by a worker that still remembers them.
    world.job.receive("worker-1.1", m.Resumed(change(2)))
    world.job.receive("worker-1.1", m.Resumed(change(MAX_CHANGES + 11, repeated=3)))
    status = world.job.status()
    assert len(status.changes) == MAX_CHANGES
    assert status.changes_total == MAX_CHANGES + 10
    assert status.repeated_steps == MAX_CHANGES + 12
    assert status.changes[0].generation == generation(12)


def test_of_a_change_the_longest_pause_and_transfer_that_anybody_saw_count() -> None:
    world = running_world(2)
    receiver = msgspec.structs.replace(change(2), pause_ms=None, state_bytes=640, state_ms=3.0, state_donors=2)
    donor = msgspec.structs.replace(change(2), pause_ms=7.0, state_bytes=600, state_ms=4.0, state_donors=2)
    for worker, told in (("worker-0.0", receiver), ("worker-1.1", donor), ("worker-1.1", change(2))):
        world.job.receive(worker, m.Resumed(told))
    (known,) = world.job.status().changes
    assert (known.pause_ms, known.state_bytes, known.state_ms, known.state_donors) == (7.0, 640, 4.0, 2)


def test_a_brief_status_has_the_latest_changes_and_events_and_the_same_sums() -> None:
    world = running_world(2)
    for counter in range(2, 102):
        world.job.receive("worker-0.0", m.Resumed(change(counter)))
    whole, brief = world.job.status(), world.job.status(brief=True)
    assert brief.changes == whole.changes[-20:]
    assert brief.events == whole.events[-50:]
    assert brief == msgspec.structs.replace(whole, changes=brief.changes, events=brief.events)
    assert (brief.changes_total, brief.repeated_steps) == (100, 100)


def test_progress_is_no_news_and_everything_else_is() -> None:
    world = running_world(2)
    job = world.job
    assert job.running is not None

    def told(message: m.FromWorker) -> tuple[bool, bool]:
        before = (job.version, job.news)
        job.receive("worker-0.0", message)
        return job.version != before[0], job.news != before[1]

    progress = m.Progress(job.running.generation, 50, 0, None, {"loss": 1.0}, 2.0, "training")
    assert told(progress) == (True, False)
    assert told(msgspec.structs.replace(progress, step=51, epoch=1, metrics={}, steps_per_second=3.0)) == (True, False)
    assert told(msgspec.structs.replace(progress, step=52, phase="evaluating")) == (True, True)
    assert told(msgspec.structs.replace(progress, step=53, phase="evaluating")) == (True, False)
    assert told(msgspec.structs.replace(progress, step=54)) == (True, True)
    assert told(msgspec.structs.replace(progress, total_steps=60)) == (True, True)
    assert told(m.Heartbeat()) == (False, False)
    assert told(m.Note("checkpoint", "written")) == (True, True)
    assert told(m.Resumed(change(2))) == (True, True)
    assert told(m.DrainRequest("SIGTERM")) == (True, True)
    assert told(done(60)) == (True, True)


def test_also_by_a_coordinator_that_has_never_known_it() -> None:
    world = running_world(3)
    lost = world.workers["worker-1.1"]
    lost.hung = True
    world.settle(10.0)
    world.start_coordinator()
    world.settle(5.0)
    replacement = world.start_worker("worker-1")
    replacement.ready = True
    world.settle(5.0)
    lost.hung = False
    world.settle(2.0)
    assert lost.over is not None
    assert "went on" in lost.over
    assert replacement.synced


def test_the_dead_are_forgotten_and_still_refused() -> None:
    world = running_world(1)
    for number in range(50):
        worker = world.start_worker(f"spot-{number}")
        worker.ready = True
        world.settle(2.0)
        assert worker.synced
        world.kill(worker)
        world.settle(2.0)
    assert len(world.job.roster.workers) == 1
    assert world.job.hello(world.workers["spot-0.1"].hello(world.now)) is not None


@pytest.mark.parametrize("incarnation", [None, "nobody.7"], ids=["by name", "by incarnation"])
def test_the_loss_of_a_worker_that_never_was_is_no_news(incarnation: str | None) -> None:
    world = running_world(2)
    with pytest.raises(UnknownWorker):
        world.job.gone(m.GoneCall("nobody", incarnation))
    with pytest.raises(UnknownWorker):
        world.job.gone(m.GoneCall("nobody", "worker-0.0"))


def test_a_loss_may_be_reported_twice() -> None:
    world = running_world(2)
    call = m.GoneCall("worker-1", "worker-1.1", "killed")
    world.kill(world.workers["worker-1.1"])
    world.job.gone(call)
    world.settle(2.0)
    assert "already" in world.job.gone(call)
    assert world.workers["worker-0.0"].synced


def test_a_loss_that_a_new_coordinator_hears_of_too_early_is_kept_in_mind() -> None:
    world = running_world(2)
    world.kill(world.workers["worker-1.1"])
    world.start_coordinator()
    with pytest.raises(UnknownWorker):
        world.job.gone(m.GoneCall("worker-1", "worker-1.1", "killed"))
    world.settle(2.0)
    assert world.workers["worker-0.0"].synced
    assert world.job.running is not None
    assert len(world.job.running.members) == 1


def test_a_silent_coordinator_is_not_the_workers_silence() -> None:
    world = running_world(2)
    world.now += 30.0
    world.job.set_time(world.now, 0.0)
    world.job.excuse(30.0)
    world.turn()
    assert not any(worker.gone for worker in world.job.roster.workers.values())


def test_a_stop_before_the_first_step_ends_all_at_once() -> None:
    world = World(wanted=2)
    for number in range(2):
        worker = world.start_worker(f"worker-{number}")
        worker.ready, worker.builds = True, False
    world.settle(3.0)
    assert world.job.proposed is not None
    world.job.request_stop("enough")
    world.turn()
    world.settle(1.0)
    assert world.job.phase == "stopped"
    assert all(worker.over is not None and "ended: False" in worker.over for worker in world.workers.values())


def test_a_stop_lets_all_leave_at_one_step_and_ends_those_who_wait() -> None:
    world = running_world(2)
    waiting = world.start_worker("worker-2")
    world.settle(1.0)
    world.job.request_stop("enough")
    world.turn()
    world.settle(2.0)
    first, second = world.workers["worker-0.0"], world.workers["worker-1.1"]
    assert first.over == second.over == "left"
    assert first.step == second.step
    assert waiting.over is not None
    assert world.job.phase == "stopped"


def done(step: int, digest: str = "d") -> m.Done:
    return m.Done(step, digest, digest, {}, 1.0, step)


def test_the_end_is_told_to_those_who_wait_to_join() -> None:
    world = running_world(2)
    waiting = world.start_worker("worker-2")
    world.settle(1.0)
    for incarnation in ("worker-0.0", "worker-1.1"):
        world.job.receive(incarnation, done(7))
        world.turn()
    assert world.job.phase == "done"
    assert m.End(False, "the job is complete") in waiting.inbox
    assert [event.kind for event in world.job.status().events].count("done") == 1


def test_a_coordinator_that_restarts_at_the_end_does_not_wait_for_those_who_are_through() -> None:
    world = running_world(2)
    first, second = world.workers.values()
    first.kept[m.Done] = done(7)
    world.kill(second)
    world.start_coordinator()
    world.settle(SETTINGS.heartbeat_limit + 3.0)
    assert world.job.phase == "done"


def test_different_weights_at_the_end_fail_the_job() -> None:
    world = running_world(2)
    world.job.receive("worker-0.0", done(7, "aaaa"))
    world.job.receive("worker-1.1", done(7, "bbbb"))
    world.turn()
    assert world.job.phase == "failed"
    assert "not deterministic" in (world.job.status().error or "")


def test_different_weights_at_the_end_are_no_fault_of_a_statistical_job() -> None:
    world = running_world(2)
    world.job.reproducibility = "statistical"
    world.job.receive("worker-0.0", done(7, "aaaa"))
    world.job.receive("worker-1.1", done(7, "bbbb"))
    world.turn()
    assert world.job.phase == "done"
    assert world.job.status().digest == "aaaa"


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        pytest.param({"protocol": 99}, "protocol 99", id="another protocol"),
        pytest.param({"virtual_nodes": 8}, "8 virtual nodes", id="another number of virtual nodes"),
        pytest.param({"fingerprint": "other"}, "results would differ", id="another torch"),
        pytest.param({"device": "a P100", "self_test": "other"}, "bits of the training would differ", id="other bits"),
        pytest.param({"device": "a P100"}, "runs on [a P100] and the job on []", id="a device that tells no bits"),
        pytest.param({"self_test": "other"}, "both run on []", id="other bits on the same type of machine"),
        pytest.param({"reproducibility": "statistical"}, "statistical and the job bitwise", id="another kind"),
        pytest.param({"incarnation": "worker-0.0"}, "was called worker-0", id="another's incarnation"),
    ],
)
def test_who_does_not_fit_is_refused_and_changes_nothing(facts: dict[str, object], sentence: str) -> None:
    world = running_world(2)
    before = world.job.status()
    hello = msgspec.structs.replace(Worker("stranger", "stranger.9").hello(world.now), **facts)
    refusal = world.job.hello(hello)
    assert refusal is not None
    assert sentence in refusal
    world.turn()
    after = world.job.status()
    assert msgspec.structs.replace(after, events=()) == msgspec.structs.replace(before, events=())


def generation(counter: int, incarnation: int = 1_001) -> m.Generation:
    return m.Generation(incarnation, counter)


def member(worker: str, first: int, last: int) -> m.Member:
    return m.Member(worker, f"{worker}.0", "127.0.0.1", first, last)


def plan(counter: int, *members: m.Member, incarnation: int = 1_001) -> m.Plan:
    return m.Plan(generation(counter, incarnation), "planned", members, (), "join", "")


LIES = [
    pytest.param(m.Prepared(generation(99)), id="prepared for a generation that is not"),
    pytest.param(m.Broken(generation(0, 0), 1, ""), id="a broken generation of old"),
    pytest.param(m.Entered(plan(0, member("worker-0", 0, 4)), 3, False), id="in a generation numbered 0"),
    pytest.param(m.Entered(plan(9), 3, False), id="in a generation without members"),
    pytest.param(m.Entered(plan(9, member("worker-9", 0, 4)), 3, False), id="in a generation of others"),
    pytest.param(m.Entered(plan(9, member("worker-0", 0, 3)), 3, False), id="in one that leaves out a virtual node"),
    pytest.param(m.Entered(plan(9, member("worker-0", 1, 4)), 3, False), id="in one that leaves out the first"),
    pytest.param(m.Entered(plan(9, member("worker-0", 0, 4), member("worker-1", 4, 4)), 3, False), id="with idle ones"),
    pytest.param(m.Entered(plan(2**53, member("worker-0", 0, 4)), 3, False), id="with a number too large to go on"),
    pytest.param(m.Publish(generation(99), "k", b"v"), id="a key of no generation"),
    pytest.param(m.Progress(generation(0, 0), 2**53, 0, 1, {}, 1.0, "training"), id="the progress of long ago"),
    pytest.param(m.Pace(generation(99), 1.0, 1.0, 1.0, 0.0, 9), id="a pace in a generation that is not"),
    pytest.param(m.Pace(generation(1), 1.0, 2.0, 0.5, 0.0, 9), id="a pace that is in none of its own quartiles"),
    pytest.param(m.Heartbeat(), id="a sign of life"),
]


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_true_changes_nothing(lie: m.FromWorker) -> None:
    world = running_world(2)
    before = msgspec.structs.replace(world.job.status(), events=())
    world.job.receive("worker-0.0", lie)
    world.turn()
    assert msgspec.structs.replace(world.job.status(), events=()) == before
    assert not any(worker.inbox for worker in world.workers.values())
    world.settle(1.0)
    assert all(worker.synced for worker in world.workers.values())


def test_keys_of_a_rendezvous_are_bounded() -> None:
    world = running_world(2)
    assert world.job.running is not None
    for number in range(500):
        world.job.receive("worker-0.0", m.Publish(world.job.running.generation, str(number), b"v"))
    world.job.decide()
    relayed = {key for _, message in world.job.outbox if isinstance(message, m.Keys) for key in message.values}
    assert 1 <= len(relayed) <= 64


def test_sentences_of_any_length_reach_the_workers() -> None:
    world = running_world(4)
    for incarnation in ("worker-1.1", "worker-2.2", "worker-3.3"):
        worker = world.workers[incarnation]
        world.kill(worker)
        world.job.gone(m.GoneCall(worker.name, incarnation, "x" * 4_096))
    world.turn()  # decodes what is sent
    world.settle(2.0)
    assert world.workers["worker-0.0"].synced
    world.job.fail("y" * 4_096)
    world.turn()
    assert world.job.phase == "failed"
