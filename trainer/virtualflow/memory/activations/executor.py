"""Carries out a plan of memory in the user's own loop, by hooks on the model's blocks.

What autograd saves while a block runs goes through :class:`torch.autograd.graph.saved_tensors_hooks`: it is kept,
copied to the host when the block is over and back at the point that the plan names (KARMA; Wahib et al., SC 2020), or
computed again from what entered the block or its segment. No bits depend on it: what autograd gets back are the same
bits, and the graph is the one of the run without a plan. What a plan does not foresee (a block that is called twice, in
another order or not at all) costs memory or time, never bits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.utils._pytree import TreeSpec, tree_flatten

from virtualflow.errors import ConfigurationError
from virtualflow.memory import Action, BlockPlan, Point, Wait
from virtualflow.memory.activations.blocks import Named
from virtualflow.memory.activations.copies import Copies
from virtualflow.memory.activations.ledger import Kept, Ledger, Packed, StorageEntry, has_storage, is_plain, key_of
from virtualflow.memory.activations.visits import Recomputation, Segment, Visit, all_here, find_links
from virtualflow.state import StayingHook

logger = logging.getLogger("virtualflow.worker")

_UNCHANGING = (
    *(Tensor, NoneType, int, float, complex, str, bytes, Enum, slice, range, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""What a block may be given a second time: a forward pass leaves it as it is, or it is noticed."""


_Made = TypeVar("_Made")


class Observer(Protocol):
    """Somebody who measures blocks while they run."""

    def begin(self, visit: Visit, inputs: list[Tensor], arguments: Any, options: Any, *, joins: bool) -> None:
        """A block's forward pass begins.

        Args:
            joins: whether it gets what the block before has returned.
        """

    def saved(self, visit: Visit, tensor: Tensor) -> None:
        """Autograd has saved a tensor."""

    def beside(self, block: int, do: Callable[[], _Made]) -> _Made:
        """Do what the plan asks for beside the computing of that block."""

    def end(self, visit: Visit, outputs: list[Tensor]) -> None:
        """The forward pass is over."""

    def outside(self, tensor: Tensor) -> Packed:
        """Autograd has saved a tensor outside of all blocks; what it is to keep instead."""

    def reach(self, point: Point) -> None:
        """The backward pass begins with a block, or computes it again."""

    def recomputed(self) -> None:
        """A segment has been computed again."""


class Divided(Protocol):
    """Parameters that are divided over workers: a block's are here while it runs."""

    @property
    def workers(self) -> int:
        """Over how many they are divided now; 1: all are here."""

    def memory(self) -> Iterable[Tensor]:
        """Where they are, or come to be when their block is gathered: no plan moves or drops that."""

    def gathered(self, module: nn.Module) -> AbstractContextManager[bool]:
        """See that a module can be computed again meanwhile, and say whether its parameters are true."""


