"""What the tests of elastic training share: real jobs (processes, connections, a coordinator) that start quickly.

Workers are forked from a server process that has imported torch already. A test gives a *script*, a function of a test
module, which runs in every worker as a user's script would; what it returns comes back through a pipe. Changes are made
while the job is held at a step, and every wait is for a condition and has an end.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import torch
from aiohttp import web
from identities import Identities
from injected import inject

from forking import FORKING, start
from virtualflow.coordinator.server import CoordinatorServer
from virtualflow.coordinator.settings import CoordinatorSettings, MembershipSettings
from virtualflow.errors import Leave
from virtualflow.protocol import http_api
from virtualflow.protocol.environment import LocalPlace
from virtualflow.protocol.identity import Identity
from virtualflow.protocol.settings import ENV_COORDINATOR, ENV_IDENTITY, ENV_LAUNCH, ENV_TOKEN, ENV_WORKER
from virtualflow.reduction.pipeline import Early
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.settings import Exchange
from virtualflow.state import codec, digests, join_optimizers

TOKEN = "a-token-for-tests"
PATIENCE = 60.0
"""Seconds until a wait fails; far more than anything takes."""
PAUSE = 0.01
"""Seconds between two looks, which take a third of that: the workers need the processors."""

# The coordinators here replace nobody, so there is nobody to wait for; and what a busy machine does to the speed of
# workers must not add changes to those that a test makes, nor divide one among workers that start at different speeds.
MEMBERSHIP = MembershipSettings(restart_grace=0.0, rebalance_gain=1.0, admission_window=PATIENCE)

EXCHANGE = "TEST_EXCHANGE"
"""In a job's environment: ``early`` lets exchanges begin during the last backward pass, ``behind`` right behind it."""

BEGUN_EARLY = "an exchange has begun early"
"""What such a worker then prints each time."""


@dataclass(frozen=True)
class Trained:
    """What a script tells of its training."""

    digest: str
    optimizer: str
    metrics: Any = None
    more: Any = None


def trained(
    run: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    metrics: Any = None,
    more: Any = None,
) -> Trained:
    """The bits of a finished training."""
    return Trained(
        digests.digest(model.state_dict()), digests.optimizer_digest(join_optimizers(optimizer)), metrics, more
    )


def _plain(value: Any) -> Any:
    """What a script returned as a nest of plain values: the one class that they return becomes a dict."""
    if isinstance(value, Trained):
        return {"Trained": astuple(value)}
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value


def _returned(plain: Any) -> Any:
    if isinstance(plain, dict) and plain.keys() == {"Trained"}:
        return Trained(*plain["Trained"])
    return tuple(_returned(item) for item in plain) if isinstance(plain, tuple) else plain


def _pack(kind: str, value: Any = None, text: str = "", trace: str = "") -> bytes:
    """How a worker ended, as bytes: by the library's own description of nests, exact to the bit."""
    return codec.pack({"kind": kind, "value": _plain(value), "text": text, "trace": trace}).numpy().tobytes()


def _unpack(raw: bytes) -> dict[str, Any]:
    told: dict[str, Any] = codec.unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return told | {"value": _returned(told["value"])}


def _begin_early(one_by_one: bool) -> None:
    """Let exchanges of the small models here begin during the backward pass, as those of large ones do."""
    exchange = Exchange("reduce-scatter", overlap=True)
    inject(reduction={"exchange": exchange, "bucket": 256, "one_by_one": 0 if one_by_one else 1 << 30})
    begin = Reducer.begin

    def counting(*arguments: Any, **options: Any) -> Early | None:
        early = begin(*arguments, **options)
        if early is not None:
            print(BEGUN_EARLY, flush=True)
        return early

    Reducer.begin = counting  # type: ignore[method-assign, assignment]
    # As on a slow network: the optimizer steps what has come while others are still on their way.
    Early.complete = property(lambda self: False)  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Outcome:
    """How a worker ended."""

    worker: str
    kind: str
    """``"returned"``, ``"killed"``, or the name of the exception that ended the script."""
    value: Any = None
    text: str = ""
    trace: str = ""
    log: str = ""


