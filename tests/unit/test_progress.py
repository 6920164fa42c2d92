"""A bar on a terminal, lines elsewhere, and nothing at all of what is over soon."""

from __future__ import annotations

import io
import re

import pytest

import terminals
from virtualflow.progress import LINE_EVERY, SHOWN_AFTER, ProgressBar, clock, describe_rest, seconds_left


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    """What a person sees, with the marks that move the cursor."""

    def isatty(self) -> bool:
        return True


def words(terminal: io.StringIO) -> str:
    """Without the marks."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


@pytest.mark.parametrize(
    ("share", "passed", "left"),
    [(0.0, 7.0, None), (0.5, 10.0, 10.0), (0.25, 10.0, 30.0), (1.0, 10.0, 0.0)],
)
def test_the_rest_takes_as_long_as_what_was_done_did(share: float, passed: float, left: float | None) -> None:
    assert seconds_left(share, passed) == left


@pytest.mark.parametrize(
    ("share", "passed", "idle", "said"),
    [
        pytest.param(0.42, 42.0, 0.0, "42 %, 0:58 left", id="some of it is done"),
        pytest.param(0.42, 50.0, 8.0, "42 %, 0:50 left", id="no more for a while, which counts down"),
        pytest.param(0.5, 90.0, 80.0, "50 %, 0:00 left", id="no more for longer than all should have taken"),
        pytest.param(0.0, 75.0, 75.0, "1:15", id="nothing is done yet"),
        pytest.param(None, 3_723.0, 0.0, "1:02:03", id="nobody knows how much there is"),
    ],
)
def test_it_says_how_much_is_done_and_how_long_the_rest_takes(
    share: float | None, passed: float, idle: float, said: str
) -> None:
    assert describe_rest(share, passed, idle) == said


def test_seconds_are_read_as_a_clock() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.6, 3_600)] == ["0:00", "1:00", "1:00:00"]


def test_where_there_is_no_terminal_what_ends_soon_says_nothing() -> None:
    pipe, now = io.StringIO(), Clock()
    with ProgressBar("counting", 100, stream=pipe, now=now) as progress:
        for done in range(100):
            now.seconds += 0.9 * LINE_EVERY / 100
            progress.reach(done)
    assert pipe.getvalue() == ""


def test_where_there_is_no_terminal_there_is_a_line_now_and_then() -> None:
    pipe, now = io.StringIO(), Clock()
    with ProgressBar("counting", 100, stream=pipe, now=now) as progress:
        for done in range(1, 101):
            now.seconds += LINE_EVERY / 30
            progress.reach(done)
    left = [clock(LINE_EVERY * n / 30) for n in (70, 40, 10)]
    assert pipe.getvalue().splitlines() == [
        f"virtualflow: counting: 30 %, {left[0]} left",
        f"virtualflow: counting: 60 %, {left[1]} left",
        f"virtualflow: counting: 90 %, {left[2]} left",
    ]


def test_what_takes_a_day_has_few_lines() -> None:
    pipe, now = io.StringIO(), Clock()
    with ProgressBar("counting", 86_400, stream=pipe, now=now) as progress:
        for done in range(86_400):
            now.seconds += 1.0
            progress.reach(done)
    assert 20 < len(pipe.getvalue().splitlines()) < 100


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_on_a_terminal_what_ends_soon_shows_nothing(terminal: Terminal) -> None:
    now = Clock()
    with ProgressBar("counting", 100, stream=terminal, now=now) as progress:
        for done in range(100):
            now.seconds += 0.9 * SHOWN_AFTER / 100
            progress.reach(done)
    assert terminal.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_which_goes_away_when_all_is_done(terminal: Terminal) -> None:
    now = Clock()
    with ProgressBar("counting", 100, stream=terminal, now=now) as progress:
        for done in range(1, 101):
            now.seconds += 1.0
            progress.reach(done)
    assert "counting" in words(terminal)
    assert "40 %, 1:00 left" in words(terminal)
    assert terminal.getvalue().endswith("\x1b[2K"), "the last thing that is done is to erase its line"


def test_a_total_may_become_known_later_and_what_was_said_wrongly_stays_in_bounds(terminal: Terminal) -> None:
    now = Clock()
    with ProgressBar("counting", stream=terminal, now=now) as progress:
        now.seconds += 5.0
        progress.reach(0)
        assert "0:05" in words(terminal)
        progress.total = 4
        now.seconds += 5.0
        progress.reach(9)
    assert "100 %, 0:00 left" in words(terminal)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal, now = Terminal(), Clock()
    with ProgressBar("counting", 2, stream=terminal, now=now) as progress:
        now.seconds += LINE_EVERY
        progress.reach(1)
    assert terminal.getvalue() == f"virtualflow: counting: 50 %, {clock(LINE_EVERY)} left\n"


SCRIPT = """
from virtualflow import progress
progress.SHOWN_AFTER = 0.0
with progress.ProgressBar("counting", 3) as going:
    for done in range(1, 4):
        going.reach(done)
        print(f"the answer {done}", flush=True)
"""


def test_answers_in_a_pipe_are_as_they_are_without_a_bar_and_above_it_on_a_real_terminal() -> None:
    answers = [f"the answer {done}" for done in (1, 2, 3)]
    alone = terminals.run(["-c", SCRIPT], piped=True)
    assert (alone.code, alone.piped.splitlines()) == (0, answers)
    assert "counting" in alone.words
    assert "answer" not in alone.words
    both = terminals.run(["-c", SCRIPT], piped=False)
    assert "counting" in both.words
    assert both.left == answers
    assert both.cursor
