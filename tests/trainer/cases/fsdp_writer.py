"""Two ranks of torch's own FSDP2 write a checkpoint of a model: ``python fsdp_writer.py FOLDER``."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, multiprocessing, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard


def build() -> nn.Sequential:
    """A model whose shapes two ranks cannot halve, with a buffer."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 33), nn.Linear(33, 1))


def write(rank: int, folder: str, port: int) -> None:
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model: Any = build()
    for module in model:
        fully_shard(module)
    fully_shard(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    distributed.destroy_process_group()


if __name__ == "__main__":
    from socket import socket

    with socket() as free:
        free.bind(("127.0.0.1", 0))
        unused = free.getsockname()[1]
    multiprocessing.spawn(write, (sys.argv[1], unused), nprocs=2)
