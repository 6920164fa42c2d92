"""The command line: ``virtualflow run``, ``profile``, ``status``, ``scale``, ``drain`` and ``coordinator``.

Commands of other parts of the project (``virtualflow simulate``) are found by the entry points of the group
:data:`COMMANDS`: the library knows their names, and nothing of what they do.

What is wrong with a request is said in one line on standard error. Exit codes: 0 success; 1 the job failed or
the coordinator said no; 2 the request makes no sense and nothing was started; 130 and 143 stopped by SIGINT
and SIGTERM. Modules are imported when a command needs them, so that the command line starts fast; none of
them imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.first_process import obey_sigterm
from virtualflow.settings import (
    BACKOFF_LIMIT,
    CHECKPOINT_KEEP,
    CHECKPOINT_SECONDS,
    ENV_COORDINATOR,
    ENV_TOKEN,
    MAX_WORKERS,
    VIRTUAL_NODES,
    WORKERS,
    CoordinatorSettings,
    MembershipSettings,
    SignalSettings,
)

if TYPE_CHECKING:
    from virtualflow.calls import Status
    from virtualflow.signals import CoordinatorClient

EXIT_FAILED = 1
EXIT_USAGE = 2

COMMANDS = "virtualflow.commands"
"""The group of entry points: each is a function from the arguments behind the command's name to the exit code."""

_ELSEWHERE = {"simulate": "play a trace of jobs against scheduling policies"}
"""Commands of other parts, with their line of help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code.

    Args:
        arguments: without the program's name; ``None``: those of this process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given and given[0] in _ELSEWHERE:
            return _elsewhere(given[0])(given[1:])
        parsed = _parser().parse_args(given)
        action: Callable[[argparse.Namespace], int] = parsed.action
        return action(parsed)
    except ConfigurationError as error:
        complain(str(error))
        return EXIT_USAGE
    except VirtualFlowError as error:
        complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def complain(sentence: str) -> None:
    """Say in one line on standard error what is wrong."""
    print(f"virtualflow: {' '.join(sentence.split())}", file=sys.stderr)


def _elsewhere(name: str) -> Callable[[Sequence[str]], int]:
    from importlib.metadata import entry_points

    for entry in entry_points(group=COMMANDS, name=name):
        try:
            command: Callable[[Sequence[str]], int] = entry.load()
        except ModuleNotFoundError as error:
            if not entry.module.startswith(f"{error.name}."):
                raise
        else:
            return command
    raise ConfigurationError(
        f"virtualflow {name} comes with the operator's part, which this installation does not have or not know of; "
        "install the whole project with pip, and a checkout again after an update"
    )


class Parser(argparse.ArgumentParser):
    """Complains in one line instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        """End the process, as argparse has it."""
        complain(f"{message} (see {self.prog} --help)")
        sys.exit(EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="virtualflow",
        description="Elastic training over a fixed number of virtual nodes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_run(
        commands.add_parser("run", help="run a script or a manifest as processes of this machine", allow_abbrev=False)
    )
    _add_profile(
        commands.add_parser("profile", help="measure a script on this device, for jobs to come", allow_abbrev=False)
    )
    _add_signals(commands)
    for name, text in _ELSEWHERE.items():
        commands.add_parser(name, help=text, add_help=False)
    _add_coordinator(commands.add_parser("coordinator", help="serve the coordinator of one job", allow_abbrev=False))
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        from virtualflow import __version__

        print(f"virtualflow {__version__}")
        sys.exit(0)


# --- virtualflow run --------------------------------------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "virtualflow run [OPTIONS] (SCRIPT [ARGS ...] | -f JOB.yaml)"
    parser.set_defaults(action=_run)
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--workers", type=int, metavar="N", help=f"worker processes (default {WORKERS}, or the manifest's)"
    )
    job.add_argument(
        "--virtual-nodes",
        type=int,
        metavar="V",
        help=f"overrides the script's and the manifest's (default {VIRTUAL_NODES})",
    )
    job.add_argument(
        "--schedule",
        metavar="STEP:ACTION,...",
        help="rehearse: =N, kill, kill:K, term, hang, slow:K, fast, coordinator, all",
    )
    job.add_argument(
        "-f", dest="manifest", metavar="JOB.yaml", help="run a VirtualFlowJob manifest instead of a script"
    )
    job.add_argument("--name", help="what the other commands call this job (default: after the script)")
    results = parser.add_argument_group("what it leaves behind")
    results.add_argument("--report", metavar="FILE", help="JSON: digests, steps, membership changes, metrics")
    results.add_argument(
        "--audit", metavar="FILE", help="JSON lines: who processed which samples, per step and virtual node"
    )
    results.add_argument("--log-dir", metavar="DIR", help="keep the output of every process there")
    checkpoints = parser.add_argument_group("checkpoints")
    checkpoints.add_argument(
        "--checkpoint-dir", metavar="DIR", help="write checkpoints there and resume from the newest"
    )
    checkpoints.add_argument("--checkpoint-steps", type=int, metavar="N", help="every N steps")
    checkpoints.add_argument(
        "--checkpoint-seconds",
        type=float,
        metavar="T",
        help=f"every T seconds (default {CHECKPOINT_SECONDS:g})",
    )
    checkpoints.add_argument(
        "--checkpoint-keep", type=int, metavar="K", help=f"keep the last K (default {CHECKPOINT_KEEP})"
    )
    running = parser.add_argument_group("how it runs")
    _add_heartbeat_limit(running)
    _add_rebalance_gain(running)
    running.add_argument(
        "--profile",
        metavar="FILE",
        help="what virtualflow profile has written here: a first guess of the workers' speed",
    )
    running.add_argument(
        "--port", type=int, default=0, metavar="P", help="of the coordinator (default: any that is free)"
    )
    running.add_argument("--plain", action="store_true", help="lines instead of the live view")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments, passed on untouched")
    parser.epilog = (
        "Ctrl-C lets all workers leave at the same step, after a checkpoint where there is a directory for "
        "one; a second Ctrl-C ends them at once. Killed workers are replaced, up to "
        f"{BACKOFF_LIMIT} times in a row without progress."
    )


