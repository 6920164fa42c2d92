"""The command line: ``virtualflow run``, ``check``, ``bisect``, ``profile``, ``plan``, ``explain``, ``report``,
``status``, ``scale``, ``drain``, ``coordinator``, ``turns`` and ``processes``.

Commands of other parts of the project (``virtualflow export``, ``simulate``) are found by the entry points of the group
:data:`COMMANDS`: the command line knows their names, and nothing of what they do.

What is wrong with a request is said in one line on standard error. Exit codes: 0 success; 1 the job failed or
the coordinator said no; 2 the request makes no sense and nothing was started; 130 and 143 stopped by SIGINT
and SIGTERM; 141 nobody reads its output any more, as a shell has it of SIGPIPE. Modules are imported when a
command needs them, so that the command line starts fast; none of them imports torch.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from virtualflow._process import obey_sigterm
from virtualflow.coordinator.settings import LEAST_HANG_LIMIT, CoordinatorSettings, LivePageSettings, MembershipSettings
from virtualflow.errors import ConfigurationError, VirtualFlowError, installed
from virtualflow.launcher.subcommands import EXTERNAL, Subcommand, build_parser
from virtualflow.launcher.usage import EXIT_FAILED, EXIT_UNREAD, EXIT_USAGE, Parser, complain
from virtualflow.protocol.environment import read_credential, read_number
from virtualflow.protocol.settings import ENV_CONFIRMED_START, ENV_HANG_SECONDS, ENV_LOG_DIR, SignalSettings
from virtualflow.protocol.wording import counted, printable

if TYPE_CHECKING:
    from virtualflow.protocol.http_client import CoordinatorClient

COMMANDS = "virtualflow.commands"
"""The group of entry points: each is a function from the arguments behind the command's name to the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code.

    Args:
        arguments: without the program's name; ``None``: those of this process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given and given[0] == "help":
            given = [*given[1:2], "--help"]
        if not given:
            parser().print_help()
            code = 0
        elif given[0] in EXTERNAL:
            code = _external(given[0])(given[1:])
        else:
            parsed = parser().parse_args(given)
            action: Subcommand = parsed.action
            with installed():
                code = action(parsed)
        sys.stdout.flush()  # a reader that has gone is noticed here
        return code
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        return EXIT_UNREAD
    except ConfigurationError as error:
        complain(str(error))
        return EXIT_USAGE
    except VirtualFlowError as error:
        complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _reader_has_gone() -> bool:
    """Whether nobody reads standard output any more (``| head``); then what is left of it goes nowhere."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    if not any(state & select.POLLERR for _, state in pipe.poll(0)):
        return False  # it was another pipe or a connection
    # The interpreter flushes once more at its end, and would complain.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def parser() -> Parser:
    subcommands: Mapping[str, Subcommand] = {
        "run": _run,
        "check": _check,
        "bisect": _bisect,
        "profile": _profile,
        "plan": _plan,
        "explain": _explain,
        "report": _report,
        "status": _status,
        "scale": _scale,
        "drain": _drain,
        "coordinator": _coordinator,
        "turns": _turns,
        "processes": _processes,
    }
    return build_parser(subcommands)


def _external(name: str) -> Callable[[Sequence[str]], int]:
    from importlib.metadata import entry_points

    for entry in entry_points(group=COMMANDS, name=name):
        try:
            command: Callable[[Sequence[str]], int] = entry.load()
        except ModuleNotFoundError as error:
            if error.name in ("torch", "safetensors"):
                raise ConfigurationError(
                    f"virtualflow {name} needs {error.name}: pip install 'virtualflow[trainer]'"
                ) from None
            if (error.name or "").partition(".")[0] != entry.module.partition(".")[0]:
                raise
        else:
            return command
    raise ConfigurationError(
        f"virtualflow {name} is in a part of the project that this installation does not have or not know of; install "
        "the whole project with pip, and a checkout again after an update"
    )


def _run(arguments: argparse.Namespace) -> int:
    from virtualflow.launcher.options import resolve

    options = resolve(arguments)
    from virtualflow.launcher.runner import run

    return run(options)


def _profile(arguments: argparse.Namespace) -> int:
    from virtualflow.launcher.profile import profile

    return profile(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    from virtualflow.launcher.profile import explain

    return explain(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from virtualflow.launcher.plan import plan

    return plan(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from virtualflow.launcher.check import check

    return check(arguments)


def _bisect(arguments: argparse.Namespace) -> int:
    from virtualflow.launcher.check import bisect

    return bisect(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from virtualflow.atomic_file import read_regular, write_whole
    from virtualflow.launcher.report import MAX_REPORT, read_report
    from virtualflow.launcher.report_comparison import compare
    from virtualflow.launcher.report_page import page

    sources = [source for source in (arguments.report, arguments.other) if source is not None]
    target = arguments.html
    if target is None:
        target = sources[0].with_name(f"{'-and-'.join(source.stem for source in sources)}.html")
    try:
        reports = [read_report(read_regular(source, MAX_REPORT), str(source)) for source in sources]
        write_whole(target, page(*reports).encode())
    except OSError as error:
        raise ConfigurationError(f"{error.filename or target}: {error.strerror}") from None
    if len(reports) > 1:
        print("\n".join(compare(*reports)))
    print(target)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    async def show(client: CoordinatorClient, name: str) -> str:
        status = await client.status()
        if arguments.json:
            from virtualflow.protocol.messages import encode

            return encode(status).decode()
        from virtualflow.protocol.job_view import describe_status, view_job

        return printable(describe_status(name, view_job(status, time.time())))

    return _with_job(arguments, show)


def _scale(arguments: argparse.Namespace) -> int:
    from virtualflow.protocol.http_api import ScaleCall

    async def scale(client: CoordinatorClient, name: str) -> str:
        status = await client.status()
        virtual_nodes, processes = status.virtual_nodes, max((len(x.processes) for x in status.workers), default=0)
        if virtual_nodes is not None and arguments.workers * max(1, processes) > virtual_nodes:
            of_each = f" of {processes} processes" if processes else ""
            raise ConfigurationError(
                f"{name} has {counted(virtual_nodes, 'virtual node')}; {counted(arguments.workers, 'worker')}{of_each} "
                "cannot share them"
            )
        return f"{name}: {printable(await client.send(ScaleCall(arguments.workers)))}"

    return _with_job(arguments, scale)


def _drain(arguments: argparse.Namespace) -> int:
    import msgspec

    from virtualflow.protocol.http_api import DrainCall

    asked = {"workers": [arguments.worker], "deadline": arguments.deadline, "reason": "asked to by virtualflow drain"}
    try:
        call = msgspec.convert(asked, DrainCall)
    except msgspec.ValidationError:
        raise ConfigurationError(f"{arguments.worker!r} is not the name of a worker; see virtualflow status") from None

    async def drain(client: CoordinatorClient, name: str) -> str:
        return f"{name}: {printable(await client.send(call))}"

    return _with_job(arguments, drain)


def _with_job(arguments: argparse.Namespace, act: Callable[[CoordinatorClient, str], Awaitable[str]]) -> int:
    """Print what ``act`` says of the job that the arguments name."""
    import asyncio

    from virtualflow.protocol.http_client import CoordinatorClient

    if arguments.coordinator is not None:
        name = url = arguments.coordinator
        credential = read_credential(url)
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"--coordinator {url}: write http://host:port")
    else:
        from virtualflow.launcher.registry import find

        job = find(arguments.job)
        name, url, credential = job.name, job.url, job.credential

    async def talk() -> str:
        async with CoordinatorClient(url, credential, SignalSettings()) as client:
            return await act(client, name)

    print(asyncio.run(talk()))
    return 0


def _turns(arguments: argparse.Namespace) -> int:
    if os.getpid() == 1:
        obey_sigterm()
    import logging

    from virtualflow.launcher.turn_server import serve_turns

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return serve_turns(arguments.path, arguments.limit)


def _processes(arguments: argparse.Namespace) -> int:
    from virtualflow.launcher.processes import run_processes

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigurationError("say what to run, as in: virtualflow processes 2 -- python train.py")
    try:
        return run_processes(arguments.count, command)
    except OSError as error:
        raise ConfigurationError(f"{command[0]} cannot be executed: {error.strerror}") from None


def _coordinator(arguments: argparse.Namespace) -> int:
    if os.getpid() == 1:
        obey_sigterm()
    import asyncio
    import logging

    from virtualflow.coordinator import serve
    from virtualflow.protocol.identity import PAGE_TOKEN

    credential = read_credential()
    identity = None if isinstance(credential, str) else credential
    token = credential if isinstance(credential, str) else credential.read_beside(PAGE_TOKEN)

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    hang_limit = arguments.hang_seconds
    if hang_limit is None:
        hang_limit = read_number(ENV_HANG_SECONDS, float, LEAST_HANG_LIMIT)
    membership = replace(
        MembershipSettings(),
        heartbeat_limit=arguments.heartbeat_limit,
        startup_grace=arguments.startup_grace,
        rebalance_gain=arguments.rebalance_gain,
        hang_limit=hang_limit,
    )
    serving = serve(
        host=arguments.host,
        port=arguments.port,
        token=token,
        wanted=arguments.wanted,
        minimum=arguments.minimum,
        settings=CoordinatorSettings(
            membership=membership,
            live_page=LivePageSettings(logs=Path(logs) if (logs := os.environ.get(ENV_LOG_DIR)) else None),
            confirmed_start=bool(read_number(ENV_CONFIRMED_START, int, 0)),
        ),
        ready_file=arguments.ready_file,
        identity=identity,
    )
    return asyncio.run(serving)
