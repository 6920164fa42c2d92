"""Turns over real sockets: who gets the device when others give it back, die, hang or change their minds."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from turn_servers import PATIENCE, turn_server

from forking import FORKING, start
from virtualflow.errors import CommunicatorBroken
from virtualflow.launcher.turn_server import Peer, find_pod, identify
from virtualflow.protocol.turns import Ask, Attach, line
from virtualflow.transport import Activity, Turns
from virtualflow.transport.settings import TurnSettings

SETTINGS = TurnSettings(answer=PATIENCE, retry=0.0, wait_slice=0.01)


class Sharer:
    """A worker's turns, in a thread of the test."""

    def __init__(self, path: Path, job: str, settings: TurnSettings = SETTINGS) -> None:
        self.told: list[str] = []
        self.activity = Activity()
        self.turns = Turns(path, job, "device", settings, self.activity, self.told.append)

    def take(self, check: Callable[[], object] = lambda: None) -> float:
        return self.turns.take(7, check)

    def in_background(self, check: Callable[[], object] = lambda: None) -> threading.Event:
        """Take a turn in another thread; set when it has it."""
        has_it = threading.Event()

        def take() -> None:
            self.take(check)
            has_it.set()

        threading.Thread(target=take, daemon=True).start()
        return has_it


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns"


@pytest.fixture
def sharers(path: Path) -> Iterator[Callable[..., Sharer]]:
    made: list[Sharer] = []

    def make(job: str, settings: TurnSettings = SETTINGS) -> Sharer:
        made.append(Sharer(path, job, settings))
        return made[-1]

    yield make
    for sharer in made:
        sharer.turns.close()


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_computes_while_the_other_does_not(path: Path, sharers: Callable[..., Sharer]) -> None:
    one, other = sharers("one"), sharers("other")
    with turn_server(path) as server:
        one.take()
        assert one.take() == 0.0, "it has it already"
        has_it = other.in_background()
        wait_for(lambda: server._devices and server._devices["device"].waiting)
        assert not has_it.is_set()
        one.turns.give_back()
        assert has_it.wait(PATIENCE)
        assert not one.told
        assert not other.told


def test_who_waits_for_its_turn_does_not_look_hung(path: Path, sharers: Callable[..., Sharer]) -> None:
    one, other = sharers("one"), sharers("other")
    looks: list[tuple[str, bool]] = []
    with turn_server(path):
        one.take()

        def look() -> None:
            doing = other.activity.report(1.0)
            looks.append((doing.stage, doing.waits))
            one.turns.give_back()

        other.take(look)
        assert looks[0] == ("waiting for its turn", True)
        assert not other.activity.report(1.0).waits


def test_who_is_called_away_from_its_wait_leaves_the_queue(path: Path, sharers: Callable[..., Sharer]) -> None:
    one, away, other = sharers("one"), sharers("away"), sharers("other")

    def recover() -> None:
        raise CommunicatorBroken("a recovery is called for")

    with turn_server(path) as server:
        one.take()
        with pytest.raises(CommunicatorBroken):
            away.take(recover)
        away.turns.give_back()
        has_it = other.in_background()
        wait_for(lambda: server._devices["device"].waiting)
        one.turns.give_back()
        assert has_it.wait(PATIENCE)


def hold(path: str, pipe: Connection) -> None:
    """Take a turn, fork something that lives on, and compute for ever."""
    dying = Sharer(Path(path), "dying")
    dying.take()
    child = os.fork()
    if child:
        pipe.send(child)
    signal.pause()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_is_killed_or_stopped_loses_its_turn(
    path: Path, sharers: Callable[..., Sharer], end: signal.Signals
) -> None:
    ours, theirs = FORKING.Pipe(duplex=False)
    process: Any = FORKING.Process(target=hold, args=(str(path), theirs))
    # A killed one loses it by the end of its connection, long before the limit.
    with turn_server(path, limit=PATIENCE if end == signal.SIGKILL else 0.2) as server:
        start(process)
        child = ours.recv()
        assert server._devices["device"].holders
        other = sharers("other")
        os.kill(process.pid, end)
        has_it = other.in_background()
        try:
            assert has_it.wait(PATIENCE / 2), "what it has forked has kept the connection"
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()  # if it is still there
            process.join()


