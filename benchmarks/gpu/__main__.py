"""``make gpu``, or ``python -m benchmarks.gpu`` where there is no make: everything of ours that needs a GPU.

It needs nothing but this repository and a Python that has the library's dependencies and a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.parts import PARTS, Outcome, Result, Setting, Wrong
from benchmarks.gpu.runner import check_packages, execute, run_parts

BUDGET = 575.0
"""Seconds for all parts; starting and writing come on top, within ten minutes."""


def main() -> None:
    """Run the parts and write the report; or, in a process of its own, measure one of them."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Run everything that needs a GPU, and write docs/explanation/gpu.md.\n\n"
        + "\n".join(f"  {part.name:12} {part.title}" for part in PARTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="what to run (default: all)")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for all parts together")
    parser.add_argument("--small", action="store_true", help="small sizes: to see that it works")
    parser.add_argument("--measure", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.parts if name not in names]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; choose from {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes that were started
    if args.measure:
        measure(args.measure, Setting(args.device, args.small), args.rows)
    else:
        sys.exit(run(args.parts or names, small=args.small, budget=args.budget))


def measure(name: str, setting: Setting, rows: Path) -> None:
    """Measure one part in this process; its rows go into a file as they come."""
    part = next(part for part in PARTS if part.name == name)
    with rows.open("a", buffering=1) as file:

        def note(row: Any) -> None:
            print(json.dumps(row), flush=True)
            file.write(json.dumps(row) + "\n")

        try:
            importlib.import_module(part.module).measure(setting, note)
        except Wrong as wrong:
            sys.exit(str(wrong))


def run(names: list[str], *, small: bool, budget: float) -> int:
    """Run these parts; the exit status is 1 if one has failed or packages are missing.

    It is 0 where there is no device, or not enough time.
    """

    def told(outcome: Outcome) -> None:
        print(f"  {outcome.name:12} {outcome.status}{f': {outcome.why}' if outcome.why else ''}", flush=True)

    began = time.monotonic()
    lacking = check_packages()
    if lacking:
        print(lacking, flush=True)
    devices, outcomes = run_parts(PARTS, names, small=small, budget=budget, execute=execute, told=told)
    result = Result(devices, small, outcomes, report.made())
    for path in report.write(result):
        print(path)
    print(f"{time.monotonic() - began:.0f} s")
    return int(lacking is not None or any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    main()
