"""What workers send where backward passes end early, counted by their transport, beside whole passes.

Each mix is a job of processes: all that a worker sends in a step counts, headers as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from benchmarks.jobs import LIMIT, ROOT, environment, job_command

BLOCKS, WIDTH = 12, 1024
STEPS = 6
"""Steps that are counted: a multiple of the classes of each mix. One before them settles how buckets travel."""
TEXT = """\
Twelve blocks of 4.2 MB, SGD. Cells: MB that all workers together send in a step, headers included, with passes that end
early and with whole ones, and their ratio; in brackets the ratio of the gradients that `virtualflow explain` foretells
for one assignment (without `rotate`, whole passes have another one). A sharded optimizer also sends new weights to
those who have not stepped them. All weights are new in every step, so these bytes do not become fewer: with n workers,
n - 1 times the weights (the sums for second keepers included)."""


@dataclass(frozen=True)
class Mix:
    """Who computes what."""

    workers: int
    virtual_nodes: int
    fractions: tuple[float, ...]
    rotate: bool


MIXES = [
    Mix(3, 3, (1, 0.67, 0.34), True),
    Mix(3, 12, (1, 0.67, 0.34), True),
    Mix(3, 12, (1, 0.67, 0.34), False),
    Mix(2, 2, (1, 0.5), True),
]


def train(mix: Mix, whole: bool, sharded: bool, folder: Path) -> None:
    """One worker; it writes down what it has sent."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(2 * mix.virtual_nodes, WIDTH))
    backward = None if whole else vf.PartialBackward(mix.fractions, mix.rotate)
    sent, foretold, foretold_whole = [], 0, 0
    options: dict[str, Any] = {"virtual_nodes": mix.virtual_nodes, "shard_optimizer": sharded, "backward": backward}
    with vf.elastic(model, optimizer, data, batch_size=mix.virtual_nodes, steps=STEPS + 3, **options) as run:
        for step in run:
            for (x,) in step:
                (model(x) - x).square().mean().backward()
            session, reducer = run._context.session, run._context.update.reducer
            assert session.communicator is not None
            # Of the steps before this one.
            sent.append(session.communicator.traffic[0])
            if 2 < step.number <= STEPS + 2:
                foretold += sum(one.moved(session.rank)[0] for one in reducer.schedule)
                foretold_whole += sum(one.moved(session.rank)[0] for one in reducer.schedule_if_whole())
        rank = session.rank
    counted = {"sent": sent[STEPS + 1] - sent[1], "foretold": foretold, "foretold_whole": foretold_whole}
    (folder / f"{rank}.json").write_text(json.dumps(counted))


def measure(mix: Mix, *, whole: bool, sharded: bool) -> dict[str, float]:
    """What all workers of a job have sent in a step on average, and what was foretold of the gradients; bytes."""
    with tempfile.TemporaryDirectory() as directory:
        told = json.dumps({**asdict(mix), "whole": whole, "sharded": sharded, "folder": directory})
        workers = ["--workers", mix.workers, "--virtual-nodes", mix.virtual_nodes, "--rebalance-gain", 1]
        checkpoints = ["--checkpoint-dir", Path(directory) / "checkpoints", "--checkpoint-seconds", 31_622_400]
        script = ["-m", "benchmarks.partial_bytes", "--train", told]
        command = job_command(*workers, *checkpoints, *script)
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
        found = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(mix.workers)]
    return {key: sum(one[key] for one in found) / STEPS for key in found[0]}


def row(mix: Mix) -> dict[str, Any]:
    """A row of the table."""
    cells: dict[str, Any] = {
        "workers": mix.workers,
        "virtual nodes": mix.virtual_nodes,
        "fractions": ", ".join(f"{fraction:g}" for fraction in mix.fractions),
        "rotate": mix.rotate,
    }
    for title, sharded in (("whole optimizer", False), ("sharded", True)):
        partial, whole = (measure(mix, whole=one, sharded=sharded) for one in (False, True))
        share, foretold = partial["sent"] / whole["sent"], partial["foretold"] / partial["foretold_whole"]
        cells[title] = f"{partial['sent'] / 1e6:.1f} of {whole['sent'] / 1e6:.1f}: **{share:.2f}** ({foretold:.2f})"
    return cells


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first mix only")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.train:
        told = json.loads(args.train)
        whole, sharded, folder = told.pop("whole"), told.pop("sharded"), Path(told.pop("folder"))
        train(Mix(**told | {"fractions": tuple(told["fractions"])}), whole, sharded, folder)
        return
    rows = []
    for mix in MIXES[: 1 if args.quick else None]:
        rows.append(row(mix))
        print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"text": TEXT, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
