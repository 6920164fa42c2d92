"""A sharded optimizer, as one worker has it: the state of its share of the parameters, and a step made of shares.

All parameters stand in a row that is cut into equal shares, and a share has two keepers or one
(``reduction.ownership``).
A step has a point of no return. The reduced gradient of each parameter comes to those who keep any of it. When all have
theirs, they say so to one another, and whoever has heard it from everybody steps its share and sends the new values to
those who do not keep it. Before that point nobody has stepped, so the attempt can be repeated. After it every worker
has what it needs for its share, so whoever is left can step it, too: the step counts if only one of them got beyond the
point (``worker.resharding``), and of two keepers one may be lost at any time. With the only one, the present state is
lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

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
    plan_moves,
    share_row,
    total_norm,
    union,
)
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state import Moving, OwnShare, SavedPiece, codec, transfer
from virtualflow.step.divided_averages import DividedAverage
from virtualflow.step.elementwise import cut_unit, grains_of
from virtualflow.step.meta_parameters import MetaModel
from virtualflow.step.placement import OptimizerPlacement
from virtualflow.step.share_states import ShareStates
from virtualflow.step.sliced_values import SlicedValues, in_memory
from virtualflow.step.state_watch import KeptPart, bytes_of_state
from virtualflow.transport import Collectives, Message, Pending

_NOTHING: Mapping[str, AveragedModel] = MappingProxyType({})
_BYTE = torch.zeros(1, dtype=torch.uint8)
_STEPPED = 3
"""What the values and states of a stepped parameter take, in sizes of it: those of Adam, and most have fewer."""


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
    averaged: tuple[int, ...] = ()
    """Of each average of weights that is divided, how many updates its slices have seen."""


class Shards:
    """The share of one worker.

    Args:
        parameters: all of the model's; they stand in a row, in this order.
        optimizer: one that treats each element for itself (``partial_step.is_separable``).
        clip_norm: the most that the norm of the gradient may be.
        clip_value: the most that each of its elements may be.
        reduction: how new values travel, and of what a norm is made.
        copies: how many workers keep each share: 1 or 2.
        alike: whether both keepers step a share to the same bits, so that neither has to send the other its values.
        names: the parameters' where each worker keeps only the values of its share, too; ``None``: it has all values.
        meta: see :class:`~virtualflow.step.sliced_values.SlicedValues`.
        averages: of the model's weights, by name, to be divided as these are.
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
        alike: bool = True,
        names: Sequence[str] | None = None,
        meta: MetaModel | None = None,
        averages: Mapping[str, AveragedModel] = _NOTHING,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._settings = reduction
        self._placement = placement
        self._copies, self._alike = copies, alike
        unmade = frozenset[int]() if meta is None else meta.places
        self.row = row_of(parameters, optimizer, reduction.norm_block, unmade, values=names is not None)
        self._run = reduction.bucket * (1 if names is None else _STEPPED)
        self._names = names or ()
        self.sliced = None if names is None else SlicedValues(names, parameters, self.row, meta)
        """The values of the share; ``None``: all values are here."""
        self.averages: list[DividedAverage] = []
        if self.sliced is not None:
            made = partial(DividedAverage, row=self.row, current=self.sliced, pieces=lambda: self._my_pieces)
            self.averages = [made(name, average) for name, average in averages.items()]
        self._divided = [] if self.sliced is None else [self.sliced, *(each.values for each in self.averages)]
        """The values that are divided, those of the model first."""
        grains = grains_of(parameters, optimizer, reduction.norm_block, placement.device)
        self._kept = ShareStates(optimizer, parameters, self.row, grains)
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

    @property
    def states_here(self) -> Iterator[Mapping[str, Any]]:
        """These states, one of each parameter or slice."""
        return self._kept.here()

    @property
    def portion(self) -> float:
        """How much of all is kept here, from 0 to 1."""
        return sum(end - begin for begin, end in self.mine) / max(1, self.row.offsets[-1])

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
        return share_row(self.row, members, self._copies, self._run)

    def tell(self) -> Holding:
        return Holding(
            self.states,
            self.values,
            self._gradients is not None,
            self._decided,
            None if self._norm is None else self._norm.hex(),
            self.finishing,
            tuple(average.made for average in self.averages),
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
        for values in self._divided:
            values.keep(self.mine)
        gradients = self._gradients_of([piece for piece in self._my_pieces if self._present[piece.place]])
        opened = {self._kept.open(piece, self._value(piece)): (piece, of) for piece, of in gradients.items()}

        def work(parameters: Sequence[nn.Parameter]) -> None:
            self._kept.step({parameter: opened[parameter] for parameter in parameters})

        self._placement.visit(list(opened), work, at_once=False)
        unchanged = union([self.row.span(place) for place, there in enumerate(self._present) if not there])
        self.values = union(self.mine, intersection(self.values, unchanged))
        self._stepped = True

    def spread(self, collectives: Collectives) -> None:
        """Send the new values of the share to whoever has not stepped them, and take others' as they come.

        Keepers of one share send each other a byte instead. So whoever comes to the end of a step knows that all others
        have got beyond its point of no return, and need nothing of it that is forgotten then.

        Raises:
            CommunicatorBroken: some have not come; ``values`` says which are here.
        """
        rank, size = collectives.rank, collectives.size
        shares = [self._sent_by(member) for member in range(size)]
        longest = max(sum(map(self._size, share)) for share in shares)
        if longest == 0:
            return
        steppers = min(self._copies, size) if self._alike else 1  # of a share: its first keeper, and who is behind that
        own = torch.cat([as_raw(self._value(piece).cpu().contiguous()) for piece in shares[rank]] or [_BYTE])
        sends, lengths, writers = dict[int, Tensor](), dict[int, int](), dict[int, _ShareWriter]()
        for peer in (peer for peer in range(size) if peer != rank):
            sends[peer] = own if (peer - rank) % size >= steppers else _BYTE
            comes = shares[peer] if (rank - peer) % size >= steppers else []
            lengths[peer] = max(len(_BYTE), sum(map(self._size, comes)))
            writers[peer] = _ShareWriter(map(self._value, comes))
        unit = self._settings.alignment
        length = -(-self._settings.bucket // (size * unit)) * unit
        arriving: tuple[dict[int, Tensor], Pending] | None = None
        for begin in [*range(0, longest, length), longest]:
            following = None
            if begin < longest:
                rows = {
                    peer: torch.empty(max(0, min(length, whole - begin)), dtype=torch.uint8)
                    for peer, whole in lengths.items()
                }
                stretch, byte = own[begin : begin + length], _BYTE[begin : begin + length]  # each is hashed once
                messages = [Message(peer, row, incoming=True) for peer, row in rows.items()]
                messages += [
                    Message(peer, stretch if block is own else byte, incoming=False) for peer, block in sends.items()
                ]
                following = rows, collectives.start_messages([each for each in messages if len(each.stretch)])
            if arriving is not None:
                arriving[1].wait()
                for peer, row in arriving[0].items():
                    writers[peer].take(row)
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
        for piece, keepers, first, last in self._within(place, begin, end):
            if self._rank not in keepers or len(keepers) == 1:
                continue
            for key, raw in bytes_of_state(self._value(piece), self._kept.read(piece) or {}, first, last):
                yield KeptPart(key, keepers, self._rank, raw)

    def keepers(self, place: int, begin: int, end: int) -> Iterator[tuple[int, ...]]:
        """See :class:`KeptStates`."""
        return (keepers for _, keepers, _, _ in self._within(place, begin, end))

    def _within(self, place: int, begin: int, end: int) -> Iterator[tuple[Stretch, tuple[int, ...], int, int]]:
        """Each stretch in the bytes ``[begin, end)`` of a parameter, its keepers, and which of its bytes are in it."""
        itemsize = self._parameters[place].itemsize
        for piece in (piece for pieces in self._first_pieces for piece in pieces if piece.place == place):
            origin, size = piece.begin * itemsize, self._size(piece)
            first, last = max(0, begin - origin), min(size, end - origin)
            if first < last or not size:
                yield piece, self.shares.keepers(self.row.offsets[place] + piece.begin), first, last

    # --- states on their way ------------------------------------------------------------------------------------------

    def claim(self, spans: Spans) -> None:
        """Of what the optimizer's states that are here count for the generation that begins; forget all others."""
        if spans == self.all and self.states != self.all:
            self._kept.claim(spans)  # they come from a checkpoint
        self._kept.keep(spans)

    def drop_borrowed(self) -> None:
        self._kept.drop_borrowed()

    def reopen_values(self) -> None:
        """Make room for all values, which come from a checkpoint."""
        for values in self._divided:
            values.reopen()

    def capture(self) -> OwnShare:
        """What this worker has first, by reference, to be written down."""
        pieces = []
        for piece in self._first_pieces[self._rank]:
            state, hosted = self._described(piece)
            grains = self._kept.grains(piece.place, state or {})
            name, value = self._names[piece.place], self._value(piece)
            averages = {average.name: average.values.read(piece) for average in self.averages}
            pieces.append(SavedPiece(name, piece.begin, piece.end, value, state, grains, tuple(hosted), averages))
        return OwnShare(self._rank, self.shares.members, pieces, self.shares.first(self._rank))

    def stretches(self, rank: int, size: int) -> list[tuple[str, int, int]]:
        """What a member of a generation of ``size`` keeps: the parameter's name, and where it begins and ends."""
        pieces = self.row.pieces(self.cut_for(size).kept(rank))
        return [(self._names[piece.place], piece.begin, piece.end) for piece in pieces]

    def begin(self, pieces: Sequence[SavedPiece], spans: Spans) -> None:
        """Go on from what was written down of ``spans``; forget all else."""
        for values in self._divided:
            values.forget()
        places = {name: place for place, name in enumerate(self._names)}
        states: dict[Stretch, dict[str, Any] | None] = {}
        for piece in pieces:
            stretch = Stretch(places[piece.name], piece.begin, piece.end)
            saved = [piece.value, *(piece.averages[average.name] for average in self.averages)]
            whole, shape = self.row.is_whole(stretch), self._parameters[stretch.place].shape
            for values, value in zip(self._divided, saved, strict=True):
                values.put(stretch, values.as_laid_out(stretch.place, value.view(shape)) if whole else value)
            states[stretch] = self._placed(stretch.place, piece.state, piece.hosted)
        self.values = spans
        self._kept.begin(states, spans)

    def detach_states(self) -> dict[Tensor, Any]:
        states = dict(self._optimizer.state)
        self._optimizer.state.clear()
        return states

    def attach_states(self, states: dict[Tensor, Any]) -> None:
        self._optimizer.state.update(states)

    def pass_values(self, communicator: Moving, moves: Sequence[Move]) -> None:
        """Pass values of parameters on; all members take part, with the same ``moves``."""

        def given(spans: Spans) -> list[Any]:
            pieces = self.row.pieces(spans)
            if self.sliced is None:
                return [[*piece, self._value(piece)] for piece in pieces]
            # Slices are put together in the order in which they lie in memory, which is not that of a copy's elements.
            return [[*piece, *(in_memory(values.read(piece)) for values in self._divided)] for piece in pieces]

        for spans, rows in _pass_on(communicator, moves, given):
            with torch.no_grad():
                for place, begin, end, *came in rows:
                    piece = Stretch(place, begin, end)
                    if self.sliced is None:
                        self._value(piece).copy_(*came)
                    for values, value in zip(self._divided, came, strict=False):
                        values.put(piece, value)
            self.values = union(self.values, spans)

    def gather(self, communicator: Moving, place: int) -> Tensor | None:
        """Give the leader a whole parameter; all members take part. ``None`` on the others."""
        span, size = (self.row.span(place),), communicator.size
        have = [intersection(self.shares.first(rank), span) for rank in range(size)]
        want: list[Spans] = [span, *[() for _ in range(1, size)]]

        def given(spans: Spans) -> list[Any]:
            return [[piece.begin, piece.end, in_memory(self._value(piece))] for piece in self.row.pieces(spans)]

        came = [row for _, rows in _pass_on(communicator, plan_moves(have, want), given) for row in rows]
        if communicator.rank:
            return None
        assert self.sliced is not None
        whole = self.sliced.like(place)
        for begin, end, value in [*given(have[0]), *came]:
            in_memory(whole)[begin:end].copy_(value)
        return whole

    def keep_values(self) -> None:
        """Forget the values of others' shares, in a generation in which all have those of theirs."""
        for values in self._divided:
            values.keep(self.mine)
        if self.sliced is not None:
            self.values = self.mine

    def pass_states(self, communicator: Moving, moves: Sequence[Move], *, to_host: bool = False) -> None:
        """Likewise, states of the optimizer; they stay in host memory if they are only to be written down."""

        def given(spans: Spans) -> list[Any]:
            return [[*piece, *self._described(piece)] for piece in self.row.pieces(spans)]

        for spans, rows in _pass_on(communicator, moves, given):
            came: dict[Stretch, dict[str, Any] | None] = {}
            for place, begin, end, state, hosted in rows:
                came[Stretch(place, begin, end)] = self._placed(place, state, state or () if to_host else hosted)
            self._kept.put(came, spans, borrowed=to_host)

    def _placed(self, place: int, state: dict[str, Any] | None, hosted: Iterable[str]) -> dict[str, Any] | None:
        """A copy of a state where the parameter is, but for those of its tensors that are to be on the host."""
        device, on_host = self._parameters[place].device, set(hosted)
        return state and {
            key: value.to("cpu" if key in on_host else device, copy=True) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }

    def _described(self, piece: Stretch) -> list[Any]:
        """A piece's state, and which of its tensors are on the host though the parameter is not."""
        state = self._kept.read(piece)
        hosted = [
            key for key, value in (state or {}).items() if isinstance(value, Tensor) and value.device.type == "cpu"
        ]
        return [None if state is None else dict(state), hosted]

    def _value(self, piece: Stretch) -> Tensor:
        if self.sliced is not None:
            return self.sliced.read(piece)
        parameter = self._parameters[piece.place]
        value = parameter.detach()
        return value if self.row.is_whole(piece) else in_memory(value)[piece.begin : piece.end]

    def _size(self, piece: Stretch) -> int:
        return (piece.end - piece.begin) * self._parameters[piece.place].itemsize


def row_of(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    block: int,
    unmade: frozenset[int] = frozenset(),
    *,
    values: bool = False,
) -> Row:
    """The row in which parameters stand to be shared out.

    One that is not contiguous stays whole, and one that no optimizer steps costs nothing but its values.

    Args:
        unmade: places of those that are not made yet, and will be contiguous.
        values: whether their values are shared out, too.
    """
    cost = _STEPPED if values else 1
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return Row(
        tuple(parameter.numel() for parameter in parameters),
        tuple(p.itemsize * (cost if id(p) in stepped else int(values)) for p in parameters),
        tuple(
            cut_unit(parameter, block) if parameter.is_contiguous() or place in unmade else 0
            for place, parameter in enumerate(parameters)
        ),
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
