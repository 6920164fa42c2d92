"""Waiting for a collective in slices: what completes while nobody looks is complete, and not broken."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from virtualflow import messages as m
from virtualflow.communicator import Communicator
from virtualflow.errors import CommunicatorBroken
from virtualflow.settings import CommunicatorSettings

PLAN = m.Plan(
    m.Generation(1, 1),
    "planned",
    (m.Member("worker-0", "a", "127.0.0.1", 0, 1), m.Member("worker-1", "b", "127.0.0.1", 1, 2)),
    (),
    "start",
    "start",
)


class Work:
    """A collective that completes after so many slices, right when the slice has timed out."""

    def __init__(self, slices: int, error: str | None = None) -> None:
        self.slices, self.error = slices, error

    def is_completed(self) -> bool:
        return self.slices <= 0

    def wait(self, _: timedelta) -> None:
        if self.slices > 0:
            self.slices -= 1
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)


class Group:
    def __init__(self, work: Work) -> None:
        self.work = work

    def _allgather_base(self, *_: Any) -> Work:
        return self.work


def communicator(work: Work) -> Communicator:
    return Communicator(PLAN, 0, Group(work), lambda: None, CommunicatorSettings())


@pytest.mark.parametrize("slices", [0, 1, 2, 7])
def test_a_collective_that_completes_as_its_slice_ends_is_complete(slices: int) -> None:
    communicator(Work(slices)).all_gather(torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_a_collective_that_fails_breaks_the_communicator_with_its_own_words(slices: int) -> None:
    with pytest.raises(CommunicatorBroken, match="Connection closed by peer"):
        communicator(Work(slices, "Connection closed by peer")).all_gather(torch.zeros(4, dtype=torch.uint8))
