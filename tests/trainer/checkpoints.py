"""Checkpoints whose content tells which step they are of, and how to damage their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from virtualflow.state.checkpoint_format import FoundCheckpoint, JobIdentity, find_newest, load, skipped
from virtualflow.state.checkpoint_order import complete
from virtualflow.state.checkpoint_writer import CheckpointPolicy, CheckpointWriter

WEIGHT = {"shape": [10, 64], "dtype": "float32", "trained": True}
SIGNATURE = {
    "parameters": {"fc.weight": WEIGHT},
    "optimizer": "SGD",
    "groups": [["fc.weight"]],
}
IDENTITY = JobIdentity(virtual_nodes=8, seed=0, batch_size=64, dataset_size=1000, signature=SIGNATURE)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tree_of(step: int, size: int = 1000) -> dict[str, Any]:
    """A state that tells which step it is of, in every byte."""
    return {"weight": torch.full((size,), float(step)), "extra": {"step": step, "loss": 0.1 * step}}


def writer_to(directory: Path, events: list[str], **policy: Any) -> CheckpointWriter:
    options = {"every_steps": None, "every_seconds": None, "keep": 3, **policy}
    kept = CheckpointPolicy(directory, **options)
    return CheckpointWriter(kept, IDENTITY, events.append, Clock(), lambda step, failure: None)


def steps_in(directory: Path) -> list[int]:
    return sorted(mark.step for mark, _ in complete(directory))


def checkpoint_of(directory: Path, step: int) -> Path:
    """The one of that step that counts."""
    return next(path for mark, path in complete(directory) if mark.step == step)


def newest(directory: Path, events: list[str]) -> FoundCheckpoint:
    """The newest one that can be loaded, as whoever restores it comes to it."""
    damaged: set[int] = set()
    while True:
        found = find_newest(directory, events.append, IDENTITY, damaged)
        assert found is not None
        try:
            load(found)
            return found
        except ValueError as error:
            events.append(skipped(found.path, error))
            damaged.add(found.step)


def assert_holds(found: FoundCheckpoint, step: int, size: int = 1000) -> None:
    tree = load(found)
    assert found.step == step
    assert tree["extra"] == {"step": step, "loss": 0.1 * step}
    assert torch.equal(tree["weight"], torch.full((size,), float(step)))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


class Counted:
    """A training of which nothing matters but the step."""

    def __init__(self, step: int) -> None:
        self.completed_steps = step

    def capture(self) -> dict[str, Any]:
        return tree_of(self.completed_steps)

    def restore(self, tree: dict[str, Any]) -> None:
        assert torch.equal(tree["weight"], tree_of(tree["extra"]["step"])["weight"])
        self.completed_steps = tree["extra"]["step"]
