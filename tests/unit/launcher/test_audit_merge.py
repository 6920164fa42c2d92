"""The audit of a job: what the fragments of its workers say about the attempts that counted."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from virtualflow.launcher.report import merge_audit, write_audit


def _carried(
    generation: tuple[int, int],
    step: int,
    virtual_node: int,
    worker: str,
    samples: list[int],
    kind: str = "computed",
) -> str:
    fact = {
        "generation": generation,
        "epoch": 0,
        "step": step,
        "virtual_node": virtual_node,
        "worker": worker,
        "samples": samples,
    }
    return json.dumps({kind: fact}) + "\n"


def _committed(generation: tuple[int, int], step: int) -> str:
    return json.dumps({"committed": {"generation": generation, "step": step}}) + "\n"


def _who(rows: list[dict[str, object]]) -> list[tuple[object, object, object]]:
    return [(row["step"], row["virtual_node"], row["worker"]) for row in rows]


def test_each_step_has_one_row_for_each_virtual_node_in_order() -> None:
    first = [_carried((1, 1), 1, 1, "worker-0", [2, 3]), _committed((1, 1), 1)]
    second = [_carried((1, 1), 1, 0, "worker-1", [0, 1]), _committed((1, 1), 1)]
    rows = list(merge_audit([first, second]))
    assert rows == [
        {"run": 1, "epoch": 0, "step": 1, "virtual_node": 0, "worker": "worker-1", "samples": [0, 1]},
        {"run": 1, "epoch": 0, "step": 1, "virtual_node": 1, "worker": "worker-0", "samples": [2, 3]},
    ]


def test_an_attempt_that_nobody_saw_committed_does_not_count() -> None:
    lines = [
        _carried((1, 1), 1, 0, "worker-0", [0]),
        _committed((1, 1), 1),
        _carried((1, 1), 2, 0, "worker-0", [1]),
    ]
    assert _who(list(merge_audit([lines]))) == [(1, 0, "worker-0")]


def test_a_worker_that_died_before_it_saw_the_commit_is_credited_all_the_same() -> None:
    dead = [_carried((1, 1), 1, 0, "worker-0", [0])]
    survivor = [_carried((1, 1), 1, 1, "worker-1", [1]), _committed((1, 1), 1)]
    assert _who(list(merge_audit([dead, survivor]))) == [(1, 0, "worker-0"), (1, 1, "worker-1")]


def test_what_was_kept_of_an_aborted_attempt_counts_in_the_next() -> None:
    dead = [_carried((1, 1), 1, 0, "worker-0", [0])]
    survivor = [
        _carried((1, 1), 1, 1, "worker-1", [1]),
        _carried((1, 2), 1, 1, "worker-1", [1], "kept"),
        _carried((1, 2), 1, 0, "worker-1", [0]),
        _committed((1, 2), 1),
    ]
    assert _who(list(merge_audit([dead, survivor]))) == [(1, 0, "worker-1"), (1, 1, "worker-1")]


def test_of_several_attempts_the_highest_committed_generation_counts() -> None:
    lost = [_carried((1, 1), 5, 0, "worker-0", [0]), _committed((1, 1), 5)]
    resumed = [_carried((2, 2), 5, 0, "worker-1", [0]), _committed((2, 2), 5)]
    broken = [_carried((2, 3), 5, 0, "worker-2", [0])]
    for order in ([lost, resumed, broken], [broken, resumed, lost]):
        assert _who(list(merge_audit(order))) == [(5, 0, "worker-1")]


def test_a_generation_of_a_later_coordinator_is_higher_whatever_its_counter() -> None:
    early = [_carried((1, 9), 1, 0, "worker-0", []), _committed((1, 9), 1)]
    late = [_carried((2, 1), 1, 0, "worker-1", []), _committed((2, 1), 1)]
    assert _who(list(merge_audit([late, early]))) == [(1, 0, "worker-1")]


@given(cut=st.integers(0, 200))
def test_a_torn_last_line_is_ignored(cut: int) -> None:
    torn = _carried((1, 1), 2, 0, "worker-0", list(range(20)))
    lines = [_carried((1, 1), 1, 0, "worker-0", [0]), _committed((1, 1), 1), torn[: min(cut, len(torn) - 2)]]
    assert _who(list(merge_audit([lines]))) == [(1, 0, "worker-0")]


def test_the_fragments_of_a_directory_become_one_file(tmp_path: Path) -> None:
    fragments = tmp_path / "fragments"
    fragments.mkdir()
    (fragments / "worker-1-b.jsonl").write_text(_carried((1, 1), 1, 1, "worker-1", [1]) + '{"carri')
    (fragments / "worker-0-a.jsonl").write_text(
        _carried((1, 1), 1, 0, "worker-0", [0]) + _committed((1, 1), 1), encoding="utf-8"
    )
    target = tmp_path / "audit.jsonl"
    target.write_text("of an earlier run\n")
    assert write_audit(target, fragments) == 2
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert _who(rows) == [(1, 0, "worker-0"), (1, 1, "worker-1")]
    assert {path.name for path in tmp_path.iterdir()} == {"fragments", "audit.jsonl"}
