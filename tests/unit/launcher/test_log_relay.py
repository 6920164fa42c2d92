"""Which of the workers' lines are shown: those of one worker, and no traceback that ends the job anyway."""

from __future__ import annotations

import pytest

from virtualflow.launcher.log_relay import LogRelay, last_exception, last_traceback
from virtualflow.launcher.supervisor import Stream

GRACE = 10.0
TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: sour"]
SENTENCE = ["virtualflow: the batch does not divide"]


class Scene:
    """A relay with a clock, and what it has shown."""

    def __init__(self) -> None:
        self.now, self.shown = 0.0, list[str]()
        self.relay = LogRelay(self._show, lambda: self.now, replay=1.5, grace=GRACE)

    def _show(self, stream: Stream, text: str) -> None:
        self.shown.append(text)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.relay.tick()


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.relay.choose("worker-0")
    return scene


def test_the_lines_of_one_worker_are_shown(scene: Scene) -> None:
    for worker in ("worker-0", "worker-1"):
        scene.relay.line(worker, "stdout", f"hello from {worker}")
    assert scene.shown == ["hello from worker-0"]


def test_a_successors_latest_lines_are_caught_up_on_but_for_what_was_shown(scene: Scene) -> None:
    scene.relay.line("worker-1", "stdout", "too old")
    scene.wait(2.0)
    for worker in ("worker-0", "worker-1"):
        scene.relay.line(worker, "stdout", "epoch 3")
    scene.relay.line("worker-1", "stdout", "epoch 4")
    scene.relay.choose("worker-1")
    scene.relay.line("worker-1", "stdout", "epoch 5")
    assert scene.shown == ["epoch 3", "epoch 4", "epoch 5"]


@pytest.mark.parametrize("words", [TRACEBACK, SENTENCE], ids=["a traceback", "a sentence"])
def test_last_words_are_not_shown_here(scene: Scene, words: list[str]) -> None:
    for line in words:
        scene.relay.line("worker-0", "stderr", line)
    scene.wait(0.9 * GRACE)
    scene.relay.ended("worker-0", with_error=True)
    scene.wait(GRACE)
    assert scene.shown == []


@pytest.mark.parametrize("words", [TRACEBACK, SENTENCE], ids=["a traceback", "a sentence"])
def test_words_whose_writer_lives_on_or_succeeds_are_shown(scene: Scene, words: list[str]) -> None:
    for line in words:
        scene.relay.line("worker-0", "stderr", line)
    scene.wait(0.5 * GRACE)
    assert scene.shown == []
    scene.wait(0.5 * GRACE)
    assert scene.shown == words
    for line in words:
        scene.relay.line("worker-0", "stderr", line)
    scene.relay.ended("worker-0", with_error=False)
    assert scene.shown == words * 2


@pytest.mark.parametrize("with_error", [True, False], ids=["it ends by itself", "it is killed"])
def test_nothing_withheld_is_released_while_the_job_is_failing(scene: Scene, with_error: bool) -> None:
    scene.relay.withholding = True
    for line in TRACEBACK:
        scene.relay.line("worker-0", "stderr", line)
    scene.wait(2 * GRACE)
    scene.relay.ended("worker-0", with_error)
    assert scene.shown == []


def test_of_what_is_withheld_only_the_latest_lines_are_kept(scene: Scene) -> None:
    scene.relay.line("worker-0", "stderr", TRACEBACK[0])
    for number in range(10_000):
        scene.relay.line("worker-0", "stderr", f"  {number}")
    scene.wait(GRACE)
    assert scene.shown == [f"  {number}" for number in range(9_500, 10_000)]


@pytest.mark.parametrize(
    ("tail", "last"),
    [
        pytest.param(["a", *TRACEBACK], TRACEBACK, id="one"),
        pytest.param([*TRACEBACK, "b", *SENTENCE], SENTENCE, id="the last of two"),
        pytest.param(
            [*TRACEBACK, "During handling of the above exception, another exception occurred:", *TRACEBACK],
            [*TRACEBACK, "During handling of the above exception, another exception occurred:", *TRACEBACK],
            id="a chain",
        ),
        pytest.param(
            ['  File "train.py", line 3', "SyntaxError"], ['  File "train.py", line 3', "SyntaxError"], id="no"
        ),
        pytest.param(["killed"], ["killed"], id="none at all"),
    ],
)
def test_the_last_traceback_is_found(tail: list[str], last: list[str]) -> None:
    assert last_traceback(tail).splitlines() == last


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (TRACEBACK, "ValueError: sour"),
        ([*TRACEBACK[:2], "    x = f(", "        ^^", "torch.Error: a", "b", "", "more"], "torch.Error: a"),
        (
            [*TRACEBACK, "", "During handling of the above exception, another one:", "", *TRACEBACK[:2], "OSError"],
            "OSError",
        ),
        (['  File "train.py", line 3', "    x y", "      ^", "SyntaxError: no"], "SyntaxError: no"),
        (["Killed"], ""),
        ([], ""),
    ],
)
def test_what_a_traceback_ends_with_is_found(tail: list[str], said: str) -> None:
    assert last_exception(tail) == said
