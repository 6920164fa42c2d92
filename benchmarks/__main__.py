"""``python -m benchmarks [FIGURE ...] [--quick]`` measures and writes the page; ``report`` only writes the page.

What takes long or needs something else (``soak``, ``workloads``, ``larger_than_worker``, ``planned_devices``,
``packing_limits``, ``replica_groups``, ``sharded_steps``, ``simulator_scale``, ``operator_scale``, ``hostile_tenants``,
``api_faults``) is measured only when it is named.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from benchmarks import report, results
from benchmarks.figures import FIGURES


def main() -> None:
    """Measure the named figures, or all, and write the page."""
    known = "\n".join(f"  {name:16} {figure.title}" for name, figure in FIGURES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measure, and write docs/explanation/benchmarks.md.\n\n{known}\n  {'report':16} measure nothing",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="what to measure (default: all that take minutes)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it works")
    for name, figure in FIGURES.items():
        for option, text in figure.options.items():
            parser.add_argument(f"--{option}", type=int, metavar="N", help=f"{name}: {text}")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends the processes that were started
    unknown = [name for name in args.figures if name not in FIGURES and name != "report"]
    if unknown:
        parser.error(f"there is no figure {', '.join(unknown)}; choose from {', '.join([*FIGURES, 'report'])}")
    for name in args.figures or [name for name, figure in FIGURES.items() if not figure.on_demand]:
        if name == "report":
            continue
        print(f"{name}: {FIGURES[name].title}", flush=True)
        began = time.monotonic()
        chosen = {option: getattr(args, option) for option in FIGURES[name].options}
        result = FIGURES[name].measure(args.quick, **chosen)
        if result.get("skipped"):
            print(f"  skipped: {result['skipped']}", flush=True)
        seconds = time.monotonic() - began
        print(f"  {results.write(name, args.quick, seconds, result)} ({seconds:.0f} s)", flush=True)
    report.write(results.read())
    print(report.DOCUMENT)


if __name__ == "__main__":
    main()
