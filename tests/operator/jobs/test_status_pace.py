"""How soon a status is to be written."""

from __future__ import annotations

from typing import Any

import pytest

from virtualflow_operator.jobs import is_progress


def ready(status: str = "True", message: str = "Workers are training.") -> dict[str, Any]:
    return {"type": "Ready", "status": status, "reason": "Training", "message": message}


@pytest.mark.parametrize(
    ("patch", "progress"),
    [
        pytest.param({"step": 41, "loss": "0.5", "stepsPerSecond": "30"}, True, id="steps"),
        pytest.param({"lastChange": {"generation": 2}, "changes": 2}, True, id="a change that moves no worker"),
        pytest.param({"conditions": [ready(message="Others say so.")]}, True, id="the same in other words"),
        pytest.param({"step": 41, "conditions": [ready("False")]}, False, id="a condition"),
        pytest.param({"step": 41, "conditions": [ready(), ready()]}, False, id="a further condition"),
        pytest.param({"step": 41, "phase": "Complete"}, False, id="the phase"),
        pytest.param({"readyReplicas": 1, "workers": "1/2"}, False, id="workers"),
        pytest.param({"startTicket": 7}, False, id="what a call waits for"),
        pytest.param({"failures": {"counted": ["uid"]}}, False, id="what a deletion waits for"),
    ],
)
def test_only_progress_may_wait(patch: dict[str, Any], progress: bool) -> None:
    assert is_progress({"step": 40, "conditions": [ready()]}, patch) is progress
