"""What can be said on the command line: the options of each subcommand, their ranges and their help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from virtualflow.coordinator.settings import LEAST_HANG_LIMIT, LEAST_HEARTBEAT_LIMIT, MembershipSettings
from virtualflow.launcher.usage import Number, Parser
from virtualflow.protocol.environment import ABOVE_ZERO
from virtualflow.protocol.settings import (
    BACKOFF_LIMIT,
    CHECKPOINT_KEEP,
    CHECKPOINT_SECONDS,
    ENV_IDENTITY,
    ENV_TOKEN,
    MAX_PROCESSES,
    MAX_VIRTUAL_NODES,
    MAX_WORKERS,
    ON_NON_FINITE,
    REDUNDANCIES,
    SHARD_CHOICES,
    VIRTUAL_NODES,
    WORKERS,
)

_MEMBERSHIP = MembershipSettings()
_EXPLAIN_STEPS = 10
"""Steps whose exchanges ``virtualflow explain`` measures; in the first one nothing begins early."""
_CHECK_STEPS = 6
"""Steps of each run of ``virtualflow check``: enough for a worker to join, and to show what has gone wrong."""
_CHECK_WORKERS = 8
"""The most workers of such a run: each is a process that holds the whole model."""
_CHECK_LIMIT = 600.0
"""How long such a run may take."""
_TURN_LIMIT = 30.0
"""``virtualflow turns``: how long a turn may take while others wait. It is far more than a step of a job that is
worth packing, and what others lose by one that hangs."""

# What the help of each command shows of its use; a test parses all of them.

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "": ("virtualflow check train.py", "virtualflow run --workers 3 train.py --lr 0.1"),
    "run": (
        "virtualflow run --workers 3 train.py --lr 0.1",
        "virtualflow run --workers 3 -m package.train --lr 0.1",
        'virtualflow run --schedule "10:=3,20:kill" --report report.json train.py',
        "virtualflow run --checkpoint-dir checkpoints -f job.yaml",
    ),
    "check": ("virtualflow check train.py --lr 0.1", "virtualflow check --steps 3 --workers 4 -m package.train"),
    "bisect": ("virtualflow bisect traces/alone traces/three-workers",),
    "profile": ("virtualflow profile train.py", "virtualflow profile --out v100.json --sizes 1,2 train.py --lr 0.1"),
    "plan": (
        "virtualflow plan --device 12GiB train.py",
        "virtualflow plan v100.json --device 12GiB",
        "virtualflow plan v100.json t4.json --devices V100:2,T4:4",
    ),
    "explain": ("virtualflow explain --workers 4 train.py --lr 0.1",),
    "report": ("virtualflow report report.json", "virtualflow report one.json other.json"),
    "status": ("virtualflow status", "virtualflow status train --json"),
    "scale": ("virtualflow scale 4", "virtualflow scale 4 --job train"),
    "drain": ("virtualflow drain worker-1", "virtualflow drain worker-1 --deadline 30"),
    "coordinator": ("VIRTUALFLOW_TOKEN=secret virtualflow coordinator --host 127.0.0.1 --port 7700 --wanted 2",),
    "turns": ("virtualflow turns /tmp/turns.sock",),
    "processes": ("virtualflow processes 2 -- python train.py --lr 0.1",),
}
"""By the command's name; of none of them: of all."""


Subcommand = Callable[[argparse.Namespace], int]

EXTERNAL = {
    "export": "write a checkpoint's weights as files that others read without this library",
    "simulate": "play a trace of jobs against scheduling policies",
}
"""Subcommands of other parts of the project, with their line of help."""

EXPLAIN_WORKERS = 2
"""The fewest between which anything travels."""

_DAY = 86_400
_LONGEST = 366 * _DAY


