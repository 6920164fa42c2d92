"""Traces on disk: what workers have written is read back, and what is none is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow.verify import Began, Committed, Computed, Opened, encode, plan_trials, read_trace

OPENED = Opened("worker-0", "i", 2, 0, 16, "bitwise", "2.9", "0")
COMPUTED = Computed((1, 1), 1, 0, "s", "d", "r", {"a": "g"}, {}, {"loss": "nan"})
RECORDS = [
    OPENED,
    Began(1, {"parameter a": "p"}),
    COMPUTED,
    Committed((1, 1), 1, {"parameter a": "q"}, {"loss": "inf"}),
]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "worker-0-i.jsonl").write_bytes(b"".join(map(encode, RECORDS)))
    trace = read_trace(tmp_path)
    process = "worker-0", "i"
    assert trace.opened == {process: OPENED}
    assert trace.before == {1: {process: {"parameter a": "p"}}}
    assert trace.nodes == {1: {0: (process, COMPUTED)}}
    assert trace.after == {1: {process: RECORDS[-1]}}


def test_what_a_kill_has_torn_and_what_a_later_version_says_is_passed_over(tmp_path: Path) -> None:
    torn = encode(COMPUTED)[:20] + b"\n"
    unknown = b'{"kind": "dreamt", "step": 1}\n'
    lines = [encode(OPENED), unknown, encode(COMPUTED).replace(b"{", b'{"later":1,', 1), torn]
    (tmp_path / "worker-0-i.jsonl").write_bytes(b"".join(lines))
    assert read_trace(tmp_path).attempts == {(1, 0): 1}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        pytest.param("missing", "is not there", id="missing"),
        pytest.param("file", "is no directory", id="a file"),
        pytest.param("empty", "there is no trace in", id="empty"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=sentence):
        read_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("virtual_nodes", "steps", "most", "expected"),
    [
        pytest.param(8, 6, 8, [1, 1, 2, 8, 1, 1, 2], id="usual"),
        pytest.param(2, 6, 8, [1, 1, 2, 1, 1, 2], id="two ways are all"),
        pytest.param(64, 6, 8, [1, 1, 2, 8, 1, 1, 2], id="no more workers than asked for"),
        pytest.param(8, 2, 2, [1, 1, 2, 1], id="too few steps for a join"),
    ],
)
def test_the_trials_of_a_check(virtual_nodes: int, steps: int, most: int, expected: list[int]) -> None:
    trials = plan_trials(virtual_nodes, steps, most)
    assert [trial.workers for trial in trials] == expected
    assert len({trial.name for trial in trials}) == len(trials)
    assert all(trial.resumes_after is None or 0 < trial.resumes_after < steps for trial in trials)
    assert all(trial.repeated_step is None or trial.repeated_step <= steps for trial in trials)
    assert [trial.hash_seed for trial in trials].count("1") == 1
