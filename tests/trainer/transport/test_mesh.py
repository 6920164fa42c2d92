"""A member's port: strangers find it closed once the mesh stands, and do no harm before."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers import nightly

MEANWHILE = 3_000
"""Connections that strangers try before the last member has come."""
MEMBERS = """
import os, resource, sys, threading
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
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
    """Two members of a mesh in one process of at most 1,024 descriptors; the second comes when it is told."""
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


@pytest.mark.parametrize("connections", [10_000, nightly(100_000)])
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


@pytest.mark.usefixtures("many_descriptors")
def test_thousands_of_connections_while_the_mesh_is_built_do_not_end_a_member() -> None:
    with members() as process, contextlib.ExitStack() as held:
        port = line(process, "port")
        for number in range(MEANWHILE):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60.0))
            stranger.sendall(os.urandom(number % 16))
        go_on(process)
        line(process, "stands")
        go_on(process)
        line(process, "trains")
