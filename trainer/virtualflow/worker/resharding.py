"""The state of a sharded optimizer when the members of a job change, or when one of them is to have the whole.

A generation begins with a question that there is without sharding, too (who has the newest state?), and two more. Does
the last step count, though perhaps nobody has come to its end? It does if anybody has heard that all were ready for it
(``sharded_optimizer``); then those who are left complete it. And who has the states of which parameters? They go from
those to the owners in the new generation; what a worker does not own any more it forgets at the next step, when it is
certain that the others have what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from virtualflow.errors import Evicted
from virtualflow.protocol import messages as m
from virtualflow.protocol.wording import counted
from virtualflow.reduction import Spans, lost, plan_hand_over, plan_moves
from virtualflow.state import SavedPiece, Standing, Transfer, digests
from virtualflow.step import Holding, Shards
from virtualflow.transport import Communicator, as_bytes, gather_bytes
from virtualflow.worker.train_state import Training


class Resharding:
    """Moves the shares of one training's optimizer."""

    def __init__(self, training: Training, shards: Shards) -> None:
        self._training = training
        self._shards = shards
        self.divides_values = shards.sliced is not None
        self._finishing = False
        self._have: list[Spans] = []
        """Of whose states each member of the generation to come had which, when it was asked,"""
        self._have_values: list[Spans] = []
        """and of whose values."""

    # --- a generation begins ------------------------------------------------------------------------------------------

    def complete_step(self, communicator: Communicator, standings: list[Standing], workers: int) -> list[Standing]:
        """If the last step counts for anybody, see that it is complete for all who have a share of it.

        Returns:
            Where they stand then.

        Raises:
            Evicted: all keepers of something are.
        """
        training, shards = self._training, self._shards
        shards.drop_borrowed()
        holdings = self._gather_holdings(communicator)
        newest = completed_exchanges(standings, holdings)
        told = next((holding.norm for holding in holdings if holding.decided), None)
        norm = None if told is None else float.fromhex(told)
        completed = list(standings)
        for rank, (standing, holding) in enumerate(zip(standings, holdings, strict=True)):
            if standing.has_state and holding.pending and standing.exchanges == newest - 1:
                if rank == communicator.rank:
                    training.complete_pending(norm, workers)
                completed[rank] = replace(standing, exchanges=newest, step=standing.step + 1)
        training.update.forget_pending()
        # Completing a step takes values of parameters and states away from those who do not keep them.
        holdings = self._gather_holdings(communicator)
        self._finishing = any(holding.finishing for holding in holdings)
        pairs = list(zip(standings, holdings, strict=True))
        self._have = [holding.states if standing.has_state else () for standing, holding in pairs]
        if any(standing.has_state for standing in standings):
            values = [holding.values if standing.has_state else () for standing, holding in pairs]
            missing = lost(values, shards.row) or lost(self._have, shards.row)
            if missing:
                count = len({piece.place for piece in shards.row.pieces(missing)})
                who, verb = ("the worker", "is") if shards.shares.copies == 1 else ("both workers", "are")
                raise Evicted(
                    f"{who} that kept the optimizer's state of {counted(count, 'parameter')} {verb} lost: the job "
                    "goes on from its newest checkpoint, or begins anew if there is none"
                )
            self._have_values = values
            for number, average in enumerate(shards.averages):
                newest = max(holding.averaged[number] for standing, holding in pairs if standing.has_state)
                if standings[communicator.rank].has_state:
                    average.catch_up(newest)
                else:
                    average.made = newest
            if shards.sliced is None:
                want = [shards.all if standing.has_state else () for standing in standings]
                shards.pass_values(communicator, plan_moves(values, want))
        return completed

    def share_out(
        self,
        communicator: Communicator,
        standings: Sequence[Standing],
        transfer: Transfer,
        read: Sequence[SavedPiece] | None = None,
    ) -> None:
        """Bring each member the optimizer's state of its share in the generation that begins.

        Args:
            read: what this member has read of a checkpoint that is divided; all others have read theirs then.
        """
        shards, size = self._shards, communicator.size
        if read is not None:
            self._have = self._have_values = [shards.cut_for(size).kept(rank) for rank in range(size)]
            shards.begin(read, self._have[communicator.rank])
        elif not any(standing.has_state for standing in standings):  # It begins, from a checkpoint or anew.
            self._have = self._have_values = [shards.all if rank in transfer.donors else () for rank in range(size)]
        shards.claim(self._have[communicator.rank])
        shards.enter(communicator.rank, size)
        want = [shards.shares.kept(rank) for rank in range(size)]
        if shards.sliced is not None:
            shards.pass_values(communicator, plan_moves(self._have_values, want))
            shards.keep_values()
            if not any(standing.has_state for standing in standings):
                for average in shards.averages:
                    average.made = int(average.average.n_averaged)
        if self._finishing and shards.sliced is None:
            want[0] = shards.all
        shards.pass_states(communicator, plan_moves(self._have, want), to_host=self._finishing)

    def enter(self, communicator: Communicator) -> None:
        """All members have their shares, and the same state: whoever needs others' parameters may ask for them."""
        sharded = self._training.update.sharded
        if sharded is not None:
            sharded.enter(communicator, self._shards.shares, self._training.exchanges)

    def reopen(self) -> None:
        """A whole state is about to be restored."""
        self._shards.reopen_values()

    def stretches(self, communicator: Communicator) -> list[tuple[str, int, int]]:
        """What this member keeps of which parameters in the generation that begins."""
        return self._shards.stretches(communicator.rank, communicator.size)

    def _gather_holdings(self, communicator: Communicator) -> list[Holding]:
        raw = torch.frombuffer(bytearray(msgspec.json.encode(self._shards.tell())), dtype=torch.uint8)
        blocks = gather_bytes(communicator, raw)
        return [msgspec.json.decode(block.numpy().tobytes(), type=Holding) for block in blocks]

    # --- a generation ends --------------------------------------------------------------------------------------------

    def hand_over(self, communicator: Communicator, running: m.Plan, coming: m.Plan) -> None:
        """Before members leave: see that those who stay have every state, in as many copies as there are to be."""
        stays = [coming.rank_of(member.worker, member.incarnation) is not None for member in running.members]
        stay = [rank for rank, does in enumerate(stays) if does]
        if all(stays):
            return
        if not stay:  # The job ends, and its leader writes a checkpoint.
            self.complete_leader(communicator)
            return
        shards = self._shards
        ranks = {member.incarnation: rank for rank, member in enumerate(running.members)}
        old_ranks = [ranks.get(member.incarnation) for member in coming.members]
        planned = shards.cut_for(len(coming.members))
        have = [shards.shares.kept(rank) for rank in range(communicator.size)]
        want = plan_hand_over(shards.shares, planned, old_ranks, stay)
        moves = plan_moves(have, want)
        if shards.sliced is not None:
            shards.pass_values(communicator, moves)
        shards.pass_states(communicator, moves)
        _confirm(communicator)

    def complete_leader(self, communicator: Communicator) -> None:
        shards, size = self._shards, communicator.size
        if size == 1:
            return
        if shards.sliced is not None:
            self._training.digest = self._digest_together(communicator)
            return
        have = [shards.shares.kept(rank) for rank in range(size)]
        want = [shards.all if rank == 0 else () for rank in range(size)]
        shards.pass_states(communicator, plan_moves(have, want), to_host=True)
        _confirm(communicator)

    def _digest_together(self, communicator: Communicator) -> str:
        """The digest of a model that nobody has as a whole: the leader gets one parameter after the other.

        Returns:
            On all members what ``digests.digest`` would give of its ``state_dict()``.
        """
        model, shards = self._training.model, self._shards
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        known = {name: places[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        state = model.state_dict()

        def read(name: str) -> Any:
            return shards.gather(communicator, known[name]) if name in known else state[name]

        found = digests.digest_of(state, read) if communicator.rank == 0 else "-"
        if communicator.rank:
            for name in sorted(state):
                read(name)
        return gather_bytes(communicator, as_bytes(found))[0].numpy().tobytes().decode()

    def keep_share(self) -> None:
        self._shards.drop_borrowed()


def completed_exchanges(standings: Sequence[Standing], holdings: Sequence[Holding]) -> int:
    """How many exchanges count: whoever knows that all are ready for the next one has as good as completed it."""
    return max(
        (
            standing.exchanges + holding.decided
            for standing, holding in zip(standings, holdings, strict=True)
            if standing.has_state
        ),
        default=0,
    )


def _confirm(communicator: Communicator) -> None:
    nothing: Tensor = torch.zeros(1, dtype=torch.uint8)
    communicator.all_gather(nothing)
