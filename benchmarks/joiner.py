"""What a joiner's start costs the worker that trains meanwhile, where a core is free for it.

One worker trains on one core; then a second boots (imports, model, connection, rehearsal) on the other. Step times of
the first, before and meanwhile; the same with nobody, for the noise of the machine; and with a process that boots the
same script but has nothing to do with the job, for what cores share (caches, memory, a physical core's threads).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

from benchmarks.jobs import run_job


def main() -> None:
    """Run it some times and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    print("median step of a worker alone on its core: first half, second half, ratio")
    cases: list[tuple[str, list[str], str]] = [
        ("nobody joins", [], ""),
        ("a stranger boots", [], "1"),
        ("a joiner boots", ["--schedule", "300:=2"], ""),
    ]
    for name, schedule, stranger in cases:
        ratios = []
        for _ in range(args.runs):
            os.environ["STRANGER"] = stranger
            _, output = run_job("--workers", 1, *schedule, "benchmarks/pinned.py", "--steps", 600)
            line = next(json.loads(line) for line in output.splitlines() if line.startswith('{"before"'))
            ratios.append(line["during"] / line["before"])
            print(f"  {name:16} {line['before']:.2f} ms  {line['during']:.2f} ms  {ratios[-1]:.3f}")
        print(f"  {name:16} median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
