"""Watch one training go through everything that usually ends or changes one, and come out with the same bits.

python examples/demo.py               what `make demo` runs: about a minute on two cores
python examples/demo.py --steps 24    shorter

It trains the digits example three times with `virtualflow run`: undisturbed on one worker, then with workers that come
and go on request, then with workers and the coordinator killed. Exit code 0 means that all weights are equal.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

SCRIPT = Path(__file__).resolve().parent / "digits.py"
STEPS = 120
FEWEST_STEPS = 12  # so that no two actions of an act fall on one step
VIRTUAL_NODES = 8
DIGEST_SHOWN = 12  # of 64 hexadecimal digits
EXIT_INTERRUPTED = 130
WIDTH = 110  # where there is no terminal to ask


@dataclass(frozen=True)
class Act:
    """One of the runs: what happens in it, and what there is to understand about it."""

    name: str
    workers: int
    schedule: tuple[tuple[float, str], ...]
    """Fractions of the training, and what `--schedule` is to do there."""
    happens: str
    hard: str

    def schedule_of(self, steps: int) -> str:
        """Return the text for `--schedule` in a training of that many steps."""
        return ",".join(f"{max(1, round(steps * fraction))}:{action}" for fraction, action in self.schedule)


ACTS = (
    Act(
        "undisturbed",
        1,
        (),
        "One worker trains a small convolutional network (batch norm, dropout, AdamW) on handwritten digits. It "
        f"carries all {VIRTUAL_NODES} virtual nodes: in every step it computes {VIRTUAL_NODES} slices of the batch, "
        "one after the other, and adds their gradients up.",
        "Nothing. This is what the others have to match, bit for bit.",
    ),
    Act(
        "announced",
        2,
        ((0.2, "=4"), (0.45, "term"), (0.7, "=2")),
        "Two workers become four; one gets a SIGTERM, as from a node that is being emptied; the rest shrink to two.",
        "Floating-point sums depend on their order, and the number of workers usually decides the order. Dropout, "
        "batch norm and the shuffle usually depend on the process. And those who stay should neither restart nor wait "
        "for those who are starting.",
    ),
    Act(
        "killed",
        3,
        ((0.2, "kill"), (0.45, "coordinator"), (0.7, "kill:2")),
        "Of three workers one is killed with SIGKILL in the middle of a step; later the coordinator, which decides who "
        "carries what; in the end two workers at once. Everyone killed is replaced.",
        "The dead cannot hand anything over. The step that they were in must be neither lost nor applied twice, the "
        "samples that they held must not be skipped, and newcomers need the exact state, optimizer and all.",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What the report of a run says."""

    act: Act
    report: dict[str, Any]

    @property
    def workers(self) -> str:
        """How many there were, one number after the other."""
        changes = self.report["changes"]
        first = changes[0]["from"] if changes else self.act.workers
        return "→".join(str(count) for count in [first, *(change["to"] for change in changes)])

    @property
    def longest_pause(self) -> str:
        """The longest time that survivors of a change had to wait."""
        pauses = [change["pause_ms"] for change in self.report["changes"] if change["pause_ms"] is not None]
        return f"{max(pauses):.0f} ms" if pauses else "-"


class DemoFailed(Exception):
    """Something went wrong; the message is one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    try:
        with tempfile.TemporaryDirectory(prefix="virtualflow-demo-") as directory:
            outcomes = [perform(console, act, options.steps, Path(directory)) for act in ACTS]
        return conclude(console, outcomes)
    except DemoFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"length of each training ({STEPS})")
    options = parser.parse_args(arguments)
    if options.steps < FEWEST_STEPS:
        parser.error(f"--steps {options.steps}: at least {FEWEST_STEPS} are needed for all that is to happen")
    return options


def perform(console: Console, act: Act, steps: int, directory: Path) -> Outcome:
    """Tell what is about to happen, and let it happen."""
    number = ACTS.index(act) + 1
    report = directory / f"{act.name}.json"
    command = ["run", "--workers", str(act.workers), "--virtual-nodes", str(VIRTUAL_NODES)]
    if act.schedule:
        command += ["--schedule", act.schedule_of(steps)]
    script = [str(_shown(SCRIPT)), "--steps", str(steps)]
    console.print()
    console.print(Rule(f"{number} of {len(ACTS)}: {act.name}", align="left"))
    console.print(act.happens)
    console.print(f"[bold]What is hard about it:[/bold] {act.hard}")
    console.print(f"\n  $ virtualflow {shlex.join([*command, *script])}\n", style="cyan", soft_wrap=True, markup=False)
    code = run([sys.executable, "-m", "virtualflow", *command, "--report", str(report), *script])
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise DemoFailed(f"the run '{act.name}' ended with exit code {code}; its output above says why")
    try:
        content = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DemoFailed(f"the run '{act.name}' left no readable report: {error}") from error
    if not content.get("digest"):
        raise DemoFailed(f"the run '{act.name}' ended in phase '{content.get('phase')}' without a result")
    return Outcome(act, content)


def run(command: list[str]) -> int:
    """Run a command on this terminal; its exit code, as a shell counts it.

    Ctrl-C reaches the command, too, and is left to it: it drains its workers, and this script ends after it.
    """
    sys.stdout.flush()
    former = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.run(command, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, former)
    return code if code >= 0 else 128 - code


def conclude(console: Console, outcomes: Sequence[Outcome]) -> int:
    """Show all runs side by side and say whether they are equal; the exit code."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, justify in (
        ("run", "left"),
        ("workers", "left"),
        ("changes", "right"),
        ("longest pause", "right"),
        ("repeated steps", "right"),
        ("accuracy", "right"),
        ("digest", "left"),
    ):
        table.add_column(heading, justify=justify, no_wrap=heading in ("run", "workers", "digest"))  # type: ignore[arg-type]
    for outcome in outcomes:
        report = outcome.report
        table.add_row(
            outcome.act.name,
            outcome.workers,
            str(len(report["changes"])),
            outcome.longest_pause,
            str(report["repeated_steps"]),
            f"{report['metrics'].get('test_accuracy', float('nan')):.2%}",
            report["digest"][:DIGEST_SHOWN],
        )
    console.print()
    console.print(Rule("what came of it", align="left"))
    console.print(table)
    for name, noun in (("digest", "weights"), ("optimizer_digest", "optimizer states")):
        if len({outcome.report[name] for outcome in outcomes}) > 1:
            console.print(
                f"[bold red]The {noun} differ.[/bold red] This should not happen; docs/how-to/compare-digests.md says "
                "how to find out why."
            )
            return 1
    console.print(
        "[bold green]The same bits.[/bold green] Weights, batch norm statistics and optimizer states of all runs are "
        "equal (SHA-256), whoever came, left or died."
    )
    console.print("A 'repeated step' is one that a death broke off: what only the dead worker had was done again.")
    console.print("Next: README.md shows how few lines it takes in a script of your own.")
    return 0


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


if __name__ == "__main__":
    sys.exit(main())
