"""A member's port: strangers find it closed once the mesh stands, and do no harm before."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from meshes import Board

from tiers import nightly
from virtualflow.errors import CommunicatorBroken
from virtualflow.transport.mesh import build_mesh

MEANWHILE = 800
"""Connections that strangers try before the last member has come."""
MEMBERS = """
import os, resource, sys, threading
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
import torch
from meshes import Board, plan_of
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.mesh import build_mesh
from virtualflow.transport.settings import CommunicatorSettings

class Told(Board):
    # The rendezvous; it tells the ports, which are in the addresses that members publish.
    def publish(self, key, value):
        print("port", int(value.rsplit(b" ", 1)[1]), flush=True)
        super().publish(key, value)

told, communicators = Told(), [None, None]

def join(rank):
    lanes = build_mesh(told, rank, 2, "127.0.0.1", 120.0)
    communicators[rank] = Communicator(plan_of(2), rank, lanes, lambda: None, CommunicatorSettings())

def gather():
    block = torch.ones(1 << 20, dtype=torch.uint8)
    threads = [threading.Thread(target=c.all_gather, args=(block,)) for c in communicators]
    for one in threads: one.start()
    for one in threads: one.join()

threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
threads[0].start()
sys.stdin.readline()
threads[1].start()
for one in threads: one.join()
gather()
print("stands", len(os.listdir("/proc/self/fd")), flush=True)
sys.stdin.readline()
gather()
print("trains", len(os.listdir("/proc/self/fd")), flush=True)
for one in communicators: one.close()
print("over", len(os.listdir("/proc/self/fd")), flush=True)
"""


@contextlib.contextmanager
def members() -> Iterator[subprocess.Popen[str]]:
    """Two members of a mesh in one process of at most 256 descriptors; the second comes when it is told."""
    root = Path(__file__).resolve().parents[3]
    paths = [str(root / folder) for folder in ("trainer", "tests/trainer")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, "-c", MEMBERS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stop = threading.Timer(300.0, process.kill)
        stop.start()
        try:
            yield process
        finally:
            stop.cancel()
            process.kill()


def line(process: subprocess.Popen[str], word: str) -> int:
    """The number that follows upon that word."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(word):
            return int(text.split()[1])
    raise AssertionError(f"it ended before it said {word!r}: {process.wait()}")


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MEANWHILE + 500:
        pytest.skip("this process may not open enough connections to show it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("connections", [2_000, nightly(100_000)])
def test_connections_find_no_port_once_the_mesh_stands(connections: int) -> None:
    with members() as process:
        ports = [line(process, "port")]
        go_on(process)
        ports.append(line(process, "port"))
        before, let_in = line(process, "stands"), []
        for number in range(connections):
            with contextlib.suppress(ConnectionRefusedError):
                let_in.append(socket.create_connection(("127.0.0.1", ports[number % 2]), timeout=60.0))
                let_in[-1].sendall(os.urandom(8))
        go_on(process)
        assert line(process, "trains") == before
        assert let_in == []
        assert line(process, "over") == before - 4, "two connections of a pair have two ends each"
        assert process.wait() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("many_descriptors")
def test_more_connections_than_descriptors_while_the_mesh_is_built_do_not_end_a_member() -> None:
    with members() as process, contextlib.ExitStack() as held:
        port = line(process, "port")
        for number in range(MEANWHILE):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60.0))
            stranger.sendall(os.urandom(number % 16))
        go_on(process)
        line(process, "stands")
        go_on(process)
        line(process, "trains")


# --- in this process --------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_member_that_does_not_come_is_not_waited_for_for_ever_and_leaves_nothing_open() -> None:
    before = descriptors()
    with pytest.raises(CommunicatorBroken, match="2 connections of other members have not come"):
        build_mesh(Board(), 0, 2, "127.0.0.1", 0.2)
    with pytest.raises(CommunicatorBroken, match="not all come"):
        build_mesh(Board(), 1, 2, "127.0.0.1", 0.2)
    assert descriptors() == before


def test_a_mesh_that_is_not_wanted_any_more_is_given_up() -> None:
    asked: list[float] = []

    def superseded() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 2

    with pytest.raises(CommunicatorBroken):
        build_mesh(Board(), 0, 2, "127.0.0.1", 600.0, superseded)


def test_a_member_that_is_gone_by_the_time_it_is_connected_to_breaks_the_mesh() -> None:
    board = Board()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        board.publish("member-0", bytes(16) + f"127.0.0.1 {gone.getsockname()[1]}".encode())
    before = descriptors()
    with pytest.raises(CommunicatorBroken, match="refused"):
        build_mesh(board, 1, 2, "127.0.0.1", 10.0)
    assert descriptors() == before


@pytest.mark.parametrize("says", ["nothing", "half", "a wrong secret", "no such rank", "no such lane"])
def test_only_members_are_let_in(says: str) -> None:
    board = Board()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(build_mesh, board, 0, 2, "127.0.0.1", 60.0)
        (told,) = board.wait(["member-0"], 60.0)
        secret, port = told[:16], int(told.rsplit(b" ", 1)[1])
        greeting = {
            "nothing": b"",
            "half": secret[:9],
            "a wrong secret": os.urandom(16) + bytes([1, 0, 0, 0, 0]),
            "no such rank": secret + bytes([7, 0, 0, 0, 0]),
            "no such lane": secret + bytes([1, 0, 0, 0, 9]),
        }[says]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
            if says != "nothing":
                stranger.settimeout(60.0)
                assert stranger.recv(1) == b"", "it is turned away before anybody else comes"
            lanes = threads.submit(build_mesh, board, 1, 2, "127.0.0.1", 60.0).result()
            found = first.result()
        for mine, theirs in zip(found, lanes, strict=True):
            mine[1].sendall(b"hello")
            assert theirs[0].recv(5) == b"hello"
            mine[1].close()
            theirs[0].close()
