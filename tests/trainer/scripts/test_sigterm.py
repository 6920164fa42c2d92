"""SIGTERM asks for a drain wherever the script has a handler of its own, and that handler hears it as well."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import Drained, ScriptExited
from virtualflow.state import checkpoint_order
from virtualflow.worker.process import Sigterm, read_exit

CASES = Path(__file__).resolve().parents[1] / "cases"


@pytest.fixture(autouse=True)
def sigterm_is_left_as_it_was() -> Iterator[None]:
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


class Heard:
    """A run's handler, what it has asked for, and what it has said."""

    def __init__(self) -> None:
        self.drains = 0
        self.warnings: list[str] = []
        self.sigterm = Sigterm(self._drain, self.warnings.append)
        self.sigterm.open()

    def _drain(self) -> None:
        self.drains += 1


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("inside", [False, True], ids=["before the run", "inside it"])
def test_the_scripts_handler_and_the_drain_both_hear(inside: bool) -> None:
    calls: list[int] = []

    def handler(number: int, frame: Any) -> None:
        calls.append(number)

    if not inside:
        signal.signal(signal.SIGTERM, handler)
    heard = Heard()
    if inside:
        signal.signal(signal.SIGTERM, handler)
    heard.sigterm.look()
    send()
    assert (calls, heard.drains, heard.warnings) == ([signal.SIGTERM], 1, [])
    heard.sigterm.close()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_handler_that_calls_the_one_before_it_is_called_once() -> None:
    calls: list[int] = []
    heard = Heard()
    former: Any = signal.getsignal(signal.SIGTERM)

    def handler(number: int, frame: Any) -> None:
        calls.append(number)
        former(number, frame)

    signal.signal(signal.SIGTERM, handler)
    heard.sigterm.look()
    send()
    assert calls == [signal.SIGTERM]
    assert heard.drains >= 1


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), RuntimeError("preempted")], ids=repr)
def test_what_a_handler_raises_does_not_strike_where_the_signal_does(error: BaseException) -> None:
    def handler(number: int, frame: Any) -> None:
        raise error

    signal.signal(signal.SIGTERM, handler)
    heard = Heard()
    send()
    assert heard.drains == 1
    heard.sigterm.close()


@pytest.mark.parametrize(
    ("disposition", "says"), [(signal.SIG_IGN, "is ignored"), (signal.SIG_DFL, "ends this process")]
)
def test_a_script_that_takes_sigterm_away_is_told_once_what_that_costs(disposition: Any, says: str) -> None:
    heard = Heard()
    signal.signal(signal.SIGTERM, disposition)
    heard.sigterm.look()
    heard.sigterm.look()
    (warning,) = heard.warnings
    assert says in warning
    assert f"signal.{disposition.name}" in warning
    heard.sigterm.close()
    assert signal.getsignal(signal.SIGTERM) == disposition


def test_processes_that_the_script_forks_end_by_sigterm_as_ever() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    heard = Heard()
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begins, b".")  # a signal that comes before Python is through with the fork is forgotten
        while True:  # signal.pause would miss one that comes right before it
            time.sleep(0.01)
    assert os.read(begun, 1) == b"."
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    heard.sigterm.close()
    os.close(begun)
    os.close(begins)


# --- scripts that end themselves --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "draining", "coordinated", "kind"),
    [
        pytest.param(0, True, True, Drained, id="told to leave, and gone"),
        pytest.param(None, True, False, Drained, id="also alone"),
        pytest.param(143, True, True, Drained, id="by the code of a process that SIGTERM ends"),
        pytest.param(1, True, True, ScriptExited, id="an error is one, even then"),
        pytest.param(0, False, True, ScriptExited, id="nobody told it to leave"),
        pytest.param("no data", False, True, ScriptExited, id="with a sentence"),
        pytest.param(0, False, False, SystemExit, id="alone it may end when it likes"),
    ],
)
def test_what_it_means_that_a_script_ends_itself(
    code: Any, draining: bool, coordinated: bool, kind: type[BaseException]
) -> None:
    error = SystemExit(code)
    found = read_exit(error, 5, 80, draining, coordinated)
    assert type(found) is kind
    assert found is error or found.__cause__ is error
    if kind is ScriptExited:
        of = "" if code is None else repr(code)
        assert str(found).startswith(f"the script ended itself by sys.exit({of}) after step 5 of 80, before")


def train(directory: Path, between: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    with vf.elastic(model, optimizer, dataset, batch_size=16, steps=12, checkpoint=directory) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
            between(step.number)


def test_a_script_alone_that_sets_a_flag_and_exits_loses_no_step(tmp_path: Path) -> None:
    flag: list[int] = []

    def between(number: int) -> None:
        if number == 1:
            signal.signal(signal.SIGTERM, lambda *_: flag.append(1))
        if number == 5:
            send()
        if flag:
            sys.exit(0)

    with pytest.raises(Drained):
        train(tmp_path, between)
    assert max(mark.step for mark, _ in checkpoint_order.complete(tmp_path)) == 5


@pytest.mark.parametrize(
    "end", [pytest.param("", id="trains on"), pytest.param("exit", id="ends itself", marks=pytest.mark.nightly)]
)
def test_a_handler_set_inside_the_run_does_not_keep_a_worker_from_leaving(end: str, tmp_path: Path) -> None:
    finished = run_job(tmp_path, "--workers", 2, "--schedule", "5:term", CASES / "sigterm.py", "inside", end)
    assert "my handler" in finished.output
    assert [change["to"] for change in finished.report["changes"]] == [1]
    assert finished.report["repeated_steps"] == (1 if end else 0)
