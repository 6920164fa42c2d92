"""Lets each virtual node's backward pass end where ``partial_backward`` says.

What comes before that runs without a graph: autograd saves nothing of it, and has nothing to do there. Hooks see to
that. They suspend autograd while a module runs that is not reached, one call at a time, so that they nest with whatever
the model does itself.

Which parameters a pass reaches must be known before any runs, since a mean must not depend on which worker has seen
what. So it goes by the order of registration: what is registered between two blocks runs between them, what is
registered before all of them runs first. That this is so is checked with every virtual node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import PassClass
from virtualflow.reduction import Reach
from virtualflow.state import StayingHook
from virtualflow.step.block_work import work_of
from virtualflow.step.part import Attempt, StepPart
from virtualflow.step.partial_backward import BlockCosts, PartialBackward

WHOLE = -1
"""The level of what comes before the first block, and where a whole pass ends."""


class BackwardCut(StepPart):
    """The backward passes of one worker.

    A level is the number of a block, from 0, and of what is registered between it and the next one.

    Args:
        blocks: of it with their names, in the order in which they run.

    Raises:
        ConfigurationError: fewer than two of the blocks have parameters, or their work cannot be counted.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], backward: PartialBackward, virtual_nodes: int
    ) -> None:
        blocks = [(name, block) for name, block in blocks if next(block.parameters(), None) is not None]
        if len(blocks) < 2:
            raise ConfigurationError(
                f"vf.PartialBackward needs two blocks or more that have parameters, and the model has {len(blocks)}; "
                'name others with blocks=["first", "second"], or leave out backward='
            )
        self.names = [name for name, _ in blocks]
        self._backward, self._virtual_nodes = backward, virtual_nodes
        levels = _Levels(model, [block for _, block in blocks])
        self._named = [name for name, _ in model.named_parameters()]
        self._levels = [levels.parameters[id(parameter)] for parameter in model.parameters()]
        self.costs = BlockCosts(work_of(model, [block for _, block in blocks], backward.of))
        self._step = 0
        self._reaches: dict[tuple[int, ...], Reach | None] = {}
        """For each set of passes what they reach."""
        self._cut = self._last_cut = WHOLE
        """The first level that the present virtual node's pass reaches, and the last one's."""
        self._former: list[bool] = []
        """Whether autograd was enabled when each of the modules was called that run now and are not reached."""
        self._behind = ""
        """The last module that was called of those that are reached."""
        self._handles = [model.register_forward_pre_hook(StayingHook(self._on_model), prepend=True)]
        names = {id(module): name for name, module in model.named_modules()}
        for module, level in levels.modules:
            before = StayingHook(partial(self._before, names[id(module)], level))
            after = StayingHook(partial(self._after, level))
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, always_call=True),
            ]

    @property
    def description(self) -> str:
        """What defines the result: where passes end, and not how that was found."""
        alike = BlockCosts((1,) * len(self.names))
        ends = [[costs.reached(fraction) for fraction in self._backward.fractions] for costs in (self.costs, alike)]
        reached = f", the last {', '.join(map(str, ends[0]))}" if ends[0] != ends[1] else ""
        return self._backward.describe(self.names) + reached

    def close(self) -> None:
        self.abandon()
        for handle in self._handles:
            handle.remove()

    # --- the decision, in levels --------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        self._step = attempt.number
        attempt.work = self.work(attempt.computes, attempt.number)

    def cut(self, virtual_node: int, step: int) -> int:
        fraction = self._backward.fraction(step, virtual_node, self._virtual_nodes)
        return WHOLE if fraction == 1 else len(self.names) - self.costs.reached(fraction)

    def work(self, virtual_nodes: Sequence[int], step: int) -> float:
        """How many virtual nodes with a whole pass compute as much as these."""
        fractions = (self._backward.fraction(step, node, self._virtual_nodes) for node in virtual_nodes)
        return sum(map(self.costs.cost, fractions))

    def classes(self) -> tuple[PassClass, ...]:
        """What whoever assigns virtual nodes is to know."""
        return self._backward.classes(self.costs)

    def factors(self, weights: Mapping[int, float]) -> dict[int, float]:
        """What makes of a mean over all virtual nodes that over those whose pass was to reach the parameter."""
        if self._backward.scale == "sum":
            return {}
        cuts = {node: self.cut(node, self._step) for node in weights}
        whole = math.fsum(weights.values())
        reached = {
            level: math.fsum(by for node, by in weights.items() if cuts[node] <= level) for level in set(self._levels)
        }
        # Where it is none, nobody has a gradient.
        return {
            place: whole / reached[level]
            for place, level in enumerate(self._levels)
            if reached[level] not in (0, whole)
        }

    def reach(self) -> Reach | None:
        """For each parameter the virtual nodes whose pass may reach it in the present step; ``None``: all of all."""
        cuts = tuple(self.cut(node, self._step) for node in range(self._virtual_nodes))
        if cuts not in self._reaches:  # there are about as many as classes
            levels = {
                level: frozenset(node for node, cut in enumerate(cuts) if cut <= level) for level in set(self._levels)
            }
            whole = set(cuts) == {WHOLE}
            self._reaches[cuts] = None if whole else tuple(levels[level] for level in self._levels)
        return self._reaches[cuts]

    # --- a virtual node -----------------------------------------------------------------------------------------------

    def before_pass(self, attempt: Attempt) -> None:
        self._cut = self._last_cut = self.cut(attempt.present.virtual_node, attempt.number)
        self._behind = ""
        self._former.clear()
        attempt.whole = self._cut == WHOLE

    def after_pass(self, attempt: Attempt) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Whatever runs now has a graph, also if the script was interrupted in a module that is not reached."""
        self._cut = WHOLE
        if self._former:  # torch calls no hooks behind an interrupted module
            torch.set_grad_enabled(self._former[0])
            self._former.clear()

    def check(self, given: Sequence[bool]) -> None:
        """The virtual node has run, and has a gradient for these of the parameters."""
        for place, there in enumerate(given):
            if there and self._levels[place] < self._last_cut:
                raise ConfigurationError(
                    f"parameter {self._named[place]} got a gradient from a backward pass that should have ended behind "
                    f"it, at block {self.names[self._last_cut]}; it must belong to a module that is called, and what "
                    "runs behind the blocks must be registered behind them: move it there in the model's __init__ (a "
                    "penalty on weights reaches all of them: give it to the optimizer, as weight_decay=)"
                )

    def _on_model(self, module: nn.Module, arguments: Any) -> None:
        self._behind = ""

    def _before(self, name: str, level: int, module: nn.Module, arguments: Any, options: Any) -> None:
        if level >= self._cut:
            self._behind = name
            return
        # What needs no gradient can be computed at any time: another call of the model's parts, or once more for a
        # checkpoint's backward pass.
        entering = tree_leaves((arguments, options)) if self._behind else ()
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in entering):
            raise ConfigurationError(
                f"module {name} runs behind {self._behind}, which is registered behind it or named as a later block; "
                "backward=vf.PartialBackward(...) needs modules in the order in which they run: change that in the "
                "model's __init__, or name its blocks in their order"
            )
        self._former.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)

    def _after(self, level: int, module: nn.Module, arguments: Any, output: Any) -> None:
        if level < self._cut and self._former:
            former = self._former.pop()
            torch.set_grad_enabled(former)
            if former:
                # A weight that was cast here must be cast once more where it is reached, under a graph.
                torch.clear_autocast_cache()


class _Levels:
    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.parameters: dict[int, int] = {}
        """By identity: of several places, the one that most passes reach."""
        self._numbers = {id(block): number for number, block in enumerate(blocks)}
        inside = {id(part) for block in blocks for part in block.modules() if part is not block}
        self._level = WHOLE
        self._modules: dict[int, tuple[nn.Module, set[int]]] = {}
        self._visit(model)
        self.modules = [
            (module, min(levels))
            for key, (module, levels) in self._modules.items()
            if len(levels) == 1 and key not in inside
        ]
        """Those that a pass reaches or not, as a whole. What is in several places may be called in any of them."""

    def _visit(self, module: nn.Module) -> None:
        number = self._numbers.get(id(module))
        self._level = self._level if number is None else number
        holds_blocks = number is None and any(id(part) in self._numbers for part in module.modules())
        if not holds_blocks and next(module.parameters(), None) is not None:
            self._modules.setdefault(id(module), (module, set()))[1].add(self._level)
        for parameter in module.parameters(recurse=number is not None):
            self.parameters[id(parameter)] = max(self.parameters.get(id(parameter), WHOLE), self._level)
        for child in module._modules.values() if number is None else ():
            if child is not None:
                self._visit(child)
