"""The runs of a script: a worker brings the job to the next one, and one that begins anew hears which is under way."""

from __future__ import annotations

from coordinator_server import TOKEN, hello, told, with_server
from driven import Driven

from virtualflow.coordinator import admission
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_RUNS
from virtualflow.protocol.versions import RUNS_PROTOCOL

SETTINGS = MembershipSettings(restart_grace=0.0)


def trained(*workers: str, total_steps: int = 7, stopped_early: bool = False) -> Driven:
    """A job whose first run is over, after seven steps."""
    job = Driven(1, len(workers), SETTINGS)
    for worker in workers:
        assert job.admit(hello(worker, ready=True, total_steps=total_steps)) is None
    job.now = 3.0
    for worker in workers:
        job.hear(f"{worker}.0", m.Heartbeat())
    job.decide()
    plan = job.state.proposed
    assert plan is not None
    for worker in workers:
        job.hear(f"{worker}.0", m.Entered(plan, 0, False))
    for worker in workers:
        job.hear(f"{worker}.0", m.Done(7, "aa", "bb", {"loss": 0.5}, 1.0, 7, stopped_early=stopped_early))
    job.decide()
    assert job.state.phase == "done"
    return job


def second(job: Driven, worker: str, **facts: object) -> str | None:
    return job.admit(hello(worker, run=2, runs=(m.RunResult(1, 7, 7, "aa", {"loss": 0.5}),), **facts))


def test_the_curve_of_a_run_ends_at_its_last_step_also_where_no_step_was_told_of() -> None:
    record = trained("a", "b").state.history.series.record()
    assert (record.steps, record.metrics["loss"]) == ((7,), ((0.5, 1),))


def test_a_worker_of_the_next_run_brings_the_job_there() -> None:
    job = trained("a", "b")
    before = job.state.counter
    assert second(job, "a", ready=True) is None
    status = job.status()
    assert (status.phase, status.run, status.step, status.digest) == ("waiting", 2, 0, None)
    assert (status.earlier_steps, status.job_step) == (7, 7)
    assert status.runs == (m.RunResult(1, 7, 7, "aa", {"loss": 0.5}),)
    assert status.events[-2].text == "run 2 of the script begins; run 1 ended after 7 steps, digest aa"
    assert second(job, "b", ready=True) is None
    job.decide()
    plan = job.state.proposed
    assert plan is not None
    assert [member.worker for member in plan.members] == ["a", "b"]
    assert plan.generation.counter > before, "no number is used twice"


def test_one_that_begins_anew_hears_what_its_run_has_ended_with() -> None:
    job = trained("a", "b")
    second(job, "a")
    assert admission.run_over(job.state, hello("c")) == m.RunOver(2, m.RunResult(1, 7, 7, "aa", {"loss": 0.5}))
    assert admission.run_over(job.state, hello("c", run=2)) is None


def test_nobody_is_ahead_of_a_run_that_goes_on() -> None:
    job = trained("a", "b")
    second(job, "a", ready=True)
    second(job, "b", ready=True)
    job.decide()
    plan = job.state.proposed
    assert plan is not None
    job.hear("a.0", m.Entered(plan, 0, False))
    refusal = job.admit(hello("c", run=3))
    assert refusal is not None
    assert refusal.startswith("c is in run 3 of its script, and the job still in run 2: all workers must")
    assert job.state.run == 2


def test_a_new_coordinator_learns_of_the_runs_from_whoever_comes_first() -> None:
    job = Driven(2, 2, SETTINGS)
    assert second(job, "a", ready=True) is None
    assert (job.state.run, job.state.earlier_steps) == (2, 7)
    assert job.status().runs == (m.RunResult(1, 7, 7, "aa", {"loss": 0.5}),)


def test_who_waits_in_a_run_of_which_a_new_coordinator_did_not_know_that_it_is_over_is_told() -> None:
    job = Driven(2, 2, SETTINGS)
    assert job.admit(hello("c")) is None
    job.take_outbox()
    second(job, "a")
    assert ("c.0", m.RunOver(2, None)) in job.take_outbox()


def test_steps_are_held_as_they_are_counted_over_all_runs() -> None:
    job = trained("a", "b")
    job.call(http_api.HoldCall(9))
    second(job, "a")
    welcomes = [message for _, message in job.take_outbox() if isinstance(message, m.Welcome)]
    assert welcomes[-1].hold == 2
    job.call(http_api.HoldCall(11))
    assert job.take_outbox() == [("a.0", m.Hold(4))]
    assert job.status().hold == 11


def test_so_many_runs_are_remembered_and_the_steps_of_all() -> None:
    job = trained("a")
    for number in range(2, MAX_RUNS + 3):
        assert job.admit(hello("a", run=number, ready=True)) is None
        job.decide()
        plan = job.state.proposed
        assert plan is not None
        job.hear("a.0", m.Entered(plan, 0, False))
        job.hear("a.0", m.Done(1, "aa", "", {}, 1.0, 1))
        job.decide()
    assert [run.run for run in job.state.runs] == list(range(2, MAX_RUNS + 2))
    assert job.state.earlier_steps == 7 + MAX_RUNS
    assert len(job.status(brief=True).runs) == 10


def test_a_failed_job_goes_on_to_no_further_run() -> None:
    job = trained("a", "b")
    job.call(http_api.FailCall("enough"))
    job.state.failed = True
    second(job, "a")
    assert (job.state.run, job.state.phase) == (1, "failed")


def test_one_that_knows_of_one_run_only_is_refused_in_a_sentence() -> None:
    async def story(server) -> None:  # type: ignore[no-untyped-def]
        server.state.run = 2
        for protocol, answer in (
            (RUNS_PROTOCOL, m.RunOver(2, None)),
            (RUNS_PROTOCOL - 1, m.Refuse("this run of the script is over, and the job is in run 2")),
        ):
            stream = await server.client.ws_connect(
                f"{server.url}/v1/worker", headers={"Authorization": f"Bearer {TOKEN}"}
            )
            await stream.send_bytes(m.encode(hello("c", protocol=protocol, oldest_protocol=3)))
            assert await told(stream) == answer

    with_server(story)


def test_a_run_that_its_script_has_left_early_is_told_as_such() -> None:
    job = trained("a", stopped_early=True, total_steps=100)
    assert job.status().stopped_early
    told = [event.text for event in job.status().events if event.kind == "done"]
    assert told == ["training stopped early by the script, 7 of 100 steps"]
    second(job, "a")
    assert [(run.step, run.total_steps, run.stopped_early) for run in job.state.runs] == [(7, 100, True)]
    assert not job.status().stopped_early


def test_a_worker_that_names_a_generation_that_cannot_be_moves_no_job() -> None:
    job = trained("a", "b")
    second(job, "a", ready=True)
    stranger = m.Plan(m.Generation(9, 9), "planned", (m.Member("x", "x.0", "h", 0, 8),), (), "start", "")
    refusal = job.admit(hello("c", run=3, plan=stranger))
    assert refusal is not None
    assert job.state.run == 2
