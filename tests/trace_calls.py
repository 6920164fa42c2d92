"""How far a reader walks: the library's modules that one training step passes, and a recovery.

``python tests/trace_calls.py`` runs two jobs of two workers on digits. The training thread of the leader is watched
(``sys.setprofile``) once everything is warm: from the end of one step to the end of the next (of five, the middle one
counts); and, where the other worker kills itself in that step, from when the loss is noticed until the next generation
is entered. Printed are the calls of library functions (a generator that goes on is one, a comprehension is none), their
modules, and how often two calls in a row are of different files. ``--list`` adds the calls of each module.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = str(ROOT / "trainer" / "virtualflow") + os.sep
COMPREHENSIONS = {"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}
WARM, STEPS = 30, 5
"""The steps before the watched ones, and how many are watched: some tell of progress, or wait, and others do not."""
LIMIT = 300
"""Seconds after which a job is taken to hang."""


RECOVERY = "Membership.recover"


class Walk:
    """The library's functions that this thread calls, in their order.

    Args:
        within: only what this one calls; ``None``: all.
    """

    def __init__(self, within: str | None) -> None:
        self.steps: list[list[tuple[str, str]]] = []
        """Of each watched step."""
        self._within, self._inside = within, within is None

    def turn(self, number: int) -> None:
        """That step has ended."""
        sys.setprofile(None)
        if WARM <= number < WARM + STEPS:
            self.steps.append([])
            sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARY) or code.co_name in COMPREHENSIONS:
            return
        if code.co_qualname == self._within and event in {"call", "return"}:
            self._inside = event == "call"
        if event == "call" and self._inside:
            self.steps[-1].append((code.co_filename.removeprefix(LIBRARY), code.co_qualname))


def train(out: Path, *, kill: bool) -> None:
    """A worker's script: digits, watched for a step, in whose course all but the leader may be killed."""
    import torch
    import torch.nn.functional as F

    import virtualflow as vf

    sys.path.insert(0, str(ROOT / "examples"))
    from digits_task import DigitsNet, digits

    torch.manual_seed(0)
    samples, _ = digits()
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    walk = Walk(RECOVERY if kill else None)
    with vf.elastic(model, optimizer, samples, batch_size=64, steps=WARM + STEPS + 2) as run:
        leads = None
        for number, step in enumerate(run, 1):  # nobody joins before it is over
            for x, y in step:
                leads = run.leader if leads is None else leads
                if kill and number == WARM + 1 and not leads:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
            walk.turn(number)
        if run.leader:
            walked = sorted(filter(None, walk.steps), key=len)
            out.write_text(json.dumps(walked[len(walked) // 2]))


def watch(*arguments: str) -> list[tuple[str, str]]:
    """Run the job, and return what its leader called."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "calls.json"
        command = [sys.executable, "-m", "virtualflow", "run", "--plain", "--workers", "2", __file__]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer"), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "--out", str(out), *arguments], env=environment, check=True, stdout=sys.stderr, timeout=LIMIT
        )
        return [(file, name) for file, name in json.loads(out.read_text())]


def count_changes(calls: list[tuple[str, str]]) -> int:
    """How often a call is of another file than the one before it."""
    return sum(before != after for (before, _), (after, _) in pairwise(calls))


def describe(calls: list[tuple[str, str]]) -> str:
    """The numbers of a walk."""
    files = {file for file, _ in calls}
    packages = {file.rpartition("/")[0] for file in files}
    within = f"{len(files)} modules of {len(packages)} packages"
    return f"{len(calls)} calls in {within}, {count_changes(calls)} changes of file"


def main() -> None:
    """Print both walks, or be a worker of a job that is watched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the calls by module")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out is not None:
        train(arguments.out, kill=arguments.kill)
        return
    walks = {"a step": watch(), "a recovery": watch("--kill")}
    for what, calls in walks.items():
        print(f"{what}: {describe(calls)}")
        if arguments.list:
            counts = Counter(calls)
            for file in sorted({file for file, _ in calls}):
                functions = {name: count for (of, name), count in counts.items() if of == file}
                print(f"  {file} {sum(functions.values())}: {', '.join(f'{n} {c}' for n, c in functions.items())}")


if __name__ == "__main__":
    main()
