"""Each of these tests runs on the CPU with every change, and, marked ``gpu``, on a CUDA device where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from virtualflow.device import pin

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test runs."""
    return torch.device(request.param)


@pytest.fixture
def pinned() -> Iterator[None]:
    """Kernels as in a bitwise job."""
    before = pin(1, "bitwise")
    yield
    before.undo()
