"""A sharded optimizer, as one worker has it: the state of its share of the parameters, and a step made of shares.

A step has a point of no return. The reduced gradient of each parameter comes to its two owners only. When all have
theirs, they say so to one another, and whoever has heard it from everybody steps its share and sends the new values
round. Before that point nobody has stepped, so the attempt can be repeated. After it every worker has what it needs
for its share, so whoever is left can step it, too: the step counts if only one of them got beyond the point
(``worker.resharding``), and of two owners one may be lost at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from virtualflow.reduction import (
    Move,
    Owners,
    Tensors,
    as_raw,
    block_norms,
    clip_by_norm,
    count_blocks,
    owned_by,
    plan_owners,
    total_norm,
)
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state import Moving, codec
from virtualflow.state.settings import TransferSettings
from virtualflow.step.state_watch import Kept, bytes_of_state
from virtualflow.transport import Collectives, Message, Pending


class Holding(msgspec.Struct, frozen=True):
    """What a member tells of its share when it enters a generation."""

    states: list[int]
    """The parameters whose optimizer state it has."""
    values: list[int]
    """Those whose values are of the last step that counts for it."""
    pending: bool
    """It has the reduced gradient of its share for one more step."""
    decided: bool
    """It knows that all have theirs, so that step counts."""
    norm: str | None
    """Of the whole gradient, if it is clipped by that and the step is decided; as ``float.hex`` writes it, since JSON
    knows neither infinity nor NaN."""
    finishing: bool
    """The training is over, and the leader is to have the whole state."""


class Shards:
    """The share of one worker.

    Args:
        parameters: all of the model's; they are known by their place among them.
        optimizer: one that treats each element for itself (``partial_step.is_separable``).
        clip_norm: the most that the norm of the gradient may be.
        clip_value: the most that each of its elements may be.
        reduction: how new values travel.
        transfer: how states do.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        clip_value: float | None,
        reduction: ReductionSettings,
        transfer: TransferSettings,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._settings = reduction
        self._transfer = transfer
        self.sizes = [parameter.numel() * parameter.itemsize for parameter in parameters]
        self.owners: Owners = plan_owners(self.sizes, 1)
        """Of the running generation."""
        self._rank = 0
        self.states = self.all
        """The parameters whose optimizer state is here, for the last step that counts."""
        self.values = self.all
        """Those whose values are."""
        self.finishing = False
        self._borrowed: frozenset[int] = frozenset()
        """Parameters whose states are here, in host memory, only to be written down."""
        self._gradients: Tensors | None = None
        self._present: list[bool] = []
        self._decided = self._stepped = False
        self._norm: float | None = None

    @property
    def all(self) -> frozenset[int]:
        """All parameters."""
        return frozenset(range(len(self._parameters)))

    @property
    def mine(self) -> frozenset[int]:
        """Those that this worker owns."""
        return owned_by(self._rank, self.owners)

    def enter(self, rank: int, size: int) -> None:
        """A generation begins, and this worker has the state of its share in it."""
        self.owners, self._rank = plan_owners(self.sizes, size), rank

    def tell(self) -> Holding:
        """What the others have to know of it."""
        return Holding(
            sorted(self.states),
            sorted(self.values),
            self._gradients is not None,
            self._decided,
            None if self._norm is None else self._norm.hex(),
            self.finishing,
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    def prepare(self, gradients: Tensors, present: Sequence[bool]) -> None:
        """The reduced gradient of the share has arrived.

        Args:
            gradients: for each parameter; ``None`` for others' and for those that have none.
            present: which of all parameters have one.
        """
        self._gradients, self._present = gradients, list(present)
        self._decided = self._stepped = False

    def decide(self, collectives: Collectives) -> None:
        """Hear from everybody that theirs has arrived: from here on the step counts.

        Raises:
            CommunicatorBroken: perhaps it does, for others.
        """
        assert self._gradients is not None
        if self._clip_value is not None:
            for gradient in self._gradients:
                if gradient is not None:
                    gradient.clamp_(min=-self._clip_value, max=self._clip_value)
        norms = torch.zeros(1, dtype=torch.float64)
        if self._clip_norm is not None:
            norms = torch.zeros(max(map(sum, self._blocks(collectives.size))), dtype=torch.float64)
            own = [
                gradient
                for (first, *_), gradient in zip(self.owners, self._gradients, strict=True)
                if gradient is not None and first == self._rank
            ]
            found = block_norms(own, self._settings.norm_block)
            norms[: len(found)] = found
        gathered = collectives.all_gather(as_raw(norms)).contiguous().view(torch.float64).view(collectives.size, -1)
        if self._clip_norm is not None:
            self._norm = self._total_norm(gathered)
        self._decided = True

    def _blocks(self, size: int) -> list[list[int]]:
        """For each of so many workers, of how many blocks it computes the norms, for each parameter."""
        counts = [
            count_blocks(parameter.numel(), self._settings.norm_block) if there else 0
            for parameter, there in zip(self._parameters, self._present, strict=True)
        ]
        return [
            [count if ranks[0] == rank else 0 for ranks, count in zip(self.owners, counts, strict=True)]
            for rank in range(size)
        ]

    def _total_norm(self, gathered: Tensor) -> float:
        """From what each worker has computed, in the order of the parameters."""
        parts = [
            torch.split(row[: sum(counts)], counts)
            for row, counts in zip(gathered, self._blocks(len(gathered)), strict=True)
        ]
        return float(total_norm(torch.cat([part for of_place in zip(*parts, strict=True) for part in of_place])))

    def step(self, norm: float | None = None) -> None:
        """Step the share, unless that is done; ``norm`` as others know it, for a worker that does not."""
        assert self._gradients is not None
        if self._stepped:
            return
        if self._clip_norm is not None:
            known = self._norm if norm is None else norm
            assert known is not None
            given = [gradient for gradient in self._gradients if gradient is not None]
            clip_by_norm(given, self._clip_norm, torch.tensor(known, dtype=torch.float64))
        mine = self.mine
        for place, parameter in enumerate(self._parameters):
            parameter.grad = self._gradients[place] if place in mine else None
        self._optimizer.step()
        self.keep(mine)
        self.values = mine | {place for place in self.values if not self._present[place]}
        self._stepped = True

    def spread(self, collectives: Collectives) -> None:
        """Send the new values of the share round, and take those of the others as they come.

        Raises:
            CommunicatorBroken: some have not come; ``values`` says which are here.
        """
        shares = [
            [place for place, ranks in enumerate(self.owners) if ranks[0] == rank and self._present[place]]
            for rank in range(collectives.size)
        ]
        longest = max(sum(self.sizes[place] for place in share) for share in shares)
        if longest == 0:
            return
        own = [_raw(self._parameters[place]) for place in shares[collectives.rank]]
        sent = torch.cat([*own, torch.zeros(longest - sum(map(len, own)), dtype=torch.uint8)])
        writers = [_ShareWriter([self._parameters[place] for place in share]) for share in shares]
        unit = self._settings.alignment
        length = -(-self._settings.bucket // (collectives.size * unit)) * unit
        arriving: tuple[Tensor, Pending] | None = None
        for begin in [*range(0, longest, length), longest]:
            following = None
            if begin < longest:
                stretch = sent[begin : begin + length]
                rows = torch.empty((collectives.size, len(stretch)), dtype=torch.uint8)
                following = rows, collectives.start_all_gather(rows.view(-1), stretch)
            if arriving is not None:
                arriving[1].wait()
                for rank, (writer, row) in enumerate(zip(writers, arriving[0], strict=True)):
                    if rank != collectives.rank:
                        writer.take(row)
            arriving = following
        self.values = self.all

    def settle(self) -> None:
        """The step is committed, or aborted and forgotten."""
        self._gradients, self._norm = None, None
        self._decided = self._stepped = False

    @property
    def gradients(self) -> Tensors | None:
        """The reduced gradient of the share, from its arrival until the step is committed."""
        return self._gradients

    # --- states at rest -----------------------------------------------------------------------------------------------

    def kept(self, place: int, begin: int, end: int) -> Iterator[Kept]:
        """See :class:`KeptStates`: whoever owns a parameter keeps all of its state."""
        if place not in self.mine:
            return
        parameter = self._parameters[place]
        for key, raw in bytes_of_state(parameter, self._optimizer.state.get(parameter, {}), begin, end):
            yield Kept(key, self.owners[place], self._rank, raw)

    # --- states on their way ------------------------------------------------------------------------------------------

    def keep(self, places: Collection[int]) -> None:
        """Forget the optimizer state of all other parameters."""
        self.states = self.states & frozenset(places)
        for place in self.all - self.states:
            self._optimizer.state.pop(self._parameters[place], None)

    def drop_borrowed(self) -> None:
        """Forget the states that came only to be written down."""
        self.keep(self.states - self._borrowed)
        self._borrowed = frozenset()

    def detach_states(self) -> dict[Tensor, Any]:
        """Take all states out of the optimizer, for :meth:`attach_states`."""
        states = dict(self._optimizer.state)
        self._optimizer.state.clear()
        return states

    def attach_states(self, states: dict[Tensor, Any]) -> None:
        """Put them back."""
        self._optimizer.state.update(states)

    def pass_values(self, communicator: Moving, moves: Sequence[Move]) -> None:
        """Pass values of parameters on; all members take part, with the same ``moves``.

        Raises:
            CommunicatorBroken: a member was lost meanwhile.
        """

        def given(places: list[int]) -> Tensor:
            return codec.pack({place: self._parameters[place].detach() for place in places})

        for tree in _pass_on(communicator, moves, given, self._transfer):
            with torch.no_grad():
                for place, value in tree.items():
                    self._parameters[place].copy_(value)
            self.values = self.values | frozenset(tree)

    def pass_states(self, communicator: Moving, moves: Sequence[Move], *, to_host: bool = False) -> None:
        """Likewise, states of the optimizer; they stay in host memory if they are only to be written down.

        Raises:
            CommunicatorBroken: a member was lost meanwhile.
        """

        def given(places: list[int]) -> Tensor:
            return codec.pack({place: self._described(place) for place in places})

        for tree in _pass_on(communicator, moves, given, self._transfer):
            for place, (state, hosted) in tree.items():
                parameter = self._parameters[place]
                if state is not None:
                    self._optimizer.state[parameter] = {
                        key: value.to("cpu" if to_host or key in hosted else parameter.device, copy=True)
                        if isinstance(value, Tensor)
                        else value
                        for key, value in state.items()
                    }
            self.states = self.states | frozenset(tree)
            if to_host:
                self._borrowed = self._borrowed | frozenset(tree)

    def _described(self, place: int) -> list[Any]:
        """A parameter's state, and which of its tensors are on the host though the parameter is not."""
        parameter = self._parameters[place]
        state = self._optimizer.state.get(parameter)
        hosted = [
            key for key, value in (state or {}).items() if isinstance(value, Tensor) and value.device.type == "cpu"
        ]
        return [None if state is None else dict(state), hosted]


class _ShareWriter:
    """Where the values of one worker's share are written, byte for byte, as they come."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._left = [(parameter, parameter.numel() * parameter.itemsize) for parameter in parameters]
        self._left.reverse()
        self._partial: list[Tensor] = []

    def take(self, row: Tensor) -> None:
        """The next bytes; what comes behind the last parameter is padding."""
        while len(row) and self._left:
            parameter, size = self._left[-1]
            here = row[: size - sum(map(len, self._partial))]
            row = row[len(here) :]
            self._partial.append(here)
            if sum(map(len, self._partial)) == size:
                whole = self._partial[0].clone() if len(self._partial) == 1 else torch.cat(self._partial)
                with torch.no_grad():
                    parameter.copy_(whole.view(parameter.dtype).view(parameter.shape))
                self._left.pop()
                self._partial = []


def _raw(tensor: Tensor) -> Tensor:
    return as_raw(tensor.detach().cpu().contiguous())


def _pass_on(
    communicator: Moving, moves: Sequence[Move], given: Callable[[list[int]], Tensor], settings: TransferSettings
) -> Iterator[dict[int, Any]]:
    """Carry out ``moves``: what ``given`` packs of some parameters comes out as a tree at the receiver."""
    if not moves:
        return
    rank = communicator.rank
    outgoing = {
        receiver: given([move.place for move in moves if (move.donor, move.receiver) == (rank, receiver)])
        for receiver in sorted({move.receiver for move in moves if move.donor == rank})
    }
    lengths = torch.zeros(communicator.size, dtype=torch.int64)
    for receiver, block in outgoing.items():
        lengths[receiver] = len(block)
    told = communicator.all_gather(as_raw(lengths)).contiguous().view(torch.int64).view(communicator.size, -1)
    incoming = {
        donor: torch.empty(int(told[donor, rank]), dtype=torch.uint8)
        for donor in range(communicator.size)
        if told[donor, rank]
    }
    messages = [
        Message(peer, stretch, incoming=blocks is incoming)
        for blocks in (outgoing, incoming)
        for peer, block in blocks.items()
        for stretch in torch.split(block, settings.piece)
    ]
    communicator.move(iter([messages]), timeout=settings.message_timeout)
    for block in incoming.values():
        yield codec.unpack(block)
