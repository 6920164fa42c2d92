"""A job's report as a page: what is on it, and that it is a page whatever is in the report."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import cli
from virtualflow.launcher.report import Report, read_report
from virtualflow.launcher.report_page import page
from virtualflow.protocol.job_view import ChangeEntry
from virtualflow.protocol.live_view import ViewSeries
from virtualflow.protocol.messages import NonFinite

VOID = {"meta"}

REPORT: dict[str, Any] = {
    "job": "digits",
    "phase": "done",
    "digest": "5eb2afcb" * 8,
    "steps": 600,
    "total_steps": 600,
    "virtual_nodes": 8,
    "reproducibility": "bitwise",
    "changes": [
        {"step": 100, "from": 2, "to": 3, "cause": "join", "reason": "worker-2 joins", "pause_ms": 41.2},
        {"step": 250, "from": 3, "to": 2, "cause": "lost", "reason": "worker-1 <was> killed", "repeated_steps": 1},
    ],
    "repeated_steps": 1,
    "repeated_virtual_nodes": 3,
    "step_ms": 8.4,
    "pace_ms": {"worker-0": 1.5, "worker-2": 3.0},
    "metrics": {"loss": 0.0123, "accuracy": None},
    "pids": {"worker-0": [1]},
    "seconds": 12.4,
    "error": None,
    "origin": {"command": "python train.py --lr <1>", "git_commit": "8709766f", "workers": "torch 2.13.0, 2 threads"},
}


class Reader(HTMLParser):
    """Checks that what is opened is closed, and remembers what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(content: str) -> Reader:
    reader = Reader()
    reader.feed(content)
    reader.close()
    assert (reader.open, reader.loads) == ([], [])
    return reader


def test_what_happened_is_on_the_page_and_in_words() -> None:
    content = page(read_report(json.dumps(REPORT).encode(), "job.json"))
    text = " ".join(read(content).text)
    for said in (
        "Training complete after 600 steps in 12.4 s on 2 to 3 workers: 2 membership changes, 1 step repeated.",
        "2 → 3",
        "worker-1 <was> killed",
        "41 ms",
        "no survivor",
        "not finite",
        "5eb2afcb" * 8,
        "python train.py --lr <1>",
        "8709766f",
        "torch 2.13.0, 2 threads",
    ):
        assert said in text
    assert "url(" not in content
    assert "@import" not in content
    assert "uPlot" not in content, "there are no curves to draw"


def test_the_curves_of_a_run_are_in_its_page_and_cannot_be_code() -> None:
    series = ViewSeries(
        (1, 2),
        (1.0, 2.0),
        (1.0, 2.0),
        {"</script><b>": (3.0, None)},
        (5.0, 6.0),
        began=5.0,
        non_finite=NonFinite("</script><b>", "NaN", 2),
    )
    content = page(msgspec.structs.replace(read_report(json.dumps(REPORT).encode(), "job.json"), series=series))
    text = " ".join(read(content).text)
    assert "Not finite </script><b> NaN in step 2" in text
    assert "Started 01 Jan 1970, 00:00 UTC" in text
    _, _, rest = content.partition('<script type="application/json" id="run">')
    told = json.loads(rest.partition("</script>")[0])
    assert told["series"] == json.loads(msgspec.json.encode(series))
    assert [(change["step"], change["to"], change["kind"]) for change in told["changes"]] == [
        (100, 3, "join"),
        (250, 2, "loss"),
    ]
    for script in re.findall(r"<script>(.*?)</script>", content, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in content, "its policy allows it"


def test_two_runs_stand_beside_each_other_and_what_differs_is_marked() -> None:
    series = ViewSeries((1, 2), (1.0, 2.0), (1.0, 2.0), {"loss": (3.0, 2.0)}, (5.0, 6.0), (), 5.0, 1)
    one = msgspec.structs.replace(read_report(json.dumps(REPORT).encode(), "job.json"), series=series)
    content = page(one, msgspec.structs.replace(one, job="<other>", digest="other", steps=599))
    text = " ".join(read(content).text)
    assert "The digests differ: the runs ended with other bits." in text
    assert "Steps differs 600 599" in text
    assert "Virtual nodes 8 8" in re.sub(" +", " ", text)
    told = json.loads(content.partition('id="run">')[2].partition("</script>")[0])
    assert (told["job"], told["under"]["job"]) == ("digits", "<other>")
    assert text.count("Membership changes of") == 2


def test_a_job_without_changes_has_no_empty_pictures() -> None:
    text = " ".join(read(page(Report("a", "waiting", 0, 0.0))).text)
    assert "Workers over steps" not in text
    assert "0 steps in 0 s: 0 membership changes, 0 steps repeated." in text


@given(
    st.builds(
        Report,
        job=st.text(max_size=20),
        phase=st.text(max_size=10),
        steps=st.integers(0, 10**9),
        seconds=st.floats(0, 1e7),
        changes=st.lists(
            st.builds(
                ChangeEntry,
                step=st.integers(0, 10**9),
                from_=st.integers(0, 4_096),
                to=st.integers(0, 4_096),
                cause=st.text(max_size=8),
                reason=st.text(max_size=20),
                pause_ms=st.none() | st.floats(0, 1e7),
            ),
            max_size=5,
        ),
        pace_ms=st.dictionaries(st.text(max_size=5), st.floats(0, 1e6), max_size=3),
        metrics=st.dictionaries(st.text(max_size=5), st.none() | st.floats(-1e9, 1e9), max_size=3),
        error=st.none() | st.text(max_size=40),
    )
)
def test_any_report_is_a_page(report: Report) -> None:
    read(page(report))


def test_the_command_writes_beside_the_report_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(REPORT))
    assert cli.main(["report", str(tmp_path / "job.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'job.html'}\n"
    assert (tmp_path / "job.html").read_text().startswith("<!doctype html>")
    assert cli.main(["report", str(tmp_path / "job.json"), "--html", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()


def test_what_is_no_report_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text('{"job": "x"}')
    with pytest.raises(ConfigurationError, match=r"is no report of virtualflow run --report: .*phase"):
        read_report(b'{"job": "x"}', "job.json")
    assert cli.main(["report", str(tmp_path / "job.json")]) == 2
    assert cli.main(["report", str(tmp_path / "gone.json")]) == 2
    assert "gone.json: No such file" in capsys.readouterr().err
