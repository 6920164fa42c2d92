"""Changes of a job whose parameters are divided: how long they stop it, and what moves, beside the least that could.

Each worker counts what it sends while values and states go to their new keepers, and what it lacks of its new share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import virtualflow as vf
from benchmarks.changes import kind_of
from benchmarks.jobs import run_job
from benchmarks.sharded_steps import loss_of, make
from virtualflow.reduction import difference
from virtualflow.step import Shards
from virtualflow.transport import Communicator

CASE, VIRTUAL_NODES = "25 M", 8
STATE = 3
"""Values and AdamW's two moments: sizes of a parameter that move with it."""
SCHEDULE = "4:=3,8:=2,12:=3,16:kill,20:=2,24:=3,28:kill"
STEPS = 32
TEXT = """\
A transformer of 25 million parameters (303 MB with AdamW's state), eight virtual nodes, `redundancy="peer"`: each share
has two keepers. The job has two workers or three; a killed one is replaced. *Pause*: median, beside a step. *Moved*: MB
that all send to bring values and states to their new keepers, all included; *lacked*: what the new keepers did not have
yet, so the least for these shares."""


def train(folder: Path) -> None:
    """One worker; it writes down what it lacks of its share in each generation that it enters, and has sent for it."""
    sent = 0

    def counted(move: Callable[..., None]) -> Callable[..., None]:
        def counting(shards: Shards, communicator: Communicator, *rest: Any, **more: Any) -> None:
            nonlocal sent
            before = communicator.traffic[0]
            move(shards, communicator, *rest, **more)
            sent += communicator.traffic[0] - before

        return counting

    for name in ("pass_values", "pass_states"):
        setattr(Shards, name, counted(getattr(Shards, name)))
    path = folder / f"{os.environ['VIRTUALFLOW_WORKER']}-{os.getpid()}.json"
    model, data, _ = make(CASE)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    options: dict[str, Any] = {"virtual_nodes": VIRTUAL_NODES, "shard": "parameters", "steps": STEPS}
    told: list[dict[str, int]] = []
    generation, kept = 0, ()
    try:
        with vf.elastic(model, optimizer, data, batch_size=VIRTUAL_NODES, drop_last=True, **options) as run:
            for step in run:
                for (tokens,) in step:
                    loss_of(model, tokens).backward()
                session, shards = run._context.session, run._context.update.shards
                assert session.communicator is not None
                assert shards is not None
                if session.communicator.plan.generation.counter != generation:
                    generation = session.communicator.plan.generation.counter
                    lacked = shards.row.pieces(difference(shards.mine, kept))
                    size = STATE * sum((piece.end - piece.begin) * 4 for piece in lacked)
                    told.append({"generation": generation, "lacked": size, "sent": sent})
                    kept, sent = shards.mine, 0
                    path.write_text(json.dumps(told))
    finally:  # a worker that leaves does so by an exception, after it has handed over
        told.append({"generation": generation + 1, "lacked": 0, "sent": sent})
        path.write_text(json.dumps(told))


def measure() -> list[dict[str, Any]]:
    """The rows of the table."""
    with tempfile.TemporaryDirectory() as directory:
        script = ("-m", "benchmarks.sharded_changes", "--train", directory)
        counts = ("--workers", 2, "--virtual-nodes", VIRTUAL_NODES)
        report, _ = run_job(*counts, "--schedule", SCHEDULE, *script)
        told = [entry for path in Path(directory).glob("*.json") for entry in json.loads(path.read_text())]
    moved: dict[int, dict[str, int]] = defaultdict(lambda: {"lacked": 0, "sent": 0})
    for entry in told:
        for key in ("lacked", "sent"):
            moved[entry["generation"]][key] += entry[key]
    by_kind: dict[str, list[tuple[float, dict[str, int]]]] = defaultdict(list)
    for change in report["changes"]:
        by_kind[kind_of(change)].append((change["pause_ms"], moved[change["generation"]]))
    rows = []
    for kind, found in by_kind.items():
        sent, lacked = (statistics.median(counted[key] for _, counted in found) for key in ("sent", "lacked"))
        rows.append(
            {
                "change": kind,
                "changes": len(found),
                "pause, ms": f"{statistics.median(pause for pause, _ in found):.0f}",
                "a step, ms": f"{report['step_ms']:.0f}",
                "moved, MB": f"{sent / 1e6:.1f}",
                "lacked, MB": f"{lacked / 1e6:.1f}",
                "moved over lacked": f"{sent / lacked:.3f}" if lacked else "",
            }
        )
        print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.train:
        train(args.train)
        return
    found = {"text": TEXT, "rows": measure()}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
