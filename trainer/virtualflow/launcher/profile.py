"""``virtualflow profile`` and ``virtualflow explain``: run a user's script to measure it, or to see how its gradients
travel, and not to train.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import IO

from virtualflow.atomic_file import write_whole
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.launcher.options import check_target, check_trainer
from virtualflow.launcher.supervisor import describe_exit, ourselves, run_to_end
from virtualflow.launcher.training_program import ALLOCATOR_ENVIRONMENT, TrainingProgram
from virtualflow.protocol.device_profile import DeviceProfile, describe, encode, read_profile
from virtualflow.protocol.exchange_report import BucketReport, ExchangeReport, Traffic, read_report
from virtualflow.protocol.settings import (
    ENV_AUDIT_DIR,
    ENV_COORDINATOR,
    ENV_EXPLAIN_OUT,
    ENV_IDENTITY,
    ENV_PROFILE,
    ENV_PROFILE_OUT,
    ENV_PROFILE_SIZES,
    ENV_TERMINATION_LOG,
    ENV_TOKEN,
    ENV_VIRTUAL_NODES,
    ENV_WORKER,
)
from virtualflow.protocol.wording import counted, format_bytes, milliseconds

_NOT_FOR_IT = (ENV_COORDINATOR, ENV_TOKEN, ENV_IDENTITY, ENV_WORKER, ENV_PROFILE, ENV_AUDIT_DIR, ENV_TERMINATION_LOG)
"""What the environment may say about workers of a job, of which there is none here."""

_QUIET = ALLOCATOR_ENVIRONMENT | {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Memory as workers have it; torch counts it by its profiler, which talks about itself otherwise."""


def profile(arguments: Namespace) -> int:
    """Measure a script and write its profile; the exit code."""
    program = TrainingProgram(arguments.script, arguments.module)
    target = target_of(program) if arguments.out is None else Path(arguments.out)
    measured = measure(program, arguments.args, target, virtual_nodes=arguments.virtual_nodes, sizes=arguments.sizes)
    print(describe(measured))
    print(f"written to {target}: name it with virtualflow run --profile, or as the profile of a worker group")
    return 0


def target_of(program: TrainingProgram) -> Path:
    """Where the profile of a script goes unless a user says otherwise."""
    return Path(f"{program.title}.profile.json")


def measure(
    program: TrainingProgram,
    arguments: Sequence[str],
    target: Path,
    *,
    virtual_nodes: int | None = None,
    sizes: str | None = None,
    output: IO[bytes] | None = None,
) -> DeviceProfile:
    """Measure a script and write its profile.

    Args:
        sizes: in virtual nodes, with commas between them, instead of those that suggest themselves.
        output: where what the script writes goes; ``None``: where ours goes.
    """
    program.check()
    check_trainer()
    check_target(target, "--out")
    environment = _QUIET | {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT}
    if virtual_nodes is not None:
        environment[ENV_VIRTUAL_NODES] = str(virtual_nodes)
    if sizes is not None:
        if not all(word.strip().isdecimal() and int(word) > 0 for word in sizes.split(",")):
            raise ConfigurationError(f"--sizes {sizes}: write numbers of virtual nodes like 1,2,4")
        environment[ENV_PROFILE_SIZES] = sizes
    with tempfile.TemporaryDirectory(prefix="virtualflow-") as directory:
        written = Path(directory) / "profile.json"
        environment[ENV_PROFILE_OUT] = str(written)
        code = run_to_end([sys.executable, "-u", *program.words, *arguments], environment, output=output)
        if code != 0:
            raise VirtualFlowError(
                f"{program} ended with {describe_exit(code)} before it was measured; no profile was written"
            )
        if not written.exists():
            raise VirtualFlowError(
                f"{program} ended without training anything, so there is nothing to measure; it must iterate over the "
                "run of vf.elastic and over the micro-batches of its steps"
            )
        measured = read_profile(written)
    try:
        write_whole(target, encode(measured))
    except OSError as error:
        raise VirtualFlowError(f"the profile cannot be written to {target}: {error.strerror}") from error
    return measured


# --- virtualflow explain: run some steps of a script, and say how its gradients travel and why ------------------------

_NEVER = "31536000"
"""Seconds between two checkpoints: the script's own are neither read nor written."""
_FEW = 3
"""Names that stand for a bucket."""


