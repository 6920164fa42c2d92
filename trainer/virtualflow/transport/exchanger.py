"""A thread beside the one that trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Exchanger:
    """The thread that carries exchanges out, one thing after the other, beside the one that trains.

    It is no thread of a pool, for which Python would wait at the end of the process, whatever it waits for itself.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="virtualflow-exchange", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Do this next; the task must not raise."""
        self._tasks.put(task)

    def close(self, patience: float) -> None:
        """End when all that was submitted is done, which is waited for as long as ``patience`` says."""
        self._tasks.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # nor what it refers to, while nothing is to be done