def _add_heartbeat_limit(parser: argparse._ActionsContainer) -> None:
    limit = MembershipSettings().heartbeat_limit
    parser.add_argument(
        "--heartbeat-limit",
        type=float,
        default=limit,
        metavar="S",
        help=f"give up a worker that was silent for S seconds (default {limit:g})",
    )


def _add_rebalance_gain(parser: argparse._ActionsContainer) -> None:
    gain = MembershipSettings().rebalance_gain
    parser.add_argument(
        "--rebalance-gain",
        type=float,
        default=gain,
        metavar="G",
        help=f"move virtual nodes to faster workers where that saves this share of a step (default {gain:g}; 1: never)",
    )


def _run(arguments: argparse.Namespace) -> int:
    from virtualflow.local.options import resolve

    options = resolve(arguments)
    from virtualflow.local.runner import run

    return run(options)


# --- virtualflow profile ----------------------------------------------------------------------------------------------


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.usage = "virtualflow profile [OPTIONS] SCRIPT [ARGS ...]"
    parser.set_defaults(action=_profile)
    parser.description = (
        "Measure how long micro-batches of a training script take on this device, and how much memory: with the "
        "samples of one virtual node, of two, of four, ... as far as memory allows. The script runs unchanged, as one "
        "process; its loop gets some hundred micro-batches, nothing is trained or saved, and it is ended before the "
        "code that follows the training."
    )
    parser.add_argument("--out", metavar="FILE", help="the profile (default: SCRIPT.profile.json in this directory)")
    parser.add_argument(
        "--virtual-nodes", type=int, metavar="V", help=f"overrides the script's (default {VIRTUAL_NODES})"
    )
    parser.add_argument("--sizes", metavar="1,2,...", help="measure only these numbers of virtual nodes at a time")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments, passed on untouched")
    parser.epilog = (
        "Peak memory is what tensors take beyond model and optimizer: the micro-batch, activations and gradients. Keep "
        "the device otherwise idle, and give the same VIRTUALFLOW_THREADS as the job will have."
    )


def _profile(arguments: argparse.Namespace) -> int:
    from virtualflow.local.profile import profile

    return profile(arguments)


# --- virtualflow status, scale, drain ---------------------------------------------------------------------------------


def _add_signals(commands: argparse._SubParsersAction[Parser]) -> None:
    status = commands.add_parser("status", help="show what a running job is doing", allow_abbrev=False)
    status.add_argument("job", nargs="?", metavar="NAME", help="of the job; not needed when only one is running")
    status.add_argument("--json", action="store_true", help="all of it, as JSON")
    status.set_defaults(action=_status)
    scale = commands.add_parser("scale", help="change the number of workers of a running job", allow_abbrev=False)
    scale.add_argument("workers", type=int, metavar="N")
    scale.set_defaults(action=_scale)
    drain = commands.add_parser(
        "drain", help="let a worker leave a running job; another takes its place", allow_abbrev=False
    )
    drain.add_argument("worker", metavar="WORKER")
    drain.add_argument("--deadline", type=float, metavar="S", help="it must have left in S seconds")
    drain.set_defaults(action=_drain)
    for command in (scale, drain):
        command.add_argument("--job", metavar="NAME", help="of the job; not needed when only one is running")
    for command in (status, scale, drain):
        command.add_argument(
            "--coordinator",
            metavar="URL",
            help=f"of a job elsewhere; its token is taken from {ENV_TOKEN} in the environment",
        )


def _status(arguments: argparse.Namespace) -> int:
    async def show(client: CoordinatorClient, name: str) -> None:
        status: Status = await client.status()
        if arguments.json:
            from virtualflow.messages import encode

            print(encode(status).decode())
        else:
            from virtualflow.local.view import describe_status

            print(describe_status(name, status))

    return _with_job(arguments, show)


