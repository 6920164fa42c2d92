"""How far the backward pass of each virtual node goes: structured partial backpropagation (Kumar et al., 2021).

Which part of the model a virtual node's backward pass reaches is a function of the virtual node and the step, never of
the worker that computes it: so no bit depends on who does. This module is that function; ``backward_cut`` carries it
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from virtualflow._arguments import checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import MAX_CLASSES, BackwardSpec, PassClass, class_of, cost_of
from virtualflow.protocol.wording import counted

if TYPE_CHECKING:
    from torch import Tensor, nn

Scale = Literal["mean", "sum"]
Counted = Literal["blocks", "parameters"]

WARM_UP = 0
"""In place of a step: what a joiner warms up with."""


@checked_class("vf.PartialBackward")
@dataclass(frozen=True)
class PartialBackward:
    """Backward passes that end before they have reached the model's first blocks.

    It changes what is trained, alike on any number of workers, and is the same for a job's life.

    Args:
        fractions: of the model's blocks, those that a backward pass reaches, counted from the last one: one for each
            class of virtual nodes. A pass ends between two blocks, where it is nearest to the fraction; it reaches at
            least one. 1 is the whole pass, through everything in front of the blocks, too.
        rotate: whether a virtual node has another class in every step, neighbours different ones, so that workers with
            as many virtual nodes as there are classes, or a multiple of it, have equal work. Otherwise the first
            virtual nodes have the first class for the job's life, and so on: whoever is assigned none of the first
            ones needs less memory.
        scale: ``"mean"``: a parameter's gradient is the mean over the virtual nodes that have reached it. ``"sum"``:
            those that have not count as zero.
        full_every: in each step whose number is a multiple of it, all passes are whole.
        blocks: the model's blocks, in the order in which they run: modules, or their names. Without them, those of
            an ``nn.ModuleList`` or ``nn.Sequential`` that cut the model best, and others of the same class. Those
            without parameters do not count.
        of: what fractions are of. ``"blocks"``: their number. ``"parameters"``: the elements of their parameters, as
            the work of linear layers goes. An example of what the model is called with, as a tensor, a tuple of
            arguments or a mapping of named ones: the operations of the blocks' matrix products and convolutions with
            it, which are counted without computing anything. All three say the same of blocks that are alike.

    Raises:
        ConfigurationError: a value makes no sense.
    """

    fractions: Sequence[float] = (1, 0.75, 0.5, 0.25)
    rotate: bool = True
    scale: Scale = "mean"
    full_every: int | None = None
    blocks: Sequence[str | nn.Module] | None = None
    of: Counted | Tensor | tuple[Any, ...] | Mapping[str, Any] = "blocks"

    def __post_init__(self) -> None:
        fractions: Any = self.fractions
        if not isinstance(fractions, list | tuple) or not fractions:
            raise ConfigurationError(
                f"fractions is {fractions!r}; vf.PartialBackward needs one for each class, such as (1, 0.5)"
            )
        if len(fractions) > MAX_CLASSES:
            raise ConfigurationError(f"fractions has {len(fractions)} numbers; pass at most {MAX_CLASSES}")
        for fraction in fractions:
            if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
                raise ConfigurationError(f"fractions has {fraction!r}; each must be above 0 and at most 1")
        if self.scale not in get_args(Scale):
            raise ConfigurationError(f'scale is {self.scale!r}; it must be "mean" or "sum"')
        of: Any = self.of
        if of not in get_args(Counted) if isinstance(of, str) else not _is_example(of):
            raise ConfigurationError(
                f'of is {of!r}; it must be "blocks", "parameters", or an example of what the model is called with: a '
                "tensor, a tuple of arguments, or a dict of named ones"
            )
        every: Any = self.full_every
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigurationError(f"full_every is {every!r}; it must be a whole number of steps, at least 1")
        if every is None and 1 not in fractions:
            raise ConfigurationError(
                "no fraction is 1, so what is in front of the model's last blocks would never be trained; add 1 to "
                "fractions, pass full_every=, or freeze those blocks with requires_grad_(False)"
            )

    def fraction(self, step: int, virtual_node: int, virtual_nodes: int) -> float:
        """The part of the blocks that a virtual node's backward pass reaches in a step, from 1.

        For :data:`WARM_UP`, to a joiner who does not know yet which virtual nodes it will be assigned, it is a whole
        pass where it will have to run some, and else the shortest, for which alone there may be memory.
        """
        if step == WARM_UP:
            return 1.0 if self.rotate or self.full_every is not None else float(min(self.fractions))
        if self.full_every is not None and step % self.full_every == 0:
            return 1.0
        classes = len(self.fractions)
        at = (virtual_node + step) % classes if self.rotate else class_of(virtual_node, virtual_nodes, classes)
        return float(self.fractions[at])

    def classes(self, blocks: BlockCosts) -> tuple[PassClass, ...]:
        """What whoever assigns virtual nodes is to know: with ``rotate`` they are all alike, by and by."""
        costs = [self._on_average(blocks.cost(fraction)) for fraction in self.fractions]
        if self.rotate:
            return (PassClass(sum(costs) / len(costs), 1.0),)
        longest = [1.0 if self.full_every is not None else float(fraction) for fraction in self.fractions]
        return tuple(map(PassClass, costs, longest))

    def _on_average(self, cost: float) -> float:
        """With the steps in which all passes are whole."""
        return cost if self.full_every is None else cost + (1 - cost) / self.full_every

    def check(self, virtual_nodes: int) -> None:
        """Check that a job of so many virtual nodes trains all of the model.

        Raises:
            ConfigurationError: it does not.
        """
        if self.rotate or self.full_every is not None:
            return
        if all(self.fraction(1, node, virtual_nodes) < 1 for node in range(virtual_nodes)):
            raise ConfigurationError(
                f"none of the {counted(virtual_nodes, 'virtual node')} has the class whose fraction is 1; put it first "
                "in fractions, use more virtual nodes, or pass rotate=True"
            )

    def describe(self, blocks: Sequence[str]) -> str:
        """What defines the result, for blocks of these names; without any, of whatever blocks."""
        fractions = ", ".join(repr(float(fraction)) for fraction in self.fractions)
        rotating = "rotating" if self.rotate else "fixed"
        full = "" if self.full_every is None else f", whole every {counted(self.full_every, 'step')}"
        of = f", of {', '.join(blocks)}" if blocks else ""
        return f"{rotating} fractions {fractions}{full}, {self.scale}{of}"


@dataclass(frozen=True)
class BlockCosts:
    """What a model's blocks cost, in the order in which they run.

    Args:
        work: what fractions count of each, as whole numbers, since every worker must end its passes at the same block.
        seconds: what the forward and the backward pass of each take, if that was measured. They end no pass elsewhere,
            since they are others on each worker.
    """

    work: tuple[int, ...]
    seconds: Sequence[tuple[float, float]] = ()

    def reached(self, fraction: float) -> int:
        """How many blocks a pass reaches: those whose work is nearest to that part of all, of two the more."""
        until = list(accumulate(reversed(self.work), initial=0))
        return max(1, sum(before + after <= 2 * fraction * until[-1] for before, after in pairwise(until)))

    def cost(self, fraction: float) -> float:
        """The computing of a virtual node with such a pass, as a share of a whole one's."""
        reached = self.reached(fraction)
        if not self.seconds:
            return cost_of(sum(self.work[-reached:]) / sum(self.work))
        forward, backward = map(sum, zip(*self.seconds, strict=True))
        return (forward + sum(seconds for _, seconds in self.seconds[-reached:])) / (forward + backward)


def _is_example(of: Any) -> bool:
    return isinstance(of, tuple | Mapping) or hasattr(of, "dtype")


def agreed(said: PartialBackward | None, told: BackwardSpec | None) -> PartialBackward | None:
    """How far backward passes go, by what a script says and what its job says; ``None``: they are whole.

    Raises:
        ConfigurationError: the two differ, or what the job says makes no sense.
    """
    if told is None:
        return said
    scale: Scale = "mean" if told.scale == "Mean" else "sum"
    of_job = PartialBackward(told.fractions, told.rotate, scale, told.full_every)
    if said is not None:  # only the script knows the model
        of_job = replace(of_job, blocks=said.blocks, of=said.of)
    if said is not None and said.describe(()) != of_job.describe(()):
        raise ConfigurationError(
            f"the script says backward=[{said.describe(())}] and the job's spec.backward [{of_job.describe(())}]; "
            "let both say the same, or leave it out of the script"
        )
    return of_job