def test_without_a_server_it_computes_and_says_so_once(path: Path, sharers: Callable[..., Sharer]) -> None:
    one, other = sharers("one"), sharers("other")
    assert one.take() == one.take() == 0.0
    (told,) = one.told
    assert "is not there (No such file or directory)" in told
    with turn_server(path) as server:
        one.take()
        assert server._devices["device"].job == "one"
        assert other.take(one.turns.give_back) > 0.0
    one.take()
    assert len(one.told) == 2, "the server has ended"


def test_a_server_that_hangs_costs_one_wait(path: Path, sharers: Callable[..., Sharer]) -> None:
    one = sharers("one", TurnSettings(answer=0.05, retry=PATIENCE, wait_slice=0.01))
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind(str(path))
        nobody.listen()
        assert one.take() >= 0.05
        assert one.take() == 0.0
    assert "is not there (it does not answer)" in one.told[0]


@pytest.mark.parametrize(
    "said",
    [
        b"{}\n",
        b'{"type": "ask", "turn": 1}\n',
        b'{"type": "attach", "job": "x", "device": "device"}\n{"type": "ask", "turn": 1}\n{"type": "ask", "turn": 2}\n',
        b'{"type": "attach", "job": "", "device": "device"}\n',
        b"x" * 100_000,
        b"\xff\n",
    ],
)
def test_who_says_something_else_is_not_served(path: Path, sharers: Callable[..., Sharer], said: bytes) -> None:
    with turn_server(path), socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        try:
            stranger.sendall(said)
            while stranger.recv(4_096):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass
        one = sharers("one")
        one.take()
        assert not one.told


def attach(path: Path, job: str, device: str = "device") -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.sendall(line(Attach(job, device)) + line(Ask(1)))
    return connection


def is_served(connection: socket.socket) -> bool:
    """Whether it was told of its turn, or that it is to wait; the end of the connection is the other answer."""
    connection.settimeout(PATIENCE)
    try:
        return bool(connection.recv(4_096))
    except ConnectionResetError:
        return False


def test_a_pod_has_so_many_connections_and_names_and_takes_none_from_another(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pods = chain("aaaaab", repeat("a"))
    with ExitStack() as stack:
        stack.enter_context(turn_server(path, identify=lambda _: Peer(f"the pod {next(pods)}", 3, 2)))

        def served(job: str) -> bool:
            try:
                return is_served(stack.enter_context(attach(path, job)))
            except BrokenPipeError:  # it was refused before it could say what it wants
                return False

        first = stack.enter_context(attach(path, "one"))
        assert is_served(first)
        assert [served("other"), served("third"), served("one")] == [True, False, True]
        assert not served("one"), "a fourth connection"
        assert served("one"), "of another pod"
        first.close()
        while not served("other"):  # until the server has seen that end
            pass
        assert not served("other"), "one of its connections was free again, and no other"
    (ended,) = [record.getMessage() for record in caplog.records if "was ended" in record.getMessage()]
    assert "of the pod a was ended: it has the names of 2 other jobs already" in ended, "and it is told once"


def test_who_connects_is_known_from_the_kernel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        found = identify(ours).name
    pod = find_pod(Path("/proc/self/cgroup").read_text())
    assert found == (f"the pod {pod}" if pod else f"the user {os.getuid()}")


UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


@pytest.mark.parametrize(
    ("groups", "pod"),
    [
        (f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{'a' * 64}.scope\n", UID),
        (f"0::/../../kubepods-besteffort-pod{UID.replace('-', '_')}.slice/crio-{'a' * 64}.scope\n", UID),
        (
            f"12:cpu:/kubepods/burstable/pod{UID}/{'a' * 64}\n1:name=systemd:/kubepods/burstable/pod{UID}/{'a' * 64}\n",
            UID,
        ),
        (f"0::/kubepods/pod{UID}/{'a' * 64}/pod{'1' + UID[1:]}\n", UID),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", None),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_the_pod_of_a_process_is_read_from_its_control_groups(groups: str, pod: str | None) -> None:
    assert find_pod(groups) == pod