def build_parser(subcommands: Mapping[str, Subcommand]) -> Parser:
    """The parser of the whole command line; what it parses names its subcommand as ``action``."""
    parser = Parser(
        prog="virtualflow",
        description="Elastic training over a fixed number of virtual nodes.",
        epilog="virtualflow COMMAND --help says what each takes.",
        examples=EXAMPLES[""],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def add(name: str, help: str, *, advanced: bool = False) -> Parser:  # noqa: A002 - as argparse calls it
        listed: dict[str, Any] = {} if advanced else {"help": help}  # argparse lists what has a help
        if advanced:
            parser.advanced[name] = help
        if name in EXTERNAL:
            made: Parser = commands.add_parser(name, add_help=False, **listed)
            return made
        command: Parser = commands.add_parser(
            name, description=f"{help[0].upper()}{help[1:]}.", examples=EXAMPLES[name], allow_abbrev=False, **listed
        )
        command.set_defaults(action=subcommands[name])
        return command

    _add_run(add("run", "run a script or a manifest as processes of this machine"))
    _add_check(add("check", "run a script in several ways, and compare the bits of a few steps"))
    status = add("status", "show what a running job is doing")
    status.add_argument("job", nargs="?", metavar="NAME", help="of the job (optional; default: the one that runs)")
    status.add_argument("--json", action="store_true", help="all of it, as JSON")
    scale = add("scale", "change the number of workers of a running job")
    scale.add_argument(
        "workers",
        metavar="N",
        help="how many are wanted from now on",
        **_range(int, 1, MAX_WORKERS, "a job has between {} and {} workers"),
    )
    drain = add("drain", "let a worker leave a running job; another takes its place")
    drain.add_argument("worker", metavar="WORKER", help="its name, as virtualflow status shows it")
    drain.add_argument(
        "--deadline", metavar="S", help="it must have left in S seconds", **_range(float, 0, _LONGEST, _SECONDS)
    )
    for command in (scale, drain):
        command.add_argument("--job", metavar="NAME", help="of the job (default: the one that runs)")
    for command in (status, scale, drain):
        command.add_argument(
            "--coordinator",
            metavar="URL",
            help=f"of a job elsewhere, known to it by {ENV_IDENTITY} in the environment, or in plaintext by "
            f"{ENV_TOKEN} (default: one of this machine)",
        )
    add("export", EXTERNAL["export"])
    _add_report(add("report", "make a page of the report of a job that is over"))
    _add_coordinator(add("coordinator", "serve the coordinator of one job"))
    _add_bisect(add("bisect", "find the first step, virtual node and tensor in which two runs differ", advanced=True))
    _add_explain(add("explain", "run some steps, and say how their gradients travel and why", advanced=True))
    _add_profile(add("profile", "measure a script on this device, for jobs to come", advanced=True))
    _add_plan(add("plan", "say what fits into a device's memory, and which devices are worth it", advanced=True))
    add("simulate", EXTERNAL["simulate"], advanced=True)
    _add_turns(add("turns", "lend this machine's devices in turns to jobs that share them", advanced=True))
    _add_processes(add("processes", "be a worker of several processes, as in the pods of a job", advanced=True))
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        from virtualflow._version import __version__

        print(f"virtualflow {__version__}")
        sys.exit(0)


_BETWEEN = "it must be between {} and {}"
_SECONDS = f"{_BETWEEN} seconds"


def _range(kind: type, least: float, most: float, must: str = _BETWEEN) -> dict[str, Any]:
    """The part of an option's definition that says which numbers it takes."""
    return {"type": kind, "action": Number, "least": least, "most": most, "must": must.format(least, most)}


_AT_LEAST_1 = _range(int, 1, sys.maxsize, "it must be at least 1")
_PORT = _range(int, 0, 65_535, "a port is between 1 and {1}, or 0 for any that is free")
_ABOVE_ZERO = _range(float, ABOVE_ZERO, _LONGEST, "it must be above 0 and at most {1} seconds")
_WORKERS = _range(int, 1, MAX_WORKERS, "a job needs at least one worker, and {1} at most")


def _add_run(parser: Parser) -> None:
    parser.usage = "virtualflow run [OPTIONS] (SCRIPT [ARGS ...] | -m MODULE [ARGS ...] | -f JOB.yaml)"
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--workers",
        metavar="N",
        help=f"worker processes (default {WORKERS}, or the manifest's)",
        **_WORKERS,
    )
    job.add_argument(
        "--processes-per-worker",
        metavar="K",
        help="processes of each worker, as of a pod with several devices; they come and go together (default 1, or the "
        "manifest's)",
        **_range(int, 1, MAX_PROCESSES, "a worker has between {} and {} processes"),
    )
    job.add_argument(
        "--virtual-nodes",
        metavar="V",
        help=f"overrides the script's and the manifest's (default {VIRTUAL_NODES})",
        **_range(int, 1, MAX_VIRTUAL_NODES, "a job needs at least one virtual node, and {1} at most"),
    )
    job.add_argument(
        "--schedule",
        metavar="STEP:ACTION,...",
        help="inject faults: =N, kill, kill:K, term, hang, slow:K, fast, coordinator, all",
    )
    job.add_argument("--stop-after", metavar="STEP", help="make no step after it (default: make all)", **_AT_LEAST_1)
    job.add_argument(
        "-f", dest="manifest", metavar="JOB.yaml", help="run a VirtualFlowJob manifest instead of a script"
    )
    job.add_argument("--name", help="what the other commands call this job (default: after the script)")
    results = parser.add_argument_group("what it leaves behind")
    results.add_argument("--report", metavar="FILE", help="JSON: digests, steps, membership changes, metrics")
    results.add_argument(
        "--audit", metavar="FILE", help="JSON lines: who processed which samples, per step and virtual node"
    )
    results.add_argument(
        "--trace", metavar="DIR", help="hashes of all that each step computes, for virtualflow bisect; slow"
    )
    results.add_argument("--log-dir", metavar="DIR", help="keep the output of every process there")
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    running = parser.add_argument_group("how it runs")
    _add_membership(running)
    running.add_argument(
        "--on-non-finite",
        choices=tuple(ON_NON_FINITE),
        help="once a metric is NaN or infinite, go on (as by default, and say so) or stop before the next checkpoint",
    )
    running.add_argument(
        "--verify",
        metavar="SHARE",
        help="in this share of the steps (for example 0.01), let a second worker compute one virtual node: one whose "
        "gradients are wrong is evicted before they are used (default 0: nobody does)",
        **_range(float, 0, 1, "it must be from {0} to {1}"),
    )
    for option, whose in (("--device-memory", "the device's memory"), ("--host-memory", "the host's for it")):
        running.add_argument(
            option,
            metavar="SIZE",
            help=f"{whose} that each worker may use, like 24GiB (default: what the script's memory= says)",
        )
    running.add_argument(
        "--shard",
        choices=tuple(SHARD_CHOICES.values()),
        help="divide this over the workers: the optimizer's state, or the parameters too, where a model is too large "
        "for a worker; hybrid: the parameters over the processes of each worker (default: what the script's shard= "
        "says)",
    )
    running.add_argument(
        "--redundancy",
        choices=tuple(REDUNDANCIES.values()),
        help="who else has a worker's share: another worker, the newest checkpoint, or nobody, with whom the job "
        "begins anew (default: what the script's redundancy= says)",
    )
    running.add_argument(
        "--profile",
        metavar="FILE",
        help="what virtualflow profile has written here: a first guess of the workers' speed",
    )
    running.add_argument(
        "--turns",
        metavar="SOCKET",
        help="of virtualflow turns: compute in turns with other jobs on the same devices, while they exchange",
    )
    running.add_argument(
        "--port", default=0, metavar="P", help="of the coordinator (default: any that is free)", **_PORT
    )
    _add_plaintext(running)
    running.add_argument(
        "--web", action="store_true", help="print the address of the job's live page, for a browser of this machine"
    )
    running.add_argument("--plain", action="store_true", help="lines instead of the live view")
    _add_script(parser, required=False)
    parser.epilog = (
        "Ctrl-C lets all workers leave at the same step, after a checkpoint where there is a directory for "
        "one; a second Ctrl-C ends them at once. Killed workers are replaced, up to "
        f"{BACKOFF_LIMIT} times in a row without progress."
    )


