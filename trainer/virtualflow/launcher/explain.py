"""``virtualflow explain``: run two steps of a script, and say how its gradients travel and why."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from virtualflow.errors import VirtualFlowError
from virtualflow.launcher.options import check_trainer
from virtualflow.launcher.supervisor import describe_exit, ourselves, run_to_end
from virtualflow.launcher.training_program import TrainingProgram
from virtualflow.protocol.exchange_report import BucketReport, ExchangeReport, read_report
from virtualflow.protocol.settings import ENV_EXPLAIN_OUT
from virtualflow.protocol.wording import counted, milliseconds

STEPS = 2
"""Nothing begins early in the first one: only then is it known that gradients stay as they are."""
_NEVER = "31536000"
"""Seconds between two checkpoints: the script's own are neither read nor written."""
_FEW = 3
"""Names that stand for a bucket."""


def explain(arguments: Namespace) -> int:
    """Run two steps and print how gradients travelled; the exit code.

    Raises:
        ConfigurationError: the script cannot be run; nothing has been started.
        VirtualFlowError: it failed, or trained nothing.
    """
    program = TrainingProgram(arguments.script, arguments.module)
    program.check()
    check_trainer()
    with tempfile.TemporaryDirectory(prefix="virtualflow-", ignore_cleanup_errors=True) as directory:
        written, said = Path(directory) / "exchange.json", Path(directory) / "said"
        environment = os.environ | {ENV_EXPLAIN_OUT: str(written)}
        with said.open("wb") as output:
            # A runner ends its workers when it is asked to.
            code = run_to_end(
                _command(arguments, program, Path(directory)), environment, output=output, interrupt=signal.SIGTERM
            )
        if code != 0:
            print(said.read_text("utf-8", "replace").rstrip(), file=sys.stderr)
            raise VirtualFlowError(f"{program} ended with {describe_exit(code)}; its output is above")
        if not written.exists():
            raise VirtualFlowError(
                f"{program} made no step, so there is nothing to explain; it must iterate over vf.elastic(...)"
            )
        if arguments.json:
            print(written.read_text())
        else:
            print(describe(read_report(written)))
    return 0


def _command(given: Namespace, program: TrainingProgram, directory: Path) -> list[str]:
    command = ourselves("run", "--plain", "--workers", str(given.workers))
    command += ["--stop-after", str(STEPS), "--rebalance-gain", "1"]
    command += ["--checkpoint-dir", str(directory / "checkpoints"), "--checkpoint-seconds", _NEVER]
    if given.virtual_nodes is not None:
        command += ["--virtual-nodes", str(given.virtual_nodes)]
    return [*command, *program.words, *given.args]


def describe(report: ExchangeReport) -> str:
    workers = len(report.rows)
    if workers == 1:
        return "one worker: nothing travels; ask for more by --workers"
    sums = ", ".join(map(str, report.rows))
    lines = [
        f"step {report.step}: {counted(workers, 'worker')} that contribute {sums} sums, "
        f"{counted(len(report.buckets), 'bucket')}",
        _describe_network(report),
    ]
    for number, bucket in enumerate(report.buckets, 1):
        lines += ["", *_describe_bucket(number, bucket)]
    return "\n".join(lines)


def _describe_network(report: ExchangeReport) -> str:
    network = report.network
    source = "measured when the last worker joined" if report.measured else "assumed, since so little is not measured"
    latency = milliseconds(1e3 * network["latency"])
    return (
        f"network, {source}: messages take {latency} and bring {_speed(network['byte'])}; "
        f"additions {_speed(network['add_byte'])}; beside a backward pass {network['hidden']:.0%} of that is hidden"
    )


def _describe_bucket(number: int, bucket: BucketReport) -> list[str]:
    names = ", ".join(bucket.tensors[:_FEW])
    if len(bucket.tensors) > _FEW:
        names += f" and {len(bucket.tensors) - _FEW} more"
    when = "beside the backward pass" if bucket.overlapped else "behind the step headers"
    lines = [
        f"bucket {number}: {_bytes(bucket.bytes)} of {bucket.dtype} ({names})",
        f"  {bucket.way}, {when}; {bucket.reason}",
        f"  stages: {bucket.program}",
    ]
    if bucket.predicted:
        weighed = ", ".join(f"{way} {milliseconds(1e3 * seconds)}" for way, seconds in bucket.predicted.items())
        lines.append(f"  predicted: {weighed}")
    return [*lines, *(f"  no further {rewrite}: {why}" for rewrite, why in bucket.refused.items())]


def _speed(seconds_a_byte: float) -> str:
    return f"{1e-9 / seconds_a_byte:.2g} GB/s" if seconds_a_byte else "no time a byte"


def _bytes(size: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
