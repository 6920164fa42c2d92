"""One call of a block, and how what autograd has saved in it is computed again.

Blocks of a segment that follow each other directly are computed again together, from what entered the first of them:
what enters the others is the output of the one before, and nobody has kept it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from virtualflow.errors import ConfigurationError
from virtualflow.memory.activations.ledger import ChangedInPlace, Kept, Ledger, Packed, StorageEntry, is_plain, key_of
from virtualflow.memory.activations.module_state import Surroundings

Gathered = Callable[[nn.Module], AbstractContextManager[bool]]
"""Sees that the parameters of a module are here meanwhile, and says whether they are true."""


def all_here(module: nn.Module) -> AbstractContextManager[bool]:
    """Where parameters are not divided."""
    return nullcontext(True)


class Slot:
    """In place of a tensor that is computed again when autograd asks for it."""

    __slots__ = ("__weakref__", "_kept", "_segment", "_visit", "saved")

    def __init__(self, segment: Segment, visit: Visit, kept: Kept | None) -> None:
        self._segment, self._visit, self._kept = segment, visit, kept
        self.saved: Packed | None = None

    def load(self) -> Tensor:
        if self.saved is None:
            self._segment.recompute()
        packed = self._kept if self.saved is None else self.saved
        if packed is None:  # an attempt has failed before
            raise self._visit.differs()
        return packed.load()


@dataclass(frozen=True)
class OutputLink:
    """An input that is an output of the visit before, by its position."""

    position: int
    requires_grad: bool


@dataclass(frozen=True)
class _Input:
    saved: Packed
    requires_grad: bool


class _Enough(BaseException):
    """All that is wanted was computed; as no error of the block's, its code does not catch it."""


@dataclass(eq=False)
class Visit:
    """One call of a block in a forward pass with gradients."""

    block: int
    name: str
    module: nn.Module
    ledger: Ledger
    given: frozenset[int]
    """Keys of inputs that autograd does not know the origin of: the user's data."""
    permanent: frozenset[int]
    """Keys of parameters and buffers."""
    entries: list[ref[StorageEntry]] = field(default_factory=list)
    """Whose owner it is."""
    outputs: list[tuple[ref[Tensor], int] | None] = field(default_factory=list)
    """Each output, and its version."""

    def counts(self, tensor: Tensor) -> bool:
        """Whether that tensor takes memory because this block has saved it."""
        if not is_plain(tensor):
            return False
        key = key_of(tensor)
        return key not in self.permanent and key not in self.given

    def own(self, entry: ref[StorageEntry]) -> None:
        self.entries.append(entry)

    def claim(self, tensor: Tensor) -> None:
        """An input: if it is known and nobody's input yet, it is this block's."""
        entry = self.ledger.find(tensor)
        if entry is not None and not entry.claimed:
            entry.claimed = True
            self.own(ref(entry))

    def save(self, tensor: Tensor) -> Packed:
        return self.ledger.save(tensor, self.block, self.own) if self.counts(tensor) else Kept(tensor)

    def differs(self) -> ConfigurationError:
        """What is to be said if the second forward pass is not like the first."""
        return ConfigurationError(
            f"block {self.name} does something else when it is computed again; let its forward depend on its inputs, "
            'its parameters and the global random streams alone, or use activations="swap"'
        )


@dataclass(eq=False)
class Segment:
    """Visits that are computed again together. Only slots know it: it ends with the last of them."""

    began: Callable[[int], object]
    """Told of each block right before,"""
    done: Callable[[], object]
    """and when all are."""
    refused: Callable[[ConfigurationError], object] | None = None
    """Told why they cannot be computed again, where that is only rehearsed: all of it is kept as well."""
    gathered: Gathered = all_here
    visits: list[Recomputation] = field(default_factory=list)

    def recompute(self) -> None:
        """Fill the slots of all its visits; what entered them is given back."""
        try:
            self._compute()
        except ConfigurationError as error:
            if self.refused is None:
                raise
            self.refused(error)
        self.done()

    def _compute(self) -> None:
        outputs: list[Any] = []
        if self.visits and not self.visits[-1].ended:
            name = self.visits[-1].name
            raise ConfigurationError(
                f"block {name} asks for gradients while its forward pass runs, so it cannot be computed again; "
                'leave it out of vf.Memory(..., blocks=[...]), or use activations="swap"'
            )
        visits, self.visits = self.visits, []
        with torch.enable_grad():
            for visit in visits:
                self.began(visit.block)
                with self.gathered(visit.module) as true:
                    # From other values a block may go another way: of a broken attempt nothing is computed again.
                    outputs = visit.run(outputs, last=visit is visits[-1]) if true else visit.fill()