def _add_plaintext(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--insecure-plaintext",
        action="store_true",
        help="encrypt nothing, and let one token, in the environment of all processes, open everything",
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--checkpoint-dir", metavar="DIR", help="write checkpoints there and resume from the newest")
    group.add_argument(
        "--checkpoint-memory",
        action="store_true",
        help="while there is only one worker, keep a copy of its state in the memory of the coordinator: if it dies, "
        "a few steps are repeated",
    )
    group.add_argument("--checkpoint-steps", metavar="N", help="every N steps (default: by time alone)", **_AT_LEAST_1)
    group.add_argument(
        "--checkpoint-seconds", metavar="T", help=f"every T seconds (default {CHECKPOINT_SECONDS:g})", **_ABOVE_ZERO
    )
    group.add_argument(
        "--checkpoint-keep", metavar="K", help=f"keep the last K (default {CHECKPOINT_KEEP})", **_AT_LEAST_1
    )
    group.add_argument("--sign", metavar="KEY.pem", help="sign them, and resume from signed ones alone")
    group.add_argument("--trust", metavar="PUBLIC.pem", help="resume also from those that these keys have signed")


def _add_membership(parser: argparse._ActionsContainer) -> None:
    limit, gain = _MEMBERSHIP.heartbeat_limit, _MEMBERSHIP.rebalance_gain
    parser.add_argument(
        "--heartbeat-limit",
        default=limit,
        metavar="S",
        help=f"declare a worker lost that was silent for S seconds (default {limit:g})",
        **_range(float, LEAST_HEARTBEAT_LIMIT, _DAY, _SECONDS),
    )
    parser.add_argument(
        "--hang-seconds",
        metavar="S",
        help="declare a worker lost whose training thread makes no progress for S seconds while others wait for it "
        f"(default: {_MEMBERSHIP.hang_steps:g} times the job's slowest step, at least "
        f"{_MEMBERSHIP.hang_floor:g})",
        **_range(float, LEAST_HANG_LIMIT, _DAY, _SECONDS),
    )
    parser.add_argument(
        "--rebalance-gain",
        default=gain,
        metavar="G",
        help=f"move virtual nodes to faster workers where that saves this share of a step (default {gain:g}; 1: never)",
        **_range(float, ABOVE_ZERO, 1, "it must be above 0 and at most 1 (1: never)"),
    )


def _add_script(parser: Parser, *, required: bool) -> None:
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="SCRIPT is a module, like package.train, as for python -m",
    )
    text = "the training script" if required else "the training script; without it, say -f"
    parser.add_argument("script", nargs=None if required else "?", metavar="SCRIPT", help=text)
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments, passed on untouched (optional)"
    )


