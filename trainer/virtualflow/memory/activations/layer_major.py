"""Layer-major order: a block runs for all virtual nodes of a worker, then the next one, and backward the other way.

So weights come to the device twice a step, and not twice a virtual node, and it holds one block at a time. Between its
turns a virtual node is in flight: what enters each block waits on the host, with the states of the random streams, and
a block is computed again in the backward pass, with gradients. While a block is computed, the weights of the next one
are copied, if both fit, and the sums of those behind it may travel between workers (the phased exchange of KARMA, Wahib
et al., SC 2020, arXiv 2008.11421). Bits are those of the ordinary order: a virtual node finds the streams where its
block before left them and the buffers that every one finds, and each block's gradients are added up in the order of the
job's summation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from virtualflow.errors import ConfigurationError
from virtualflow.memory import Budget, DoesNotFit, format_bytes
from virtualflow.memory.activations.chain import Carrier, Chain, Loaded
from virtualflow.memory.activations.live_bytes import LiveBytes
from virtualflow.memory.activations.module_state import Streams, read_streams, write_streams
from virtualflow.protocol.wording import counted
from virtualflow.reduction import Accumulator, Parts, Summation, Tensors, separate

logger = logging.getLogger("virtualflow.worker")

Loss = Callable[["Flight", Any, Sequence[Any]], Any]
"""Gets a virtual node, what the last block returns for it, and the elements of its micro-batch behind the first."""

Complete = Callable[[Sequence[int], Sequence[Tensors]], object]
"""Gets the places of a block's parameters and the sums over all flights, for each sum a tensor a place; it may take
tensors out of them."""


@dataclass
class Flight:
    """A virtual node between its blocks."""

    number: int
    samples: int
    weight: float
    data: Any
    """Its micro-batch: the first element enters the first block."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Those that its forward pass has changed."""
    _entered: list[_Boundary] = field(default_factory=list)
    _streams: list[Streams] = field(default_factory=list)
    """Where they were when each block began."""
    _gradients: list[Tensor | None] = field(default_factory=list)
    """Of what entered the block behind."""


@dataclass(frozen=True)
class _Boundary:
    leaves: list[Any]
    structure: TreeSpec
    differentiable: list[bool]


@dataclass(frozen=True)
class Summed:
    """The gradients of all flights."""

    parts: Parts
    """One place for each parameter of the model."""
    given: list[bool]
    """At which of them there was a gradient."""


@dataclass(frozen=True)
class _OfBlock:
    """What came of one block: the places of its parameters, the sums at these, and where there was any."""

    places: list[int]
    parts: Parts
    given: set[int]


