"""What ``kubectl vf`` says of jobs and their workers, and how several logs become one: without a cluster."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from virtualflow.cluster.explanation import ADVICE, age, explain
from virtualflow.cluster.logs import BrokenOff, Line, followed, merged
from virtualflow.cluster.tables import JobLine, job_line, job_rows
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import table

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)
REASONS = Path(__file__).parents[3] / "docs" / "reference" / "reasons.md"


def condition(kind: str, status: str, reason: str, message: str = "a sentence.") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def job(name: str = "digits", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "creationTimestamp": "2026-11-24T11:00:00Z"}
    return {"metadata": metadata, "spec": {}, "status": status}


def test_advice_is_what_the_reference_says() -> None:
    rows = [re.split(r" \| ", line.strip("| ")) for line in REASONS.read_text().splitlines() if line.startswith("| `")]
    documented = {
        row[0].strip("`"): re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", row[3].strip())
        for row in rows
        if len(row) == 4 and row[1] != "event"
    }
    assert {name: documented.get(name) for name in ADVICE} == dict(ADVICE)


def test_what_is_in_the_way_comes_first_with_what_would_help() -> None:
    body = job(
        phase="Running",
        workers="2/3",
        step=120,
        totalSteps=400,
        conditions=[
            condition("Allocated", "True", "Allocated", "3 workers of the queue shared: has its share."),
            condition("Ready", "True", "Training", "Workers are training."),
            condition("Progressing", "False", "Unschedulable", "digits-w-2: 0/3 nodes are available."),
            condition("Degraded", "True", "FewerWorkers", "2 of 3 workers train."),
            condition("Suspended", "False", "NotSuspended"),
            condition("Complete", "False", "NotFinished"),
            condition("Failed", "False", "NotFinished"),
            condition("Reconciling", "True", "Unschedulable", "digits-w-2: 0/3 nodes are available."),
        ],
        lastChange={
            "from": 3,
            "to": 2,
            "step": 90,
            "reason": "digits-w-2 is lost",
            "pauseMilliseconds": 41,
            "repeatedSteps": 1,
        },
    )
    late = NOW - timedelta(minutes=5)
    events = [
        {"type": "Normal", "reason": "Resized", "message": "fine", "count": 1, "time": NOW},
        {
            "type": "Warning",
            "reason": "WorkerLost",
            "message": "digits-w-2: its node is gone",
            "count": 2,
            "time": late,
        },
    ]
    assert explain(body, events, NOW) == [
        "digits: Running, 2/3 workers train, step 120 of 400",
        "  Progressing False, Unschedulable: digits-w-2: 0/3 nodes are available.",
        "    to do: see Pods are Pending",
        "  Degraded True, FewerWorkers: 2 of 3 workers train.",
        "  Allocated True, Allocated: 3 workers of the queue shared: has its share.",
        "  last change: 3 workers → 2 workers at step 90 (digits-w-2 is lost): pause 41 ms, 1 step repeated",
        "  5m ago, WorkerLost (2 times): digits-w-2: its node is gone",
    ]


def test_a_job_that_nobody_has_seen_says_so() -> None:
    told = ["digits: no operator has seen it yet", "  to do: see Nothing happens"]
    assert explain(job(), [], NOW) == explain(job(observedGeneration=0), [], NOW) == told


def test_of_a_job_that_is_over_nobody_trains_and_that_goes_without_saying() -> None:
    assert explain(job(phase="Complete", workers="0/2", step=9, totalSteps=9), [], NOW) == [
        "digits: Complete, step 9 of 9"
    ]


def test_jobs_that_train_come_first_the_fastest_first() -> None:
    bodies = [
        job("waits", phase="Pending"),
        job("slow", phase="Running", workers="1/1", step=3, stepsPerSecond="0.5", loss="2.1"),
        job("over", phase="Complete", step=9, totalSteps=9, stepsPerSecond="99"),
        job("fast", phase="Running", workers="2/2", step=30, totalSteps=60, stepsPerSecond="12", changes=1),
    ]
    lines = table(job_rows(bodies, NOW)).splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "fast", "slow", "over", "waits"]
    assert lines[1].split() == ["fast", "Running", "2/2", "30/60", "12", "1", "0", "60m"]
    assert "99" not in lines[3], "it is not fast any more"
    assert table(job_rows(bodies, NOW, namespaces=True)).startswith("NAMESPACE   NAME")


def line(**changed: Any) -> JobLine:
    usual = {"namespace": "default", "name": "digits", "progress": "", "done": None, "goodput": "", "queue": ""}
    usual |= {"workers": "", "why": "", "advice": "", "change": "", "over": False, "page": False}
    return JobLine(**(usual | changed))


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        pytest.param(
            job(),
            line(phase="Pending", workers="0 of 1 wanted", why="no operator has seen it yet"),
            id="one that nobody has seen",
        ),
        pytest.param(
            job(
                phase="Running",
                workers="4/4",
                step=30,
                totalSteps=60,
                stepsPerSecond="3",
                goodput="0.9412",
                coordinator="digits-coordinator-0",
                allocation={"queue": "shared", "workers": 4, "reason": "has its share"},
                conditions=[
                    condition("Allocated", "True", "Allocated", "4 workers of the queue shared: has its share.")
                ],
            ),
            line(
                phase="Running",
                progress="step 30 of 60, about 10 s left",
                done=0.5,
                goodput="94.1 %",
                workers="4 of 4 wanted",
                queue="shared: has its share",
                page=True,
            ),
            id="one that trains",
        ),
        pytest.param(
            job(
                phase="Pending",
                workers="0/2",
                allocation={"queue": "shared", "workers": 0, "reason": "waits behind other"},
                conditions=[condition("Progressing", "False", "Queued", "Queue shared has none: waits behind other.")],
            ),
            line(
                phase="Pending",
                workers="0 of 2 wanted",
                queue="shared",
                why="Queue shared has none: waits behind other.",
                advice="wait, or see A job waits in its queue",
            ),
            id="one that waits in its queue, whose reason is said once",
        ),
        pytest.param(
            job(
                phase="Failed",
                workers="0/2",
                step=9,
                coordinator="digits-coordinator-0",
                conditions=[
                    condition(
                        "Failed", "True", "BackoffLimitExceeded", "w-0 crashed:\nTraceback\n  x\nValueError: no\n"
                    )
                ],
            ),
            line(
                phase="Failed",
                progress="step 9",
                why="w-0 crashed: … ValueError: no",
                advice="correct the script; make a new job",
                over=True,
            ),
            id="one that has failed, with the two lines of its traceback that say why",
        ),
    ],
)
def test_a_job_on_the_page_of_all_jobs(body: dict[str, Any], shown: JobLine) -> None:
    assert job_line(body) == shown


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def test_an_api_server_that_does_not_answer_is_asked_again_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was seen last stays, beside what is wrong; once it answers, nothing is wrong any more."""
    pytest.importorskip("kubernetes", reason="needs kubernetes: install the extra cluster")
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    from virtualflow.cluster.jobs_page import JobsSeen

    answers = iter([[job("digits")], None, None, None, None, None, None, [job("other")]])
    waits: list[float] = []

    class Api:
        """An API server that answers a list only."""

        def __init__(self, _: object) -> None:
            pass

        def list_namespaced_custom_object(self, *_: str, **options: Any) -> dict[str, Any]:
            if options.get("watch") and not waits:
                raise ApiException(410, "Expired: it knows that version no more, which is nothing wrong")
            items = None if options.get("watch") else next(answers)
            if items is None:
                raise HTTPError("connection refused")
            return {"items": items, "metadata": {"resourceVersion": "1"}}

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            assert not jobs.view("").trouble
        if len(waits) == 7:
            assert jobs.view("").trouble.startswith("Cannot list the jobs of the namespace default: the API server")
            assert [line.name for line in jobs.view("").jobs] == ["digits"]
        if len(waits) == 8:
            raise Interrupted

    monkeypatch.setattr("kubernetes.client.CustomObjectsApi", Api)
    monkeypatch.setattr("time.sleep", wait)
    jobs = JobsSeen(SimpleNamespace(api=None, namespace="default"), everywhere=False)  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        jobs.follow(jobs.look())
    assert waits == [1, 1, 2, 4, 8, 16, 30, 30]
    assert [line.name for line in jobs.view("").jobs] == ["other"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (119, "119s"), (120, "2m"), (7_199, "119m"), (7_200, "2h"), (200_000, "2d")]
)
def test_an_age_is_short(seconds: int, text: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == text
    assert age((NOW - timedelta(seconds=seconds)).isoformat(), NOW) == text


def test_logs_are_one_by_time() -> None:
    logs = {"a": "2026-11-26T1 one\n2026-11-26T3 three words\n", "b": "2026-11-26T2 two\n2026-11-26T4\n", "c": ""}
    assert list(merged(logs)) == [
        Line("2026-11-26T1", "a", "one"),
        Line("2026-11-26T2", "b", "two"),
        Line("2026-11-26T3", "a", "three words"),
        Line("2026-11-26T4", "b", ""),
    ]


def test_a_log_that_is_followed_has_each_line_of_everybody_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream breaks off, and begins again with lines that are known; a pod goes, one comes late; the job ends."""
    monkeypatch.setattr("virtualflow.cluster.logs.LOOK_SECONDS", 0.05)
    readings: dict[str, int] = {}
    over = threading.Event()

    def stream(worker: str, since: str | None) -> Iterator[str]:
        readings[worker] = readings.get(worker, 0) + 1
        yield "2026-11-26T1 begins"
        if readings[worker] == 1:
            return  # broken off
        assert since in ("2026-11-26T1", "2026-11-26T2")
        yield "2026-11-26T2 goes on"
        if worker == "late":
            over.set()

    def workers() -> dict[str, bool]:
        again = min(readings.get(name, 0) for name in ("first", "gone")) > 1
        names = ["first", "late"] if again else ["first", "gone"]
        return {name: not over.is_set() for name in names}

    found = list(followed(workers, stream, over.is_set))
    assert sorted((line.worker, line.text) for line in found) == [
        ("first", "begins"),
        ("first", "goes on"),
        ("gone", "begins"),
        ("gone", "goes on"),
        ("late", "begins"),
        ("late", "goes on"),
    ]


def test_the_log_of_a_worker_that_has_ended_is_read_again_where_it_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("virtualflow.cluster.logs.LOOK_SECONDS", 0.01)
    readings: list[str | None] = []

    def stream(_: str, since: str | None) -> Iterator[str]:
        readings.append(since)
        if len(readings) == 1:
            raise BrokenOff
        yield "2026-11-26T1 begins"
        if len(readings) == 2:
            raise BrokenOff
        yield "2026-11-26T2 ends"

    found = [line.text for line in followed(lambda: {"first": False}, stream, lambda: True)]
    assert found == ["begins", "ends"]
    assert readings == [None, None, "2026-11-26T1"]


GONE = 'failed to try resolving symlinks in path "/var/log/pods/first": no such file or directory'


def test_what_a_kubelet_says_of_a_log_that_is_gone_is_said_once_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no time, and its first word is later than every time by its letters."""
    monkeypatch.setattr("virtualflow.cluster.logs.LOOK_SECONDS", 0.01)
    assert list(merged({"first": f"2026-11-26T1 begins\n{GONE}", "second": GONE})) == [
        Line("", "second", GONE),
        Line("2026-11-26T1", "first", "begins"),
        Line("2026-11-26T1", "first", GONE),
    ]
    over = threading.Event()
    parts = iter(["2026-11-26T1 begins", GONE, GONE, "2026-11-26T2 goes on"])

    def stream(_: str, since: str | None) -> Iterator[str]:
        part = next(parts, "2026-11-26T2 goes on")
        if part.endswith("on"):
            over.set()
        yield part

    found = [line.text for line in followed(lambda: {"first": not over.is_set()}, stream, over.is_set)]
    assert found == ["begins", GONE, "goes on"]


def test_a_worker_that_writes_on_and_on_does_not_hide_one_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("virtualflow.cluster.logs.LOOK_SECONDS", 0.05)
    over, written = threading.Event(), threading.Event()

    def stream(worker: str, _: str | None) -> Iterator[str]:
        if worker == "late":
            yield "2026-11-26T1 begins"
            over.set()
            return
        for number in itertools.count():
            if over.wait(0.001):
                return
            yield f"2026-11-26T{number:09} goes on"
            written.set()

    def workers() -> dict[str, bool]:
        return dict.fromkeys(["first", "late"] if written.is_set() else ["first"], not over.is_set())

    assert Line("2026-11-26T1", "late", "begins") in followed(workers, stream, over.is_set)


def test_who_may_not_read_logs_hears_of_it_while_following() -> None:
    def stream(worker: str, _: str | None) -> Iterator[str]:
        yield "2026-11-26T1 begins"
        raise ConfigurationError(f"cannot read the log of {worker}: forbidden")

    lines = followed(lambda: {"first": True}, stream, lambda: False)
    assert next(lines) == Line("2026-11-26T1", "first", "begins")
    with pytest.raises(ConfigurationError, match="cannot read the log of first: forbidden"):
        next(lines)


@pytest.mark.parametrize("absent", ["kubernetes", "urllib3"])
def test_without_its_extra_the_plugin_says_what_it_needs(absent: str) -> None:
    program = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "from virtualflow.cluster.plugin import main\n"
        "sys.exit(main(['top']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "pip install 'virtualflow[cluster]'" in done.stderr


def test_what_conditions_say_twice_for_tools_is_said_once() -> None:
    stuck = "digits-w-0 cannot start: FailedMount: no such volume"
    kinds = (("Progressing", "False"), ("Degraded", "True"), ("Stalled", "True"))
    conditions = [condition(kind, truth, "CannotStart", stuck) for kind, truth in kinds]
    assert explain(job(phase="Pending", conditions=conditions), [], NOW)[1:] == [
        f"  Progressing False, CannotStart: {stuck}",
        "    to do: see CannotStart",
    ]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ('{"kind": "Status", "message": "jobs is forbidden"}', "jobs is forbidden"),
        ('{"kind": "Status", "message": ""}', "the API server answered 502 Bad Gateway"),
        ("<html><title>502: 0x" + "f" * 5_000 + "</title>", "the API server answered 502 Bad Gateway"),
        ('{"message": ["a list"]}', "the API server answered 502 Bad Gateway"),
        ("[" * 100_000, "the API server answered 502 Bad Gateway"),
        ("2026-13-45", "the API server answered 502 Bad Gateway"),
        (None, "the API server answered 502 Bad Gateway"),
    ],
    ids=["a status", "without words", "a proxy's page", "another type", "nested", "no date", "nothing"],
)
def test_what_answers_is_told_in_one_sentence_whatever_it_says(body: str | None, sentence: str) -> None:
    pytest.importorskip("kubernetes", reason="needs kubernetes: install the extra cluster")
    from kubernetes.client import ApiException

    from virtualflow.cluster.api import why

    error = ApiException(502, "Bad Gateway")
    error.body = body
    assert why(error) == sentence
