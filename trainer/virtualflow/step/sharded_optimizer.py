"""A sharded optimizer, as one worker has it: the state of its share of the parameters, and a step made of shares.

All parameters stand in a row that is cut into equal shares, and a share has two keepers or one
(``reduction.ownership``).
A step has a point of no return. The reduced gradient of each parameter comes to those who keep any of it. When all have
theirs, they say so to one another, and whoever has heard it from everybody steps its share and sends the new values
round. Before that point nobody has stepped, so the attempt can be repeated. After it every worker has what it needs
for its share, so whoever is left can step it, too: the step counts if only one of them got beyond the point
(``worker.resharding``), and of two keepers one may be lost at any time. With the only one, the present state is lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from virtualflow.reduction import (
    Move,
    Row,
    Shares,
    Spans,
    Stretch,
    Tensors,
    as_raw,
    block_norms,
    clip_by_norm,
    count_blocks,
    intersection,
    share_row,
    total_norm,
    union,
)
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state import Moving, codec, transfer
from virtualflow.step.elementwise import cut_unit, grains_of
from virtualflow.step.placement import OptimizerPlacement
from virtualflow.step.share_states import ShareStates, flat
from virtualflow.step.state_watch import KeptPart, bytes_of_state
from virtualflow.transport import Collectives, Message, Pending


class Holding(msgspec.Struct, frozen=True):
    """What a member tells of its share when it enters a generation."""

    states: Spans
    """Of what in the row of all parameters it has the optimizer's states."""
    values: Spans
    """Of what it has the values of the last step that counts for it."""
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
        parameters: all of the model's; they stand in a row, in this order.
        optimizer: one that treats each element for itself (``partial_step.is_separable``).
        clip_norm: the most that the norm of the gradient may be.
        clip_value: the most that each of its elements may be.
        reduction: how new values travel, and of what a norm is made.
        copies: how many workers keep each share: 1 or 2.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        clip_value: float | None,
        reduction: ReductionSettings,
        placement: OptimizerPlacement,
        copies: int,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._settings = reduction
        self._placement = placement
        self._copies = copies
        self.row = row_of(parameters, optimizer, reduction.norm_block)
        self._kept = ShareStates(
            optimizer, parameters, self.row, grains_of(parameters, optimizer, reduction.norm_block, placement.device)
        )
        self.values: Spans = self.row.all
        """Of what the values are here, for the last step that counts."""
        self.finishing = False
        self._gradients: Tensors | None = None
        self._present: list[bool] = []
        self._decided = self._stepped = False
        self._norm: float | None = None
        self.enter(0, 1)

    @property
    def all(self) -> Spans:
        return self.row.all

    @property
    def states(self) -> Spans:
        """Of what the optimizer's states are here, for the last step that counts."""
        return self._kept.spans

    def enter(self, rank: int, size: int) -> None:
        self.shares, self._rank = self.cut_for(size), rank
        self.mine = self.shares.kept(rank)
        self._my_pieces = self.row.pieces(self.mine)
        self._places: dict[int, list[tuple[int, int]]] = {}
        """Of each parameter where the pieces begin that are kept here, and by how much earlier in its gradient."""
        ends: dict[int, int] = {}
        for place, begin, end in self._my_pieces:
            at = ends.get(place, 0)
            self._places.setdefault(place, []).append((begin, begin - at))
            ends[place] = at + end - begin
        self._first_pieces = [self.row.pieces(self.shares.first(member)) for member in range(size)]

    def cut_for(self, members: int) -> Shares:
        """The shares of a generation of so many members."""
        return share_row(self.row, members, self._copies, self._settings.bucket)

    def tell(self) -> Holding:
        return Holding(
            self.states,
            self.values,
            self._gradients is not None,
            self._decided,
            None if self._norm is None else self._norm.hex(),
            self.finishing,
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    def prepare(self, gradients: Tensors, present: Sequence[bool]) -> None:
        """The reduced gradient of the share has arrived.

        Args:
            gradients: for each parameter what this worker keeps of it (``Reducer.share``); ``None`` for others' and for
                those that have none.
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
            most = max(map(self._count_blocks, range(collectives.size)))
            norms = torch.zeros(max(1, most), dtype=torch.float64)
            found = block_norms(list(self._gradients_of(self._sent_by(self._rank)).values()), self._settings.norm_block)
            norms[: len(found)] = found
        gathered = collectives.all_gather(as_raw(norms)).contiguous().view(torch.float64).view(collectives.size, -1)
        if self._clip_norm is not None:
            self._norm = float(total_norm(torch.cat(self._in_order(gathered))))
        self._decided = True

    def _in_order(self, gathered: Tensor) -> list[Tensor]:
        """The norms that each member has told of the blocks of its share, in the order of the parameters."""
        shares = [(piece, member) for member in range(len(gathered)) for piece in self._sent_by(member)]
        taken = [0] * len(gathered)
        found = []
        for piece, rank in sorted(shares):
            begin = taken[rank]
            taken[rank] += count_blocks(piece.end - piece.begin, self._settings.norm_block)
            found.append(gathered[rank, begin : taken[rank]])
        return found

    def _sent_by(self, rank: int) -> list[Stretch]:
        return [piece for piece in self._first_pieces[rank] if self._present[piece.place]]

    def _count_blocks(self, rank: int) -> int:
        block = self._settings.norm_block
        return sum(count_blocks(piece.end - piece.begin, block) for piece in self._sent_by(rank))

    def _gradients_of(self, pieces: Sequence[Stretch]) -> dict[Stretch, Tensor]:
        assert self._gradients is not None
        found = {}
        for piece in pieces:
            gradient = self._gradients[piece.place]
            assert gradient is not None
            if self.row.is_whole(piece):
                found[piece] = gradient
                continue
            places = self._places[piece.place]
            _, earlier = places[bisect_right(places, piece.begin, key=lambda place: place[0]) - 1]
            found[piece] = gradient.view(-1)[piece.begin - earlier : piece.end - earlier]
        return found

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
        self._kept.keep(self.mine)
        gradients = self._gradients_of([piece for piece in self._my_pieces if self._present[piece.place]])
        opened = {self._kept.open(piece): (piece, gradient) for piece, gradient in gradients.items()}

        def work(parameters: Sequence[nn.Parameter]) -> None:
            self._kept.step({parameter: opened[parameter] for parameter in parameters})

        self._placement.visit(list(opened), work, at_once=False)
        unchanged = union([self.row.span(place) for place, there in enumerate(self._present) if not there])
        self.values = union(self.mine, intersection(self.values, unchanged))
        self._stepped = True

    def spread(self, collectives: Collectives) -> None:
        """Send the new values of the share round, and take those of the others as they come.

        Raises:
            CommunicatorBroken: some have not come; ``values`` says which are here.
        """
        shares = [self._sent_by(rank) for rank in range(collectives.size)]
        longest = max(sum(map(self._size, share)) for share in shares)
        if longest == 0:
            return
        own = [as_raw(self._value(piece).cpu().contiguous()) for piece in shares[collectives.rank]]
        sent = torch.cat([*own, torch.zeros(longest - sum(map(len, own)), dtype=torch.uint8)])
        writers = [_ShareWriter(map(self._value, share)) for share in shares]
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
        self._gradients, self._norm = None, None
        self._decided = self._stepped = False

    @property
    def gradients(self) -> Tensors | None:
        return self._gradients

    # --- states at rest -----------------------------------------------------------------------------------------------

    def kept(self, place: int, begin: int, end: int) -> Iterator[KeptPart]:
        """See :class:`KeptStates`: a state is cut where shares are, so that both keepers of a stretch cut it alike."""
        parameter = self._parameters[place]
        for piece in (piece for pieces in self._first_pieces for piece in pieces if piece.place == place):
            keepers = self.shares.keepers(self.row.offsets[place] + piece.begin)
            origin, size = piece.begin * parameter.itemsize, self._size(piece)
            first, last = max(0, begin - origin), min(size, end - origin)
            if self._rank not in keepers or len(keepers) == 1 or (first >= last and size):
                continue
            for key, raw in bytes_of_state(self._value(piece), self._kept.read(piece) or {}, first, last):
                yield KeptPart(key, keepers, self._rank, raw)

    # --- states on their way ------------------------------------------------------------------------------------------

    def claim(self, spans: Spans) -> None:
        """Of what the optimizer's states that are here count for the generation that begins; forget all others."""
        if spans == self.all and self.states != self.all:
            self._kept.claim(spans)  # they come from a checkpoint
        self._kept.keep(spans)

    def drop_borrowed(self) -> None:
        self._kept.drop_borrowed()

    def detach_states(self) -> dict[Tensor, Any]:
        states = dict(self._optimizer.state)
        self._optimizer.state.clear()
        return states

    def attach_states(self, states: dict[Tensor, Any]) -> None:
        self._optimizer.state.update(states)

    def pass_values(self, communicator: Moving, moves: Sequence[Move]) -> None:
        """Pass values of parameters on; all members take part, with the same ``moves``."""

        def given(spans: Spans) -> list[Any]:
            return [[*piece, self._value(piece)] for piece in self.row.pieces(spans)]

        for spans, rows in _pass_on(communicator, moves, given):
            with torch.no_grad():
                for place, begin, end, value in rows:
                    self._value(Stretch(place, begin, end)).copy_(value)
            self.values = union(self.values, spans)

    def pass_states(self, communicator: Moving, moves: Sequence[Move], *, to_host: bool = False) -> None:
        """Likewise, states of the optimizer; they stay in host memory if they are only to be written down."""

        def given(spans: Spans) -> list[Any]:
            return [[*piece, *self._described(piece)] for piece in self.row.pieces(spans)]

        for spans, rows in _pass_on(communicator, moves, given):
            came: dict[Stretch, dict[str, Any] | None] = {}
            for place, begin, end, state, hosted in rows:
                device = self._parameters[place].device
                came[Stretch(place, begin, end)] = state and {
                    key: value.to("cpu" if to_host or key in hosted else device, copy=True)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in state.items()
                }
            self._kept.put(came, spans, borrowed=to_host)

    def _described(self, piece: Stretch) -> list[Any]:
        """A piece's state, and which of its tensors are on the host though the parameter is not."""
        state = self._kept.read(piece)
        hosted = [
            key for key, value in (state or {}).items() if isinstance(value, Tensor) and value.device.type == "cpu"
        ]
        return [None if state is None else dict(state), hosted]

    def _value(self, piece: Stretch) -> Tensor:
        parameter = self._parameters[piece.place]
        return parameter.detach() if self.row.is_whole(piece) else flat(parameter)[piece.begin : piece.end]

    def _size(self, piece: Stretch) -> int:
        return (piece.end - piece.begin) * self._parameters[piece.place].itemsize


def row_of(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, block: int) -> Row:
    """The row in which parameters stand to be shared out.

    One that is not contiguous stays whole, and one that no optimizer steps costs nothing.
    """
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return Row(
        tuple(parameter.numel() for parameter in parameters),
        tuple(parameter.itemsize if id(parameter) in stepped else 0 for parameter in parameters),
        tuple(cut_unit(parameter, block) if parameter.is_contiguous() else 0 for parameter in parameters),
    )


class _ShareWriter:
    def __init__(self, values: Iterable[Tensor]) -> None:
        self._left = [(value, value.numel() * value.itemsize) for value in values]
        self._left.reverse()
        self._partial: list[Tensor] = []

    def take(self, row: Tensor) -> None:
        """The next bytes; what comes behind the last value is padding."""
        while len(row) and self._left:
            value, size = self._left[-1]
            here = row[: size - sum(map(len, self._partial))]
            row = row[len(here) :]
            self._partial.append(here)
            if sum(map(len, self._partial)) == size:
                whole = self._partial[0].clone() if len(self._partial) == 1 else torch.cat(self._partial)
                value.copy_(whole.view(value.dtype).view(value.shape))
                self._left.pop()
                self._partial = []


def _pass_on(
    communicator: Moving, moves: Sequence[Move], given: Callable[[Spans], list[Any]]
) -> Iterator[tuple[Spans, list[Any]]]:
    """Carry out ``moves``: what ``given`` says of some spans comes out at the receiver, from each donor."""
    if not moves:
        return
    rank = communicator.rank

    def between(donor: int, receiver: int) -> Spans:
        return union([move.span for move in moves if (move.donor, move.receiver) == (donor, receiver)])

    outgoing = {
        receiver: codec.pack(given(between(rank, receiver)))
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
        for stretch in torch.split(block, transfer.PIECE)
    ]
    communicator.move(iter([messages]), timeout=transfer.MESSAGE_TIMEOUT)
    for donor, block in incoming.items():
        yield between(donor, rank), codec.unpack(block)
