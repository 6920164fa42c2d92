"""A worker's part in the job's membership: join, enter a generation with one state, switch, recover, leave.

Between ``session`` (which plans there are) and ``loop`` (what the user's script sees).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from virtualflow.errors import CommunicatorBroken, ConfigurationError, Convicted, Damaged, release_frames
from virtualflow.protocol import messages as m
from virtualflow.protocol.lineage import find_objection
from virtualflow.reduction import Exchange
from virtualflow.state import (
    SPOILED,
    Checkpointer,
    Origin,
    Path,
    Standing,
    Transfer,
    WriterState,
    digests,
    move_state,
    pack_state,
    plan_transfer,
    someone_has_state,
)
from virtualflow.step import Parts
from virtualflow.transport import Communicator, gather_bytes
from virtualflow.worker.contents import other_contents
from virtualflow.worker.repair import Remains, Repair, count_repeated, plan_repair
from virtualflow.worker.resharding import Resharding
from virtualflow.worker.resuming import compare, describe_built
from virtualflow.worker.standalone import AnySession
from virtualflow.worker.stopwatch import Stopwatch
from virtualflow.worker.train_state import Training, signature_hash

logger = logging.getLogger("virtualflow.worker")

ID_LENGTH = 16
"""Hexadecimal digits of a training's id: 64 bits, drawn at random."""


class NoMajority(CommunicatorBroken):
    """A generation does not count: others could go on without its members."""

    def __init__(self, plan: m.Plan, contested: m.Generation, known: m.Plan | None) -> None:
        super().__init__(
            f"generation {plan.generation} has no majority of generation {contested}: waiting for the others, or for "
            "the word of whoever runs them that they have ended"
        )
        self.contested = known
        """What this worker knows of the generation that would have to agree."""


