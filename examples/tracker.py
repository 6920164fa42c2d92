"""Stands in, in the plain PyTorch examples, for the experiment tracker that a real script reports to."""

from __future__ import annotations

import time
from typing import Self

from torch import Tensor


class Tracker:
    """Counts the steps of a training, prints its loss now and then, and at the end how long a step took."""

    def __init__(self, *, every: int = 50) -> None:
        self.steps = 0
        self._every = every

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def log(self, *, loss: Tensor) -> None:
        """Take the loss of one more step."""
        self.steps += 1
        if self.steps % self._every == 0:
            print(f"step {self.steps}: loss {loss.item():.4f}", flush=True)

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        print(
            f"{self.steps} steps in {seconds:.1f} s, {1000 * seconds / max(self.steps, 1):.1f} ms each",
            flush=True,
        )
