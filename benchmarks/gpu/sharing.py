"""What two processes on one device have for sending gradients: NCCL, CUDA IPC, and staging through the host."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu.parts import Note, Setting

ROUNDS = 8
LIMIT = 60
"""Seconds for a process."""


def measure(setting: Setting, note: Note) -> None:
    """See whether NCCL takes two ranks on one device, and how fast bytes come from one process to the other."""
    context = mp.get_context("spawn")
    backend = "nccl" if setting.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=_rank, args=(rank, backend, directory), daemon=True)  # type: ignore[attr-defined]
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LIMIT)
        said = [path.read_text() for path in sorted(Path(directory).glob("said-*"))]
    version = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""  # type: ignore[no-untyped-call]
    note(
        {
            "what": f"{backend} {version} with two ranks on one device".replace("  ", " "),
            "came to": said[0] if said else "no answer",
        }
    )
    size = 1 << 16 if setting.small else 256 << 20
    ours, theirs = context.Pipe()
    peer = context.Process(target=_receive, args=(theirs, size, setting.device), daemon=True)  # type: ignore[attr-defined]
    peer.start()
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=setting.device)
    for way in ("ipc", "host") if setting.device == "cuda" else ("host",):
        took = _send(ours, source, way)
        title = "CUDA IPC, one copy on the device" if way == "ipc" else "out to pinned memory, shared memory, and back"
        note({"what": title, "MiB": size / 2**20, "ms": 1_000 * took, "GB/s": size / took / 1e9})
    ours.send(("end", None))
    peer.join(LIMIT)


def _rank(rank: int, backend: str, directory: str) -> None:
    os.environ["NCCL_DEBUG"] = "WARN"
    device = "cuda" if backend == "nccl" else "cpu"
    store = dist.FileStore(f"{directory}/store", 2)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        ones = torch.ones(1 << 10, device=device)
        dist.all_reduce(ones)
        said = f"all-reduce works, and gives {ones[0].item():g}"
    except RuntimeError as error:  # DistBackendError is one
        said = str(error).strip().splitlines()[-1][:160]
    Path(directory, f"said-{rank}").write_text(said)
    os._exit(0)  # NCCL's own threads may wait for the other rank for ever


def _send(connection: Connection, source: torch.Tensor, way: str) -> float:
    """The median of the seconds until the receiver has all on its device."""
    pinned = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=source.is_cuda)
    shared = torch.empty(source.numel(), dtype=torch.uint8).share_memory_()
    took = []
    for number in range(ROUNDS):
        source[-1] = number
        _wait(source)
        began = time.perf_counter()
        if way == "ipc":
            connection.send((way, source))
        else:
            pinned.copy_(source, non_blocking=True)
            _wait(source)
            shared.copy_(pinned)
            connection.send((way, shared))
        assert connection.recv() == number
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def _receive(connection: Connection, size: int, device: str) -> None:
    """Take what comes to memory of this process on the device, and answer with its last byte."""
    here = torch.empty(size, dtype=torch.uint8, device=device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=here.is_cuda)
    while True:
        way, sent = connection.recv()
        if way == "end":
            return
        if way == "ipc":
            here.copy_(sent)
        else:
            pinned.copy_(sent)
            here.copy_(pinned, non_blocking=True)
        connection.send(int(here[-1]))
        del sent


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
