"""The communicators of a worker's generations: built beside the training, and taken down when they are not needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial

from virtualflow.device import FreedMemory
from virtualflow.errors import CommunicatorBroken
from virtualflow.protocol import messages as m
from virtualflow.state import Reserve, elder, make_room, tell_room
from virtualflow.state.transfer import RESERVE_WAIT
from virtualflow.transport import Communicator, Link, Signer
from virtualflow.worker.member_state import MemberState
from virtualflow.worker.settings import WorkerSettings

_KEPT = 128 << 20
"""Bytes of freed memory that a worker on the CPU keeps across a change of the members, at most."""


class Communicators:
    """Those that stand ready and those that are over; all of it is read and written under the link's lock.

    Args:
        interruption: why a collective of a plan is not to be waited for any longer, if so.
        offered: the plans that this worker has offered to enter, whose communicators stay although newer ones stand.
        signer: of a worker that seals what it sends to others.
        asks: whether workers ask one another for what each keeps.
    """

    def __init__(
        self,
        link: Link,
        state: MemberState,
        incarnation: str,
        settings: WorkerSettings,
        interruption: Callable[[m.Plan], str | None],
        offered: Callable[[], Collection[m.Plan]],
        signer: Signer | None = None,
        asks: bool = False,
    ) -> None:
        self.reserve = Reserve()
        """Memory for the state that will come, where this worker has none."""
        self._link = link
        self._state = state
        self._incarnation = incarnation
        self._settings = settings
        self._interruption = interruption
        self._offered = offered
        self._signer = signer
        self._asks = asks
        self._prepared: dict[m.Generation, Communicator] = {}
        self.retired: list[Communicator] = []
        self._closers: list[threading.Thread] = []
        self._closed = False
        self._freed = FreedMemory(_KEPT)

    def __contains__(self, generation: m.Generation) -> bool:
        return generation in self._prepared

    def prepare(self, plan: m.Plan, rank: int) -> None:
        """Build the communicator of a plan, in which this worker has that rank, in a thread of its own."""
        name = f"virtualflow-generation-{plan.generation}"
        threading.Thread(target=self._build_or_fail, args=(plan, rank), name=name, daemon=True).start()

    def take(self, generation: m.Generation, former: Communicator | None) -> Communicator:
        with self._link.changed:
            communicator = self._prepared.pop(generation, None)
            if communicator is None:
                raise CommunicatorBroken(f"the communicator of generation {generation} is not there")
            if former is not None:
                self.retired.append(former)
        return communicator

    def tidy(self) -> None:
        with self._link.changed:
            finished, self.retired = self.retired, []
        self._close_behind(finished)

    def let_go(self, newest: m.Generation) -> None:
        """Take down those that stand for generations before ``newest``: whoever waits in one is to notice."""
        with self._link.changed:
            former = [self._prepared.pop(known) for known in list(self._prepared) if known < newest]
        self._close_behind(former)

    def _close_behind(self, communicators: Iterable[Communicator]) -> None:
        """Close them, and give memory back where much was freed with their message buffers: in threads, since that
        takes a while.
        """

        def close(communicator: Communicator) -> None:
            communicator.close()
            self._freed.limit()

        for communicator in communicators:
            name = f"virtualflow-close-{communicator.plan.generation}"
            closer = threading.Thread(target=close, args=(communicator,), name=name, daemon=True)
            closer.start()
            with self._link.changed:
                self._closers = [*(known for known in self._closers if known.is_alive()), closer]

    def close(self, running: Communicator | None) -> None:
        with self._link.changed:
            self._closed = True
            communicators = [*self.retired, *self._prepared.values()]
            self.retired, self._prepared = [], {}
        for communicator in (*communicators, running):
            if communicator is not None:
                communicator.close()
        for closer in self._closers:
            closer.join()  # all that it waits for has a limit, and no thread must be in torch as the interpreter ends

    def _build_or_fail(self, plan: m.Plan, rank: int) -> None:
        try:
            self._build(plan, rank)
        except Exception as error:  # noqa: BLE001 - the training thread raises it
            self._link.fail(error)

    def _build(self, plan: m.Plan, rank: int) -> None:
        link, state, settings = self._link, self._state, self._settings

        def superseded() -> bool:
            newest = link.plan
            return newest is not None and newest.generation > plan.generation

        told_by = elder(plan)
        if told_by is not None and told_by.incarnation == self._incarnation:
            tell_room(link, plan, state.room)
        elif told_by is not None and not state.has_state:
            make_room(link, plan, self.reserve, superseded, RESERVE_WAIT)
        try:
            communicator = Communicator.open(
                plan,
                rank,
                link,
                superseded,
                partial(self._interruption, plan),
                settings.communicator,
                self._signer,
                asks=self._asks,
            )
        except CommunicatorBroken as error:
            if not superseded():
                detail = f"the communicator could not be built: {error}"
                link.send_unbuilt(m.Broken(plan.generation, state.step, detail))
            return
        with link.changed:
            wanted = not (superseded() or self._closed)
            if wanted:
                self._prepared[plan.generation] = communicator
                kept = {offered.generation for offered in self._offered()}
                old = [g for g in self._prepared if g < plan.generation and g not in kept]
                self.retired.extend(self._prepared.pop(g) for g in old)
                link.changed.notify_all()
        if wanted:
            link.send(m.Prepared(plan.generation), keep=True)
        else:
            communicator.close()
