"""Loader processes never outlive or give away their worker, and their failures reach it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import psutil
import pytest
import torch
from loaded_samples import (
    NODES,
    Stuck,
    Where,
    loader_processes,
    opened,
    opened_in_order,
    wait_until,
)

PROCESSES = pytest.mark.parametrize("processes", [0, 1, 2])


class Faulty(Where):
    """Sample 5 cannot be had."""

    def __init__(self, fail: Callable[[], object]) -> None:
        self.fail = fail

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.fail()
        return index


def be_unreadable() -> None:
    raise LookupError("sample 5 is unreadable")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_for_ever() -> None:
    threading.Event().wait()


def stop_iterating() -> None:
    next(iter(()))


@PROCESSES
def test_an_error_of_the_dataset_surfaces_with_its_batch_and_traceback(processes: int) -> None:
    with opened_in_order(Faulty(be_unreadable), num_workers=processes) as source:
        source.assign(range(1), 0, 4)
        assert source.fetch(0, 4, 0).samples == (4,)
        for _ in range(2):
            with pytest.raises(LookupError, match="sample 5 is unreadable") as error:
                source.fetch(0, 5, 0)
            if processes:
                assert "in __getitem__" in str(error.value)
            source.assign(range(1), 0, 5)


def test_an_error_in_a_batch_that_is_no_longer_wanted_is_nobodys() -> None:
    with opened_in_order(Faulty(be_unreadable), virtual_nodes=8, num_workers=1) as source:
        source.assign(range(3, 6), 0, 0)  # loads ahead 4 and 5
        assert source.fetch(0, 0, 3).samples == (3,)
        source.assign(range(2), 0, 0)
        assert [source.fetch(0, 0, node).samples for node in range(2)] == [(0,), (1,)]


@PROCESSES
def test_a_stray_stop_iteration_does_not_end_the_training(processes: int) -> None:
    with opened_in_order(Faulty(stop_iterating), num_workers=processes) as source:
        source.assign(range(1), 0, 5)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            source.fetch(0, 5, 0)


def test_a_loader_process_that_dies_is_an_error() -> None:
    with opened_in_order(Faulty(be_killed), num_workers=1) as source:
        source.assign(range(1), 0, 5)
        with pytest.raises(RuntimeError, match=r"a loader process \(pid \d+\) was killed by SIGKILL"):
            source.fetch(0, 5, 0)
        with pytest.raises(RuntimeError, match="failed before"):
            source.fetch(0, 5, 0)


def test_a_loader_that_takes_longer_than_the_timeout_is_an_error() -> None:
    with opened_in_order(Faulty(take_for_ever), num_workers=1, timeout=0.3) as source:
        source.assign(range(1), 0, 5)
        with pytest.raises(RuntimeError, match="timed out"):
            source.fetch(0, 5, 0)


@pytest.mark.parametrize("dataset", [Where(), Stuck()], ids=["idle", "busy for ever"])
def test_closing_leaves_no_process_and_no_thread(dataset: Where) -> None:
    threads = threading.active_count()
    with opened_in_order(dataset, num_workers=2) as source:
        processes = loader_processes()
        assert len(processes) == 2
        source.assign(range(1), 0, 0)
        source.fetch(0, 0, 0)
        started = time.monotonic()
        source.close()
        assert time.monotonic() - started < 4.5, "torch waits for 5 s for a process"
        assert not any(process.is_running() for process in processes)
        wait_until(lambda: threading.active_count() <= threads)
        source.close()
        with pytest.raises(RuntimeError, match="closed"):
            source.fetch(0, 1, 0)


class Sockets(Where):
    """Tells how many TCP sockets the process that loads holds, and whether it heeds Ctrl-C."""

    def __getitem__(self, index: int) -> torch.Tensor:
        connections = len(psutil.Process().net_connections(kind="inet"))
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return torch.tensor([connections, ignored, default])


def test_a_loader_process_holds_no_connection_of_its_worker() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with (
        listener,
        socket.create_connection(listener.getsockname()) as dialled,
        listener.accept()[0] as accepted,
    ):
        with opened(Sockets(), num_workers=1) as source:
            source.assign(range(NODES), 0, 0)
            assert source.fetch(0, 0, 0).data[0].tolist() == [0, 1, 1]
        dialled.sendall(b"still ours")
        assert accepted.recv(10) == b"still ours"


WORKER = """
    import os, socket, sys, threading
    from virtualflow.data import open_source

    class Stuck:
        def __len__(self): return 8
        def __getitem__(self, index):
            if index >= 4: threading.Event().wait()
            return os.getpid()

    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    source = open_source(Stuck(), batch_size=1, virtual_nodes=1, seed=0, shuffle=False, drop_last=False,
                         epochs=1, options={"num_workers": 2})
    source.assign(range(1), 0, 0)
    pids = {int(source.fetch(0, step, 0).data[0]) for step in range(4)}
    connection.sendall((" ".join(map(str, pids)) + "\\n").encode())
    threading.Event().wait()
"""


@pytest.mark.slow
def test_when_a_worker_is_killed_its_loaders_die_and_its_peers_notice_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", textwrap.dedent(WORKER), str(listener.getsockname()[1])]
        worker = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        try:
            listener.settimeout(60)
            connection = listener.accept()[0]
            with connection, connection.makefile() as lines:
                connection.settimeout(60)
                pids = [int(pid) for pid in lines.readline().split()]
                assert len(pids) == 2
                loaders = [os.pidfd_open(pid) for pid in pids]
                connection.settimeout(1.0)
                worker.kill()
                assert lines.readline() == ""  # the end of the connection, well before any time-out
                for loader in loaders:
                    assert select.select([loader], [], [], 1.0)[0], "a loader process outlived its worker"
                    os.close(loader)
        finally:
            worker.kill()
            worker.wait()