class Executor:
    """The blocks of a model, and what becomes of what they save; before :meth:`follow` all of it is kept.

    Args:
        rehearses: what is computed again is kept as well, and what cannot be is no error.
        divided: ``None``: every parameter is where it is.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Named],
        device: torch.device,
        copies: Copies | None = None,
        *,
        rehearses: bool = False,
        divided: Divided | None = None,
    ) -> None:
        self.ledger = Ledger(copies or Copies(device))
        self.observer: Observer | None = None
        self._model, self._blocks, self._device = model, list(blocks), device
        self._rehearses, self._divided = rehearses, divided
        self._index = {id(module): index for index, (_, module) in enumerate(blocks)}
        self._plans: Sequence[BlockPlan] = [BlockPlan(Action.KEEP)] * len(blocks)
        self._keeps = True
        self._fetched_at: dict[Point, list[int]] = {}
        self._leaving_at: dict[Point, int] = {}
        self._due: deque[int] = deque()
        """Blocks whose copies back are due, but for what is leaving."""
        self._sharing: set[int] = set()
        """Blocks that have saved what another one copies out."""
        self._ran = self._known = False
        """Whether a whole forward pass has followed the plan (a backward pass shows it), and whether one did in a
        micro-batch before, so that it is known who shares."""
        self._permanent: frozenset[int] = frozenset()
        self._open: list[_Open | None] = []
        self._outside: saved_tensors_hooks | None = None
        """While a micro-batch is observed, around all blocks."""
        self._before: tuple[Visit, Segment | None] | None = None
        """The last visit, and its segment."""
        self._swapped: dict[int, list[ref[StorageEntry]]] = {}
        self._said: set[str] = set()
        before, after = StayingHook(self._begin), StayingHook(self._end)
        self._handles = [
            handle
            for _, module in blocks
            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=True),
            )
        ]

    def follow(self, plans: Sequence[BlockPlan], host_bytes: int | None = None, waits: Sequence[Wait] = ()) -> None:
        """Do so from the next forward pass on.

        In the first micro-batch all that autograd saves is looked at. From then on a kept block is left alone, unless
        it shares what another one copies out, which would stay on the device otherwise.

        Args:
            host_bytes: the most that is swapped at a time; what would be more is kept. ``None``: no limit.
            waits: for copies out, where these take time.
        """
        if list(plans) != list(self._plans):
            self._ran = self._known = False
            self._sharing = set()
        self._plans = plans
        self._keeps = all(plan.action is Action.KEEP for plan in plans)
        self._leaving_at = {wait.point: wait.leaving for wait in waits}
        self.ledger.copies.ring.limit = host_bytes
        self._fetched_at = {}
        for block, plan in enumerate(plans):
            if plan.prefetch is not None:
                self._fetched_at.setdefault(plan.prefetch, []).append(block)

    def begin(self) -> None:
        parameters = self._model.parameters() if self._divided is None else self._divided.memory()
        tensors = [*parameters, *self._model.buffers()]
        self._permanent = frozenset(key_of(tensor) for tensor in tensors if has_storage(tensor))
        self._known = self._ran
        self._forget()
        if self.observer is not None:
            self._outside = saved_tensors_hooks(self._pack_outside, _load_outside)
            self._outside.__enter__()

    def end(self) -> None:
        """A micro-batch is over."""
        self._forget()

    def _pack_outside(self, tensor: Tensor) -> Packed:
        if self.observer is None or not is_plain(tensor) or key_of(tensor) in self._permanent:
            return Kept(tensor)
        return self.observer.outside(tensor)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._forget()

    def _forget(self) -> None:
        """Let go of a micro-batch, and of blocks in it that were interrupted: torch calls hooks for exceptions only."""
        while self._open:
            opened = self._open.pop()
            if opened is not None and opened.hooks is not None:
                opened.hooks.__exit__()
        if self._outside is not None:
            self._outside.__exit__()
            self._outside = None
        self._before = None
        self._swapped.clear()
        self._due.clear()

    # --- forward ------------------------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, arguments: Any, options: Any) -> None:
        if not torch.is_grad_enabled() or (self._keeps and self.observer is None):
            self._open.append(None)  # nothing is to be done, and nothing counted
            return
        block = self._index[id(module)]
        leaves, structure = tree_flatten((arguments, options))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and has_storage(leaf)]
        given = frozenset(key_of(tensor) for tensor in inputs if tensor.grad_fn is None)
        visit = Visit(block, self._blocks[block][0], module, self.ledger, given, self._permanent)
        self._make_room(Point("forward", block))
        pack: Callable[[Tensor], Packed]
        segment: Segment | None = None
        recomputation: Recomputation | None = None
        if self._plans[block].action is Action.RECOMPUTE and self._can_be_repeated(block, leaves):
            segment, recomputation = self._beside(block, partial(self._join, leaves, structure, visit))
            pack = partial(recomputation.pack, segment)
        else:
            pack = visit.save
        for tensor in inputs:
            if tensor.grad_fn is not None:
                visit.claim(tensor)
        joins = self.observer is not None and self._is_handed_over(leaves, block)
        self._before = None  # that it is not kept while this one runs
        if self.observer is not None:
            pack = partial(self._observed, visit, pack)
            self.observer.begin(visit, inputs, arguments, options, joins=joins)
        hooks = None
        if not self._left_alone(block):
            hooks = saved_tensors_hooks(pack, partial(self._load, block))
            hooks.__enter__()
        self._open.append(_Open(visit, hooks, segment, recomputation))

    def _left_alone(self, block: int) -> bool:
        """Whether autograd may keep what that block saves by itself, which is faster."""
        kept = self._plans[block].action is Action.KEEP
        return kept and self._known and self.observer is None and block not in self._sharing

    def _can_be_repeated(self, block: int, leaves: list[Any]) -> bool:
        """Whether a forward pass that is like this one can be asked for; if not, the block is kept."""
        name, module = self._blocks[block]
        before, after = self._handles[2 * block], self._handles[2 * block + 1]
        unknown = next((type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _UNCHANGING)), None)
        if unknown is not None:
            why = f"gets a {unknown}, which its forward may change"
        elif next(reversed(module._forward_pre_hooks)) != before.id:
            why = "has a forward pre-hook that was registered behind vf.elastic"
        elif next(iter(module._forward_hooks)) != after.id or torch_module._global_forward_hooks:
            why = "has a forward hook that is called before those of vf.elastic"
        else:
            return True
        if why not in self._said:
            self._said.add(why)
            logger.warning("memory: block %s %s; so it, and others like it, is kept and not computed again", name, why)
        return False

    def _is_handed_over(self, leaves: list[Any], block: int) -> bool:
        """Whether the block before that one hands over to it."""
        before = self._before
        return before is not None and before[0].block == block - 1 and bool(find_links(leaves, before[0]))

    def _join(self, leaves: list[Any], structure: TreeSpec, visit: Visit) -> tuple[Segment, Recomputation]:
        """How the visit is computed again: with the one before if that hands over to it, or by itself."""
        before, segment = self._before or (None, None)
        joins = (
            before is not None
            and segment is not None
            and bool(segment.visits)
            and self._plans[before.block].segment == self._plans[visit.block].segment
            and self._is_handed_over(leaves, visit.block)
        )
        if segment is None or not joins:
            before = None
            refused = self._refused if self._rehearses else None
            gathered = all_here if self._divided is None else self._divided.gathered
            segment = Segment(self._recomputes, self._recomputed, refused, gathered)
        recomputation = Recomputation(visit, leaves, structure, before, self._device)
        segment.visits.append(recomputation)
        return segment, recomputation

    def _observed(self, visit: Visit, pack: Callable[[Tensor], Packed], tensor: Tensor) -> Packed:
        if self.observer is not None:
            self.observer.saved(visit, tensor)
        return self._beside(visit.block, partial(pack, tensor))

    def _beside(self, block: int, do: Callable[[], _Made]) -> _Made:
        return do() if self.observer is None else self.observer.beside(block, do)

    def _end(self, module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
        opened = self._open.pop() if self._open else None  # empty: it has failed before its forward pass
        if opened is None:
            return
        visit = opened.visit
        if opened.hooks is not None:
            opened.hooks.__exit__()
        leaves = tree_flatten(output)[0]
        visit.outputs = [(ref(leaf), leaf._version) if isinstance(leaf, Tensor) else None for leaf in leaves]
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if opened.recomputation is not None:
            check = bool(outputs) and not self._rehearses  # without outputs it may have failed
            self._beside(visit.block, partial(opened.recomputation.end, check=check))
        plan = self._plans[visit.block]
        if plan.action is Action.SWAP or plan.prefetch is not None:
            self._swap_out(visit, {key_of(tensor) for tensor in outputs if has_storage(tensor)})
        if self.observer is not None:
            self.observer.end(visit, [tensor for tensor in outputs if has_storage(tensor)])
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(_reach, self._reach, Point("backward", visit.block)))
        self._before = visit, opened.segment

    def _swap_out(self, visit: Visit, outputs: set[int]) -> None:
        """What is this block's leaves; what it hands over belongs to whoever gets it."""
        swapped = self._swapped.setdefault(visit.block, [])
        for known in visit.entries:
            entry = known()
            if entry is not None and entry.key not in outputs:
                self._sharing |= entry.savers
                entry.swap_out()
                swapped.append(known)
        visit.entries = []

    # --- backward -----------------------------------------------------------------------------------------------------

    def _recomputes(self, block: int) -> None:
        self._reach(Point("recompute", block))

    def _recomputed(self) -> None:
        if self.observer is not None:
            self.observer.recomputed()

    def _refused(self, error: ConfigurationError) -> None:
        if str(error) not in self._said:
            self._said.add(str(error))
            logger.warning("memory: %s", error)

    def _reach(self, point: Point) -> None:
        self._ran = True
        if self.observer is not None:
            self.observer.reach(point)
        self._make_room(point)
        self._due.extend(self._fetched_at.get(point, ()))
        self._fetch()

    def _make_room(self, point: Point) -> None:
        """Wait for copies out whose memory is needed there."""
        leaving = self._leaving_at.get(point)
        if leaving is not None:
            self.ledger.copies.reclaim(leaving)

    def _fetch(self) -> None:
        """Issue copies back that are due, unless something is still leaving, whose memory they get."""
        while self._due and self.ledger.copies.clear():
            for known in self._swapped.pop(self._due.popleft(), ()):
                entry = known()
                if entry is not None:
                    entry.swap_in()

    def _load(self, block: int, packed: Packed) -> Tensor:
        self._fetch()
        return packed.load() if self.observer is None else self.observer.beside(block, packed.load)


@dataclass(frozen=True)
class _Open:
    visit: Visit
    hooks: saved_tensors_hooks | None
    """``None``: it is left alone."""
    segment: Segment | None
    recomputation: Recomputation | None


def _load_outside(packed: Packed) -> Tensor:
    return packed.load()


def _reach(reach: Callable[[Point], None], point: Point, gradients: Any) -> None:
    reach(point)
