"""Two reports beside each other: the verdict, and what is said to differ first."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from virtualflow.launcher import cli
from virtualflow.launcher.report import Report
from virtualflow.launcher.report_comparison import compare, rows
from virtualflow.protocol.live_view import ViewSeries

MADE = {"command": "python a.py", "script_sha256": "ab", "workers": "torch 2.13.0, 1 thread", "cpu": "EPYC"}
EQUAL = "The digests are equal: both runs ended with the same bits."
OTHER = "The digests differ: the runs ended with other bits."
SAME_ORIGIN = "All that is known of what they were made of is the same."


def series(width: int = 1, **metrics: dict[int, float | None]) -> ViewSeries:
    steps = sorted({step for column in metrics.values() for step in column})
    columns = {name: tuple(column.get(step) for step in steps) for name, column in metrics.items()}
    nothing = (None,) * len(steps)
    return ViewSeries(tuple(steps), nothing, nothing, columns, width=width)


ONE = Report("one", "done", 40, 12.0, digest="aa", virtual_nodes=8, reproducibility="bitwise", origin=MADE)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        pytest.param({}, {"origin": {**MADE, "cpu": "Xeon"}}, [EQUAL], id="equal digests need no more words"),
        pytest.param({}, {"digest": "bb"}, [OTHER, SAME_ORIGIN], id="nothing known differs"),
        pytest.param(
            {},
            {"digest": "bb", "origin": {**MADE, "script_sha256": "cd", "cpu": "Xeon"}, "virtual_nodes": 4},
            [OTHER, "What they were made of differs, first in this: SHA-256 of the script, CPU, virtual nodes."],
            id="what they were made of, in the order of causes",
        ),
        pytest.param(
            {"series": series(loss={1: 3.0, 5: 2.0, 9: 1.0})},
            {"digest": "bb", "series": series(loss={1: 3.0, 4: 2.1, 5: 2.0, 9: 1.5})},
            [
                OTHER,
                "The curves are equal to step 5. The first figure that differs is loss in step 9: 1 and 1.5.",
                SAME_ORIGIN,
            ],
            id="the first step of which both have told something else",
        ),
        pytest.param(
            {"series": series(loss={1: 3.0, 2: None}, odd={2: 1.0})},
            {"digest": "bb", "series": series(loss={1: 3.0, 2: 2.0})},
            [OTHER, "No figure that both have told differs, to step 1.", SAME_ORIGIN],
            id="what one alone has told says nothing",
        ),
        pytest.param(
            {"series": series(2, loss={1: 3.0})},
            {"digest": "bb", "series": series(2, loss={1: 4.0})},
            [
                OTHER,
                "Points of their curves are means of several steps: run both with --trace, and virtualflow bisect "
                "finds the first step that differs.",
                SAME_ORIGIN,
            ],
            id="means of several steps are not compared",
        ),
        pytest.param(
            {"digest": None},
            {"origin": {}},
            [
                "A run without a digest has not come to its end, so its bits are not compared.",
                "What they were made of differs, first in this: Command, SHA-256 of the script, All workers, CPU.",
            ],
            id="one that did not end",
        ),
    ],
)
def test_what_differs_first_is_said_behind_the_verdict(
    one: dict[str, object], other: dict[str, object], said: list[str]
) -> None:
    assert compare(msgspec.structs.replace(ONE, **one), msgspec.structs.replace(ONE, job="other", **other)) == said


def test_all_that_is_known_of_a_run_stands_in_its_rows() -> None:
    known = rows(msgspec.structs.replace(ONE, step_ms=12.5, metrics={"loss": 0.25, "odd": None}))
    told = {name: value for name, value in known.items() if value}
    assert list(told.values()) == [
        *("aa", "python a.py", "ab", "torch 2.13.0, 1 thread", "EPYC", "8", "bitwise", "done", "40", "0", "12 s"),
        *("12.5 ms", "0.25", "not finite"),
    ]
    assert set(known) - set(told) == {"Script", "Git commit", "virtualflow", "Python", "Devices"}


def test_the_command_says_the_verdict_and_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for report in (ONE, msgspec.structs.replace(ONE, job="other")):
        (tmp_path / f"{report.job}.json").write_bytes(msgspec.json.encode(report))
    assert cli.main(["report", str(tmp_path / "one.json"), str(tmp_path / "other.json"), "--html"]) == 0
    assert capsys.readouterr().out.splitlines() == [EQUAL, str(tmp_path / "one-and-other.html")]
    assert "<strong>The digests are equal" in (tmp_path / "one-and-other.html").read_text()