_OVERRIDES = f"overrides the script's (default {VIRTUAL_NODES})"


def _add_virtual_nodes(
    parser: Parser, says: str = _OVERRIDES, least: int = 1, refusal: str = "a job has between {} and {}"
) -> None:
    parser.add_argument("--virtual-nodes", metavar="V", help=says, **_range(int, least, MAX_VIRTUAL_NODES, refusal))


def _add_steps(parser: Parser, steps: int, says: str) -> None:
    says += f" (default {steps}, or all that the script makes)"
    parser.add_argument("--steps", default=steps, metavar="N", help=says, **_AT_LEAST_1)


def _add_check(parser: Parser) -> None:
    parser.usage = "virtualflow check [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.description = (
        "Does a script come to the same bits however it is run? It makes a few steps on one worker, with another "
        "PYTHONHASHSEED, with a step made twice, on two workers, on one for each virtual node, with a worker that "
        "joins and with one that is killed. Samples, gradients, state and metrics are compared; the first difference "
        "is named, with its usual cause."
    )
    _add_steps(parser, _CHECK_STEPS, "of each run")
    _add_virtual_nodes(parser, least=2, refusal="a check needs between {} and {}")
    parser.add_argument(
        "--workers",
        default=_CHECK_WORKERS,
        metavar="N",
        help=f"the most of any run (default {_CHECK_WORKERS}, or the number of virtual nodes)",
        **_range(int, 2, MAX_WORKERS, "a check needs between {} and {}"),
    )
    parser.add_argument(
        "--processes", metavar="N", help="workers of all runs at the same time (default: one a core)", **_AT_LEAST_1
    )
    parser.add_argument(
        "--timeout",
        default=_CHECK_LIMIT,
        metavar="S",
        help=f"how long each run may take (default {_CHECK_LIMIT:g})",
        **_ABOVE_ZERO,
    )
    _add_plaintext(parser)
    _add_script(parser, required=True)
    parser.epilog = (
        "The script runs as it stands, so what it writes itself it writes; its checkpoints go elsewhere and are "
        "deleted. Exit codes: 0 equal, 1 a difference, 2 the script could not be run."
    )


