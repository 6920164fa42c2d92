"""``virtualflow turns`` as a program: where it listens, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow.launcher.turn_server import serve_turns

ROOT = Path(__file__).parents[3]
ATTACH, ASK = b'{"type":"attach","job":"one","device":"d"}\n', b'{"type":"ask","turn":1}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns"


@pytest.fixture
def server(path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that takes the place of one that was killed, and listens."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer")}
    command = [sys.executable, "-m", "virtualflow", "turns", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    assert "listening at" in process.stderr.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_lends_until_it_is_ended_and_leaves_nothing(
    server: subprocess.Popen[str], path: Path, number: signal.Signals
) -> None:
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(str(path))
        worker.sendall(ATTACH + ASK)
        assert worker.recv(100) == b'{"type":"granted","turn":1}\n'
        with pytest.raises(ConfigurationError, match="a turn server listens at"):
            serve_turns(path, 1.0)
        server.send_signal(number)
        said = server.communicate(timeout=60)[1]
        assert worker.recv(100) == b""
    assert (server.returncode, path.exists()) == (0, False)
    assert [line.split("INFO ")[1] for line in said.splitlines()] == ["one shares d", "one shares d no more"]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("file", "is there already, and no socket"), ("x" * 200, "cannot listen at"), ("no/such", "cannot listen at")],
)
def test_where_it_cannot_listen_it_says_so(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=complaint):
        serve_turns(tmp_path / name, 1.0)
    assert (tmp_path / "file").exists()