def _scale(arguments: argparse.Namespace) -> int:
    from virtualflow.calls import ScaleCall

    if not 1 <= arguments.workers <= MAX_WORKERS:
        raise ConfigurationError(f"a job has between 1 and {MAX_WORKERS} workers, not {arguments.workers}")

    async def scale(client: CoordinatorClient, name: str) -> None:
        virtual_nodes = (await client.status()).virtual_nodes
        if virtual_nodes is not None and arguments.workers > virtual_nodes:
            raise ConfigurationError(
                f"{name} has {virtual_nodes} virtual nodes; {arguments.workers} workers cannot share them"
            )
        print(f"{name}: {await client.send(ScaleCall(arguments.workers))}")

    return _with_job(arguments, scale)


def _drain(arguments: argparse.Namespace) -> int:
    import msgspec

    from virtualflow.calls import DrainCall

    try:
        call = msgspec.convert(
            {
                "workers": [arguments.worker],
                "deadline": arguments.deadline,
                "reason": "asked to by virtualflow drain",
            },
            DrainCall,
        )
    except msgspec.ValidationError:
        raise ConfigurationError(
            f"cannot drain {arguments.worker!r} in {arguments.deadline} s; see virtualflow status"
        ) from None

    async def drain(client: CoordinatorClient, name: str) -> None:
        print(f"{name}: {await client.send(call)}")

    return _with_job(arguments, drain)


def _with_job(arguments: argparse.Namespace, act: Callable[..., object]) -> int:
    import asyncio

    from virtualflow.signals import CoordinatorClient

    if arguments.coordinator is not None:
        name, url, token = arguments.coordinator, arguments.coordinator, _token()
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"--coordinator {url}: write http://host:port")
    else:
        from virtualflow.local.registry import find

        job = find(arguments.job)
        name, url, token = job.name, job.url, job.token

    async def talk() -> None:
        async with CoordinatorClient(url, token, SignalSettings()) as client:
            outcome = act(client, name)
            assert asyncio.iscoroutine(outcome)
            await outcome

    asyncio.run(talk())
    return 0


# --- virtualflow coordinator ------------------------------------------------------------------------------------------


def _add_coordinator(parser: argparse.ArgumentParser) -> None:
    parser.description = f"Serve the coordinator of one job. Its token is taken from {ENV_TOKEN} in the environment."
    parser.add_argument("--host", required=True, metavar="H", help="the address to listen on")
    parser.add_argument(
        "--port", required=True, type=int, metavar="P", help="the port to listen on; 0 for any that is free"
    )
    parser.add_argument("--wanted", type=int, default=1, metavar="N", help="how many workers to start with (default 1)")
    parser.add_argument(
        "--minimum", type=int, default=1, metavar="N", help="begin with no fewer workers than that (default 1)"
    )
    grace = MembershipSettings().startup_grace
    parser.add_argument(
        "--startup-grace",
        type=float,
        default=grace,
        metavar="S",
        help=f"once the minimum is ready, wait S seconds for the others that are wanted (default {grace:g})",
    )
    _add_heartbeat_limit(parser)
    _add_rebalance_gain(parser)
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="write http://host:port there once it listens")
    parser.set_defaults(action=_coordinator)


def _coordinator(arguments: argparse.Namespace) -> int:
    if os.getpid() == 1:
        obey_sigterm()
    token = _token()
    if arguments.wanted < 1:
        raise ConfigurationError(f"--wanted {arguments.wanted}: a job needs at least one worker")
    if not 1 <= arguments.minimum <= MAX_WORKERS:
        raise ConfigurationError(f"--minimum {arguments.minimum}: it must be between 1 and {MAX_WORKERS}")
    if not 0 <= arguments.startup_grace <= 86_400:
        raise ConfigurationError(f"--startup-grace {arguments.startup_grace:g}: it must be between 0 and 86400 seconds")
    if not 0 <= arguments.port <= 65_535:
        raise ConfigurationError(f"--port {arguments.port}: a port is between 1 and 65535, or 0 for any that is free")
    if not arguments.heartbeat_limit > 0:
        raise ConfigurationError(f"--heartbeat-limit {arguments.heartbeat_limit:g}: it must be positive")
    if not 0 < arguments.rebalance_gain <= 1:
        raise ConfigurationError(f"--rebalance-gain {arguments.rebalance_gain:g}: it must be above 0 and at most 1")
    import logging

    from virtualflow.coordinator import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    membership = MembershipSettings(
        heartbeat_limit=arguments.heartbeat_limit,
        startup_grace=arguments.startup_grace,
        rebalance_gain=arguments.rebalance_gain,
    )
    return serve(
        arguments.host,
        arguments.port,
        token,
        arguments.wanted,
        CoordinatorSettings(membership=membership),
        arguments.ready_file,
        arguments.minimum,
    )


def _token() -> str:
    token = os.environ.get(ENV_TOKEN, "").strip()
    if not token:
        raise ConfigurationError(
            f"set {ENV_TOKEN} to the job's token (the one beside {ENV_COORDINATOR} of its workers)"
        )
    return token
