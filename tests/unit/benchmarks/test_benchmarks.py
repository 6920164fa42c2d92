"""The machinery of the measurements: turns, the reading of logs, and the page that is made of the results."""

from __future__ import annotations

import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import memory_copy, packing, report, results
from benchmarks.changes import kind_of
from benchmarks.external import rows_of
from benchmarks.figures import FIGURES
from benchmarks.tables import cost, crossed, event, phase
from benchmarks.torchrun import Line, pause
from benchmarks.turns import WARM_UP, Side, compare

STEPPER = """
import sys
from benchmarks.turns import Pace, Turns

with Turns() as turns, open(sys.argv[1], "a", buffering=1) as log:
    pace = Pace(turns)
    while pace.goes_on():
        log.write(sys.argv[2] + "\\n")
"""


def stepper(name: str, log: Path, workers: int = 1) -> Side:
    """A side whose processes write a line instead of making a step."""
    return Side(name, [[sys.executable, "-c", STEPPER, str(log), name]] * workers, workers)


def test_sides_take_turns_and_make_equally_many_steps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    steps, times = compare([stepper("a", log, workers=2), stepper("b", log)], rounds=3, seconds=0.0)
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    blocks = [(name, len(list(lines))) for name, lines in groupby(log.read_text().split())]
    there = [("a", 2), ("b", 1)]
    turns = [*((n, there) for n in WARM_UP), (steps, there), (steps, there[::-1]), (steps, there)]
    expected = [(name, n * workers) for n, order in turns for name, workers in order]
    assert blocks == [(name, sum(n for _, n in found)) for name, found in groupby(expected, itemgetter(0))]


def test_a_side_that_dies_ends_the_measurement_with_what_it_said(tmp_path: Path) -> None:
    dying = STEPPER.replace('log.write(sys.argv[2] + "\\n")', "sys.exit('out of patience')")
    with pytest.raises(SystemExit, match="out of patience"):
        compare([Side("a", [[sys.executable, "-c", dying, str(tmp_path / "log"), "a"]], 1)], rounds=1, seconds=0.0)