def _add_processes(parser: Parser) -> None:
    parser.usage = "virtualflow processes K -- COMMAND [ARGS ...]"
    parser.description = (
        "Run a command as the K processes of one worker: each is told which it is (LOCAL_RANK, LOCAL_WORLD_SIZE) and "
        "sees one of the accelerators. Signals are passed on, lines are printed behind the process's number, and the "
        "first process that ends badly ends the others. The pods of a job with processesPerWorker run it."
    )
    parser.add_argument(
        "count", metavar="K", help="how many", **_range(int, 2, MAX_PROCESSES, "it must be between {} and {}")
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each of them executes")


def _add_bisect(parser: Parser) -> None:
    parser.description = (
        "Compare two runs of one script that were made with virtualflow run --trace DIR, and name the first step, "
        "virtual node and tensor in which they differ. Exit codes: 0 equal, 1 a difference, 2 they cannot be compared."
    )
    parser.add_argument("one", metavar="DIR", help="the trace of a run")
    parser.add_argument("two", metavar="DIR", help="the trace of another")


def _add_report(parser: Parser) -> None:
    parser.description = (
        "Make one HTML file of what virtualflow run --report has written; it loads nothing. Of two reports, say also "
        "whether their bits are the same and what differs first."
    )
    parser.add_argument("report", type=Path, metavar="REPORT.json", help="the report")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER.json", help="one to compare it with (optional)")
    parser.add_argument(
        "--html", type=Path, nargs="?", metavar="FILE", help="the page (default: beside the first report)"
    )


def _add_profile(parser: Parser) -> None:
    parser.usage = "virtualflow profile [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.description = (
        "Measure how long micro-batches of a training script take on this device, and how much memory: with the "
        "samples of one virtual node, of two, of four, ... as far as memory allows. The script runs unchanged, as one "
        "process; its loop gets micro-batches of each size for some seconds, and then those of some steps. Nothing is "
        "saved, and it is ended before the code that follows a step."
    )
    parser.add_argument("--out", metavar="FILE", help="the profile (default: SCRIPT.profile.json in this directory)")
    _add_virtual_nodes(parser)
    parser.add_argument(
        "--sizes",
        metavar="1,2,...",
        help="measure only these numbers of virtual nodes at a time (default: 1, 2, 4, ...)",
    )
    _add_script(parser, required=True)
    parser.epilog = (
        "Peak memory is what tensors take beyond model and optimizer: the micro-batch, activations and gradients. Keep "
        "the device otherwise idle, and give the same VIRTUALFLOW_THREADS as the job will have."
    )


def _add_explain(parser: Parser) -> None:
    parser.usage = "virtualflow explain [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.description = (
        "Run some steps of a training script and print, for each bucket of gradients, the way that it takes between "
        "workers, the bytes and times that were measured, how much of the time is hidden beside the backward pass, the "
        "predicted times of the alternatives, and why further rewrites of its exchange are refused."
    )
    workers = f"worker processes (default {EXPLAIN_WORKERS})"
    parser.add_argument("--workers", default=EXPLAIN_WORKERS, metavar="N", help=workers, **_WORKERS)
    _add_steps(parser, _EXPLAIN_STEPS, "that are run; nothing begins early in the first one")
    _add_virtual_nodes(parser)
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    _add_plaintext(parser)
    _add_script(parser, required=True)
    parser.epilog = (
        "The script runs as it stands, so what it writes itself it writes; its checkpoints go elsewhere and are "
        "deleted. The schedule changes no bit of the result."
    )


