"""Step times side by side: plain PyTorch, DistributedDataParallel and VirtualFlow, on the same micro-batches."""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys

from benchmarks.jobs import ROOT, environment, run_job


def times_of(output: str) -> list[float]:
    """The step times in what the workload printed."""
    return next(json.loads(line)["times"] for line in output.splitlines() if line.startswith('{"times"'))


def by_hand(regime: str, workers: int, arguments: list[str]) -> list[float]:
    """Run the workload without VirtualFlow."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.workload", regime, *arguments]
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment()
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(workers)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    outputs = [process.communicate()[0] for process in running]
    return times_of("\n".join(outputs))


def main() -> None:
    """Measure all and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print("median step; ratio to plain PyTorch or DDP at the same number of workers (below 1: VirtualFlow is faster)")
    for size, steps in (("small", "400"), ("large", "60")):
        for workers, regime in ((1, "plain"), (2, "ddp")):
            for virtual_nodes in ("2", "8"):
                arguments = ["--size", size, "--steps", steps, "--virtual-nodes", virtual_nodes]
                theirs, ours = [], []
                for _ in range(args.runs):
                    theirs.append(statistics.median(by_hand(regime, workers, arguments)))
                    script = ["benchmarks/workload.py", "virtualflow", *arguments]
                    _, output = run_job("--workers", workers, "--virtual-nodes", virtual_nodes, *script)
                    ours.append(statistics.median(times_of(output)))
                a, b = statistics.median(theirs), statistics.median(ours)
                print(
                    f"  {size:6} {workers} workers, {virtual_nodes} virtual nodes: {regime:5} {a:7.2f} ms, "
                    f"VirtualFlow {b:7.2f} ms, ratio {b / a:.2f}"
                )


if __name__ == "__main__":
    main()
