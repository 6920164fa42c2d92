"""One worker whose steps hash and hash nothing by turns: what checksums and compared states cost, step beside step.

All workers of the job take the same steps without: nothing that is sent then bears a checksum, and no state is looked
at. From one sweep of the state to the next, the steps with and without change places, so that of every part of the
state both are measured. ``--verify`` of the job adds spot checks, which are told apart by the steps that they are due
in.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import virtualflow as vf
from benchmarks.tasks import TASKS, VIRTUAL_NODES, loss_of
from virtualflow.step.settings import StateWatchSettings
from virtualflow.step.state_watch import StateWatch
from virtualflow.transport.gloo import Communicator
from virtualflow.transport.interface import DONE, Message, Pending
from virtualflow.transport.pending import Letter

SWEEP = StateWatchSettings().sweep


class Guards:
    """Whether this process hashes at present; all workers of the job change it between the same two steps."""

    def __init__(self) -> None:
        self.on = True
        guarded_post, guarded_gather = Communicator._post, Communicator.start_all_gather
        guarded_begin = StateWatch.begin

        def post(one: Communicator, group: c10d.ProcessGroup, message: Message, check: Tensor | None = None) -> Letter:
            return guarded_post(one, group, message, check) if self.on else _post(one, group, message)

        def gather(one: Communicator, out: Tensor, block: Tensor) -> Pending:
            return guarded_gather(one, out, block) if self.on else _start_all_gather(one, out, block)

        def begin(one: StateWatch, step: int | None) -> None:
            guarded_begin(one, step if self.on else None)

        Communicator._post = post  # type: ignore[method-assign]
        Communicator.start_all_gather = gather  # type: ignore[method-assign]
        StateWatch.begin = begin  # type: ignore[method-assign]


class _Bare(Letter):
    """A message without a checksum."""

    def wait(self, timeout: timedelta) -> None:
        """Wait for it to its end."""
        for work in self.works:
            work.wait(timeout)


def _post(one: Communicator, group: c10d.ProcessGroup, message: Message) -> Letter:
    key = message.peer, message.incoming
    one._tags[key] = tag = one._tags.get(key, 0) + 1
    start = group.recv if message.incoming else group.send
    works = (start([message.stretch], message.peer, tag),)
    return _Bare(message, message.stretch, message.stretch, works, "", one._landing)


def _start_all_gather(one: Communicator, out: Tensor, block: Tensor) -> Pending:
    if one._group is None:
        out.copy_(block)
        return DONE
    return one._gather(out.view(-1).view(torch.uint8), block.view(-1).view(torch.uint8))


def guarded(step: int) -> bool:
    """Whether the step of that number is one with hashes."""
    return (step + step // SWEEP) % 2 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path, help="where the leader writes each step's seconds, of the clock and CPU")
    parser.add_argument("--always", action="store_true", help="hash in every step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    guards = Guards()
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
            guards.on = args.always or guarded(step.number)
            for batch in step:
                loss_of(model, batch).backward()
        guards.on = True
        if run.leader:
            fresh = args.out.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(seconds))
            fresh.replace(args.out)


if __name__ == "__main__":
    main()
