"""What a job's status tells of its changes, and which messages are news to those who watch it."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_server import hello
from simulated import World, done, generation, running_world

from virtualflow.coordinator.admission import admit
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.status_view import describe
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.http_api import Status
from virtualflow.protocol.settings import MAX_CHANGES, MAX_VIRTUAL_NODES, MAX_WORKERS


def change(counter: int, repeated: int = 1) -> m.Change:
    return m.Change(generation(counter), counter, 2, 1, "lost", "", 1.0, repeated)


def test_repeated_steps_are_counted_over_all_changes_that_there_ever_were() -> None:
    world = running_world(2)
    for counter in range(2, MAX_CHANGES + 12):
        world.hear("worker-0.0", m.Resumed(change(counter)))
    # The oldest are told of again, by a worker that still remembers them.
    world.hear("worker-1.1", m.Resumed(change(2)))
    world.hear("worker-1.1", m.Resumed(change(MAX_CHANGES + 11, repeated=3)))
    status = world.status()
    assert len(status.changes) == MAX_CHANGES
    assert status.changes_total == MAX_CHANGES + 10
    assert status.repeated_steps == MAX_CHANGES + 12
    assert status.changes[0].generation == generation(12)


def test_of_a_change_the_longest_pause_and_transfer_that_anybody_saw_count() -> None:
    world = running_world(2)
    receiver = msgspec.structs.replace(change(2), pause_ms=None, state_bytes=640, state_ms=3.0, state_donors=2)
    donor = msgspec.structs.replace(
        change(2), pause_ms=7.0, state_bytes=600, state_ms=4.0, state_donors=2, repeated_virtual_nodes=3
    )
    for worker, told in (("worker-0.0", receiver), ("worker-1.1", donor), ("worker-1.1", change(2))):
        world.hear(worker, m.Resumed(told))
    (known,) = world.status().changes
    assert (known.pause_ms, known.state_bytes, known.state_ms, known.state_donors) == (7.0, 640, 4.0, 2)
    assert known.repeated_virtual_nodes == 3


def test_a_change_is_told_once_and_with_the_pause_of_a_survivor() -> None:
    world = running_world(2)
    job = world.state
    assert job.running is not None
    joined = msgspec.structs.replace(change(2), cause="join", pause_ms=None)
    progress = m.Progress(job.running.generation, joined.step, 0, None, {}, 2.0, "training")

    def told() -> list[str]:
        return [event.text for event in world.status().events if event.kind == "change"]

    for message in (m.Resumed(joined), progress):
        world.hear("worker-0.0", message)
        assert (world.status().changes, world.status().changes_total, told()) == ((), 0, [])
    world.hear("worker-1.1", m.Resumed(change(2)))
    world.hear("worker-1.1", m.Resumed(joined))
    assert [found.pause_ms for found in world.status().changes] == [1.0]
    assert ["pause 1 ms" in text for text in told()] == [True]


@pytest.mark.parametrize("told_by_all", [True, False])
def test_a_change_is_told_with_one_pause_once_all_have_told_theirs_or_gone_on(told_by_all: bool) -> None:
    world = running_world(2)
    assert world.state.running is not None
    joined = msgspec.structs.replace(change(2), cause="join", to=2)
    world.hear("worker-0.0", m.Resumed(joined))
    assert world.status().changes == ()
    if told_by_all:
        world.hear("worker-1.1", m.Resumed(msgspec.structs.replace(joined, pause_ms=9.0)))
    else:
        world.hear("worker-0.0", m.Progress(world.state.running.generation, 3, 0, None, {}, 2.0, "training"))
    pause = 9 if told_by_all else 1
    assert [found.pause_ms for found in world.status().changes] == [pause]
    (event,) = [event.text for event in world.status().events if event.kind == "change"]
    assert f"pause {pause} ms" in event


@pytest.mark.parametrize("end", ["progress", "done"])
def test_a_change_without_survivors_is_told_when_the_training_has_gone_on_or_is_over(end: str) -> None:
    world = running_world(2)
    job = world.state
    assert job.running is not None
    world.hear("worker-0.0", m.Resumed(msgspec.structs.replace(change(2), cause="restart", pause_ms=None)))
    before = job.news
    if end == "progress":
        world.hear("worker-0.0", m.Progress(job.running.generation, 3, 0, None, {}, 2.0, "training"))
        assert job.news > before
    else:
        for worker in ("worker-0.0", "worker-1.1"):
            world.hear(worker, done(2))
        world.decide()
    assert [found.cause for found in world.status().changes] == ["restart"]


def test_a_change_without_survivors_is_told_before_the_next_one() -> None:
    """Somebody joins right behind the first step after a restart, which no report has told of."""
    world = running_world(2)
    restart = msgspec.structs.replace(change(2), cause="restart", step=7, pause_ms=None)
    world.hear("worker-0.0", m.Resumed(restart))
    world.hear("worker-0.0", m.Resumed(msgspec.structs.replace(change(3), step=8)))
    status = world.status()
    assert [found.generation for found in status.changes] == [generation(2), generation(3)]
    assert status.last_change == status.changes[-1]


def test_a_change_without_survivors_is_told_when_a_later_generation_trains_from_an_earlier_step() -> None:
    world = running_world(2)
    world.hear("worker-0.0", m.Resumed(msgspec.structs.replace(change(2), cause="restart", step=100, pause_ms=None)))
    world.hear("worker-0.0", m.Progress(generation(3), 51, 0, None, {}, 2.0, "training"))
    assert [found.generation for found in world.status().changes] == [generation(2)]


def test_a_new_coordinator_hears_at_once_of_changes_without_survivors() -> None:
    """They are no news: whoever watches has counted them, and must not see them go and come."""
    world = running_world(2)
    restart = msgspec.structs.replace(change(2), cause="restart", pause_ms=None)
    hello = world.workers["worker-0.0"].hello(world.now)
    world.admit(msgspec.structs.replace(hello, changes=(restart,)))
    assert [found.cause for found in world.status().changes] == ["restart"]


def test_a_brief_status_has_the_latest_changes_no_events_and_the_same_sums() -> None:
    world = running_world(2)
    for counter in range(2, 102):
        world.hear("worker-0.0", m.Resumed(change(counter)))
    whole, brief = world.status(), world.status(brief=True)
    assert brief.changes == whole.changes[-20:]
    assert whole.events
    assert brief == msgspec.structs.replace(whole, changes=brief.changes, events=(), fingerprint="", devices=())
    assert (brief.changes_total, brief.repeated_steps) == (100, 100)


def test_a_metric_that_is_not_finite_is_told_once_and_is_news() -> None:
    world = running_world(2)
    job = world.state
    assert job.running is not None
    found = m.NonFinite("loss", "NaN", 50)
    progress = m.Progress(job.running.generation, 49, 0, None, {"loss": 1.0}, 2.0, "training")
    world.hear("worker-0.0", progress)
    assert world.status().non_finite is None
    before = job.news
    for step in (50, 51):
        told = msgspec.structs.replace(progress, step=step, metrics={"loss": "NaN"}, non_finite=found)
        world.hear("worker-0.0", told)
    assert job.news == before + 1
    status = world.status()
    assert (status.metrics, status.non_finite) == ({"loss": "NaN"}, found)
    assert [e.text for e in status.events if e.kind == "warning"] == ["loss became NaN in step 50"]
    assert m.encode(status)


def test_a_worker_that_stops_because_of_a_metric_says_which_it_was() -> None:
    world = running_world(2)
    found = m.NonFinite("loss", "Infinity", 7)
    world.hear("worker-1.1", m.Failed(0, "the job is to stop", "", found))
    assert (world.status().phase, world.status().non_finite) == ("failed", found)


def test_the_newest_checkpoint_and_why_one_failed_are_in_the_status() -> None:
    world = running_world(2)
    job = world.state
    assert world.status().checkpoint is None
    before = job.news
    world.hear("worker-0.0", m.Checkpointed(m.CheckpointState(100.0, 20, 100.0)))
    assert job.news == before + 1
    assert world.status().checkpoint == m.CheckpointState(100.0, 20, 100.0)
    # Another worker leads from now on. It has written none yet, and cannot.
    world.hear("worker-1.1", m.Checkpointed(m.CheckpointState(160.0, failure="the disk is full")))
    assert world.status().checkpoint == m.CheckpointState(160.0, 20, 100.0, "the disk is full")
    # The former one comes back after its connection was lost, and says again what it knows.
    world.hear("worker-0.0", m.Checkpointed(m.CheckpointState(100.0, 20, 100.0)))
    assert world.status().checkpoint == m.CheckpointState(160.0, 20, 100.0, "the disk is full")
    world.hear("worker-1.1", m.Checkpointed(m.CheckpointState(220.0, 60, 220.0)))
    assert world.status().checkpoint == m.CheckpointState(220.0, 60, 220.0)


def test_progress_is_no_news_and_everything_else_is() -> None:
    world = running_world(2)
    job = world.state
    assert job.running is not None

    def told(message: m.FromWorker) -> tuple[bool, bool]:
        before = (job.version, job.news)
        world.hear("worker-0.0", message)
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


@pytest.mark.slow
def test_the_brief_status_of_the_largest_job_is_below_a_megabyte() -> None:
    job = JobState(2**42, MAX_WORKERS, MembershipSettings(), 0.0)
    for number in range(MAX_WORKERS):
        # The longest name of a job, and of a group.
        facts = {"virtual_nodes": MAX_VIRTUAL_NODES, "address": "255.255.255.255", "pid": 4_194_304, "ready": True}
        assert admit(job, hello(f"{'j' * 40}-{'g' * 20}-{number}", f"{number:032x}", **facts), 0.0) is None
    brief = describe(job, brief=True)
    assert len(brief.workers) == MAX_WORKERS
    assigned = 10 * MAX_WORKERS  # what their ranges of virtual nodes would add
    assert len(m.encode(brief)) + assigned < (1 << 20) - 65_536
    assert msgspec.json.decode(m.encode(brief), type=Status) == brief


# --- memory -----------------------------------------------------------------------------------------------------------

SWAPS = m.MemoryPlan(kept=9, swapped=5, reason="5 are swapped")
KEEPS = m.MemoryPlan(kept=14, reason="everything fits")
MEASURES = m.MemoryPlan()


def with_plans(*plans: m.MemoryPlan | None) -> World:
    """A job of a worker with each of these: it has no budget, or a plan, or none yet."""
    world = running_world(len(plans))
    for number, plan in enumerate(plans):
        worker = world.workers[f"worker-{number}.{number}"]
        world.admit(msgspec.structs.replace(worker.hello(world.now), memory=plan))
    return world


@pytest.mark.parametrize(
    ("plans", "report"),
    [
        pytest.param((None, None), http_api.MemoryReport(0, 0, 0), id="nobody has a budget"),
        pytest.param((MEASURES, None), http_api.MemoryReport(1, 0, 0), id="one has, and no plan yet"),
        pytest.param((KEEPS, MEASURES), http_api.MemoryReport(2, 1, 0), id="one keeps all"),
        pytest.param(
            (KEEPS, SWAPS, SWAPS, None), http_api.MemoryReport(3, 3, 2, "worker-1", "5 are swapped"), id="two swap"
        ),
    ],
)
def test_the_status_tells_what_becomes_of_activations(
    plans: tuple[m.MemoryPlan | None, ...], report: http_api.MemoryReport
) -> None:
    assert with_plans(*plans).status(brief=True).memory == report


def test_a_plan_that_was_just_made_is_news_and_no_event() -> None:
    world = with_plans(MEASURES, None)
    news, events = world.state.news, world.status().events
    world.hear("worker-0.0", m.Note("info", "5 are swapped", SWAPS))
    assert world.status().memory == http_api.MemoryReport(1, 1, 1, "worker-0", "5 are swapped")
    assert (world.state.news, world.status().events) == (news + 1, events)


def test_what_becomes_of_activations_is_not_known_before_all_members_have_come() -> None:
    world = running_world(2)
    plan = world.state.running
    world.start_coordinator()
    assert world.status().memory is None
    first = world.workers["worker-0.0"]
    assert world.admit(msgspec.structs.replace(first.hello(world.now), memory=SWAPS)) is None
    assert (world.state.running, world.status().memory) == (plan, None)


def test_a_fault_of_one_machine_costs_its_worker_until_nobody_else_has_the_training() -> None:
    world = running_world(2)
    world.hear("worker-1.1", m.Failed(5, "Input/output error", "a traceback", machine_fault=True))
    status = world.status()
    assert (status.phase, status.error) == ("training", None)
    (lost,) = status.lost
    assert (lost.worker, lost.reason, lost.machine_fault, lost.ended) == ("worker-1", "Input/output error", True, True)
    assert "worker-1 lost: Input/output error" in [event.text for event in status.events]
    world.settle(5.0)
    assert world.state.running is not None
    assert [member.worker for member in world.state.running.members] == ["worker-0"]
    assert (
        world.admit(world.start_worker("worker-1").hello(world.now)) is None
    )  # the next one has nothing of the training yet
    world.hear("worker-0.0", m.Failed(6, "Input/output error", "a traceback", machine_fault=True))
    status = world.status()
    assert (status.phase, status.error, status.traceback) == ("failed", "Input/output error", "a traceback")


def test_checkpoints_in_another_directory_than_those_before_are_told_of() -> None:
    world = running_world(2)
    world.hear("worker-0.0", m.Checkpointed(m.CheckpointState(100.0, 20, 100.0, directory="/tmp/run_a/ck")))
    world.hear("worker-0.0", m.Checkpointed(m.CheckpointState(110.0, 30, 110.0, directory="/tmp/run_a/ck")))
    assert not [event for event in world.status().events if event.kind == "warning"]
    world.hear("worker-1.1", m.Checkpointed(m.CheckpointState(120.0, 40, 120.0, directory="/tmp/run_b/ck")))
    (warning,) = [event.text for event in world.status().events if event.kind == "warning"]
    assert warning.startswith("worker-1 writes its checkpoints to /tmp/run_b/ck, and those before it are in /tmp/run_a")


def test_only_the_worker_into_whose_memory_nothing_fits_is_refused_until_nobody_is_left() -> None:
    world = running_world(2)
    world.hear("worker-1.1", m.Failed(0, "use 3 GiB", "", does_not_fit=True))
    status = world.status()
    assert (status.phase, status.error, status.does_not_fit) == ("training", None, False)
    (lost,) = status.lost
    assert (lost.worker, lost.reason, lost.does_not_fit, lost.ended) == ("worker-1", "use 3 GiB", True, True)
    assert "worker-1 refused: use 3 GiB" in [event.text for event in status.events]
    world.settle(5.0)
    assert world.state.running is not None
    assert [member.worker for member in world.state.running.members] == ["worker-0"]
    world.hear("worker-0.0", m.Failed(0, "use 2 GiB", "", does_not_fit=True))
    world.hear("worker-0.0", m.Failed(0, "it has failed elsewhere", ""))
    status = world.status()
    assert (status.phase, status.error, status.does_not_fit) == ("failed", "use 2 GiB", True)
    assert [(lost.worker, lost.does_not_fit) for lost in status.lost] == [("worker-1", True), ("worker-0", True)]


def test_a_job_that_is_over_waits_for_nothing_and_prepares_no_generation() -> None:
    world = running_world(2)
    joiner = world.start_worker("worker-2")
    joiner.ready, joiner.builds = True, False
    world.settle(5.0)
    assert (world.status().proposed, world.status().reason) == (2, "worker-2 joins")
    world.call(http_api.FailCall("no room"))
    status = world.status()
    assert (status.phase, status.proposed, status.prepared, status.reason) == ("failed", None, False, "")
    assert status.error == "no room"