class Recomputation:
    """How one visit is computed again.

    Args:
        before: the visit whose outputs may be among them, if that one is in the same segment.
    """

    def __init__(
        self, visit: Visit, leaves: list[Any], structure: TreeSpec, before: Visit | None, device: torch.device
    ) -> None:
        self.block, self.name, self.module = visit.block, visit.name, visit.module
        self.ended = False
        self._visit = visit
        self._structure = structure
        links = {} if before is None else find_links(leaves, before)
        self._inputs: list[Any] = [
            links[index] if index in links else self._keep(leaf) for index, leaf in enumerate(leaves)
        ]
        self._versions = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        self._spoilt = False
        """Whether the first forward pass has changed its input."""
        self._surroundings: Surroundings | None = Surroundings(visit.module, device)
        self._saved: list[tuple[_Form, ref[Slot] | None]] = []
        """What autograd has saved, in its order; ``None``: it was kept. A second forward pass saves as much again."""

    def _keep(self, leaf: Any) -> Any:
        return _Input(self._visit.save(leaf), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    def pack(self, segment: Segment, tensor: Tensor) -> Packed:
        """What autograd is to keep in place of a tensor, when this is in that segment."""
        counts = self._visit.counts(tensor)
        if not counts:
            self._saved.append((_form(tensor), None))
            return Kept(tensor)
        slot = Slot(segment, self._visit, None if segment.refused is None else Kept(tensor))
        self._saved.append((_form(tensor), ref(slot)))
        return slot

    def end(self, *, check: bool) -> None:
        """The first forward pass is over.

        Args:
            check: whether to refuse at once what cannot be computed again.

        Raises:
            ConfigurationError: it has changed its input, so that there is nothing to begin a second one from.
        """
        self.ended = True
        assert self._surroundings is not None
        self._surroundings.forget_unchanged()
        self._spoilt = any(leaf._version != version for leaf, version in self._versions)
        self._versions = []
        if check:
            self._check_inputs()

    def _check_inputs(self) -> None:
        if self._spoilt:
            raise ConfigurationError(
                f"block {self._visit.name} changes its input in place, so it cannot be computed again; build it with "
                "inplace=False, or name larger blocks: vf.Memory(..., blocks=[...])"
            )

    def run(self, outputs: list[Any], *, last: bool) -> list[Any]:
        assert self._surroundings is not None
        self._check_inputs()
        changed = self._surroundings.changed()
        if changed is not None:
            raise ConfigurationError(
                f"{changed} of block {self._visit.name} was changed since the block's forward pass began, so it cannot "
                'be computed again; change it behind the backward pass, or use activations="swap"'
            )
        try:
            inputs, self._inputs = [_input_again(each, outputs) for each in self._inputs], []
        except ChangedInPlace as error:
            raise ConfigurationError(
                f"what entered block {self._visit.name} was changed in place since, so the block cannot be computed "
                'again; write x = x + block(x) and not x += block(x), or use activations="swap"'
            ) from error
        arguments, options = tree_unflatten(inputs, self._structure)
        surroundings, self._surroundings = self._surroundings, None
        saved, visit, at = self._saved, self._visit, 0
        enough = max((place for place, (_, known) in enumerate(saved, 1) if known is not None), default=0)

        def record(tensor: Tensor) -> Tensor:
            nonlocal at
            if at == len(saved) or saved[at][0] != _form(tensor):
                raise visit.differs()
            known, at = saved[at][1], at + 1
            slot = None if known is None else known()
            if slot is not None:
                slot.saved = visit.save(tensor)
            if last and at == enough:
                raise _Enough
            return tensor.detach()

        made: list[Any] = []
        try:
            with surroundings.again(), saved_tensors_hooks(record, as_it_is):
                made = tree_flatten(visit.module.forward(*arguments, **options))[0]
        except _Enough:
            return []
        if at != len(saved):
            raise visit.differs()
        return [each.detach() if isinstance(each, Tensor) else each for each in made]

    def fill(self) -> list[Any]:
        """In place of what cannot be computed any more, zeros: the script's pass comes to its end, for nothing."""
        self._inputs, self._surroundings = [], None
        for (dtype, shape, device), known in self._saved:
            slot = None if known is None else known()
            if slot is not None:
                slot.saved = Kept(torch.zeros(shape or (), dtype=dtype, device=device))
        return []


_Form = tuple[torch.dtype, torch.Size | None, torch.device]


def _form(tensor: Tensor) -> _Form:
    return tensor.dtype, None if tensor.is_nested else tensor.shape, tensor.device


def find_links(leaves: list[Any], before: Visit) -> dict[int, OutputLink]:
    made = {
        id(tensor): (position, version)
        for position, output in enumerate(before.outputs)
        if output is not None
        for tensor, version in [(output[0](), output[1])]
        if tensor is not None
    }
    return {
        index: OutputLink(made[id(leaf)][0], leaf.requires_grad)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and id(leaf) in made and made[id(leaf)][1] == leaf._version
    }


def _input_again(given: Any, outputs: list[Any]) -> Any:
    if isinstance(given, OutputLink):
        return outputs[given.position].detach().requires_grad_(given.requires_grad)
    if isinstance(given, _Input):
        tensor = given.saved.load()
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().requires_grad_(given.requires_grad)
    return given


def as_it_is(tensor: Tensor) -> Tensor:
    """For hooks that leave what autograd saves alone."""
    return tensor
