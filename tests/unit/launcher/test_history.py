"""What a runner remembers across the coordinators of its job."""

from __future__ import annotations

import pytest

from statuses import coordinator_status
from virtualflow.launcher.report import JobHistory
from virtualflow.protocol.job_view import describe_new_beginning
from virtualflow.protocol.messages import CheckpointState


@pytest.mark.parametrize(
    ("checkpoint", "told"),
    [
        (None, describe_new_beginning(40, 3, None)),
        (CheckpointState(60.0, 2, 50.0), describe_new_beginning(40, 3, 2)),
    ],
)
def test_a_job_of_which_nothing_was_left_says_once_that_it_began_again(
    checkpoint: CheckpointState | None, told: str
) -> None:
    history = JobHistory()
    assert history.began_again(coordinator_status("training", step=40, generation=3)) is None
    assert history.began_again(coordinator_status("waiting", incarnation=2)) is None
    new = coordinator_status("training", incarnation=2, step=3, generation=1, checkpoint=checkpoint)
    assert history.began_again(new) == told
    assert history.began_again(new) is None


def test_a_coordinator_that_remembers_the_training_tells_of_a_restart_itself() -> None:
    history = JobHistory()
    assert history.began_again(coordinator_status("training", step=40, generation=3)) is None
    assert history.began_again(coordinator_status("training", step=0, generation=4)) is None


def test_a_new_coordinator_that_hears_of_the_step_before_the_latest_has_lost_nothing() -> None:
    history = JobHistory()
    assert history.began_again(coordinator_status("training", step=40, generation=3)) is None
    assert history.began_again(coordinator_status("training", incarnation=2, step=39, generation=3)) is None