class LayerMajor:
    """Computes a worker's virtual nodes block by block.

    Args:
        budget: the device's memory, and the host's for what waits there between blocks.
    """

    def __init__(self, chain: Chain, carrier: Carrier, summation: Summation, budget: Budget) -> None:
        self.carrier = carrier
        self.peak_bytes = 0
        """The most that was on the device: a block, what it computes for a virtual node, sums, and the next block."""
        self._chain, self._summation, self._budget = chain, summation, budget
        self._measured: dict[tuple[object, ...], int] = {}
        """By pass, block, samples and what is trained: what it takes on the device, sums of gradients aside."""
        self._most: dict[tuple[str, int], int] = {}
        """By pass and block: the most that it took with these in the last step."""
        self._ahead: list[Tensor] | None = None
        """Copies of the next block's tensors, once they have begun."""
        self._waiting = 0
        """Bytes on the host between blocks."""
        self._runs = 0

    def run(
        self,
        flights: Sequence[Flight],
        loss: Loss,
        *,
        seed: Callable[[Flight], object],
        check: Callable[[], object],
        complete: Complete | None = None,
    ) -> Summed:
        """Compute them all.

        Args:
            check: called before every visit of a block; may raise.
            complete: called behind the backward pass of every block, from the last one to the first.

        Returns:
            Without the sums that ``complete`` has taken out.

        Raises:
            DoesNotFit: a block does not, or what waits on the host.
        """
        chain, last = self._chain, len(self._chain.links) - 1
        self._waiting = 0
        flying = [flight for flight in flights if flight.samples]
        for flight in flying:
            self._begin(flight)
            seed(flight)
            flight._streams.append(read_streams(self.carrier.device))
        of_blocks = []
        try:
            for index in range(last):
                self._forward_all(index, flying, check)
            for index in reversed(range(last + 1)):
                of_blocks.append(self._backward_all(index, flights, loss if index == last else None, check))
                if complete is not None:
                    complete(of_blocks[-1].places, [tensors for _, tensors in of_blocks[-1].parts])
        finally:
            self._drop_ahead()
        self._runs += 1
        if self._runs == (2 if self.carrier.beside else 1):  # nothing is copied ahead in the first one
            logger.warning(
                "memory: %d blocks run layer by layer, for %d virtual nodes each; the device holds %s at most",
                last + 1,
                len(flying),
                format_bytes(self.peak_bytes),
            )
        return _put_together(of_blocks, len(chain.parameters))

    def _forward_all(self, index: int, flights: Sequence[Flight], check: Callable[[], object]) -> None:
        with self._load("forward", index, index + 1) as block:
            for flight in flights:
                check()
                self._forward(index, block, flight)

    def _backward_all(
        self, index: int, flights: Sequence[Flight], loss: Loss | None, check: Callable[[], object]
    ) -> _OfBlock:
        with self._load("backward", index, index - 1) as block:
            sums, given = Accumulator(self._summation), set[int]()
            for flight in flights:
                check()
                gradients: Tensors = [None] * len(block.link.places)
                if flight.samples:
                    at_rest = sum(t.nbytes for _, tensors in sums.parts for t in tensors if t is not None)
                    with self._measure("backward", index, block, flight, at_rest):
                        gradients = self._backward(index, block, flight, loss)
                there = zip(block.link.places, gradients, strict=True)
                given |= {place for place, tensor in there if tensor is not None}
                sums.add(flight.number, gradients, weight=flight.weight)
                del gradients  # what is in a sum is not needed
            parts: Parts = [
                (key, [None if t is None else self.carrier.take(t) for t in row]) for key, row in sums.parts
            ]
            return _OfBlock(block.link.places, parts, given)

    @contextmanager
    def _load(self, kind: str, index: int, following: int) -> Iterator[Loaded]:
        """Put a block on the device, and begin to copy the ``following`` one if the last step left room for it."""
        ahead, self._ahead = self._ahead, None
        with self._chain.load(index, self.carrier, ahead) as block:
            room = self._budget.device - self._most.pop((kind, index), self._budget.device)
            if self.carrier.beside and following >= 0:
                tensors = self._chain.tensors(following)
                if 0 < sum(tensor.nbytes for tensor in tensors) <= room:
                    self._ahead = self.carrier.begin(tensors)
            yield block

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self.carrier.arrive(self._ahead)  # before their memory is somebody else's
            self._ahead = None

    # --- forward ------------------------------------------------------------------------------------------------------

    def _begin(self, flight: Flight) -> None:
        if not isinstance(flight.data, list | tuple) or not flight.data:
            raise ConfigurationError(
                f"in layer-major order a micro-batch must be a tuple or list whose first element enters the model; it "
                f"is {type(flight.data).__name__}: let the dataset or collate_fn make tuples"
            )
        self._enter(flight, flight.data[0], None)

    def _enter(self, flight: Flight, value: Any, take: Callable[[Tensor], Tensor] | None) -> None:
        """What is to enter the next block waits on the host: it is taken there, or (``None``) is there."""
        leaves, structure = tree_flatten(value)
        needs = [take is not None and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        if take is not None:
            # What a block returns twice enters the next one as one tensor: its gradients add up in the same order.
            taken = {id(leaf): take(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            leaves = [taken.get(id(leaf), leaf) for leaf in leaves]
        flight._entered.append(_Boundary(leaves, structure, needs))
        self._waiting += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if self._budget.host is not None and self._waiting > self._budget.host:
            raise DoesNotFit(
                f"what waits between blocks takes more than the {format_bytes(self._budget.host)} of the host; allow "
                "more, or let more workers share the virtual nodes",
                None,
            )

    def _forward(self, index: int, block: Loaded, flight: Flight) -> None:
        write_streams(flight._streams[-1])
        block.renew_buffers()
        # With gradients, though they are not used: kernels may choose by that, and outputs tell whether they need any.
        with self._measure("forward", index, block, flight, 0), torch.enable_grad():
            arguments, _ = self._bring(flight._entered[-1])
            output = block.link.module(arguments)
        torch.clear_autocast_cache()  # of parameters that are about to go
        flight._streams.append(read_streams(self.carrier.device))
        flight.buffers |= block.changed_buffers(self.carrier)
        self._enter(flight, output, self.carrier.take)

    def _bring(self, boundary: _Boundary) -> tuple[Any, dict[int, GradientEdge]]:
        leaves, edges, brought = list(boundary.leaves), dict[int, GradientEdge](), dict[int, Tensor]()
        for position, leaf in enumerate(boundary.leaves):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) not in brought:
                tensor = self.carrier.bring(leaf)
                if boundary.differentiable[position]:
                    anchor = torch.empty(0, device=self.carrier.device, requires_grad=True)
                    tensor = _Enter.apply(anchor, tensor)  # type: ignore[no-untyped-call]
                    edges[position] = get_gradient_edge(tensor)
                brought[id(leaf)] = tensor
            leaves[position] = brought[id(leaf)]
        return tree_unflatten(leaves, boundary.structure), edges

    # --- backward -----------------------------------------------------------------------------------------------------

    def _backward(self, index: int, block: Loaded, flight: Flight, loss: Loss | None) -> Tensors:
        """Compute a block again, with ``loss`` behind it if it is the last one, and its gradients, a place each."""
        write_streams(flight._streams[index])
        block.renew_buffers()
        boundary = flight._entered.pop()
        with torch.enable_grad():
            arguments, edges = self._bring(boundary)
            output = block.link.module(arguments)
            if loss is None:
                outputs, incoming = self._receive(output, flight)
            else:
                flight.buffers |= block.changed_buffers(self.carrier)
                outputs, incoming = self._close(output, flight, loss)
        torch.clear_autocast_cache()
        del arguments, output
        targets: list[Any] = [*edges.values(), *block.trained.values()]
        found: Sequence[Tensor | None] = [None] * len(targets)
        if outputs and targets:
            with _without_autocast(self.carrier.device):
                found = torch.autograd.grad(outputs, targets, incoming, allow_unused=True)
        entered = dict(zip(edges, found, strict=False))
        flight._gradients = [
            None if gradient is None else self.carrier.take(gradient)
            for gradient in (entered.get(position) for position in range(len(boundary.leaves)))
        ]
        owned = {tensor.untyped_storage().data_ptr() for tensor in block.tensors}
        pairs = zip(block.trained.values(), found[len(edges) :], strict=True)
        gradients = separate(_as_autograd_leaves_it(parameter, gradient, owned) for parameter, gradient in pairs)
        by_place = dict(zip(block.trained, self._summation.precision.cast_all(gradients), strict=True))
        return [by_place.get(place) for place in block.link.places]

    def _close(self, output: Any, flight: Flight, loss: Loss) -> tuple[list[Tensor], list[Tensor | None]]:
        value = loss(flight, output, tree_map_only(Tensor, self.carrier.bring, list(flight.data[1:])))
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigurationError(
                f"the loss of step.layer_major returned {_describe(value)}; it must return a tensor of one number"
            )
        return ([value], [None]) if value.requires_grad else ([], [])

    def _receive(self, output: Any, flight: Flight) -> tuple[list[Tensor], list[Tensor | None]]:
        outputs, incoming = list[Tensor](), list[Tensor | None]()
        for leaf, gradient in zip(tree_flatten(output)[0], flight._gradients, strict=True):
            if gradient is not None:
                outputs.append(leaf)
                incoming.append(self.carrier.bring(gradient))
        return outputs, incoming

    # --- memory -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _measure(self, kind: str, index: int, block: Loaded, flight: Flight, at_rest: int) -> Iterator[None]:
        """Find out what a visit of a block takes, the first time that it is one of so many samples.

        Raises:
            DoesNotFit: it is too much, with the sums of gradients that are ``at_rest``.
        """
        key = (kind, index, flight.samples, *block.trained)
        size = sum(tensor.untyped_storage().nbytes() for tensor in self._ahead or ())
        if self._measured.get(key, self._budget.device) + at_rest + size > self._budget.device:
            # Whatever it takes, it is not to be more for the next block's sake.
            self._drop_ahead()
            size = 0
        if key in self._measured:
            yield
        else:
            live = LiveBytes()
            live.add([*block.tensors, *block.link.module.buffers()])
            with self.carrier.seen_by(live):
                yield
            self._measured[key] = live.peak
        taken = self._measured[key] + at_rest
        self.peak_bytes = max(self.peak_bytes, taken + size)
        self._most[kind, index] = max(taken, self._most.get((kind, index), 0))
        if taken > self._budget.device:
            raise DoesNotFit(
                f"block {block.link.name} takes {format_bytes(taken, up=True)} of the device for a virtual node of "
                f"{counted(flight.samples, 'sample')}, {format_bytes(at_rest)} of it for sums of gradients, "
                "and there are "
                f"{format_bytes(self._budget.device)}; name smaller blocks, or use more virtual nodes",
                None,
            )


class _Enter(torch.autograd.Function):
    """Makes a tensor one that autograd has computed, without a copy; it may then be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    """A backward pass is not to choose types anew where the script has the whole step in an autocast."""
    with ExitStack() as stack:
        for kind in {"cpu", device.type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _as_autograd_leaves_it(parameter: nn.Parameter, gradient: Tensor | None, owned: set[int]) -> Tensor | None:
    """A gradient as ``.grad`` would hold it: laid out as the parameter, in memory that nobody else has."""
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise ConfigurationError(
            "a parameter has a sparse gradient, which cannot be summed canonically; make it dense "
            "(nn.Embedding(..., sparse=False))"
        )
    if gradient.stride() == parameter.stride() and gradient.untyped_storage().data_ptr() not in owned:
        return gradient
    return torch.empty_like(parameter.detach()).copy_(gradient)


def _put_together(of_blocks: Sequence[_OfBlock], count: int) -> Summed:
    whole: Parts = [(key, [None] * count) for key, _ in of_blocks[0].parts]
    for block in of_blocks:
        for (_, target), (_, tensors) in zip(whole, block.parts, strict=True):
            for place, tensor in zip(block.places, tensors, strict=True):
                target[place] = tensor
    given = set[int]().union(*(block.given for block in of_blocks))
    return Summed(whole, [place in given for place in range(count)])


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
