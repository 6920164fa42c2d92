"""``kubectl vf``: jobs at a glance, why one is as it is, and what one does to it by hand.

``kubectl`` finds it by its name, ``kubectl-vf`` on the PATH. Exit codes are those of ``virtualflow``: 0 success, 1 no
success, 2 the request makes no sense.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from virtualflow._imports import prefer_own
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.launcher import EXIT_FAILED, EXIT_USAGE, Parser, complain
from virtualflow.protocol.wording import counted, printable, table

if TYPE_CHECKING:
    from virtualflow.cluster import Client


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plugin; the exit code."""
    if arguments is None:
        prefer_own()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser().print_help()
        return 0
    given = parser().parse_args(words)
    try:
        from virtualflow.cluster import Client
    except ImportError as error:
        complain(str(error))
        return EXIT_USAGE
    try:
        with Client(kubeconfig=given.kubeconfig, context=given.context, namespace=given.namespace) as client:
            action: Callable[[Client, argparse.Namespace], int] = given.action
            return action(client, given)
    except ConfigurationError as error:
        complain(str(error))
        return EXIT_USAGE
    except (VirtualFlowError, TimeoutError) as error:
        complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads any more, of whatever is left
        return 141


def parser() -> Parser:
    """What may be said."""
    made = Parser(
        prog="kubectl vf",
        description="VirtualFlow jobs of a cluster.",
        epilog="kubectl vf COMMAND --help says what each takes.",
        examples=("kubectl vf top", "kubectl vf why digits"),
        allow_abbrev=False,
    )
    common = Parser(add_help=False)
    common.add_argument("--kubeconfig", metavar="FILE", help="as of kubectl, with its default")
    common.add_argument("--context", metavar="NAME", help="as of kubectl, with its default")
    common.add_argument("-n", "--namespace", metavar="NAME", help="as of kubectl, with its default")
    commands = made.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def add(name: str, action: Callable[..., int], text: str, *, job: bool = True, example: str = "") -> Parser:
        examples = [f"kubectl vf {name}{' digits' if job else ''}{example}"]
        command = commands.add_parser(
            name, help=text, description=text, parents=[common], examples=examples, allow_abbrev=False
        )
        command.set_defaults(action=action)
        if job:
            command.add_argument("job", metavar="JOB", help="its name")
        return command

    top = add("top", _top, "show all jobs: those that train first, the fastest first", job=False)
    top.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
    add("why", _why, "say why a job is as it is, and what would help")
    logs = add("logs", _logs, "print the logs of all workers as one, by time")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    logs.add_argument("--tail", type=int, metavar="N", help="only the latest N lines of each worker (default: all)")
    add("scale", _scale, "change the number of workers", example=" 4").add_argument(
        "workers", type=int, metavar="N", help="how many are wanted from now on"
    )
    drain = add("drain", _drain, "let a worker leave; another one takes its place", example=" digits-workers-1")
    drain.add_argument("worker", metavar="POD", help="its name, as kubectl get pods shows it")
    suspend = add(
        "suspend",
        _suspend,
        "stop a job behind a step, with a checkpoint if it has spec.checkpoint, and give its pods back",
    )
    suspend.add_argument("--force", action="store_true", help="also if that loses its training; ask nothing")
    add("resume", _resume, "let a suspended job go on")
    ui = add("ui", _ui, "show a job's live page, or all jobs, in a browser of this machine, until Ctrl-C", job=False)
    ui.add_argument("job", metavar="JOB", nargs="?", help="its name (default: all jobs, each with a link to its page)")
    ui.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    ui.add_argument("--port", type=int, default=0, metavar="P", help="of this machine (default: any that is free)")
    wait = add("wait", _wait, "wait until a job is over; exit code 1 if it has failed")
    wait.add_argument("--timeout", type=float, metavar="S", help="for S seconds at most (default: as long as it takes)")
    check = add(
        "check",
        _check,
        "look whether the cluster is ready for a job; exit code 1 if not",
        job=False,
        example=" job.yaml",
    )
    check.add_argument("manifest", metavar="FILE", nargs="?", help="the job's manifest (YAML; optional)")
    return made