def explain(arguments: Namespace) -> int:
    """Run some steps and print how gradients travelled; the exit code.

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
            print(describe_exchange(read_report(written)))
    return 0


def _command(given: Namespace, program: TrainingProgram, directory: Path) -> list[str]:
    command = ourselves("run", "--plain", "--workers", str(given.workers))
    command += ["--stop-after", str(given.steps), "--rebalance-gain", "1"]
    command += ["--checkpoint-dir", str(directory / "checkpoints"), "--checkpoint-seconds", _NEVER]
    command += ["--insecure-plaintext"] * given.insecure_plaintext
    if given.virtual_nodes is not None:
        command += ["--virtual-nodes", str(given.virtual_nodes)]
    return [*command, *program.words, *given.args]


def describe_exchange(report: ExchangeReport) -> str:
    workers = len(report.rows)
    if workers == 1:
        return "one worker: nothing travels; ask for more by --workers"
    sums = ", ".join(map(str, report.rows))
    whole = sum(bucket.bytes for bucket in report.buckets)
    ways = " and ".join(dict.fromkeys(bucket.way for bucket in report.buckets))
    sent, received = map(format_bytes, report.beside)
    lines = [
        _verdict(report),
        "",
        f"step {report.step}: {counted(workers, 'worker')} that contribute {sums} sums of {format_bytes(whole)}, "
        f"{counted(len(report.buckets), 'bucket')}, by {ways}",
        f"measured by {report.worker}: the median of {counted(report.steps, 'step')} with this schedule; beside the "
        f"buckets it sends {sent} and receives {received}: headers, and new values of a sharded optimizer",
        _describe_network(report),
        *_describe_partial(report),
    ]
    groups = [list(group) for _, group in groupby(enumerate(report.buckets, 1), _alike)]
    for group in groups:
        lines += ["", *_describe_buckets(group[0][0], [bucket for _, bucket in group])]
    return "\n".join(lines)


def _verdict(report: ExchangeReport) -> str:
    """What a step sends and what that costs, beside what the schedule says of both, in one sentence."""
    traffic = report.traffic
    known = [bucket.predicted[bucket.way] for bucket in report.buckets if bucket.way in bucket.predicted]
    predicted = f" (predicted: {_seconds(sum(known))})" if known else ""
    return (
        f"the exchange sends {format_bytes(traffic.sent)} a step, the schedule's bound is "
        f"{format_bytes(traffic.planned_sent)}; it takes {_seconds(traffic.seconds)}{predicted}, "
        f"{_hidden(traffic.seconds, traffic.exposed)} hidden beside the backward pass"
    )


def _describe_network(report: ExchangeReport) -> str:
    network = report.network
    source = "measured when the last worker joined" if report.measured else "assumed, since so little is not measured"
    latency = _seconds(network["latency"])
    return (
        f"network, {source}: messages take {latency} and bring {_speed(network['byte'])}; "
        f"additions {_speed(network['add_byte'])}; beside a backward pass {network['hidden']:.0%} of that is hidden"
    )


def _describe_partial(report: ExchangeReport) -> Iterator[str]:
    """What is not sent since backward passes end early."""
    if report.sent != report.sent_if_whole:
        sent, whole = sum(report.sent), sum(report.sent_if_whole)
        each = ", ".join(map(format_bytes, report.sent))
        yield (
            f"since backward passes end early, all workers together send {format_bytes(sent)} of gradients, "
            f"{sent / whole:.0%} of {format_bytes(whole)} (by worker: {each})"
        )


def _alike(numbered: tuple[int, BucketReport]) -> tuple[object, ...]:
    _, bucket = numbered
    return bucket.dtype, bucket.program, bucket.way, bucket.reason, bucket.refused, list(bucket.predicted)


def _describe_buckets(number: int, buckets: Sequence[BucketReport]) -> list[str]:
    """Some buckets in a row, from ``number`` on, that are alike in all but their size."""
    bucket, tensors = buckets[0], [name for each in buckets for name in each.tensors]
    names = ", ".join(tensors[:_FEW])
    if len(tensors) > _FEW:
        names += f" and {len(tensors) - _FEW} more"
    when = "beside the backward pass" if bucket.overlapped else "behind the step headers"
    several = len(buckets) > 1
    which = f"buckets {number} to {number + len(buckets) - 1}" if several else f"bucket {number}"
    each = " (each, the median)" if several else ""
    lines = [
        f"{which}: {format_bytes(sum(one.bytes for one in buckets))} of {bucket.dtype} ({names})",
        f"  {bucket.way}, {when}; {bucket.reason}",
        f"  stages: {bucket.program}",
        *_describe_traffic([one.traffic for one in buckets], each),
    ]
    if bucket.predicted:
        seconds = {way: median(one.predicted[way] for one in buckets) for way in bucket.predicted}
        lines.append(f"  predicted{each}: {', '.join(f'{way} {_seconds(took)}' for way, took in seconds.items())}")
    return [*lines, *(f"  no further {rewrite}: {why}" for rewrite, why in bucket.refused.items())]


def _describe_traffic(parts: Sequence[Traffic], each: str) -> Iterator[str]:
    """What some buckets have moved together, and how long one of them has travelled."""
    moved = sum(part.sent for part in parts), sum(part.received for part in parts)
    planned = sum(part.planned_sent for part in parts), sum(part.planned_received for part in parts)
    wanted = "as planned" if moved == planned else f"planned: {_both_ways(planned)}"
    yield f"  measured: {_both_ways(moved)}, {wanted}"
    seconds, exposed = median(part.seconds for part in parts), median(part.exposed for part in parts)
    yield f"  measured{each}: {_seconds(seconds)} from setting out to the sums, {_hidden(seconds, exposed)} hidden"


def _both_ways(moved: tuple[int, int]) -> str:
    return f"{format_bytes(moved[0])} sent and {format_bytes(moved[1])} received"


def _hidden(seconds: float, exposed: float) -> str:
    return f"{_seconds(seconds - exposed)} of it" if seconds > exposed else "none of it"


def _seconds(value: float) -> str:
    return milliseconds(1e3 * value)


def _speed(seconds_a_byte: float) -> str:
    return f"{1e-9 / seconds_a_byte:.2g} GB/s" if seconds_a_byte else "no time a byte"
