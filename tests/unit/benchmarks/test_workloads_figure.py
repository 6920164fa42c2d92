"""The figure of the workloads: what it reads in a job's lines, and that it fails where bits differ."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.workloads import WORKLOADS, Told, compare, leader_at, read, schedule_of

from virtualflow.launcher.fault_schedule import Kill, Resize, parse_schedule

JUDGED = [
    (1.0, "[virtualflow    1.00 s] resnet: coordinator at http://127.0.0.1:1, 2 workers wanted"),
    (5.0, "step 6: test accuracy 0.2500"),
    (
        6.0,
        "[virtualflow    6.00 s] 2 workers → 1 worker at step 9 (worker-0 lost: its connections closed): pause 216 ms",
    ),
    (7.5, "step 12: test accuracy 0.9000"),
    (8.0, "trained 701,178 parameters"),
]
TRAINED = [
    (5.0, "{'loss': '4.25', 'learning_rate': '0.005'}"),
    (6.0, "{'loss': 2.5}"),
    (8.0, "held-out loss 2.2041 nats a token, perplexity 9.1"),
    (8.0, "98,304 of 459,392 parameters have learned; they are in out"),
]


def test_a_workload_tells_its_metric_its_size_and_when_each_change_was_over() -> None:
    points = [(5.0, 0.25), (7.5, 0.9)]
    assert read(JUDGED) == Told("test accuracy", "0.9000", 701_178, "test accuracy", points, [(6.0, "2 → 1")])


def test_one_that_is_judged_at_its_end_only_is_drawn_by_its_training_loss() -> None:
    assert read(TRAINED) == Told("held-out loss", "2.2041", 459_392, "training loss", [(5.0, 4.25), (6.0, 2.5)], [])


def test_losses_that_a_trainer_prints_beside_the_metric_are_not_drawn() -> None:
    assert read([*TRAINED[:2], *JUDGED]).points == [(5.0, 0.25), (7.5, 0.9)]


@pytest.mark.parametrize("lines", [JUDGED[:1], JUDGED[:2], JUDGED[-1:]], ids=["nothing", "no size", "no metric"])
def test_a_job_that_has_not_told_all_is_no_figure(lines: list[tuple[float, str]]) -> None:
    with pytest.raises(ValueError, match="has not told its metric and its parameters"):
        read(lines)


def ended(digest: str, optimizer: str, value: str) -> dict[str, Any]:
    told = Told("test accuracy", value, 1, "test accuracy", [], [])
    return {"report": {"digest": digest, "optimizer_digest": optimizer}, "told": told}


@pytest.mark.parametrize("other", [("b", "o", "0.9"), ("a", "p", "0.9"), ("a", "o", "0.8")])
def test_runs_that_end_otherwise_are_no_figure(other: tuple[str, str, str]) -> None:
    compare("resnet", {"1": ended("a", "o", "0.9"), "2": ended("a", "o", "0.9")})
    with pytest.raises(SystemExit, match="resnet: the runs have not come to the same"):
        compare("resnet", {"1": ended("a", "o", "0.9"), "2": ended(*other)})


def test_the_leader_is_who_computes_virtual_node_0() -> None:
    audit = [
        {"step": step, "virtual_node": node, "worker": worker}
        for step, workers in ((1, "ab"), (2, "ba"))
        for node, worker in enumerate(workers)
    ]
    assert [leader_at(audit, step) for step in (1, 2)] == ["a", "b"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_each_workload_is_killed_joined_and_drained_on_its_way(workload: Any) -> None:
    groups = parse_schedule(schedule_of(workload.steps))
    assert [group.actions for group in groups] == [(Kill(1),), (Resize(3),), (Resize(1),)]
    assert 1 < groups[0].step < groups[-1].step < workload.steps - 3
