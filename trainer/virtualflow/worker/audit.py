"""Which worker ran which samples: one line for each attempt at a virtual node, and one for each attempt that counted.

What a worker has kept of an aborted attempt, it writes again for the next one, to which it contributes it, too.

Each worker writes a file of its own, each line in one write before the attempt can count, so that a SIGKILL loses
nothing. Which attempts counted is known to any worker that applied the update; ``virtualflow run --audit`` joins both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from virtualflow.protocol import messages as m


class Audit:
    """The audit file of one worker process."""

    def __init__(self, directory: Path, worker: str, incarnation: str, run: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{worker}-{incarnation}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._worker = worker
        self._run = run
        """Of the script: each has a first step."""
        self._latest: dict[int, dict[str, Any]] = {}
        """What this worker has run last of each virtual node."""

    def computed(
        self, generation: m.Generation, epoch: int, step: int, virtual_node: int, samples: tuple[int, ...]
    ) -> None:
        """This worker has run the samples of a virtual node in an attempt at ``step``."""
        facts: dict[str, Any] = {"epoch": epoch, "step": step, "virtual_node": virtual_node, "worker": self._worker}
        self._latest[virtual_node] = facts | {"samples": list(samples)}
        self._write("computed", generation, **self._latest[virtual_node])

    def kept(self, generation: m.Generation, step: int, virtual_nodes: Iterable[int]) -> None:
        """This worker goes on with what it has run of ``step`` in an earlier generation."""
        for node in virtual_nodes:
            # One without samples was not run.
            if node in self._latest and self._latest[node]["step"] == step:
                self._write("kept", generation, **self._latest[node])

    def committed(self, generation: m.Generation, step: int) -> None:
        """The attempt at ``step`` of that generation has counted: its update is applied here."""
        self._write("committed", generation, step=step)

    def _write(self, kind: str, generation: m.Generation, **values: Any) -> None:
        number = [generation.incarnation, generation.counter]
        os.write(
            self._descriptor, (json.dumps({kind: {"run": self._run, "generation": number, **values}}) + "\n").encode()
        )

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
