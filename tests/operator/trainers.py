"""Workers of a job without torch and without processes: they speak a session's protocol over real connections.

All workers of a job share one ``Training``, which stands for their collectives: a step is made when every member of the
generation is there, and a membership change is entered by all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from virtualflow.protocol import framing
from virtualflow.protocol import messages as m
from virtualflow.protocol.identity import Credential, context_of, headers_of
from virtualflow.protocol.termination_message import TerminationMessage
from virtualflow.protocol.versions import PROTOCOL

DIGEST = "d" * 64
STEP_SECONDS = 0.03
"""How long a step takes, and the pause after which a worker dials its coordinator again."""

Exit = Callable[[int, TerminationMessage | None], None]


class Trainer:
    """One worker process: its link to the coordinator and where it stands.

    Args:
        training: what it shares with the others.
        name: of its pod.
        incarnation: of the process; the uid of its pod.
        address: of its pod.
        credential: by which its coordinator knows it.
        find_coordinator: the URL behind the job's service; None: it leads nowhere just now.
        exited: called once, when it ends by itself, with its exit code and last word.
    """

    def __init__(
        self,
        training: Training,
        name: str,
        incarnation: str,
        address: str,
        credential: Credential,
        find_coordinator: Callable[[], str | None],
        exited: Exit,
    ) -> None:
        self.training, self.name, self.incarnation, self.address = training, name, incarnation, address
        self.plan: m.Plan | None = None
        self.newest: m.Plan | None = None
        self.memory: m.MemoryPlan | None = None
        self.draining = False
        self.heartbeat: float | None = None
        """How often its coordinator wants a sign of life, once that has said so."""
        self.beat_at = 0.0
        """When it gave the latest one (loop time)."""
        self.failed: m.Failed | None = None
        """What it has said, if its script has raised."""
        self.leaving = False
        self.hung = False
        """It says nothing more, but its connections stand: its node has lost its power."""
        self.deaf = False
        """It ignores SIGTERM."""
        self.alive = True
        self._find, self._exited = find_coordinator, exited
        self._credential = credential
        self._stream: aiohttp.ClientWebSocketResponse | None = None
        self._kept: dict[type, m.FromWorker] = {}
        self._out: asyncio.Queue[m.FromWorker] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"worker {name}")
        training.trainers[incarnation] = self

    @property
    def generation(self) -> m.Generation:
        return self.plan.generation if self.plan is not None else m.NO_GENERATION

    def say(self, message: m.FromWorker, *, keep: bool = False) -> None:
        if keep:
            self._kept[type(message)] = message
        if self._stream is not None and not self.hung:
            self._out.put_nowait(message)

    def fail(self, failed: m.Failed) -> None:
        """Its script raises: it says so, and ends when that has arrived."""
        self.failed = failed
        self.say(failed)

    def settle(self) -> None:
        """What was to be repeated to a new coordinator is so no more."""
        self._kept.clear()

    def terminate(self) -> None:
        """SIGTERM: ask to be relieved."""
        if not self.hung and not self.deaf and not self.draining:
            self.draining = True
            self.say(m.DrainRequest("SIGTERM"), keep=True)
            self.training.ponder()

    def kill(self) -> None:
        """SIGKILL: nothing more is said and all connections are closed."""
        self.alive = False
        self._task.cancel()
        self.training.lost(self)

    def exit(self, code: int, word: TerminationMessage | None) -> None:
        """End by itself."""
        if self.alive:
            self.alive = False
            self._task.cancel()
            self.training.trainers.pop(self.incarnation, None)
            self._exited(code, word)

    def hello(self) -> m.Hello:
        training = self.training
        return m.Hello(
            protocol=PROTOCOL,
            worker=self.name,
            incarnation=self.incarnation,
            address=self.address,
            pid=1,
            virtual_nodes=training.virtual_nodes,
            fingerprint="one machine",
            ready=True,
            draining=self.draining,
            drain_deadline=30.0 if self.draining else None,
            plan=self.plan,
            step=training.step if self.plan is not None else 0,
            total_steps=None,
            done=False,
            changes=(),
            memory=self.memory,
        )

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(ssl=context_of(self._credential), force_close=True)
        async with aiohttp.ClientSession(headers=headers_of(self._credential), connector=connector) as session:
            while True:
                url = self._find()
                if url is not None and not self.hung:
                    try:
                        async with session.ws_connect(f"{url}/v1/worker", max_msg_size=0) as stream:
                            await self._talk(stream)
                    except (aiohttp.ClientError, OSError):
                        pass  # the coordinator is away, and will be back
                    finally:
                        self._stream = None
                await asyncio.sleep(STEP_SECONDS)

    async def _talk(self, stream: aiohttp.ClientWebSocketResponse) -> None:
        self._out = asyncio.Queue()
        await stream.send_bytes(framing.pack(self.hello()))
        self._stream = stream
        for message in self._kept.values():
            self.say(message)
        writer = asyncio.create_task(self._write(stream))
        try:
            async for frame in stream:
                if not self.hung:
                    self.training.hear(self, framing.unpack_to_worker(frame.data))
        finally:
            writer.cancel()

    async def _write(self, stream: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            message = await self._out.get()
            try:
                await stream.send_bytes(framing.pack(message))
            except ConnectionError:
                return  # the reader learns it too


class Training:
    """What the workers of a job do together."""

    def __init__(self, virtual_nodes: int) -> None:
        self.virtual_nodes = virtual_nodes
        self.trainers: dict[str, Trainer] = {}
        self.step_ms: float | None = None
        """How long a step takes, if that is measured."""
        self.step = 0
        self.plan: m.Plan | None = None
        self.paused = False
        """No step is made: nothing happens."""
        self.finished = False
        self._task = asyncio.create_task(self._train(), name="training")

    def close(self) -> None:
        self._task.cancel()
        for trainer in list(self.trainers.values()):
            trainer.alive = False
            trainer._task.cancel()

    def finish(self) -> None:
        """The last step is done."""
        self.finished = True
        for trainer in self.members(self.plan):
            trainer.say(m.Done(self.step, DIGEST, DIGEST, {"loss": 0.5}, None, 0), keep=True)

    def members(self, plan: m.Plan | None) -> list[Trainer]:
        """Members of a generation that are alive."""
        known = [self.trainers.get(member.incarnation) for member in plan.members] if plan is not None else []
        return [trainer for trainer in known if trainer is not None and trainer.alive]

    def complete(self, plan: m.Plan) -> bool:
        """Whether all of a generation are there."""
        here = self.members(plan)
        return len(here) == len(plan.members) and not any(trainer.hung for trainer in here)

    def hear(self, trainer: Trainer, message: m.ToWorker) -> None:
        match message:
            case m.Plan() as plan:
                if trainer.newest is None or plan.generation > trainer.newest.generation:
                    trainer.newest = plan
                    if plan.generation > trainer.generation and self._holds(plan, trainer):
                        trainer.say(m.Prepared(plan.generation), keep=True)
            case m.Welcome():
                trainer.heartbeat = message.heartbeat
            case m.Drain():
                trainer.draining = True
            case m.Refuse() | m.End() if trainer.failed is not None:
                failed = trainer.failed
                word = TerminationMessage("failed", self.step, error=failed.error, does_not_fit=failed.does_not_fit)
                trainer.exit(1, word)
            case m.Refuse(reason):
                trainer.exit(75, TerminationMessage("refused", self.step, reason=reason))
            case m.End(failed, reason):
                trainer.exit(1 if failed else 0, TerminationMessage("ended", self.step, reason=reason))
            case m.Release():
                word = TerminationMessage("left", self.step)
                if not trainer.leaving:
                    word = TerminationMessage(
                        "done", self.step, digest=DIGEST, optimizer_digest=DIGEST, metrics={"loss": 0.5}
                    )
                trainer.exit(0, word)
        self.ponder()

    def ponder(self) -> None:
        """Enter the newest generation if all can, and let those leave that have nothing to hand over."""
        for trainer in self.trainers.values():
            if trainer.draining and trainer.plan is None and not trainer.leaving and trainer.alive:
                trainer.leaving = True
                trainer.say(m.Left(m.NO_GENERATION, 0), keep=True)
        plans = [t.newest for t in self.trainers.values() if t.newest is not None and t.alive]
        newest = max(plans, key=lambda plan: plan.generation, default=None)
        if newest is None or (self.plan is not None and newest.generation <= self.plan.generation):
            return
        joining = [trainer for trainer in self.members(newest) if trainer.newest == newest]
        if len(joining) < len(newest.members) or any(trainer.hung for trainer in joining):
            return
        if newest.mode == "planned" and self.plan is not None and self.plan.members:
            before = self.members(self.plan)
            if not self.complete(self.plan) or any(trainer.newest != newest for trainer in before):
                return
        self._enter(newest)

    def lost(self, trainer: Trainer) -> None:
        """A worker was killed: its peers see their sockets closed."""
        self.trainers.pop(trainer.incarnation, None)
        if self.plan is not None and self._holds(self.plan, trainer):
            for peer in self.members(self.plan):
                peer.say(m.Broken(self.plan.generation, self.step, "connection closed by peer"), keep=True)

    def _enter(self, plan: m.Plan) -> None:
        former, self.plan = self.plan, plan
        donors = [trainer for trainer in self.members(plan) if trainer.plan is not None]
        leaving = [trainer for trainer in self.members(former) if not self._holds(plan, trainer)]
        if not donors and plan.members:
            self.step = 0  # there is no checkpoint
        for trainer in self.members(plan):
            trainer.plan = plan
            trainer.settle()
            trainer.say(m.Entered(plan, self.step, False))
        if plan.mode == "planned":
            for trainer in leaving:
                trainer.leaving = True
                trainer.say(m.Left(plan.generation, self.step), keep=True)
        if former is not None and donors:
            repeated = 1 if plan.mode == "recovery" else 0
            counts = (len(former.members), len(plan.members))
            change = m.Change(plan.generation, self.step + 1, *counts, plan.cause, plan.reason, 10.0, repeated)
            donors[0].say(m.Resumed(change))

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            now = asyncio.get_running_loop().time()
            for trainer in self.trainers.values():
                if trainer.heartbeat is not None and now - trainer.beat_at >= trainer.heartbeat:
                    trainer.beat_at = now
                    trainer.say(m.Heartbeat())
            plan = self.plan
            if plan is None or not plan.members or self.paused or self.finished or not self.complete(plan):
                continue
            self.step += 1
            progress = m.Progress(
                plan.generation, self.step, 0, None, {"loss": 1 / self.step}, 30.0, "training", self.step_ms
            )
            self.members(plan)[0].say(progress)

    @staticmethod
    def _holds(plan: m.Plan, trainer: Trainer) -> bool:
        return any(member.incarnation == trainer.incarnation for member in plan.members)
