"""What a worker leaves behind: it always fits, says what matters, and nothing else is taken for it."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.errors import (
    ConfigurationError,
    CoordinatorAbsent,
    Drained,
    Evicted,
    JobEnded,
    JobFailed,
    VirtualFlowError,
)
from virtualflow.protocol import messages as m
from virtualflow.protocol.messages import NonFinite
from virtualflow.protocol.settings import ENV_TERMINATION_LOG
from virtualflow.protocol.termination_message import (
    TerminationMessage,
    TerminationMessageWriter,
    decode_termination_message,
    encode_termination_message,
)
from virtualflow.protocol.wording import Metric, printable

LIMIT = 4_096
TEXT = st.text(st.characters(exclude_categories=[]), max_size=3_000)


def read(path: Path) -> TerminationMessage:
    word = decode_termination_message(path.read_bytes())
    assert word is not None
    return word


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setenv(ENV_TERMINATION_LOG, str(path))
    return path


@given(
    trace=TEXT.map(lambda text: text * 4),
    error=st.none() | TEXT,
    reason=st.none() | TEXT,
    metrics=st.dictionaries(TEXT, st.floats(), max_size=30),
)
def test_a_termination_message_always_fits_and_can_be_read(
    trace: str, error: str | None, reason: str | None, metrics: dict[str, float]
) -> None:
    word = TerminationMessage("failed", step=7, error=error, reason=reason, traceback=trace, metrics=metrics)
    raw = encode_termination_message(word)
    assert len(raw) <= LIMIT
    told = decode_termination_message(raw.decode())
    assert told is not None
    assert (told.kind, told.step) == ("failed", 7)
    assert len(told.metrics) <= 16
    assert all(isinstance(value, str) or math.isfinite(value) for value in told.metrics.values())
    assert printable(trace).endswith(told.traceback or "")


def test_a_metric_that_is_not_finite_is_told_by_a_word() -> None:
    found = NonFinite("loss", "NaN", 5)
    metrics: dict[str, Metric] = {"loss": math.nan, "norm": math.inf, "accuracy": 0.5}
    raw = encode_termination_message(TerminationMessage("done", step=7, metrics=metrics, non_finite=found))
    told = decode_termination_message(raw)
    assert told is not None
    assert told.metrics == {"loss": "NaN", "norm": "Infinity", "accuracy": 0.5}
    assert told.non_finite == found


def test_of_a_long_traceback_the_end_is_kept_as_far_as_there_is_room() -> None:
    trace = "".join(f'  File "train.py", line {number}, in step\n' for number in range(1_000)) + 'ValueError: "sour"\n'
    raw = encode_termination_message(TerminationMessage("failed", error='ValueError: "sour"', traceback=trace))
    word = decode_termination_message(raw)
    assert word is not None
    assert word.error == 'ValueError: "sour"'
    assert word.traceback is not None
    assert trace.endswith(word.traceback)
    assert LIMIT - 8 < len(raw) <= LIMIT


def test_it_is_plain_json_in_the_spelling_of_the_other_messages() -> None:
    raw = encode_termination_message(TerminationMessage("done", 9, 9, "aa", "bb", {"loss": 0.5}))
    assert json.loads(raw) == {
        "type": "last-word",
        "kind": "done",
        "step": 9,
        "totalSteps": 9,
        "digest": "aa",
        "optimizerDigest": "bb",
        "metrics": {"loss": 0.5},
    }


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("Traceback (most recent call last):\n  ...", id="the end of a log"),
        pytest.param("{", id="half an object"),
        pytest.param("null", id="null"),
        pytest.param('{"kind":"done"}', id="somebody else's object"),
        pytest.param('{"type":"last-word"}', id="no kind"),
        pytest.param('{"type":"last-word","kind":"asleep"}', id="an unknown kind"),
        pytest.param('{"type":"last-word","kind":"done","step":"9"}', id="a step in quotation marks"),
        pytest.param('{"type":"done","step":9}', id="another message"),
        pytest.param('{"type":"heartbeat"}', id="a sign of life"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param("\ud800", id="half a surrogate pair"),
        pytest.param("[" * 100_000, id="deep nesting"),
    ],
)
def test_what_is_no_termination_message_is_taken_for_none(text: str | bytes) -> None:
    assert decode_termination_message(text) is None


def test_a_termination_message_of_a_later_version_is_understood() -> None:
    word = decode_termination_message('{"type":"last-word","kind":"left","reason":"enough","more":{"a":1}}\n')
    assert word == TerminationMessage("left", reason="enough")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Drained("the node goes"), TerminationMessage("left", 5, 10, reason="the node goes")),
        (
            Evicted("declared lost: no sign of life"),
            TerminationMessage("refused", 5, 10, reason="declared lost: no sign of life"),
        ),
        (JobEnded("the job is complete"), TerminationMessage("ended", 5, 10, reason="the job is complete")),
        (JobFailed("the job has failed: x"), TerminationMessage("ended", 5, 10, reason="the job has failed: x")),
        (CoordinatorAbsent("nobody answers"), TerminationMessage("ended", 5, 10, reason="nobody answers")),
        (ConfigurationError("pass epochs="), TerminationMessage("failed", 5, 10, error="pass epochs=")),
        (VirtualFlowError("a step was left"), TerminationMessage("failed", 5, 10, error="a step was left")),
        (SystemExit(3), TerminationMessage("failed", 5, 10, error="SystemExit: 3", traceback="SystemExit: 3\n")),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, BaseException) else None,
)
def test_how_a_process_ends_is_told_by_its_exception(
    log: Path, error: BaseException, expected: TerminationMessage
) -> None:
    TerminationMessageWriter().ended(error, 5, 10)
    assert read(log) == expected


def test_a_later_word_takes_the_place_of_an_earlier_one_in_the_same_file(log: Path) -> None:
    log.write_text("x" * 10_000)
    node = log.stat().st_ino
    writer = TerminationMessageWriter()
    writer.done(m.Done(9, "aa", "bb", {"loss": 0.5}, 1.0, 9), 9)
    assert read(log) == TerminationMessage("done", 9, 9, "aa", "bb", {"loss": 0.5})
    writer.ended(JobFailed("x"))
    assert read(log) == TerminationMessage("ended", reason="x")
    assert log.stat().st_ino == node


def test_nobody_asks_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_TERMINATION_LOG, raising=False)
    writer = TerminationMessageWriter()
    assert not writer.wanted
    writer.ended(Drained("x"))


@pytest.mark.parametrize("kind", ["a directory", "in no directory", "a pipe that nobody reads", "a name with a zero"])
def test_a_file_that_cannot_be_written_costs_a_warning(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = {"a directory": tmp_path, "in no directory": tmp_path / "no" / "log"}.get(kind, tmp_path / "pipe")
    if kind == "a pipe that nobody reads":
        os.mkfifo(path)
    monkeypatch.setenv(ENV_TERMINATION_LOG, str(path))
    writer = TerminationMessageWriter()
    if kind == "a name with a zero":
        writer._path = Path("a\0b")
    with caplog.at_level(logging.WARNING, logger="virtualflow.worker"):
        writer.ended(Drained("x"))
    assert "cannot be written" in caplog.text


def test_a_forked_process_does_not_speak_for_the_worker(log: Path) -> None:
    writer = TerminationMessageWriter()
    child = os.fork()
    if child == 0:
        writer.ended(RuntimeError("in the child"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not log.exists()
    writer.ended(Drained("x"))
    assert read(log).kind == "left"


def test_one_that_was_found_to_be_wrong_says_so_in_a_field_of_its_own(log: Path) -> None:
    TerminationMessageWriter().ended(Evicted("declared lost: other gradients"), 5, convicted=True)
    word = read(log)
    assert word is not None
    assert (word.kind, word.convicted) == ("refused", True)
