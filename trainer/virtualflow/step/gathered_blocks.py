"""Blocks of a model whose parameters are gathered and freed together: which there are, and hooks around their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from virtualflow.errors import ConfigurationError
from virtualflow.state import StayingHook


@dataclass
class GatheredBlock:
    """Parameters that are gathered and freed together."""

    number: int
    name: str
    places: tuple[int, ...]
    waits: set[int] = field(default_factory=set)
    """Places whose gradients have not come, of the virtual node that runs."""
    gathered: Future[None] | None = None
    """Of its parameters' values; ``None``: they are at rest."""
    shown: bool = False
    backward: bool = False
    """Whether its backward pass has begun and not ended."""
    frozen: bool = False
    """Whether some of its parameters are, which may be needed behind the gradients of the others."""
    left: bool = False
    """Whether its gradients of the virtual node have left."""
    forward_next: GatheredBlock | None = None
    """Which one was needed behind it when it last ran,"""
    backward_next: GatheredBlock | None = None
    """and in the backward pass."""


def blocks_of(model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> list[GatheredBlock]:
    """The blocks of a model: each of these modules, and first of all what is outside of them or in several."""
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    owners: dict[int, list[int]] = {place: [] for place in places.values()}
    for number, (_, module) in enumerate(modules, start=1):
        for parameter in module.parameters():
            owners[places[id(parameter)]].append(number)
    inside = {place: owned[0] for place, owned in owners.items() if len(owned) == 1}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = places[id(parameter)]
        if place in inside and not name.startswith(f"{modules[inside[place] - 1][0]}."):
            del inside[place]  # tied to one outside of it
    names = ["", *(name for name, _ in modules)]
    return [
        GatheredBlock(number, name, tuple(place for place in owners if inside.get(place, 0) == number))
        for number, name in enumerate(names)
    ]


class WatchedUses(TorchFunctionMode):
    """Refuses what computes with a parameter that is not gathered."""

    def __init__(self, find: Callable[[Tensor], str | None]) -> None:
        super().__init__()
        self._find = find

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ("__get__", "__set__"):  # shapes, and what ``.grad`` holds
            for each in pytree.tree_leaves((args, kwargs)):
                refusal = self._find(each) if isinstance(each, nn.Parameter) else None
                if refusal is not None:
                    raise ConfigurationError(refusal)
        return func(*args, **(kwargs or {}))


class _CompiledCall:
    """Stands around the call of a module that is compiled: torch would trace the module's hooks into its graph."""

    def __init__(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None] | None) -> None:
        self._module, self._before, self._after = module, before, after
        self._call: Any = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self._before(self._module, inputs)
        output = self._call(*inputs, **named)
        if self._after is not None:
            self._after(self._module, inputs, output)
        return output

    def remove(self) -> None:
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._call


def surround(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None] | None = None
) -> list[RemovableHandle | _CompiledCall]:
    """Let something happen before a module runs, and behind."""
    if module._compiled_call_impl is not None:
        return [_CompiledCall(module, before, after)]
    handles: list[RemovableHandle | _CompiledCall] = [module.register_forward_pre_hook(StayingHook(before))]
    if after is not None:
        handles.append(module.register_forward_hook(StayingHook(after)))
    return handles


def callable_holders(module: nn.Module, parameters: Set[int]) -> Iterator[nn.Module]:
    """The modules that have some of these parameters themselves; of one that is compiled with others inside, itself."""
    compiled = is_compiled(module)
    held = module.parameters() if compiled else module._parameters.values()
    if any(id(parameter) in parameters for parameter in held):
        yield module
    for child in () if compiled else module.children():
        yield from callable_holders(child, parameters)


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
