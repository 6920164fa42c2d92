"""A worker that is process 1 of a container ends at SIGTERM also while its script is still importing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from virtualflow import _process

TRAINER = str(Path(__file__).resolve().parents[3] / "trainer")
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
IMPORTING = "import virtualflow, os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False, timeout=30).returncode == 0


def handler_after(code: str, environment: dict[str, str]) -> str:
    """What SIGTERM does in another process after ``code``."""
    script = f"import os, signal; {code}; print(signal.getsignal(signal.SIGTERM))"
    variables = {"PYTHONPATH": TRAINER, "PATH": os.environ["PATH"], **environment}
    found = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    return found.stdout.strip()


WORKER = {"VIRTUALFLOW_COORDINATOR": "http://127.0.0.1:1"}
FIRST = "os.getpid = lambda: 1; import virtualflow"


def test_in_a_worker_that_is_process_1_a_handler_is_installed() -> None:
    assert handler_after(FIRST, WORKER).startswith("<function end_at_once ")


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        pytest.param("import virtualflow", WORKER, id="another process"),
        pytest.param(FIRST, {}, id="process 1 that is no worker"),
        pytest.param(FIRST, {"VIRTUALFLOW_COORDINATOR": " "}, id="process 1 with an empty variable"),
    ],
)
def test_elsewhere_nothing_is_installed(code: str, environment: dict[str, str]) -> None:
    assert handler_after(code, environment) == str(signal.SIG_DFL)


def test_a_handler_that_is_there_stays() -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + FIRST
    assert handler_after(code, WORKER) == str(signal.SIG_IGN)


def test_the_handler_ends_the_process_as_a_shell_would_show_it() -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _process.obey_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143


@pytest.mark.skipif(not may_unshare(), reason="this machine lets nobody make a process namespace")
def test_sigterm_ends_process_1_of_a_namespace() -> None:
    environment = {"PYTHONPATH": TRAINER, "PATH": os.environ["PATH"], **WORKER}
    with subprocess.Popen(
        [*UNSHARE, sys.executable, "-c", IMPORTING], env=environment, stdout=subprocess.PIPE, text=True
    ) as outer:
        try:
            assert outer.stdout is not None
            assert outer.stdout.readline() == "1\n"
            [inner] = psutil.Process(outer.pid).children()
            inner.send_signal(signal.SIGTERM)
            assert outer.wait(timeout=30) == 143
        finally:
            outer.kill()