def _add_plan(parser: Parser) -> None:
    parser.usage = "virtualflow plan [OPTIONS] (PROFILE ... | [PROFILE ...] (SCRIPT.py | -m MODULE) [ARGS ...])"
    parser.description = (
        "From a measured profile, or a script that is measured first: for each number of virtual nodes that fits "
        "into a device's memory, which blocks of the model are kept, swapped to the host and recomputed, how long a "
        "step takes, and how much memory. With several types of device, also which of them are worth asking for, and "
        "how they share the virtual nodes."
    )
    parser.add_argument(
        "profiles",
        nargs="*",
        metavar="PROFILE",
        help="one for each type of device; or a script that ends in .py, to be measured on this one, and its arguments",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs="+",
        metavar=("MODULE", "ARGS"),
        help="measure that module on this device, as python -m runs it; profiles stand before it, and end in .json",
    )
    parser.add_argument("--device", metavar="SIZE", help="the device's memory, like 24GiB (default: as in the profile)")
    parser.add_argument(
        "--host", metavar="SIZE", help="the host's memory for it (default: as in the profile; without: what is needed)"
    )
    parser.add_argument(
        "--optimizer", choices=("device", "host"), default="device", help="where its state is (default: device)"
    )
    parser.add_argument("--batch", metavar="N", help="samples of a step (default: as in the profile)", **_AT_LEAST_1)
    _add_virtual_nodes(
        parser, "plan for that number (default: from the smallest that fits; for --devices as in the profile)"
    )
    parser.add_argument(
        "--shard",
        choices=("parameters",),
        help="divide them: say how many such devices the model takes at least, with and without a plan of activations",
    )
    parser.add_argument(
        "--redundancy", choices=tuple(REDUNDANCIES.values()), help="of the shares, as virtualflow run has it"
    )
    parser.add_argument(
        "--devices",
        metavar="NAME:N,...",
        help="those that could be had; a name is a part of a profile's device, or of its file's name",
    )
    parser.add_argument(
        "--bandwidth",
        metavar="SPEED",
        help="between those devices, like 10Gbit: the exchange of gradients counts (default: it takes no time)",
    )
    parser.add_argument("--json", action="store_true", help="all of it, with the timelines, as JSON")
    parser.add_argument(
        "--trace", metavar="FILE", help="a virtual node of the first device as a Chrome trace, for ui.perfetto.dev"
    )
    parser.epilog = "What a script prints goes to standard error. Arguments that begin with a dash need -- before it."


def _add_coordinator(parser: Parser) -> None:
    parser.description = (
        f"Serve the coordinator of one job, by the identity in the folder {ENV_IDENTITY} of the environment, or, "
        f"without one, in plaintext with the token {ENV_TOKEN}."
    )
    parser.add_argument("--host", required=True, metavar="H", help="the address to listen on")
    parser.add_argument(
        "--port", required=True, metavar="P", help="the port to listen on; 0 for any that is free", **_PORT
    )
    for option, what in (
        ("--wanted", "how many workers to start with"),
        ("--minimum", "begin with no fewer workers than that"),
    ):
        parser.add_argument(option, default=1, metavar="N", help=f"{what} (default 1)", **_range(int, 1, MAX_WORKERS))
    grace = _MEMBERSHIP.startup_grace
    parser.add_argument(
        "--startup-grace",
        default=grace,
        metavar="S",
        help=f"once the minimum is ready, wait S seconds for the others that are wanted (default {grace:g})",
        **_range(float, 0, _DAY, _SECONDS),
    )
    _add_membership(parser)
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="write http://host:port there once it listens")


def _add_turns(parser: Parser) -> None:
    parser.description = (
        "Lend the devices of this machine to jobs that share them: while the gradients of one job are on their way, "
        "another computes. It serves all jobs that are run with --turns SOCKET, or VIRTUALFLOW_TURNS in their workers' "
        "environment, until it is ended. No bit of a result depends on it."
    )
    parser.add_argument("path", type=Path, metavar="SOCKET", help="where to listen: a path for a Unix socket")
    parser.add_argument(
        "--limit",
        default=_TURN_LIMIT,
        metavar="S",
        help=f"a turn that takes longer than S seconds ends for the sake of those who wait (default {_TURN_LIMIT:g})",
        **_range(float, ABOVE_ZERO, _DAY, "it must be above 0 and at most {1} seconds"),
    )
