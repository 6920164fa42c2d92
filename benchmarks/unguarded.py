"""One worker whose steps hash and hash nothing by turns: what checksums and compared states cost, step beside step.

All workers of the job take the same steps without: the checksum of all that is sent is 0 then, and no state is looked
at. From one sweep of the state to the next, the steps with and without change places, so that of every part of the
state both are measured. ``--verify`` of the job adds spot checks, which are told apart by the steps that they are due
in. All of that is of a job in plaintext. With ``--seal``, which is of one with identities, the steps seal what they
send and do not by turns, and all of them hash their states.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import virtualflow as vf
from benchmarks.tasks import TASKS, VIRTUAL_NODES, loss_of
from virtualflow.step.state_watch import StateWatch, StateWatchSettings
from virtualflow.transport import channel, communicator, key_agreement
from virtualflow.transport.channel import Arrival, Channel, FrameExchange, SealedChannel, checksum
from virtualflow.transport.communicator import Communicator

SWEEP = StateWatchSettings().sweep


class Guards:
    """Whether this process hashes at present.

    All workers of the job change it between the same two steps. Nothing is under way then: a step ends when all that it
    sends has left, and all that it expects has come. What a peer that is ahead sends for its next step waits in the
    connection, and is looked at behind the change.
    """

    def __init__(self) -> None:
        self.on = True
        take_up = StateWatch.take_up

        def take_up_or_not(one: StateWatch, step: int | None) -> None:
            take_up(one, step if self.on else None)

        StateWatch.take_up = take_up_or_not  # type: ignore[method-assign]

    def turn(self, on: bool) -> None:
        """Hash from now on, or do not."""
        self.on = on
        for module in (channel, communicator):
            # The library's own function, so that steps with hashes are what they are without this script.
            vars(module)["checksum"] = checksum if on else _no_checksum


def _no_checksum(_: memoryview | bytes) -> int:
    """What both sides of a connection agree on without a look at the bytes."""
    return 0


class Seals:
    """Whether this process seals what it sends at present; see :class:`Guards` for when that may change."""

    def __init__(self) -> None:
        key_agreement.SealedChannel = Either  # type: ignore[misc]
        Communicator._hashes = property(lambda _: not Either.sealed, lambda *_: None)  # type: ignore[assignment]

    def turn(self, on: bool) -> None:
        """Seal from now on, or do not."""
        Either.sealed = on


class Either(SealedChannel):
    """A channel that seals and does not by turns."""

    sealed = True

    def send(self, content: memoryview, check: int, exchange: FrameExchange) -> None:
        if self.sealed:
            self._sent += 1
            return super().send(content, check, exchange)
        return Channel.send(self, content, check, exchange)

    def _room_for(self, arrival: Arrival) -> list[memoryview]:
        return super()._room_for(arrival) if self.sealed else Channel._room_for(self, arrival)

    def _take(self, arrival: Arrival, received: int) -> bool:
        return super()._take(arrival, received) if self.sealed else Channel._take(self, arrival, received)


def guarded(step: int) -> bool:
    """Whether the step of that number is one with hashes."""
    return (step + step // SWEEP) % 2 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path, help="where the leader writes each step's seconds, of the clock and CPU")
    parser.add_argument("--always", action="store_true", help="hash in every step")
    parser.add_argument("--seal", action="store_true", help="seal, in place of hashing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    guards = Seals() if args.seal else Guards()
    task = TASKS[args.task]
    model, optimizer, data = task.make()
    seconds: dict[int, tuple[float, float]] = {}
    with vf.elastic(
        model,
        optimizer,
        data,
        batch_size=task.batch,
        steps=args.steps,
        virtual_nodes=VIRTUAL_NODES,
        drop_last=True,
    ) as run:
        before = time.perf_counter(), time.process_time()
        for step in run:
            now = time.perf_counter(), time.process_time()
            seconds[step.number - 1] = now[0] - before[0], now[1] - before[1]
            before = now
            guards.turn(args.always or guarded(step.number))
            for batch in step:
                loss_of(model, batch).backward()
        guards.turn(True)
        if run.leader:
            fresh = args.out.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(seconds))
            fresh.replace(args.out)


if __name__ == "__main__":
    main()
