"""``virtualflow processes``: real processes of one worker, which start, hear the same signals and end as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from virtualflow.launcher.processes import process_environment, split_line
from virtualflow.protocol.settings import ENV_LAUNCH, ENV_TERMINATION_LOG
from virtualflow.protocol.termination_message import TerminationMessage, encode_termination_message

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 60.0
DONE = encode_termination_message(TerminationMessage("done", step=7)).decode()
SAY = f"open(os.environ['{ENV_TERMINATION_LOG}'], 'w').write({DONE!r})"
WAIT = "print('here', flush=True); signal.pause()"


@contextmanager
def processes(code: str, count: int = 2, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python as so many processes; their rank is ``rank``."""
    program = f"import os, signal, sys, time\nrank = int(os.environ['LOCAL_RANK'])\n{code}"
    command = [sys.executable, "-P", "-m", "virtualflow", "processes", str(count), "--", sys.executable, "-c", program]
    known = os.environ | {"PYTHONPATH": str(ROOT / "trainer")} | environment
    with subprocess.Popen(command, env=known, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        try:
            yield started
        finally:
            started.kill()


def ended(code: str, count: int = 2, **environment: str) -> tuple[int, list[str], str]:
    with processes(code, count, **environment) as started:
        out, errors = started.communicate(timeout=LIMIT)
        return started.returncode, sorted(out.splitlines()), errors


def test_each_process_is_told_its_place_and_its_lines_bear_its_number() -> None:
    told = f"[os.environ[name] for name in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', '{ENV_LAUNCH}')]"
    code, lines, errors = ended(f"print(*{told})\n{SAY}", 3)
    assert (code, errors) == (0, "")
    places = [split_line(line) for line in lines]
    assert [rank for rank, _ in places] == [0, 1, 2]
    assert [text.split()[:2] for _, text in places] == [["0", "3"], ["1", "3"], ["2", "3"]]
    launches = [text.split()[2].split("/") for _, text in places]
    assert [numbers for _, *numbers in launches] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert len({launch for launch, *_ in launches}) == 1


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param("sys.exit(3)", 3, id="with an error"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, id="killed"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, id="by a fault"),
        pytest.param("pass", 0, id="without having trained"),
    ],
)
def test_the_first_that_ends_badly_ends_the_others_and_is_what_all_end_with(ends: str, code: int) -> None:
    found, lines, errors = ended(f"if rank == 1:\n    {ends}\nelse:\n    {WAIT}")
    assert found == code
    assert lines in ([], ["[0] here"])
    assert "process 1 of this worker ended" in errors


def test_one_that_has_seen_the_end_does_not_end_the_others(tmp_path: Path) -> None:
    other = str(tmp_path / "process-1")  # a link to its number
    reaped = f"os.path.lexists({other!r}) and not os.path.exists('/proc/' + os.readlink({other!r}))"
    first = f"while not ({reaped}):\n        time.sleep(0.01)\n    print('later')"
    second = f"os.symlink(str(os.getpid()), {other!r})"
    code, lines, errors = ended(f"{SAY}\nif rank == 0:\n    {first}\nelse:\n    {second}")
    assert (code, lines, errors) == (0, ["[0] later"], "")


def test_a_signal_reaches_all_and_one_message_is_left(tmp_path: Path) -> None:
    log = tmp_path / "message"
    log.touch()
    code = f"signal.signal(signal.SIGTERM, lambda *_: ({SAY}, os._exit(0)))\nprint('here', flush=True)\nsignal.pause()"
    with processes(code, **{ENV_TERMINATION_LOG: str(log)}) as started:
        assert started.stdout is not None
        assert sorted(started.stdout.readline() for _ in range(2)) == ["[0] here\n", "[1] here\n"]
        started.send_signal(signal.SIGTERM)
        assert started.wait(LIMIT) == 0
    assert json.loads(log.read_text())["step"] == 7


def test_processes_do_not_outlive_the_one_that_has_started_them() -> None:
    with processes("print(os.getpid(), flush=True)\nsignal.pause()") as started:
        assert started.stdout is not None
        running = [psutil.Process(int(split_line(started.stdout.readline())[1])) for _ in range(2)]
        started.kill()
        _, alive = psutil.wait_procs(running, timeout=LIMIT)
    assert alive == []


@pytest.mark.parametrize(
    ("environment", "devices", "visible"),
    [
        pytest.param({}, 0, [None, None], id="none"),
        pytest.param({}, 2, ["0", "1"], id="one each"),
        pytest.param({}, 1, ["0", "0"], id="one for all"),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 8, ["GPU-a", "GPU-b"], id="those that the worker may see"
        ),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, 8, ["", ""], id="none that it may see"),
    ],
)
def test_each_process_sees_one_device(environment: Mapping[str, str], devices: int, visible: list[Any]) -> None:
    told = [process_environment(environment, rank, 2, "launch", devices) for rank in range(2)]
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in told] == visible


def test_a_command_that_does_not_exist_is_told_in_one_line() -> None:
    command = [sys.executable, "-P", "-m", "virtualflow", "processes", "2", "--", "no-such-program"]
    known = os.environ | {"PYTHONPATH": str(ROOT / "trainer")}
    done = subprocess.run(command, env=known, text=True, capture_output=True, timeout=LIMIT, check=False)
    assert done.returncode == 2
    assert done.stderr == "virtualflow: no-such-program cannot be executed: No such file or directory\n"
