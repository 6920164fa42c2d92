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

import msgspec
import torch
from torch import Tensor

from virtualflow.errors import Evicted
from virtualflow.protocol import messages as m
from virtualflow.protocol.wording import counted
from virtualflow.reduction import Spans, lost, plan_hand_over, plan_moves
from virtualflow.state import Standing, Transfer
from virtualflow.step import Holding, Shards
from virtualflow.transport import Communicator, gather_bytes
from virtualflow.worker.train_state import Training


class Resharding:
    """Moves the shares of one training's optimizer."""

    def __init__(self, training: Training, shards: Shards) -> None:
        self._training = training
        self._shards = shards
        self._finishing = False
        self._have: list[Spans] = []
        """Of whose states each member of the generation to come had which, when it was asked."""

    # --- a generation begins ------------------------------------------------------------------------------------------

    def complete_step(self, communicator: Communicator, standings: list[Standing], members: int) -> list[Standing]:
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
                    training.complete_pending(norm, members)
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
            want = [shards.all if standing.has_state else () for standing in standings]
            shards.pass_values(communicator, plan_moves(values, want))
        return completed

    def share_out(self, communicator: Communicator, standings: Sequence[Standing], transfer: Transfer) -> None:
        """Bring each member the optimizer's state of its share in the generation that begins."""
        shards, size = self._shards, communicator.size
        if not any(standing.has_state for standing in standings):  # It begins, from a checkpoint or anew.
            self._have = [shards.all if rank in transfer.donors else () for rank in range(size)]
        shards.claim(self._have[communicator.rank])
        shards.enter(communicator.rank, size)
        want = [shards.shares.kept(rank) for rank in range(size)]
        if self._finishing:
            want[0] = shards.all
        shards.pass_states(communicator, plan_moves(self._have, want), to_host=self._finishing)

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
        shards.pass_states(communicator, plan_moves(have, want))
        _confirm(communicator)

    def complete_leader(self, communicator: Communicator) -> None:
        shards, size = self._shards, communicator.size
        if size == 1:
            return
        have = [shards.shares.kept(rank) for rank in range(size)]
        want = [shards.all if rank == 0 else () for rank in range(size)]
        shards.pass_states(communicator, plan_moves(have, want), to_host=True)
        _confirm(communicator)

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
