"""What the status text, the live page, the report's page and ``kubectl vf`` say of one job is the same."""

from __future__ import annotations

import html
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from scenes import NOW, change, ended, link, seen, training

from statuses import coordinator_status as remote
from virtualflow.cluster.explanation import explain
from virtualflow.launcher.report import JobHistory, build_report, read_report
from virtualflow.launcher.report_page import page
from virtualflow.protocol.http_api import Status
from virtualflow.protocol.job_view import describe_status, view_job
from virtualflow.protocol.messages import encode
from virtualflow.protocol.termination_message import TerminationMessage

LOST = change(3, "lost", from_=2, to=1, step=30, pause_ms=41.2, reason="digits-workers-1 is lost", repeated_steps=1)
"""It costs a step."""


def shown(status: Status) -> dict[str, str]:
    """The job as each of them shows it."""
    stage = training()
    stage.link = link(status)
    if status.phase == "done":
        stage.pods = [stage.pods[0], *(ended(pod, 0, word=TerminationMessage("done")) for pod in stage.pods[1:])]
    body = {"metadata": {"name": "digits"}, "status": msgspec.to_builtins(stage.decide().status)}
    history = JobHistory()
    history.take(status)
    report = json.dumps(build_report(history, status, "digits", 12.4)).encode()
    view = view_job(status, NOW)
    return {
        "text": describe_status("digits", view),
        "page": " ".join(encode(part).decode() for part in (view.now, view.job, view.log)),
        "report": html.unescape(page(read_report(report, "digits.json"))),
        "kubectl": "\n".join(explain(body, [], datetime.now(UTC))),
    }


@pytest.mark.parametrize(
    ("phase", "facts", "said"),
    [
        pytest.param(
            "training",
            {"step": 40, "total_steps": 100, "changes": (LOST,), "last_change": LOST, "changes_total": 1},
            ("40 of 100", "41 ms", "digits-workers-1 is lost"),
            id="one that goes on after a loss",
        ),
        pytest.param(
            "done",
            {"step": 80, "total_steps": 80, "digest": "abc"},
            ("raining complete after 80 steps",),
            id="one that is complete",
        ),
        pytest.param(
            "done",
            {"step": 5, "total_steps": 80, "digest": "abc", "stopped_early": True},
            ("raining stopped early by the script, 5 of 80 steps",),
            id="one that its script has ended",
        ),
    ],
)
def test_text_page_report_and_kubectl_say_the_same_of_a_job(
    phase: str, facts: dict[str, Any], said: tuple[str, ...]
) -> None:
    workers = [seen(pod) for pod in training().pods[1:]]
    status = remote(phase, *workers, **facts)
    for shows, text in shown(status).items():
        assert [words for words in said if words not in text] == [], f"{shows}: {text}"
