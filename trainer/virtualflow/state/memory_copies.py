"""Copies of the state of a job's only worker in the coordinator's memory: made beside the training, and read by whoever
takes its place.

Two workers are each other's backup. One has nobody, and a checkpoint may be a minute old: so its state is packed
between two steps, and a thread sends it. The next copy is made when that one has arrived, and no sooner than its share
of the time allows.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.http_api import CopyHeader
from virtualflow.protocol.messages import Generation
from virtualflow.protocol.versions import NUMERICS
from virtualflow.state import codec
from virtualflow.state.checkpoint_format import FORMAT, JobIdentity, Manifest, tell_other_versions, unseal
from virtualflow.state.checkpoint_order import NO_CHECKPOINT, Mark
from virtualflow.state.sealed_manifest import seal
from virtualflow.transport import CopyClient

logger = logging.getLogger("virtualflow.worker")

_NAME = "the copy of step {} in the coordinator's memory"


@dataclass(frozen=True)
class MemoryCopySettings:
    """How often the only worker of a job copies the state to the coordinator's memory."""

    share: float = 0.05
    """The time that a copy takes from the training is at most this share of the time between two of them."""
    interval: float = 0.05
    """They begin at least this far apart."""
    retry_first: float = 0.5
    """The first wait after one that did not get there; it doubles."""
    retry_most: float = 30.0
    """The longest such wait."""
    attempts: int = 3
    """How often a worker that begins asks for the newest copy before an older checkpoint counts."""


class MemoryCopies:
    """Makes and reads the copies of one job, for one worker process.

    Args:
        limit: bytes of the largest one that is taken there, as known now; 0: none is.
    """

    def __init__(
        self,
        place: CopyClient,
        limit: Callable[[], int],
        incarnation: str,
        identity: JobIdentity,
        tell: Callable[[str], None],
        settings: MemoryCopySettings,
    ) -> None:
        self._place = place
        self._limit = limit
        self._incarnation = incarnation
        self._identity = identity
        self._tell = tell
        self._settings = settings
        self._damaged: set[str] = set()
        """Checksums of copies that cannot be used."""
        self._found: CopyHeader | None = None
        self._thread: threading.Thread | None = None
        self._room: Tensor | None = None
        self._next = 0.0
        self._retry = settings.retry_first
        self._too_small = 0
        """The limit that the state has turned out to be above; ``0``: none."""

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self) -> Mark:
        """The newest copy, by its header; ``NO_CHECKPOINT``: there is none that can be used."""
        self._found = self._ask(self._place.head)
        if self._found is not None and self._found.sha256 in self._damaged:
            self._found = None
        return NO_CHECKPOINT if self._found is None else Mark(self._found.generation, self._found.step)

    def read(self) -> dict[str, Any] | None:
        """The state that :meth:`find` has found; ``None``: it is not what was sent, which is told."""
        found = self._found
        assert found is not None
        try:
            return self._open(found, self._ask(self._place.get))
        except ConfigurationError:
            raise  # It is a ValueError too, but no damage.
        except ValueError as error:
            self._tell(f"{_NAME.format(found.step)} cannot be used: {error}; what is older counts")
            return None

    def discard(self) -> None:
        if self._found is not None:
            self._damaged.add(self._found.sha256)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """What the place answers; ``None`` too when it does not in so many attempts."""
        pause = self._settings.retry_first
        for attempt in range(self._settings.attempts):
            if attempt:
                time.sleep(pause)
                pause *= 2
            try:
                return request()
            except OSError as error:
                failure = error
        self._tell(f"the coordinator does not say whether it has a copy of the state ({failure}); what is older counts")
        return None

    def _open(self, found: CopyHeader, answer: tuple[CopyHeader, bytearray] | None) -> dict[str, Any]:
        if answer is None or answer[0] != found:
            raise ValueError("the coordinator has it no more")
        body = answer[1]
        if hashlib.sha256(body).hexdigest() != found.sha256 or len(body) < found.state:
            raise ValueError("it is not what was sent (its SHA-256 differs)")
        name = _NAME.format(found.step)
        manifest = unseal(bytes(memoryview(body)[found.state :]), name)
        problem = self._identity.difference(manifest.identity)
        if problem:
            raise ConfigurationError(
                f"{name} belongs to another job: {problem}; make a new job, or go back to the old value"
            )
        tell_other_versions(manifest, name, self._tell)
        tree: dict[str, Any] = codec.unpack(torch.frombuffer(body, dtype=torch.uint8)[: found.state])
        return tree

    # --- writing ------------------------------------------------------------------------------------------------------

    def copy_if_due(self, step: int, generation: Generation, capture: Callable[[], dict[str, Any]]) -> None:
        """Pack the state now and send it in the background, unless a copy is under way or was just made."""
        began, limit = time.monotonic(), self._limit()
        if began < self._next or not limit or limit == self._too_small:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        packed = codec.pack(capture(), self._room)
        if self._room is None or self._room.numel() < packed.numel():
            self._room = packed
        moments = began, time.monotonic() - began
        self._thread = threading.Thread(
            target=self._send, args=(step, generation, packed, limit, *moments), name="memory-copy", daemon=True
        )
        self._thread.start()

    def close(self, timeout: float) -> None:
        """End a copy under way, and wait for that so many seconds."""
        self._place.close()
        self.wait(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for a copy under way, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _send(self, step: int, generation: Generation, packed: Tensor, limit: int, began: float, pause: float) -> None:
        state = packed.numpy().data
        checksum = hashlib.sha256(state)
        identity, versions = self._identity, (str(torch.__version__), NUMERICS)
        manifest = seal(Manifest(FORMAT, step, identity, state.nbytes, checksum.hexdigest(), *versions))
        if state.nbytes + len(manifest) > limit:
            self._room, self._too_small = None, limit
            self._tell(_too_large(state.nbytes + len(manifest), limit))
            return
        checksum.update(manifest)
        header = CopyHeader(generation, self._incarnation, step, state.nbytes, checksum.hexdigest())
        retry = self._retry
        try:
            self._place.put(header, [state, memoryview(manifest)])
            self._retry, retry = self._settings.retry_first, 0.0
        except (OSError, VirtualFlowError) as error:
            # The coordinator is being replaced, or does not know yet which generation runs.
            logger.debug("%s was not taken: %s", _NAME.format(step), error)
            self._retry = min(2 * retry, self._settings.retry_most)
        taken = (pause + time.thread_time()) / self._settings.share
        self._next = began + max(taken, retry, self._settings.interval)


def _too_large(size: int, limit: int) -> str:
    return (
        f"the state has {_mebibytes(size)} and the coordinator memory for copies of at most {_mebibytes(limit)}, so "
        "there is none; give it memory for two of them and 128 MiB (limits.memory in spec.coordinator.template)"
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