def _say(text: str, file: TextIO | None = None, *, flush: bool = False) -> None:
    """Print words that may be others': their control characters are no commands to this terminal."""
    print(printable(text), file=file, flush=flush)


def _top(client: Client, given: argparse.Namespace) -> int:
    from virtualflow.cluster.tables import job_rows

    jobs = client.jobs(everywhere=given.all_namespaces)
    if not jobs:
        where = "any namespace" if given.all_namespaces else f"the namespace {client.namespace}"
        _say(f"There are no jobs in {where}.", file=sys.stderr)
        return 0
    _say(table(job_rows([job.body for job in jobs], datetime.now(UTC), namespaces=given.all_namespaces)))
    return 0


def _why(client: Client, given: argparse.Namespace) -> int:
    from virtualflow.cluster.explanation import explain

    job = client.job(given.job)
    try:
        events, unseen = job.events(), []
    except ConfigurationError as error:  # the conditions say what matters
        events, unseen = [], [f"  events are not shown: {error}"]
    _say("\n".join([*explain(job.body, events, datetime.now(UTC)), *unseen]))
    return 0


def _logs(client: Client, given: argparse.Namespace) -> int:
    job = client.job(given.job)
    prefix = f"{job.name}-"
    for line in job.logs(follow=given.follow, tail=given.tail):
        _say(f"[{line.worker.removeprefix(prefix)}] {line.text}", flush=given.follow)
    return 0


def _scale(client: Client, given: argparse.Namespace) -> int:
    client.job(given.job).scale(given.workers)
    _say(f"{given.job}: {counted(given.workers, 'worker')} wanted")
    return 0


def _drain(client: Client, given: argparse.Namespace) -> int:
    client.job(given.job).drain(given.worker)
    _say(f"{given.job}: {given.worker} is asked to leave")
    return 0


def _suspend(client: Client, given: argparse.Namespace) -> int:
    job = client.job(given.job)
    lost = "" if given.force else job.lost_by_suspension()
    if lost and not (sys.stdin.isatty() and input(f"{lost}. Suspend it all the same? [y/N] ").strip().lower() == "y"):
        raise ConfigurationError(f"{lost}; give it a checkpoint, or say --force")
    job.suspend()
    _say(f"{given.job}: to be suspended")
    return 0


def _resume(client: Client, given: argparse.Namespace) -> int:
    client.job(given.job).resume()
    _say(f"{given.job}: to go on")
    return 0


def _ui(client: Client, given: argparse.Namespace) -> int:
    from virtualflow.cluster.tunnel import show_page

    def tell(line: str) -> None:
        _say(line, flush=True)

    def opened(address: str) -> None:
        tell(f"{address}\nCtrl-C ends it.")

    if given.job is None:
        from virtualflow.cluster.jobs_page import PortForwards, serve

        serve(client, given.all_namespaces, PortForwards(client), given.port, opened)
    if given.all_namespaces:
        raise ConfigurationError(f"say -n NAMESPACE for {given.job}, or leave it out for all jobs")
    show_page(client.job(given.job), client.kubectl(), given.port, opened, tell)
    return 0


def _wait(client: Client, given: argparse.Namespace) -> int:
    from virtualflow.cluster.explanation import headline

    job = client.job(given.job).wait(given.timeout)
    _say(f"{headline(job.body)}, digest {job.status.get('digest', '?')}")
    return 0


def _check(client: Client, given: argparse.Namespace) -> int:
    from virtualflow.cluster.checks import check
    from virtualflow.cluster.client import read_manifest

    ready = True
    for found in check(client, None if given.manifest is None else read_manifest(given.manifest)):
        _say(f"{found.verdict:7} {found.sentence}")
        ready = ready and found.verdict != "no"
    return 0 if ready else EXIT_FAILED