@dataclass
class _Worker:
    name: str
    process: Any
    pipe: Connection
    log: Path
    children: set[int] = field(default_factory=set)


def _work(
    script: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], pipe: Connection, log: str
) -> None:
    os.environ.update(environment)
    tempfile.tempdir = environment["TMPDIR"]
    # As in any script: a child of the fork server would start loader processes through a fork server of its own.
    multiprocessing.set_start_method("fork", force=True)
    with open(log, "w", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(PATIENCE / 2, exit=False)
    if environment.get(EXCHANGE) in ("early", "behind"):
        _begin_early(one_by_one=environment[EXCHANGE] == "early")
    try:
        told = _pack("returned", script(*arguments))
    except Leave as leave:
        told = _pack(type(leave).__name__, text=leave.reason)
    except Exception as error:  # noqa: BLE001 - whatever the script raised is what the test asks about
        told = _pack(type(error).__name__, text=str(error), trace=traceback.format_exc())
    pipe.send_bytes(told)
    pipe.close()


class RunningCoordinator(Protocol):
    """A coordinator that a job is to have, and that ends with it."""

    url: str

    def close(self) -> None:
        """End it."""


class _CoordinatorThread:
    """A real coordinator, on a thread of its own."""

    def __init__(self, wanted: int, membership: MembershipSettings, identity: Identity | None) -> None:
        self.url = ""
        self._identity = identity
        self._ready = threading.Event()
        self._wanted = wanted
        self._settings = CoordinatorSettings(membership=membership)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        coordinator = self.coordinator = CoordinatorServer(TOKEN, self._wanted, self._settings, identity=self._identity)
        runner = web.AppRunner(coordinator.application(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        if self._identity is None:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        else:
            assert runner.server is not None
            listening = await coordinator.door.open(runner.server, "127.0.0.1", 0)
            self.url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._over.wait()
        if self._identity is not None:
            listening.close()
        await coordinator.close()
        await runner.cleanup()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


class ElasticJob:
    """One job and its workers; made by the fixture ``start_job``.

    Args:
        processes: of each worker; the further ones are called ``worker-0.1`` and so on here.
    """

    def __init__(
        self,
        directory: Path,
        script: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        workers: int,
        processes: int = 1,
        hold: int | None = None,
        environment: Mapping[str, str] | None = None,
        membership: MembershipSettings | None = None,
        coordinator: RunningCoordinator | None = None,
        parties: Identities | None = None,
    ) -> None:
        self.workers: dict[str, _Worker] = {}
        self._directory = directory
        self._script = script
        self._arguments = arguments
        self._processes = processes
        # Of a short name, since sockets go there; a worker that is killed leaves something in it.
        self._temporary = tempfile.mkdtemp(prefix="vf-")
        self._environment = {"TMPDIR": self._temporary, **(environment or {})}
        self._parties = parties
        """Who takes part by certificate; ``None``: the job is in plaintext."""
        identity = None if parties is None else parties.hold("coordinator", "coordinator")
        self._context = None if parties is None else parties.hold("control", "control").client_context()
        self._coordinator = coordinator or _CoordinatorThread(workers, membership or MEMBERSHIP, identity)
        self.wanted = workers
        self._held: int | None = None
        if hold is not None:
            self.hold(hold)
        for _ in range(workers):
            self.start_worker()

    # --- the coordinator's interface ----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The coordinator's, for workers that a test starts itself."""
        return self._coordinator.url

    @property
    def coordinator(self) -> CoordinatorServer:
        """The one in this process."""
        assert isinstance(self._coordinator, _CoordinatorThread)
        return self._coordinator.coordinator

    def status(self) -> http_api.Status:
        """The coordinator's, which hears first of the processes that have ended: whoever runs them confirms it."""
        status = msgspec.json.decode(self._request("status", None), type=http_api.Status)
        for lost in status.lost:
            if not lost.ended and self.workers[lost.worker].process.exitcode is not None:
                self.call("gone", worker=lost.worker, incarnation=lost.incarnation, reason=lost.reason)
        return status

    def call(self, name: str, **values: Any) -> str:
        return msgspec.json.decode(self._request(name, msgspec.json.encode(values)), type=http_api.Answer).message

    def _request(self, name: str, body: bytes | None) -> bytes:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(f"{self._coordinator.url}/v1/{name}", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE, context=self._context) as answer:
            return bytes(answer.read())

    def wait_for(
        self, holds: Callable[[http_api.Status], bool], what: str, patience: float = PATIENCE
    ) -> http_api.Status:
        deadline = time.monotonic() + patience
        while True:
            status = self.status()
            if holds(status):
                return status
            if status.phase == "failed" or time.monotonic() > deadline:
                logs = "\n".join(f"--- {w.name}\n{w.log.read_text()}" for w in self.workers.values())
                raise AssertionError(f"in vain waited for: {what}\n{status}\n{logs}")
            time.sleep(PAUSE)

    # --- what a test does to a job ------------------------------------------------------------------------------------

    def start_worker(self) -> str:
        name = f"worker-{len(self.workers) // self._processes}"
        environment = {
            **self._environment,
            ENV_COORDINATOR: self._coordinator.url,
            ENV_TOKEN: TOKEN,
            ENV_WORKER: name,
        }
        if self._parties is not None:
            environment[ENV_IDENTITY] = str(self._parties.issue("worker", name))
        launch = uuid.uuid4().hex
        for local_rank in range(self._processes):
            if self._processes > 1:
                environment[ENV_LAUNCH] = str(LocalPlace(launch, local_rank, self._processes))
            self._start_process(f"{name}.{local_rank}" if local_rank else name, environment)
        return name

    def _start_process(self, name: str, environment: Mapping[str, str]) -> None:
        ours, theirs = FORKING.Pipe(duplex=False)
        log = self._directory / f"{name}.log"
        log.touch()
        arguments = (self._script, self._arguments, dict(environment), theirs, str(log))
        process = FORKING.Process(target=_work, args=arguments, name=name)
        start(process)
        theirs.close()
        self.workers[name] = _Worker(name, process, ours, log)

    def hold(self, step: int | None) -> None:
        self._held = step
        self.call("hold", step=step)

    def reach(self, step: int) -> http_api.Status:
        """Let the job go on to ``step``, and wait until it is held there."""
        self.hold(step)
        return self.wait_for(lambda status: status.step == step and status.phase == "training", f"step {step}")

    def await_checkpoint(self, step: int) -> None:
        """Wait until the checkpoint of a step is written: a job that is held behind it may write it still.

        It must be the first one that is due: one that is due while another is being written is skipped.
        """
        self.wait_for(
            lambda status: status.checkpoint is not None and status.checkpoint.step == step, f"checkpoint {step}"
        )

    def _await_hold(self) -> None:
        """Wait until a job that is to be held is: a change before that may have been made, or ended the job, unseen."""
        if self._held is not None:
            self.reach(self._held)

    def kill(self, name: str) -> None:
        """SIGKILL a worker of a job that is held, and wait until the others have gone on without it.

        The coordinator is told, as by whoever runs the processes: in a job that is held no collective breaks, and it
        would wait for the heartbeat limit first.
        """
        before = self.status()
        self.wanted -= 1
        self.call("scale", workers=max(1, self.wanted))
        self._note_children()
        processes = [one.process for key, one in self.workers.items() if key.partition(".")[0] == name]
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join(PATIENCE)
        self.call("gone", worker=name, reason="killed by SIGKILL")
        self.wait_for(lambda status: status.generation > before.generation, f"a generation without {name}")

    def await_end(self, name: str) -> None:
        """Wait until a worker's process has ended by itself, and say so, as whoever runs the processes does."""
        deadline = time.monotonic() + PATIENCE
        while self.workers[name].process.exitcode is None:
            assert time.monotonic() < deadline, f"{name} does not end"
            self.status()
            time.sleep(0.01)
        self.call("gone", worker=name, reason="it has ended")

    def kill_all(self) -> None:
        """SIGKILL all workers that live, at once."""
        self._note_children()
        alive = [worker for worker in self.workers.values() if worker.process.exitcode is None]
        for worker in alive:
            os.kill(worker.process.pid, signal.SIGKILL)
        for worker in alive:
            worker.process.join(PATIENCE)
            self.call("gone", worker=worker.name)

    def join(self, count: int = 1) -> list[str]:
        """Start workers and wait until they are ready to enter after the next step."""
        self._await_hold()
        self.wanted += count
        self.call("scale", workers=self.wanted)
        names = [self.start_worker() for _ in range(count)]
        self._await_proposal(set(names), set())
        return names

    def drain(self, *names: str) -> None:
        """Announce that workers leave, and wait until the others are ready to go on without them."""
        self._await_hold()
        self.wanted -= len(names)
        self.call("scale", workers=max(1, self.wanted))
        self.call("drain", workers=list(names), deadline=PATIENCE)
        self._await_proposal(set(), set(names))

    def _await_proposal(self, there: set[str], not_there: set[str]) -> None:
        def fits(workers: Iterable[http_api.WorkerStatus]) -> bool:
            names = {worker.worker for worker in workers}
            return there <= names and not (not_there & names)

        def proposed(status: http_api.Status) -> bool:
            planned = (worker for worker in status.workers if worker.incarnation in status.proposed_workers)
            # A job that is not held may have entered it before anybody looks.
            members = (worker for worker in status.workers if worker.first < worker.last)
            return (status.prepared and fits(planned)) or fits(members)

        self.wait_for(proposed, f"a prepared plan with {there} and without {not_there}")

    def finish(self) -> dict[str, Outcome]:
        """Let the job run to its end; how each worker ended."""
        self.hold(None)
        deadline = time.monotonic() + PATIENCE
        found: dict[str, Outcome] = {}
        for name, worker in self.workers.items():
            while worker.process.exitcode is None and not worker.pipe.poll(5 * PAUSE):
                self.status()
                self._note_children()
                assert time.monotonic() < deadline, f"{name} does not end:\n{worker.log.read_text()}\n{self.status()}"
            try:
                raw = worker.pipe.recv_bytes() if worker.pipe.poll() else b""
            except EOFError:
                raw = b""
            worker.process.join(max(0.1, deadline - time.monotonic()))
            code = worker.process.exitcode
            log = worker.log.read_text()
            if raw:
                found[name] = Outcome(name, **_unpack(raw), log=log)
            else:
                assert code == -signal.SIGKILL, f"{name} ended with {code}:\n{log}"
                found[name] = Outcome(name, "killed", log=log)
        return found

    def results(self) -> list[Any]:
        """Let the job run to its end; what the script returned in each worker that saw it."""
        outcomes = self.finish()
        for outcome in outcomes.values():
            assert outcome.kind in ("returned", "killed", "Drained", "JobEnded"), (
                f"{outcome.text}\n{outcome.trace}\n{outcome.log}"
            )
        values = [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"]
        assert values, outcomes
        return values

    def _note_children(self) -> None:
        for worker in self.workers.values():
            try:
                worker.children |= {child.pid for child in psutil.Process(worker.process.pid).children(recursive=True)}
            except psutil.Error:
                continue

    def close(self) -> None:
        """End everything, and complain about processes that would have stayed."""
        for worker in self.workers.values():
            if worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join(PATIENCE)
            worker.pipe.close()
        self._coordinator.close()
        shutil.rmtree(self._temporary)
        children = [pid for worker in self.workers.values() for pid in worker.children]
        processes = [psutil.Process(pid) for pid in children if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], "loader processes stay"


def alone(script: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Run a script in this process, without a coordinator: the reference."""
    former = {name: os.environ.get(name) for name in environment or {}}
    os.environ.update(environment or {})
    try:
        return script(*arguments)
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def is_here(worker: str) -> bool:
    """Whether this process is that worker, or that one of its processes; nobody is the one without a name."""
    place = LocalPlace.read()
    name = os.environ.get(ENV_WORKER, "") + (f".{place.local_rank}" if place and place.local_rank else "")
    return bool(worker) and name == worker


def die_here(worker: str) -> None:
    """SIGKILL this process if it is that worker."""
    if is_here(worker):
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