def test_a_restart_lasts_from_the_last_step_of_the_old_processes_to_the_first_of_the_new() -> None:
    before = [Line(1, 0, 2, step, step / 10) for step in (1, 2, 3, 4)] + [Line(2, 1, 2, 4, 0.42)]
    after = [Line(3, 0, 3, 4, 7.45), Line(4, 1, 3, 4, 7.42), Line(3, 0, 3, 5, 7.5)]
    found = pause([*before, *after], moment=0.42)
    assert found["pause_ms"] == pytest.approx(7_000)
    assert found["repeated_steps"] == 1


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"cause": "join", "from": 2, "to": 3}, "grow"),
        ({"cause": "resize", "from": 3, "to": 2}, "shrink"),
        ({"cause": "drain", "from": 2, "to": 1}, "shrink"),
        ({"cause": "lost", "from": 2, "to": 1}, "kill"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["cause"],
)
def test_a_change_is_a_grow_a_shrink_or_a_kill(change: dict[str, Any], kind: str) -> None:
    assert kind_of(change) == kind


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        pytest.param({"a": 1, "samples": [1, 2]}, [{"what": "a", "value": 1}], id="numbers"),
        pytest.param(
            {"n": 3, "figures": {"join": {"ms": 1.5, "in": {"Hello": 1}}, "loss": {"ms": 2.5}}},
            [{"what": "join", "ms": 1.5}, {"what": "loss", "ms": 2.5}],
            id="objects of objects",
        ),
        pytest.param({"grow": {"ms": 1.0}}, [{"what": "grow, ms", "value": 1.0}], id="an object"),
    ],
)
def test_what_a_program_measured_becomes_rows(written: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    assert rows_of(written) == rows


def test_long_rows_become_a_wide_table_with_gaps() -> None:
    rows = [
        {"what": "founding: settled", "seconds": 0.081, "cpu_seconds": 0.06, "to_workers_bytes": 0},
        {"what": "founding: decided and sent", "seconds": 0.21, "cpu_seconds": 0.18, "to_workers_bytes": 36_300_000},
        {"what": "status", "seconds": 0.01, "cpu_seconds": -0.0, "to_workers_bytes": 0},
    ]
    assert crossed({"event": event}, phase, cost)(rows) == [
        {"event": "first generation", "settled": "0.08 (0.06)", "decided and sent": "0.21 (0.18, 36 MB)", "takes": ""},
        {"event": "status", "settled": "", "decided and sent": "", "takes": "0.01 (0.00)"},
    ]


def test_the_page_is_what_the_results_make_it() -> None:
    assert report.DOCUMENT.read_text() == report.page(results.read())


def test_every_result_has_its_figure_and_every_plot_is_small() -> None:
    measured = results.read()
    assert {name for name in measured if name not in FIGURES} == set()
    for name, figure in FIGURES.items():
        if figure.draw is not None and measured.get(name, {}).get("rows"):
            picture = report.DOCUMENT.parent / report.PICTURES / f"{name}.png"
            assert picture.stat().st_size < 60_000


def copied(step_ms: float, *sent: float, cpu: float = 0.5, memory: int = 100_000_000) -> dict[str, Any]:
    return {
        "state_mb": 30.0,
        "step_ms": step_ms,
        "seconds": 10.0,
        "held_up_s": 0.01 * len(sent),
        "sent_s": list(sent),
        "coordinator_s": cpu,
        "worker_bytes": 3 * memory,
        "coordinator_bytes": memory,
    }


def test_what_copies_cost_is_what_a_job_without_them_does_not_have() -> None:
    rounds = [
        {"without": copied(10.0), "with": copied(10.2, 0.1, 0.3, cpu=0.7, memory=160_000_000)},
        {"without": copied(10.0), "with": copied(10.4, 0.2, 0.2, cpu=0.7, memory=160_000_000)},
    ]
    row = memory_copy.summarize(rounds)
    assert (row["copies"], row["longer"], row["every_s"]) == (4, "3.0 % (2.0 to 4.0)", 5.0)
    told = ("mb_per_s", "held_up_ms", "sending_ms", "coordinator_ms", "worker_mb", "coordinator_mb")
    assert [row[key] for key in told] == pytest.approx([6.0, 10.0, 200.0, 100.0, 180.0, 60.0])
    with pytest.raises(ValueError, match="no copy was made"):
        memory_copy.summarize([{"without": copied(10.0), "with": copied(10.0)}])


def ran(seconds: float, steps: int = 16, began: float = 0.0, digest: str = "a") -> packing.Ran:
    return packing.Ran(digest, tuple(began + seconds * step for step in range(1, steps + 1)), busy=0.5)


def test_jobs_that_share_a_device_make_steps_as_long_as_all_are_warm() -> None:
    alone = [[ran(1.0), ran(2.0)]] * 3
    shared = [[ran(2.0, steps=64), ran(4.0, began=7.0)]] * 3
    turns = [[ran(1.0, steps=64), ran(seconds, steps=64, digest="b")] for seconds in (2.0, 4.0, 2.5)]
    row = packing.summarize([8, 250], alone, {"shared": shared, "turns": turns})
    assert row["alone_ms"] == [1_000, 2_000]
    assert (row["shared_ratio"], row["shared_range"]) == (1.0, [1.0, 1.0])
    assert (row["turns_ratio"], row["turns_range"]) == (pytest.approx(1.8), [1.5, 2.0])
    assert row["digests"] == [1, 2]


def test_a_job_rests_between_the_peaks_of_its_steps() -> None:
    memory = packing.Memory(used=[(0.5, 900), *((2.0 + n / 10, 700 if n % 2 else 500 + n) for n in range(100))])
    assert packing.peak_and_rest(ran(1.0), memory) == (900, 528)
