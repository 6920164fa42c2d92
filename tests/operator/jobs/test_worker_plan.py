"""How many workers are made, where, and who goes first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import training

from virtualflow_operator.api.job import WorkerGroup
from virtualflow_operator.api.objects import Standing
from virtualflow_operator.jobs.pod_classification import ClassifiedPod, Fate
from virtualflow_operator.jobs.worker_plan import WorkerPlan, plan_workers

POD = training(1).pods[1]
SPOT, DEMAND = WorkerGroup("spot", {}), WorkerGroup("demand", {})


def placed(
    ordinal: int,
    fate: Fate = "healthy",
    standing: Standing = "training",
    *,
    group: str = "spot",
    kind: str = "",
    **pod: Any,
) -> ClassifiedPod:
    name = f"j-{group}-{ordinal}"
    reason = {"planned": "its template has changed", "stuck": "full"}.get(fate, "")
    facts = {"phase": "Pending", "node": ""} if fate == "stuck" else {}
    named: dict[str, Any] = {"name": name, "uid": name, "group": group, "ordinal": ordinal}
    made = dataclasses.replace(POD, **(named | facts | pod))
    seen = "absent" if fate == "stuck" else standing
    return ClassifiedPod(made, seen, fate, reason, outdated=fate == "planned", kind=kind)


def elsewhere(ordinal: int, **facts: Any) -> ClassifiedPod:
    """One to be replaced by one on another kind of device."""
    return dataclasses.replace(placed(ordinal, "planned", **facts), outdated=False, misplaced=True)


def plan(
    desired: int, *workers: ClassifiedPod, groups: tuple[WorkerGroup, ...] = (SPOT,), **options: Any
) -> WorkerPlan:
    return plan_workers(desired, workers, groups, {p.pod.name for p in workers}, "j", **options)


def names(workforce: WorkerPlan) -> dict[str, list[str]]:
    found = {
        "create": [f"j-{group.name}-{ordinal}" for group, ordinal, _ in workforce.create],
        "retire": [p.pod.name for p in workforce.retire],
        "withdraw": [p.pod.name for p in workforce.withdraw],
    }
    return {key: value for key, value in found.items() if value}


ROOMY = WorkerGroup("spot", {}, max_replicas=1)
CASES: dict[str, tuple[WorkerPlan, dict[str, list[str]]]] = {
    "as many as wanted": (plan(2, placed(0), placed(1)), {}),
    "none yet": (plan(2), {"create": ["j-spot-0", "j-spot-1"]}),
    "a name that is taken": (plan(2, placed(1), placed(0, "leaving")), {"create": ["j-spot-2"]}),
    "a gap in the names": (plan(3, placed(0), placed(2)), {"create": ["j-spot-1"]}),
    "one too many": (plan(1, placed(0), placed(1)), {"retire": ["j-spot-1"]}),
    "one too many that is not connected": (
        plan(1, placed(0, standing="starting"), placed(1)),
        {"retire": ["j-spot-0"]},
    ),
    "one too many where nodes are to fall idle": (
        plan(2, placed(0, node="few"), placed(1, node="many"), placed(2, node="many"), crowds={"few": 1, "many": 5}),
        {"retire": ["j-spot-0"]},
    ),
    "one too many of a less preferred group on a full node": (
        plan(
            1,
            placed(0, node="few"),
            placed(1, node="many", group="demand"),
            groups=(SPOT, DEMAND),
            crowds={"few": 1, "many": 5},
        ),
        {"retire": ["j-demand-1"]},
    ),
    "one too many that has no node": (plan(1, placed(0, node=""), placed(1)), {"retire": ["j-spot-0"]}),
    "one too many of the less preferred group": (
        plan(1, placed(0), placed(0, group="demand"), groups=(SPOT, DEMAND)),
        {"retire": ["j-demand-0"]},
    ),
    "a group that is full": (
        plan(2, placed(0), groups=(ROOMY, DEMAND)),
        {"create": ["j-demand-0"]},
    ),
    "all groups are full": (plan(3, placed(0), groups=(ROOMY,)), {}),
    "one to be replaced": (plan(2, placed(0, "planned"), placed(1)), {"create": ["j-spot-2"]}),
    "one to be replaced, and no room for one more": (
        plan(2, placed(0, "planned"), placed(1), surge=False),
        {"retire": ["j-spot-0"]},
    ),
    "all to be replaced, one missing elsewhere, and no room for one more": (
        plan(2, placed(0, "planned"), groups=(ROOMY, DEMAND), surge=False),
        {"create": ["j-demand-0"]},
    ),
    "two to be replaced, one after the other": (
        plan(2, placed(0, "planned"), placed(1, "planned")),
        {"create": ["j-spot-2"]},
    ),
    "the successor starts": (plan(2, placed(0, "planned"), placed(1), placed(2, standing="starting")), {}),
    "the successor is ready": (
        plan(2, placed(0, "planned"), placed(1), placed(2, standing="ready")),
        {"retire": ["j-spot-0"]},
    ),
    "one to be replaced that does not train": (
        plan(2, placed(0, "planned", "absent"), placed(1), placed(2)),
        {"retire": ["j-spot-0"]},
    ),
    "one to be replaced that never ran": (
        plan(2, placed(0, "planned", "absent", phase="Pending"), placed(1)),
        {"create": ["j-spot-2"], "withdraw": ["j-spot-0"]},
    ),
    "one to be replaced in a full group": (plan(1, placed(0, "planned"), groups=(ROOMY,)), {"create": ["j-spot-1"]}),
    "all go to another kind, and have their successors at once": (
        plan(2, elsewhere(0), elsewhere(1), kinds=["fast", "fast"]),
        {"create": ["j-spot-2", "j-spot-3"]},
    ),
    "they leave together when the successors are ready": (
        plan(2, elsewhere(0), elsewhere(1), placed(2, standing="ready"), placed(3, standing="ready")),
        {"retire": ["j-spot-1", "j-spot-0"]},
    ),
    "one of them leaves when one successor is ready": (
        plan(
            2, elsewhere(0), elsewhere(1), placed(2, standing="ready"), placed(3, standing="starting"), kinds=["fast"]
        ),
        {"retire": ["j-spot-1"]},
    ),
    "those that were lent leave at once": (
        plan(1, placed(0), elsewhere(1), elsewhere(2)),
        {"retire": ["j-spot-2", "j-spot-1"]},
    ),
    "some are lent back, and one is lacking": (
        plan(2, placed(0), elsewhere(1), elsewhere(2), kinds=["fast"]),
        {"create": ["j-spot-3"]},
    ),
    "one of another kind that never ran": (
        plan(1, elsewhere(0, standing="absent", phase="Pending"), kinds=["fast"]),
        {"create": ["j-spot-1"], "withdraw": ["j-spot-0"]},
    ),
    "a group whose template is for another kind": (
        plan(2, groups=(SPOT, DEMAND), kinds=["fast", "slow"], unsuitable={("spot", "fast")}),
        {"create": ["j-demand-0", "j-spot-0"]},
    ),
    "a kind that no group is for": (plan(1, kinds=["fast"], unsuitable={("spot", "fast")}), {}),
    "a group that is full on one kind": (
        plan(3, placed(0, "stuck", kind="fast"), placed(1, kind="slow"), kinds=["fast", "slow"]),
        {"create": ["j-spot-2"]},
    ),
    "a full cluster": (plan(2, placed(0), placed(1, "stuck")), {}),
    "a full cluster and another group": (
        plan(2, placed(0), placed(1, "stuck"), groups=(SPOT, DEMAND)),
        {"create": ["j-demand-0"]},
    ),
    "others have taken the place": (
        plan(2, placed(0), placed(1, "stuck"), placed(0, group="demand"), groups=(SPOT, DEMAND)),
        {"withdraw": ["j-spot-1"]},
    ),
    "others are about to take the place": (
        plan(2, placed(0), placed(1, "stuck"), placed(0, group="demand", node=""), groups=(SPOT, DEMAND)),
        {},
    ),
    "two wait where one is enough": (
        plan(2, placed(0), placed(1, "stuck"), placed(2, "stuck")),
        {"withdraw": ["j-spot-2"]},
    ),
    "both groups are full": (
        plan(2, placed(0), placed(1, "stuck"), placed(0, "stuck", group="demand"), groups=(SPOT, DEMAND)),
        {},
    ),
    "a roll on a full cluster": (
        plan(2, placed(0, "planned"), placed(1, "planned"), placed(2, "stuck")),
        {"retire": ["j-spot-0"]},
    ),
    "a roll on a full cluster while one starts": (
        plan(2, placed(0, "planned"), placed(1, standing="starting"), placed(2, "stuck")),
        {},
    ),
    "a roll on a full cluster with one worker": (plan(1, placed(0, "planned"), placed(1, "stuck")), {}),
    "a roll within a quota": (
        plan(2, placed(0, "planned"), placed(1), refused=True),
        {"create": ["j-spot-2"], "retire": ["j-spot-0"]},
    ),
    "fewer are wanted while all successors start": (
        plan(1, placed(0, "planned"), placed(1, "planned"), *(placed(n, standing="starting") for n in (2, 3))),
        {"retire": ["j-spot-1", "j-spot-3"]},
    ),
    "those that are lost, leaving or given up do not count": (
        plan(1, placed(0, "lost"), placed(1, "leaving"), placed(2, "declared-lost"), placed(3, "crashed")),
        {"create": ["j-spot-4"]},
    ),
}


@pytest.mark.parametrize(("workforce", "expected"), CASES.values(), ids=CASES)
def test_the_number_of_workers_is_brought_to_what_is_wanted(
    workforce: WorkerPlan, expected: dict[str, list[str]]
) -> None:
    assert names(workforce) == expected


def test_a_worker_on_a_cordoned_node_leaves_a_full_cluster_only_when_another_keeps_the_state() -> None:
    away = dataclasses.replace(placed(0, "planned"), outdated=False)
    assert names(plan(2, away, placed(1), placed(2, "stuck"))) == {"retire": ["j-spot-0"]}
    assert names(plan(1, away, placed(2, "stuck"))) == {}


def test_a_worker_that_has_not_begun_on_a_cordoned_node_may_yet_begin() -> None:
    away = dataclasses.replace(placed(0, "planned", "absent", phase="Pending"), outdated=False)
    assert names(plan(1, away)) == {"create": ["j-spot-1"]}


FATES = st.sampled_from(["healthy", "planned", "stuck", "announced", "leaving", "lost", "crashed"])
STANDINGS = st.sampled_from(["absent", "starting", "ready", "training", "draining"])


@given(
    st.integers(1, 6), st.lists(st.tuples(FATES, STANDINGS, st.booleans(), st.booleans()), max_size=8), st.booleans()
)
def test_never_more_than_one_beyond_what_is_wanted_is_made_and_nobody_is_named_twice(
    desired: int, facts: list[tuple[Fate, Standing, bool, bool]], refused: bool
) -> None:
    workers = [
        placed(
            n, fate, standing, group="spot" if first else "demand", **({} if node else {"node": "", "phase": "Pending"})
        )
        for n, (fate, standing, first, node) in enumerate(facts)
    ]
    decided = plan(desired, *workers, groups=(SPOT, DEMAND), refused=refused)
    leaving = [*decided.retire, *decided.withdraw]
    assert len({p.pod.uid for p in leaving}) == len(leaving)
    assert {p.fate for p in leaving} <= {"healthy", "planned", "stuck"}
    made = [f"j-{group.name}-{ordinal}" for group, ordinal, _ in decided.create]
    assert len(set(made)) == len(made)
    assert not set(made) & {p.pod.name for p in workers}
    stay = [p for p in workers if p.fate in ("healthy", "planned") and p not in leaving]
    if made:
        assert len(stay) + len(made) <= desired + 1
    ready = [p for p in workers if p.fate in ("healthy", "planned") and p.ready]
    if ready:
        assert any(p not in leaving for p in ready), "somebody keeps the state"


@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5))
def test_with_room_for_all_it_comes_to_rest_at_what_is_wanted(desired: int, healthy: int, outdated: int) -> None:
    workers = {n: placed(n, "healthy" if n < healthy else "planned") for n in range(healthy + outdated)}
    for _ in range(4 * (desired + healthy + outdated) + 4):
        decided = plan(desired, *workers.values())
        if not names(decided):
            break
        for p in (*decided.retire, *decided.withdraw):
            del workers[p.pod.ordinal]
        for _, ordinal, _ in decided.create:
            workers[ordinal] = placed(ordinal)
    assert len(workers) == desired
    assert all(p.fate == "healthy" for p in workers.values())
