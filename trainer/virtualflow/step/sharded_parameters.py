"""Parameters that are divided over the workers, as one worker has them: slices at rest, whole while a block needs them.

The optimizer's shares (``sharded_optimizer``) are those of the values, too: what a worker steps it keeps, and of two
keepers each has the values. A block's parameters are asked of their keepers before its forward pass, and again before
its backward pass; behind each they are freed. They are asked for and not exchanged, so workers may be at different
places of the script, run blocks in another order, and compute different numbers of virtual nodes. What is asked bears
the number of the update that the values are of: a keeper that is not so far yet answers when it is.

A gradient leaves at the end of a block's backward pass, each slice for whoever keeps it first. There it waits for its
neighbours in the tree over the virtual nodes (``reduction.accumulation``), so sums have the bits that they have
anywhere else. When all have come, the first keeper passes the sum to the second.

A worker of several processes may hold the values of all among these (``hybrid``, see ``reduction.holders``): blocks
are then asked of processes of the same worker only, which fetch what others have stepped once behind each update; and a
gradient waits with one of them for the other virtual nodes of its worker, before their sums go to the keeper.

In an attempt that breaks, blocks that cannot be asked for any more are zero: the script's pass comes to its end, and
what came of it is forgotten.

(Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, gather and free blocks by
hooks as well, in collectives of a group that stays what it is; their hybrid sharding, section 3.2.2, has a whole state
in each group, and Wang et al., "ZeRO++", 2023, section 3.2, as here only the parameters.)
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from virtualflow.errors import CommunicatorBroken, ConfigurationError, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.reduction import (
    Accumulator,
    Key,
    Offload,
    Parts,
    Row,
    Shares,
    Stretch,
    Summation,
    Tensors,
    deal,
    multiply,
    sum_up,
)
from virtualflow.state import StayingHook
from virtualflow.step.block_routes import BlockRoutes
from virtualflow.step.gathered_blocks import (
    GatheredBlock,
    WatchedUses,
    blocks_of,
    callable_holders,
    is_compiled,
    surround,
)
from virtualflow.step.sliced_values import SlicedValues, in_memory, refuse_reading
from virtualflow.transport import Communicator, Exchanger, Give, Message, Take

_REQUEST = struct.Struct("<BIqqIIQ")
"""What is asked, of which block, for which update, and of gradients: of which virtual node, of how many from there on,
of how many micro-batches, in how many bytes."""
_VALUES, _NEWS, _GRADIENT, _SUM = range(4)
"""Values for a pass, values for those who hold them for their worker; gradients for their sum in a worker, and in all.
"""
_ALIGNED = 16
"""Bytes at whose multiples tensors begin in a message."""
_ON_THE_WAY = 2
"""Blocks whose gradients may be on their way before the backward pass waits for them: each takes memory."""
_LOOKS = 2
"""Virtual nodes of a worker in which every use of a parameter is looked at: later, a wrong one shows as NaN."""
_CLOSE_WAIT = 5.0
"""Seconds in which a thread that asks is to end."""


class SliceSums:
    """Sums of the gradients of what one worker keeps first, for one update.

    In a ``statistical`` job there is one, in the order in which gradients come; a second keeper gets it from the first.

    Args:
        pieces: of each block.
        offload: where sums wait that are too many; ``None``: all in memory.
    """

    def __init__(
        self, summation: Summation, pieces: Sequence[Sequence[Stretch]], offload: Offload | None = None
    ) -> None:
        self._summation, self._offload = summation, offload
        self.pieces = pieces
        self._changed = threading.Condition()
        self.clear()

    def clear(self) -> None:
        """Begin with another update."""
        with self._changed:
            self._sums = [Accumulator(self._summation, self._offload) for _ in self.pieces]
            self._came = [0] * len(self.pieces)

    def add(self, block: int, part: Key, tensors: Tensors, micro_batches: int = 1) -> None:
        """The gradients of a micro-batch or of several, of each piece of a block, which belong to the sums from now on.

        Args:
            part: the stretch of virtual nodes that they are of; of several as one micro-batch, the first of them.
        """
        with self._changed:
            self._sums[block].add(part[0], tensors, count=part[1] - part[0])
            self._came[block] += micro_batches
            self._changed.notify_all()

    def stir(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, micro_batches: int, check: Callable[[], None], seconds: float) -> list[Parts]:
        """The sums of each block, when so many micro-batches have come.

        Args:
            check: called every so many ``seconds``; what it raises ends the waiting.
        """
        with self._changed:
            while any(pieces and came < micro_batches for pieces, came in zip(self.pieces, self._came, strict=True)):
                check()
                self._changed.wait(seconds)
            return [sums.parts for sums in self._sums]

    def totals(self, micro_batches: int, check: Callable[[], None], seconds: float) -> dict[Stretch, Tensor]:
        """The same as one sum, of pieces for which any micro-batch had a gradient."""
        found: dict[Stretch, Tensor] = {}
        for pieces, parts in zip(self.pieces, self.wait(micro_batches, check, seconds), strict=True):
            if pieces:
                total = sum_up(self._summation, parts)
                found |= {piece: tensor for piece, tensor in zip(pieces, total, strict=True) if tensor is not None}
        return found


class ShardedParameters:
    """One worker's part in what all need of each other's parameters and gradients.

    Args:
        values: what it keeps.
        blocks: see :func:`blocks_of`; their modules are hooked from now on.
        wait_slice: seconds between two looks at whether waiting is still worth it.
        offload: where sums of gradients wait that are too many; ``None``: all in memory.
        hybrid: whether the processes of each worker hold the values of all parameters among them.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[tuple[str, nn.Module]],
        values: SlicedValues,
        row: Row,
        summation: Summation,
        wait_slice: float,
        offload: Offload | None = None,
        *,
        hybrid: bool = False,
    ) -> None:
        self.values, self._offload, self._hybrid = values, offload, hybrid
        self._row = row
        self._summation, self._wait_slice = summation, wait_slice
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._blocks = blocks_of(model, modules)
        self._block_of = {place: block for block in self._blocks for place in block.places}
        self.active = False
        """Whether anything is divided: not where a worker is alone."""
        self._entered = False
        self._communicator: Communicator | None = None
        self._exchanger: Exchanger | None = None
        self._version = 0
        self._node: int | None = None
        """The virtual node that runs, if it contributes."""
        self._weight = 1.0
        self._given = [False] * len(self._parameters)
        self._ran: GatheredBlock | None = None
        self._ran_backward: GatheredBlock | None = None
        self._broken: Exception | None = None
        """Why blocks do not come any more."""
        self._pushes: list[Future[None]] = []
        self._held: dict[int, dict[Stretch, Tensor]] = {}
        """What is held for this worker and kept by others, of the blocks of which it has come, in the host's memory."""
        self._news: list[Future[None]] = []
        """Of each block whether it has."""
        # What is compiled would be compiled once more for the mode that looks.
        self._looks = 0 if any(map(is_compiled, model.modules())) else _LOOKS
        self._watching = ExitStack()
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        refuse_reading(model, values, "state_dict()")
        outside = {id(self._parameters[place]) for place in self._blocks[0].places}
        self._inside = {
            id(part): block
            for block, (_, module) in zip(self._blocks[1:], modules, strict=True)
            for part in module.modules()
        }
        self._hooks = [
            *(
                handle
                for block, module in zip(self._blocks, [model, *(module for _, module in modules)], strict=True)
                if block.places
                for handle in surround(
                    module, partial(self._before_forward, block), partial(self._after_forward, block)
                )
            ),
            *(handle for module in callable_holders(model, outside) for handle in surround(module, self._before_part)),
            *(
                handle
                for place, parameter in enumerate(self._parameters)
                if parameter.requires_grad
                for handle in (
                    _hook(parameter, StayingHook(partial(self._before_gradient, place))),
                    _hook_behind(parameter, partial(self._after_gradient, place)),
                )
            ),
        ]

    # --- a life -------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Of its blocks, by whose numbers workers ask one another for them."""
        return [block.name for block in self._blocks]

    def enter(self, communicator: Communicator, shares: Shares, version: int) -> None:
        """A generation begins; the values that are kept in it are here.

        Args:
            version: what the values are of: exchanges so far.
        """
        self.leave()
        self._entered = True
        self.active = communicator.size > 1
        if not self.active:
            return
        self._communicator, self._version = communicator, version
        self._rank, self._size = communicator.rank, communicator.size
        self._kept = self._row.pieces(shares.kept(self._rank))
        groups = self._groups(communicator.plan)
        self._mates = next(group for group in groups if self._rank in group)
        places = [block.places for block in self._blocks]
        routes = self._routes = BlockRoutes(self._row, shares, places, groups, hybrid=self._hybrid)
        numbers = range(len(self._blocks))
        self._gradients_for = {rank: [routes.summed(rank, block) for block in numbers] for rank in self._mates}
        """Of which gradients of each block that member makes the sums of its worker, or of all workers."""
        self._first = [self._row.pieces(shares.first(rank)) for rank in range(self._size)]
        self._copies = shares.copies
        own = self._gradients_for[self._rank]
        self._largest = [max([len(pieces), *(end for _, end in self._sum_ends(pieces, len(pieces)))]) for pieces in own]
        """Bytes of a block's gradients that may come."""
        first_here = [routes.first(self._rank, block) for block in numbers]
        self._sums = SliceSums(self._summation, first_here, self._offload)
        self._sums_of_worker = SliceSums(self._summation, own, self._offload) if self._hybrid else self._sums
        self._exchanger = Exchanger()
        assert communicator.answers is not None
        communicator.answers.begin(_REQUEST.size, self._answer, self._stir_sums)
        self._fetch_news()

    def _stir_sums(self) -> None:
        for sums in {self._sums, self._sums_of_worker}:
            sums.stir()

    def _groups(self, plan: m.Plan) -> list[tuple[int, ...]]:
        """The members that gather blocks from one another: all, or of each worker its processes."""
        workers = [member.launch_id if self._hybrid else "" for member in plan.members]
        return [tuple(n for n, one in enumerate(workers) if one == worker) for worker in dict.fromkeys(workers)]

    def deal(self, plan: m.Plan) -> list[Sequence[int]]:
        """The virtual nodes of each member.

        As sums by the tree wait for few others then, they are dealt in turns to those who make sums together.
        """
        ranges: list[Sequence[int]] = [member.virtual_nodes for member in plan.members]
        if not self._summation.movable:
            return ranges
        dealt, begin = ranges, 0
        for group in self._groups(plan):
            for rank, nodes in zip(group, deal([ranges[rank] for rank in group], begin), strict=True):
                dealt[rank] = nodes
            begin += sum(len(dealt[rank]) for rank in group)
        return dealt

    def leave(self) -> None:
        """The generation is over: its communicator is closed by others."""
        self._watching.close()
        self.rest()
        self._broken, self._pushes = None, []
        self._held, self._news = {}, []
        if self._exchanger is not None:
            self._exchanger.close(_CLOSE_WAIT)
        if self._communicator is not None and self._communicator.answers is not None:
            self._communicator.answers.cut()
        self._exchanger = self._communicator = None
        self.active = False

    def close(self) -> None:
        self.leave()
        for hook in reversed(self._hooks):
            hook.remove()

    def move_on(self, version: int) -> None:
        """The values are those of another update."""
        if not self.active:
            return
        self.rest()
        self._sums.clear()
        self._sums_of_worker.clear()
        self._held = {}  # before: the thread that answers must not take it for the new values
        self._version = version
        self._fetch_news()
        assert self._communicator is not None
        assert self._communicator.answers is not None
        self._communicator.answers.stir()

    # --- a pass -------------------------------------------------------------------------------------------------------

    def expect(self, node: int, weight: float) -> None:
        """A virtual node is about to run whose gradients count."""
        if self._node is None and self._looks:
            self._looks -= 1
            self._watching.enter_context(WatchedUses(self._find_hollow))
        self._node, self._weight = node, weight
        self._given = [False] * len(self._parameters)
        for block in self._blocks:
            trained = {place for place in block.places if self._parameters[place].requires_grad}
            block.left, block.waits, block.frozen = False, trained, len(trained) < len(block.places)

    def weigh(self, weight: float) -> None:
        """The script has said what the virtual node that runs counts by.

        Raises:
            ConfigurationError: gradients have left by what it counted by before.
        """
        if weight != self._weight and any(block.left for block in self._blocks):
            raise ConfigurationError(
                'step.weight came behind backward(), and with shard="parameters" gradients have left by then; call it '
                "before backward(), or pass weight= to vf.elastic"
            )
        self._weight = weight

    @property
    def begun(self) -> bool:
        return any(block.left for block in self._blocks)

    def settle(self) -> list[bool]:
        """The virtual node has run: send what has not left yet; which parameters it had a gradient for.

        Raises:
            CommunicatorBroken: its values were not all true, or its gradients have not all left.
        """
        self._watching.close()
        if self._broken is None:
            for block in reversed(self._blocks):
                if not block.left and block.places:
                    self._send(block)
        given, self._node = self._given, None
        self.rest()
        self.check_values()
        return given

    def check_values(self) -> None:
        """Raise what has kept values from coming, if anything has: what was computed is to be forgotten."""
        if self._broken is not None:
            raise self._broken

    def abandon(self) -> None:
        """The attempt is aborted."""
        self._watching.close()
        self._node = None
        self.rest()

    def rest(self) -> None:
        """Free all that is not kept."""
        self._ran = self._ran_backward = None
        for block in self._blocks:
            self._free(block)

    def results(self, present: Sequence[bool], scale: float, micro_batches: Sequence[int]) -> dict[int, Tensor]:
        """The reduced gradient of what this worker keeps, by place: see ``Reducer.share``.

        Args:
            micro_batches: of each member in this step.

        Raises:
            CommunicatorBroken: a member is lost.
        """
        communicator = self._communicator
        assert communicator is not None
        for push in self._pushes:
            communicator.settle(push)
        self._pushes.clear()
        if self._hybrid:
            self._pass_on(communicator, sum(micro_batches[rank] for rank in self._mates))
        found = self._sums.totals(sum(micro_batches), self._check, self._wait_slice)
        multiply(found.values(), scale)
        if self._copies > 1:
            found |= self._pass_round(communicator, found, present)
        sums: dict[int, list[tuple[Stretch, Tensor]]] = {}
        for piece, value in found.items():
            sums.setdefault(piece.place, []).append((piece, value))
        kept: dict[int, list[Stretch]] = {}
        for piece in self._kept:
            kept.setdefault(piece.place, []).append(piece)
        results: dict[int, Tensor] = {}
        for place, pieces in kept.items():
            if not present[place]:
                continue
            whole = any(map(self._row.is_whole, pieces))
            size = sum(piece.end - piece.begin for piece in pieces)
            result = (
                self.values.like(place, self._sum_dtype(place))
                if whole
                else torch.empty(size, dtype=self._sum_dtype(place), device=self.values.device(place))
            )
            ordered = [value for _, value in sorted(sums[place], key=lambda part: part[0])]
            torch.cat(ordered, out=in_memory(result))
            results[place] = result
        return results

    def _pass_round(
        self, communicator: Communicator, found: Mapping[Stretch, Tensor], present: Sequence[bool]
    ) -> dict[Stretch, Tensor]:
        """Give the sums to their second keeper, and get those of which this worker is the second one."""
        mine = [found[piece].cpu() for piece in self._first[self._rank] if present[piece.place]]
        before = (self._rank - 1) % self._size
        theirs = [piece for piece in self._first[before] if present[piece.place]]
        rooms = {piece: torch.empty(piece.end - piece.begin, dtype=self._sum_dtype(piece.place)) for piece in theirs}
        sent = [Message((self._rank + 1) % self._size, tensor, incoming=False) for tensor in mine if tensor.numel()]
        coming = [Message(before, room, incoming=True) for room in rooms.values() if room.numel()]
        communicator.start_messages([*sent, *coming]).wait()
        return {piece: room.to(self.values.device(piece.place)) for piece, room in rooms.items()}

    # --- for plans of memory (``memory.activations.Divided``) ---------------------------------------------------------

    @property
    def workers(self) -> int:
        """Over how many they are divided now."""
        return self._size if self.active else 1

    def memory(self) -> Iterable[Tensor]:
        """Where parameters are, or come to be when their block is gathered: no plan moves or drops that."""
        return self.values.memory()

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[bool]:
        """See that a module's forward pass can be called without its hooks, out of turn, and leave no trace of it.

        Yields:
            Whether values are true: else the attempt is broken, and what is computed from them counts for nothing.
        """
        own = self._inside.get(id(module)) if self.active else None
        before, begun = self._ran_backward, {block.number for block in self._blocks if block.backward}
        resting = own is not None and own.gathered is None
        if own is not None:
            self._gather(own)
        try:
            yield self._broken is None
        finally:
            self._ran_backward = before
            for block in self._blocks:
                if (resting and block is own) or (block.backward and block.number not in begun):
                    self._free(block)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _before_forward(self, block: GatheredBlock, *_: object) -> None:
        if not self.active:
            return
        self._gather(block)
        if not block.backward and self._ran_backward is None:  # else it is recomputed
            if self._ran is not None and self._ran is not block:
                self._ran.forward_next = block
            self._ran = block
            self._prefetch_next(block.forward_next)

    def _before_part(self, *_: object) -> None:
        """A module with parameters outside of all blocks runs, perhaps without the model around it."""
        if self.active:
            self._gather(self._blocks[0])

    def _after_forward(self, block: GatheredBlock, module: nn.Module, inputs: object, output: object) -> None:
        if not self.active:
            return
        if torch.is_grad_enabled():
            entered = {id(each) for each in pytree.tree_leaves(inputs)}  # a skipped block hands on what it got
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in entered:
                    _hook(tensor, partial(self._before_backward, block))
        # What is outside of all blocks is needed until the last of them has run, and may be from there on.
        if not block.backward and (block.number or not torch.is_grad_enabled()):
            self._free(block)

    def _before_backward(self, block: GatheredBlock, gradient: Tensor) -> None:
        if not self.active:
            return
        self._gather(block)
        before = self._ran_backward
        if not block.backward:
            block.backward = True
            if before is not None and not block.number:
                return  # what is outside of all blocks is needed beside them: this one has only begun
            if before is not None and before is not block:
                before.backward_next = block
                if before.number:
                    self._free(before)  # where some of its parameters are frozen or were not used
            self._ran_backward = block
            self._prefetch_next(block.backward_next)

    def _before_gradient(self, place: int, gradient: Tensor) -> None:
        if self.active and self._block_of[place].left:
            raise ConfigurationError(
                f"parameter {self._names[place]} got a gradient by a second backward() of one micro-batch, and with "
                'shard="parameters" the first one has left by then; add the losses up and call backward() once'
            )

    def _after_gradient(self, place: int, parameter: Tensor) -> None:
        if not self._entered:  # A joiner warms up, and may have no memory for all gradients.
            parameter.grad = None
        if not self.active or self._node is None:
            return
        block = self._block_of[place]
        block.waits.discard(place)
        if not block.waits:
            self._send(block)
            if block.number and not block.frozen:
                self._free(block)  # whatever has used them has come to their gradients

    def _find_hollow(self, tensor: Tensor) -> str | None:
        """What to say of a tensor that is used, if it is a parameter that is not gathered."""
        place = self._places.get(id(tensor))
        if place is None or self.values.is_kept(place) or self._block_of[place].shown:
            return None
        where = self._block_of[place].name or "the model"
        return (
            f"parameter {self._names[place]} is used where {where} does not run, so it is not gathered and is NaN; "
            f'use it in the forward pass of {where} alone, or leave out shard="parameters"'
        )

    # --- values -------------------------------------------------------------------------------------------------------

    def _gather(self, block: GatheredBlock) -> None:
        """See that a block's values are here, and shown."""
        if block.shown:
            return
        if block.gathered is None:
            self._prefetch(block)
        self._await(block)
        for place in block.places:
            if not self.values.is_kept(place):
                if self._broken is not None:
                    self.values.zero(place)
                self.values.show(place)
        block.shown = True

    def _prefetch_next(self, block: GatheredBlock | None) -> None:
        if block is not None and block.gathered is None and not block.left:
            self._prefetch(block)

    def _prefetch(self, block: GatheredBlock) -> None:
        block.gathered = Future()
        if self._broken is None:
            self._later(block.gathered, partial(self._fetch, block))
        else:
            block.gathered.set_result(None)

    def _await(self, block: GatheredBlock) -> None:
        """Wait until a block's values are here, or never will be: nobody writes to its memory behind this."""
        assert block.gathered is not None
        assert self._communicator is not None
        try:
            self._communicator.settle(block.gathered)
        except (CommunicatorBroken, VirtualFlowError) as error:
            self._broken = self._broken or error

    def _free(self, block: GatheredBlock) -> None:
        if block.gathered is not None:
            self._await(block)
            for place in block.places:
                self.values.free(place)
        block.gathered, block.shown, block.backward = None, False, False

    def _fetch(self, block: GatheredBlock) -> None:
        """Ask for a block's values (the thread that exchanges)."""
        assert self._communicator is not None
        if self._news:
            self._news[block.number].result()  # which this thread has dealt with before
        for place in block.places:
            if not self.values.is_kept(place):
                self.values.open(place)
        for piece, value in self._held.get(block.number, {}).items():
            self.values.fill(piece, value)
        pieces_of = {
            peer: self._routes.asked(peer, self._rank, block.number) for peer in self._mates if peer != self._rank
        }
        for piece, value in self._ask(_VALUES, block.number, pieces_of):
            self.values.fill(piece, value)

    def _fetch_news(self) -> None:
        """See that what is held here for this worker and kept elsewhere comes, of all blocks.

        It has come before the gradients of this member leave, behind it in the same thread: so who is asked for it has
        not moved on to another update yet.
        """
        self._held, self._news = {}, []
        for block in self._blocks if self._hybrid else ():
            self._news.append(Future())
            self._later(self._news[-1], partial(self._fetch_held, block.number, self._held))

    def _fetch_held(self, block: int, into: dict[int, dict[Stretch, Tensor]]) -> None:
        """Ask for what is held of a block (the thread that exchanges)."""
        pieces_of = {peer: self._routes.told(peer, self._rank, block) for peer in self._routes.holds[self._rank]}
        held = dict(self._ask(_NEWS, block, {peer: of for peer, of in pieces_of.items() if peer != self._rank}))
        assert self._communicator is not None
        assert self._communicator.answers is not None
        into[block] = held
        self._communicator.answers.stir()

    def _ask(self, kind: int, block: int, pieces_of: Mapping[int, Sequence[Stretch]]) -> list[tuple[Stretch, Tensor]]:
        """Get values of members, in the host's memory (the thread that exchanges)."""
        request = as_tensor(_REQUEST.pack(kind, block, self._version, 0, 0, 0, 0))
        messages, found = [], []
        for peer, pieces in pieces_of.items():
            if pieces:
                ends = self._ends(pieces)
                room = torch.empty(ends[-1][1], dtype=torch.uint8)
                messages += [Message(peer, request, incoming=False), Message(peer, room, incoming=True)]
                found += [
                    (piece, room[begin:end].view(self.values.dtype(piece.place)))
                    for piece, (begin, end) in zip(pieces, ends, strict=True)
                ]
        if messages:
            assert self._communicator is not None
            self._communicator.asking.start_messages(messages).wait()
        return found

    def _read(self, block: int, piece: Stretch) -> Tensor:
        """Values that are kept here or held."""
        for at, value in self._held.get(block, {}).items():
            if at.place == piece.place and at.begin <= piece.begin and piece.end <= at.end:
                return value[piece.begin - at.begin : piece.end - at.begin]
        return in_memory(self.values.read(piece))

    def _ends(
        self, pieces: Sequence[Stretch], ahead: int = 0, dtype: Callable[[int], torch.dtype] | None = None
    ) -> list[tuple[int, int]]:
        """Where each of them begins and ends in a message, in bytes; ``dtype``: instead of the values' types."""
        ends, at, dtype = [], ahead, dtype or self.values.dtype
        for place, begin, end in pieces:
            at = -(-at // _ALIGNED) * _ALIGNED
            size = (end - begin) * dtype(place).itemsize
            ends.append((at, at + size))
            at += size
        return ends

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _sum_dtype(self, place: int) -> torch.dtype:
        """In which a parameter's gradients travel and are summed up."""
        return self._summation.precision.of(self.values.dtype(place))

    def _sum_ends(self, pieces: Sequence[Stretch], ahead: int) -> list[tuple[int, int]]:
        """Where the gradients of some pieces are in a message, behind a byte for each piece of the block."""
        return self._ends(pieces, ahead, self._sum_dtype)

    def _send(self, block: GatheredBlock) -> None:
        """Let a block's gradients of the virtual node leave."""
        block.left = True
        if self._node is None or self._broken is not None:
            return
        gradients: dict[int, Tensor] = {}
        for place in block.places:
            gradient = self._parameters[place].grad
            self._parameters[place].grad = None
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise ConfigurationError(
                    f"parameter {self._names[place]} has a sparse gradient, which cannot be summed canonically; make "
                    "it dense (nn.Embedding(..., sparse=False))"
                )
            self._given[place] = True
            gradients[place] = self.values.as_laid_out(place, gradient.detach())
        push: Future[None] = Future()
        self._pushes.append(push)
        self._later(push, partial(self._push, block.number, self._node, self._weight, gradients))
        if len(self._pushes) > _ON_THE_WAY:
            try:
                assert self._communicator is not None
                self._communicator.settle(self._pushes.pop(0))
            except (CommunicatorBroken, VirtualFlowError) as error:
                self._broken = error

    def _push(self, block: int, node: int, weight: float, gradients: dict[int, Tensor]) -> None:
        """Send a block's gradients to those who make their sums (the thread that exchanges)."""
        for_each: dict[int, tuple[Sequence[Stretch], Tensors]] = {}
        for peer, pieces_of in self._gradients_for.items():
            for_each[peer] = (
                pieces_of[block],
                [
                    None
                    if place not in gradients
                    else _weighed(gradients[place][begin:end].to(self._sum_dtype(place)), weight)
                    for place, begin, end in pieces_of[block]
                ],
            )
        self._give(_GRADIENT if self._hybrid else _SUM, block, (node, node + 1), 1, for_each)

    def _pass_on(self, communicator: Communicator, micro_batches: int) -> None:
        """Send the sums over this worker's virtual nodes that were made here to those who make the sums of all."""
        sums = self._sums_of_worker.wait(micro_batches, self._check, self._wait_slice)
        passing: Future[None] = Future()
        self._later(passing, partial(self._give_sums, sums, micro_batches))
        communicator.settle(passing)

    def _give_sums(self, sums: Sequence[Parts], micro_batches: int) -> None:
        for block, parts in enumerate(sums):
            for number, (part, tensors) in enumerate(parts, start=1):
                for_each, at = {}, 0
                for first in self._routes.holds[self._rank]:
                    pieces = self._routes.first(first, block)
                    for_each[first] = pieces, tensors[at : at + len(pieces)]
                    at += len(pieces)
                self._give(_SUM, block, part, micro_batches if number == len(parts) else 0, for_each)

    def _give(
        self,
        kind: int,
        block: int,
        part: Key,
        micro_batches: int,
        for_each: Mapping[int, tuple[Sequence[Stretch], Tensors]],
    ) -> None:
        """Let members have gradients of a block for the sums that they make (the thread that exchanges)."""
        messages = []
        for peer, (pieces, tensors) in for_each.items():
            if not pieces:
                continue
            if peer == self._rank:
                self._sums_for(kind).add(block, part, tensors, micro_batches)
                continue
            there = [piece for piece, tensor in zip(pieces, tensors, strict=True) if tensor is not None]
            ends = self._sum_ends(there, len(pieces))
            content = torch.zeros(ends[-1][1] if ends else len(pieces), dtype=torch.uint8)
            content[: len(pieces)] = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8)
            for (begin, end), tensor in zip(ends, [t for t in tensors if t is not None], strict=True):
                content[begin:end].view(tensor.dtype).copy_(tensor)
            node, count = part[0], part[1] - part[0]
            request = as_tensor(_REQUEST.pack(kind, block, self._version, node, count, micro_batches, len(content)))
            messages += [Message(peer, request, incoming=False), Message(peer, content, incoming=False)]
        if messages:
            assert self._communicator is not None
            self._communicator.asking.start_messages(messages).wait()

    def _sums_for(self, kind: int) -> SliceSums:
        return self._sums_of_worker if kind == _GRADIENT else self._sums

    # --- for others ---------------------------------------------------------------------------------------------------

    def _answer(self, peer: int, request: bytes) -> Give | Take | None:
        """Serve a member (the thread that answers)."""
        kind, block, version, node, count, micro_batches, size = _REQUEST.unpack(request)
        if block >= len(self._blocks) or size > self._largest[block]:
            raise VirtualFlowError(f"member {peer} asks for what no worker has: its script is another one")
        if version > self._version:
            return None
        if version < self._version:
            raise VirtualFlowError(f"member {peer} asks for update {version}, and this worker is at {self._version}")
        if kind in (_VALUES, _NEWS):
            if kind == _VALUES and self._hybrid and block not in self._held:
                return None
            pieces = (self._routes.asked if kind == _VALUES else self._routes.told)(self._rank, peer, block)
            ends = self._ends(pieces)
            content = torch.empty(ends[-1][1], dtype=torch.uint8)
            for piece, (begin, end) in zip(pieces, ends, strict=True):
                content[begin:end].view(self.values.dtype(piece.place)).copy_(self._read(block, piece))
            return Give(content.numpy().data)
        room = torch.empty(size, dtype=torch.uint8)
        return Take(room.numpy().data, partial(self._take, kind, block, (node, node + count), micro_batches, room))

    def _take(self, kind: int, block: int, part: Key, micro_batches: int, room: Tensor) -> None:
        sums = self._sums_for(kind)
        pieces = sums.pieces[block]
        given = room[: len(pieces)].tolist()
        ends = iter(self._sum_ends([piece for piece, there in zip(pieces, given, strict=True) if there], len(pieces)))
        tensors: Tensors = []
        for piece, there in zip(pieces, given, strict=True):
            begin, end = next(ends) if there else (0, 0)
            value = room[begin:end].view(self._sum_dtype(piece.place)) if there else None
            tensors.append(None if value is None else value.to(self.values.device(piece.place)))
        sums.add(block, part, tensors, micro_batches)

    def _check(self) -> None:
        assert self._communicator is not None
        answers = self._communicator.answers
        if answers is not None and answers.broken is not None:
            raise answers.broken
        self._communicator.check()

    def _later(self, outcome: Future[None], task: Callable[[], None]) -> None:
        """Let the thread that exchanges do something, and tell what came of it."""

        def carry_out() -> None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - whoever waits for it raises it
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        assert self._exchanger is not None
        self._exchanger.submit(carry_out)


_hook: Callable[[Tensor, Callable[[Tensor], None]], RemovableHandle] = Tensor.register_hook
_hook_behind: Callable[[Tensor, Callable[[Tensor], None]], RemovableHandle] = Tensor.register_post_accumulate_grad_hook


def _weighed(gradient: Tensor, weight: float) -> Tensor:
    """A copy, times its weight; a mean over nothing is not a number, and counts for nothing."""
    return gradient * weight if weight else torch.zeros_like(gradient)


def as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
