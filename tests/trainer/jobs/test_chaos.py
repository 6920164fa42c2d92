"""Random schedules of everything that can happen, each compared bit for bit with the undisturbed run.

Of two with a fixed seed one is made before every change; ``make chaos RUNS=100`` makes as many as wanted.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from jobs import check_audit, check_changes, run_job

from tiers import nightly

RUNS = int(os.environ.get("VIRTUALFLOW_CHAOS_RUNS") or 2)
SEED = int(os.environ.get("VIRTUALFLOW_CHAOS_SEED") or 20_261_120)
STEPS = 60
ACTIONS = ["=1", "=2", "=3", "=4", "kill", "kill:2", "term", "hang", "slow:3", "fast", "coordinator", "all"]
SCRIPTS = ["examples/digits.py", "tests/trainer/digits_sharded.py"]


def draw_schedule(randomness: random.Random) -> str:
    """Three to five actions at random steps; a hang at most once, since each takes the heartbeat limit."""
    count = randomness.randint(3, 5)
    steps = sorted(randomness.sample(range(3, STEPS - 5), count))
    drawn: list[str] = []
    for _ in steps:
        choices = [action for action in ACTIONS if action not in ("hang", "all") or action not in drawn]
        drawn.append(randomness.choice(choices))
    return ",".join(f"{step}:{action}" for step, action in zip(steps, drawn, strict=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    finished = run_job(tmp_path_factory.mktemp("undisturbed"), "--workers", "1", *arguments(SCRIPTS[0]))
    return finished.bits


def arguments(script: str) -> list[str]:
    return [script, "--steps", str(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *map(nightly, range(1, RUNS))])
def test_a_random_schedule_gives_the_same_bits(number: int, undisturbed: tuple[str, str], tmp_path: Path) -> None:
    randomness = random.Random(f"{SEED}/{number}")
    schedule, workers, script = draw_schedule(randomness), randomness.randint(1, 4), SCRIPTS[number % 2]
    print(f"seed {SEED}, run {number}: --workers {workers} --schedule {schedule} {script}")
    finished = run_job(
        tmp_path, "--workers", workers, "--schedule", schedule, "--heartbeat-limit", "3",
        "--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-steps", "7", *arguments(script),
    )  # fmt: skip
    assert finished.bits == undisturbed
    check_audit(finished, 1_437, 8)
    check_changes(finished)
