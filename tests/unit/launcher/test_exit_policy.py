"""What the end of a worker's process means for its job."""

from __future__ import annotations

import pytest

from virtualflow.launcher.exit_policy import judge
from virtualflow.protocol.termination_message import EXIT_EVICTED

USUAL = {
    "over": False,
    "done": False,
    "alone": True,
    "joined": True,
    "left": False,
    "killed": False,
    "declared_lost": False,
    "refused": None,
    "fault": None,
    "others_well": False,
    "said": "",
    "unknown": False,
    "expired": False,
}


@pytest.mark.parametrize(
    ("code", "facts", "kind"),
    [
        pytest.param(-9, {}, "lost", id="a killed worker is replaced"),
        pytest.param(-11, {"joined": False}, "lost", id="also one that crashed before it joined"),
        pytest.param(EXIT_EVICTED, {}, "lost", id="one that was declared lost is replaced"),
        pytest.param(EXIT_EVICTED, {"joined": False}, "open", id="why one was not admitted is told in a moment"),
        pytest.param(
            EXIT_EVICTED, {"joined": False, "expired": True}, "lost", id="if it is not told it may come again"
        ),
        pytest.param(
            EXIT_EVICTED,
            {"joined": False, "unknown": True},
            "lost",
            id="so it may if the coordinator does not know it",
        ),
        pytest.param(EXIT_EVICTED, {"joined": False, "refused": "a reason"}, "refused", id="one that was not admitted"),
        pytest.param(1, {"joined": False, "refused": "a reason"}, "refused", id="however its script ends then"),
        pytest.param(-9, {"refused": "a reason", "killed": True}, "lost", id="unless it was killed before it heard"),
        pytest.param(EXIT_EVICTED, {"done": True, "refused": "a reason"}, "fine", id="nobody misses it at the end"),
        pytest.param(1, {"declared_lost": True}, "lost", id="whatever it says when it finds out"),
        pytest.param(1, {"fault": "EIO"}, "lost", id="one whose machine had a fault is replaced"),
        pytest.param(1, {"fault": "EIO", "done": True}, "fine", id="or not missed if the others are through by then"),
        pytest.param(
            1,
            {"fault": "EIO", "joined": False, "unknown": True, "others_well": True},
            "lost",
            id="so is one that meets it before it joins",
        ),
        pytest.param(
            1,
            {"fault": "EIO", "joined": False, "unknown": True},
            "failed",
            id="but not if all meet it there",
        ),
        pytest.param(1, {"fault": "EIO", "joined": False, "others_well": True}, "open", id="once that is known"),
        pytest.param(0, {"left": True}, "fine", id="one that was drained may go"),
        pytest.param(0, {"done": True}, "fine", id="all may go when the training is complete"),
        pytest.param(-9, {"done": True, "killed": True}, "fine", id="a booting joiner is killed at the end"),
        pytest.param(1, {"done": True}, "failed", id="an error after the training is an error"),
        pytest.param(-9, {"done": True, "over": True}, "failed", id="so is a death while the script goes on"),
        pytest.param(-9, {"done": True, "alone": False}, "open", id="until others have ended or train once more"),
        pytest.param(1, {"over": True}, "fine", id="of a failing job nobody asks how it ends"),
        pytest.param(1, {"joined": False}, "open", id="one that ends at once may have joined since the last news"),
        pytest.param(
            1, {"joined": False, "unknown": True}, "failed", id="a script that raises on import fails the job at once"
        ),
        pytest.param(1, {}, "open", id="an error reaches the status with its traceback in a moment"),
        pytest.param(1, {"expired": True}, "failed", id="an error that does not reach it fails the job itself"),
        pytest.param(0, {}, "open", id="an end may precede the news that the training is complete"),
        pytest.param(0, {"expired": True}, "failed", id="an end that no news explains fails the job"),
        pytest.param(0, {"expired": True, "joined": False}, "failed", id="a script that never trains fails the job"),
    ],
)
def test_the_end_of_a_process_is_judged_by_the_facts(code: int, facts: dict[str, bool | str], kind: str) -> None:
    verdict = judge("worker-3", code, **{**USUAL, **facts})
    assert verdict.kind == kind
    if kind == "failed":
        assert verdict.reason.startswith("worker-3 ended")


def test_what_ended_a_script_before_it_could_join_is_said_as_the_library_said_it() -> None:
    early = {**USUAL, "joined": False, "unknown": True}
    said = "batch_size must be at least 1, not 0"
    assert judge("worker-3", 1, **early).reason == "worker-3 ended before it could join: exit code 1"
    assert judge("worker-3", 1, **{**early, "said": said}).reason == f"worker-3 ended before it could join: {said}"