class Membership:
    """With whom this worker trains, and how that changes."""

    def __init__(
        self,
        session: AnySession,
        training: Training,
        checkpointer: Checkpointer,
        signature: dict[str, Any],
        stopwatch: Stopwatch,
    ) -> None:
        self._session = session
        self.check = session.check
        """Whether the attempt still makes sense."""
        self._state = session.state
        self._training = training
        self._checkpointer = checkpointer
        self._signature = signature
        self._stopwatch = stopwatch
        self.parts = Parts(())
        """Of each step; they hear of generations, and of attempts that are aborted."""
        self.agreed: m.Plan | None = None
        """The generation that all have agreed to enter now."""
        shards = training.update.shards
        self._resharding = None if shards is None else Resharding(training, shards)
        self._spoiled = False
        """A state was, at least in part, written over the fresh model."""
        self._room_of: m.Generation | None = None

    @property
    def communicator(self) -> Communicator:
        communicator = self._session.communicator
        assert communicator is not None
        return communicator

    def join(self) -> None:
        if not self._state.has_state:
            self._session.be_ready()
            self._enter(self._session.await_entry())

    def note_offers(self, offers: Iterable[m.Generation]) -> None:
        """An exchange is complete: remember the plan that all have offered to enter, if there is one.

        One that they have agreed on stands until it is entered: an evaluation may come first.
        """
        session = self._session
        self.agreed = session.agreed_plan(offers) or self.agreed
        if self._room_of != session.generation:
            # Once a generation, and not in the first place: an optimizer makes its state in its first step.
            self._room_of, self._state.room = session.generation, self._training.room()

    def switch(self) -> None:
        """Enter the generation that all have agreed on, or leave by it."""
        plan, self.agreed = self.agreed, None
        assert plan is not None
        try:
            if self._resharding is not None and self._state.plan is not None:
                self._resharding.hand_over(self.communicator, self._state.plan, plan)
            if not plan.members:
                self.save_final()
        except CommunicatorBroken as error:
            self.recover(error)
            return
        if not self._session.is_member(plan):
            self._session.leave(plan.generation, plan.reason if plan.cause == "stop" else "")
        self._enter(plan)

    def recover(self, error: CommunicatorBroken) -> bool:
        """The attempt is aborted: wait for the generation that takes over, and enter it.

        Returns:
            Whether the attempt turned out to count all the same, and this worker has committed it.
        """
        release_frames(error)  # they held the attempt's gradients and messages
        self._checkpointer.give_up()
        session, exchanges = self._session, self._training.exchanges
        pending = self._training.update.pending is not None
        # What was damaged on its way may have been so before it set out.
        self._training.update.abandon(keep=not isinstance(error, Damaged))
        for abandon in self.parts.abandon:
            abandon()
        self._note_damage(error)
        convicted = error.incarnation if isinstance(error, Convicted) else None
        self._state.convicted = self._state.convicted or convicted == session.incarnation
        # A conviction holds whatever has become of the generation since.
        if convicted is not None or session.interruption(self._state.plan) is None:
            logger.info("%s: generation %s broke: %s", session.worker, session.generation, error)
            session.say_broken(session.generation, str(error), convicted=convicted)
        else:
            session.keep_broken(session.generation, str(error))
        self._enter(session.await_entry())
        return pending and self._training.exchanges > exchanges

    def _enter(self, plan: m.Plan) -> None:
        """Enter ``plan``, or whichever takes over from it, and come to one state with its members."""
        session = self._session
        while True:
            session.activity.mark("entering a generation", self._training.completed_steps)
            self._stopwatch.enter(plan, has_state=self._state.has_state)
            try:
                repair = self._synchronize(session.enter(plan))
                break
            except CommunicatorBroken as error:
                release_frames(error)
                self._note_damage(error)
                # A worker without a state says so even when a newer plan has called it away: those who have agreed on
                # this one would wait for it.
                if session.interruption(plan) is None or not self._state.has_state:
                    contested = error.contested if isinstance(error, NoMajority) else None
                    session.say_broken(plan.generation, str(error), contested)
                else:
                    session.keep_broken(plan.generation, str(error))
                plan = session.await_entry()
        self._state.rank, self._state.repair = session.rank, repair
        sharded = self._training.update.sharded
        of_members = [member.virtual_nodes for member in plan.members]
        self._state.ranges = tuple(of_members if sharded is None else sharded.deal(plan))
        self._state.assigned, self._state.workers = self._state.ranges[session.rank], plan.workers
        self.agreed = None
        self._training.update.enter()
        if self._resharding is not None:
            self._resharding.enter(self.communicator)
        for enter in self.parts.enter:
            enter(self._state.assigned)

    def _note_damage(self, error: CommunicatorBroken) -> None:
        """Tell who sent what arrived damaged: cards and memory that do so are to be found."""
        if isinstance(error, Damaged):
            self._session.note("warning", str(error))

    def _synchronize(self, communicator: Communicator) -> Repair | None:
        """Come to one state with the other members of a generation, and agree on how to go on from there."""
        session, training = self._session, self._training
        plan = communicator.plan
        self._state.lease.begin()
        standing = Standing(
            has_state=self._state.has_state,
            exchanges=training.exchanges,
            step=training.completed_steps,
            signature=signature_hash(self._signature),
            claim=self._state.lineage.claim(plan),
            exchange=training.update.reducer.wish_number,
        )
        standings = [Standing.from_bytes(block) for block in communicator.all_gather(standing.to_bytes())]
        contested = find_objection([other.claim for other in standings])
        if contested is not None:
            raise NoMajority(plan, contested, self._state.lineage.plan_of(contested))
        self._state.lineage.count(plan, "counted")
        if communicator.size > 1:
            self._state.lease.renew()
        self._checkpointer.enter(plan.generation)
        if len({other.signature for other in standings}) > 1:
            self._explain_difference(communicator)
        told, reducer = standings[0].exchange, training.update.reducer
        wish = reducer.wish if told == reducer.wish_number else Exchange.from_number(told)
        training.update.agree(communicator, wish, [member.virtual_nodes for member in plan.members])
        if self._resharding is not None:
            standings = self._resharding.complete_step(communicator, standings, self._state.workers)
        known = someone_has_state(standings)
        transfer = plan_transfer(standings, []) if known else self._find_origin(communicator, standings)
        if not known:
            training.built = describe_built(training.optimizer, training.scheduler)
        self._bring_state(communicator, transfer)
        # A beginning, or a checkpoint of an earlier version: whoever has a state by now gives it the same name.
        training.id = training.id or _name_training(plan.members[0].incarnation, self._state.run)
        if self._resharding is not None:
            self._resharding.share_out(communicator, standings, transfer, self._checkpointer.take_share())
        # The last thing before this generation is entered for good: what was kept lasts until then.
        repair = self._find_repair(communicator) if known and plan.mode == "recovery" else None
        self._state.step = training.completed_steps
        if not self._state.has_state:
            self._state.has_state = True
            session.say_entered(restored=transfer.restorer is not None)
        return repair

    def _find_repair(self, communicator: Communicator) -> Repair | None:
        """Agree on who goes on with what was computed for the coming step when the last generation broke."""
        state, sync = self._state, self._training.update.sync
        kept = frozenset(sync.kept)
        undone = frozenset(state.computes).difference(sync.finished) if state.has_state else frozenset()
        blocks = communicator.all_gather(Remains(kept, undone).to_bytes(state.virtual_nodes))
        remains = [Remains.from_bytes(block) for block in blocks]
        self._stopwatch.repeat(count_repeated(remains, state.virtual_nodes))
        return plan_repair(remains, [member.virtual_nodes for member in communicator.plan.members])

    def _find_origin(self, communicator: Communicator, standings: Sequence[Standing]) -> Transfer:
        """Nobody has a state: agree on what to begin from, and have it read.

        One member reads the checkpoint and verifies what it has read, so that a volume that all share is read once. Of
        one that is divided, each reads what it is to keep, where it is to keep a share. If anything is damaged, the
        others hear so, and the next older one is tried.
        """
        checkpointer, model = self._checkpointer, self._fresh_model(communicator)
        divides = self._resharding is not None and self._resharding.divides_values
        while True:
            origin = Origin(checkpointer.find(), model)
            origins = [Origin.from_bytes(block) for block in communicator.all_gather(origin.to_bytes())]
            transfer = plan_transfer(standings, origins, equal_start=self._state.reproducibility == "bitwise")
            if transfer.restorer is None:
                return transfer
            step, reads = origins[transfer.restorer].checkpoint.step, communicator.rank == transfer.restorer
            sound = tell_all(communicator, not reads or checkpointer.read(divided=divides))
            if all(sound) and divides and any(tell_all(communicator, reads and checkpointer.has_shares)):
                assert self._resharding is not None
                sound = tell_all(communicator, checkpointer.read_share(step, self._resharding.stretches(communicator)))
            if all(sound):
                return transfer
            checkpointer.discard(step)

    def _fresh_model(self, communicator: Communicator) -> int:
        if self._spoiled:
            return SPOILED
        return self._training.model_hash() if communicator.size > 1 else 0

    def _bring_state(self, communicator: Communicator, transfer: Transfer) -> None:
        """Restore a checkpoint, give or receive the state, as the transfer says."""
        training, session = self._training, self._session
        if transfer.restorer == communicator.rank:
            self._spoiled = True
            here = training.built
            if self._resharding is not None:
                self._resharding.reopen()
            self._checkpointer.restore(training)
            differs = compare(here, training.built)
            if differs is not None:
                session.note("warning", differs)
        if not transfer.receivers:
            return
        whole = self._resharding is None
        gives = communicator.rank in transfer.donors
        packed = pack_state(training.capture(states=whole)) if gives else None
        in_place = not self._state.has_state

        def land(tree: dict[str, Any], stripes: dict[Path, Tensor]) -> dict[Path, Tensor]:
            targets = training.land(tree, stripes, session.reserve, in_place)
            self._spoiled = in_place
            return targets

        moved = move_state(communicator, transfer.donors, transfer.receivers, packed=packed, land=land)
        if moved.tree is not None:
            if whole:
                training.restore(moved.tree, given=True)
            else:
                training.restore_but_states(moved.tree)
        session.reserve.release()
        if moved.bytes:
            self._stopwatch.moved = moved.bytes, moved.seconds, moved.donors

    def complete_leader(self) -> None:
        if self._resharding is not None:
            self._resharding.complete_leader(self.communicator)

    def keep_share(self) -> None:
        if self._resharding is not None:
            self._resharding.keep_share()

    def save_shares(self) -> None:
        """Let each worker write a share of a checkpoint beside the next steps, or none if one cannot yet.

        Raises:
            CommunicatorBroken: a member is lost.
        """
        told = tell_all(self.communicator, self._checkpointer.tell_state())
        self._checkpointer.save_share(
            self._training, [WriterState(each) for each in told], leads=self._session.rank == 0
        )

    def save_final(self) -> None:
        """Write a checkpoint of the present step, and wait for it.

        Raises:
            CommunicatorBroken: a member whose share is needed is lost.
        """
        checkpointer, training, leads = self._checkpointer, self._training, self._session.rank == 0
        if training.update.sharded is None:
            if leads:
                checkpointer.save_final(training)
            return
        if self._session.communicator is None:
            return  # nothing has begun
        if tell_all(self.communicator, checkpointer.is_saved(training))[0]:
            return
        written = tell_all(self.communicator, checkpointer.save_share_now(training))
        if leads and all(written):
            checkpointer.complete_now(training, len(written))

    def _explain_difference(self, communicator: Communicator) -> None:
        raw = torch.frombuffer(bytearray(msgspec.json.encode(self._signature)), dtype=torch.uint8)
        blocks = gather_bytes(communicator, raw)
        signatures = [msgspec.json.decode(block.numpy().tobytes()) for block in blocks]
        for other in signatures:
            data = other_contents(signatures[0].get("contents", {}), other.get("contents", {}))
            if data is not None:
                raise ConfigurationError(data)
            found = digests.difference(signatures[0], other)
            if found is not None:
                raise ConfigurationError(
                    f"the workers do not run the same: {found}; start all of them with the same script and arguments"
                )


def tell_all(communicator: Communicator, number: int) -> list[int]:
    """What each member has to say, a number below 256, in the order of the ranks."""
    told = communicator.all_gather(torch.tensor([number], dtype=torch.uint8))
    return [int(block.item()) for block in told]


def _name_training(incarnation: str, run: int) -> str:
    if run == 1:
        return incarnation[:ID_LENGTH]
    return hashlib.sha256(f"{incarnation} {run}".encode()).hexdigest()[:ID_LENGTH]
