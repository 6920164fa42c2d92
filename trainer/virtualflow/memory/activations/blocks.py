"""Which modules of a model are its blocks: what the user says, or the chain that cuts it best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from virtualflow.errors import ConfigurationError

Named = tuple[str, nn.Module]
_Chain = tuple[str, list[Named]]
"""A container, by its name, and its modules."""

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


MEMORY = "name its blocks: vf.Memory(..., {})"
"""What a user is to do whose model has no blocks that are found, for a plan of memory."""
RECOMPUTE = (
    "instead of memory, set torch._functorch.config.activation_memory_budget, by which the compiler itself recomputes"
)
"""What else to do with a compiled model."""


def find_blocks(
    model: nn.Module,
    wanted: Sequence[str | nn.Module] | None,
    *,
    argument: str = MEMORY,
    compiled: str = RECOMPUTE,
    opaque: bool = False,
) -> tuple[list[Named], str]:
    """The blocks with their names, and a sentence that says which they are.

    Args:
        wanted: modules of it or their names, in the order in which they run; ``None``: found.
        argument: what a user is to do whose model has none; ``{}`` stands for the argument ``blocks``.
        compiled: what a user is to do who has compiled the model.
        opaque: whether nobody looks into blocks, so that they may be compiled, and what is outside of them.

    Raises:
        ConfigurationError: there are none, one of them is not the model's or is within another one, or the model is
            compiled.
    """
    found = _best_chains(model, argument) if wanted is None else _named(model, wanted)
    allowed = {id(block) for _, block in found[0]} if opaque else set[int]()
    for module in filter(_is_compiled, model.modules()):
        inside = {id(part) for part in module.modules() if part is not module}
        if not opaque or inside & allowed or isinstance(module, torch.jit.ScriptModule):
            raise ConfigurationError(f"a compiled model has no blocks that could be told apart; {compiled}")
    return found


def _named(model: nn.Module, wanted: Sequence[str | nn.Module]) -> tuple[list[Named], str]:
    known = dict(model.named_modules())
    names = {id(module): name for name, module in known.items()}
    blocks: list[Named] = []
    for each in wanted:
        name = each if isinstance(each, str) else names.get(id(each))
        if name is None or name not in known:
            what = f"named {each!r}" if isinstance(each, str) else f"{type(each).__name__} given as a block"
            raise ConfigurationError(f"the model has no module {what}; name blocks as model.named_modules() does")
        if isinstance(known[name], _WITHOUT_FORWARD):
            raise ConfigurationError(
                f"block {name} is a {type(known[name]).__name__}, which nobody calls; name its children"
            )
        blocks.append((name, known[name]))
    _check_apart(blocks)
    return blocks, f"the blocks are the {len(blocks)} modules that the script names"


def _check_apart(blocks: Sequence[Named]) -> None:
    if not blocks:
        raise ConfigurationError("blocks is empty; name the model's blocks, or leave it out to have them found")
    owner: dict[int, str] = {}
    for name, module in blocks:
        for part in module.modules():
            if id(part) in owner:
                raise ConfigurationError(
                    f"block {name} and block {owner[id(part)]} share a module; name each once, and none within another"
                )
            owner[id(part)] = name


def _best_chains(model: nn.Module, argument: str) -> tuple[list[Named], str]:
    """Of all chains those that leave the least of the model outside of blocks and in the largest block, together.

    Leaves of the module tree count. Ties go to the longest, then to the first.
    """
    chains = list(_chains(model))
    if not chains:
        raise ConfigurationError(
            "the model has no nn.ModuleList or nn.Sequential of two modules or more; "
            + argument.format('blocks=["first", "second"]')
        )
    leaves = sum(1 for _ in _leaves(model))
    chosen = min(_alike(chains), key=lambda group: (_unplanned(group, leaves), -_length(group)))
    chosen.sort(key=chains.index)
    blocks = [block for _, children in chosen for block in children]
    containers = " and ".join(name or "the model itself" for name, _ in chosen)
    return blocks, f"the blocks are the {len(blocks)} modules in {containers}"


def _alike(chains: Sequence[_Chain]) -> Iterator[list[_Chain]]:
    """Each chain, with others of the same class of blocks: the stages of a residual network are several containers."""
    parts = [_parts(children) for _, children in chains]
    kinds = [{type(module) for _, module in children} for _, children in chains]
    joined: set[int] = set()
    for first in sorted(range(len(chains)), key=lambda place: -len(chains[place][1])):
        if first in joined:
            continue
        group, taken = [first], set(parts[first])
        for other in range(len(chains)) if len(kinds[first]) == 1 else ():
            if kinds[other] == kinds[first] and not taken & parts[other]:
                group.append(other)
                taken |= parts[other]
        joined.update(group)
        yield [chains[place] for place in group]


def _unplanned(group: Sequence[_Chain], leaves: int) -> int:
    """Leaves outside of the group's blocks, and in the largest of them."""
    sizes = [sum(1 for _ in _leaves(module)) for _, children in group for _, module in children]
    return leaves - sum(sizes) + max(sizes)


def _length(group: Sequence[_Chain]) -> int:
    return sum(len(children) for _, children in group)


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if next(part.children(), None) is None)


def _chains(model: nn.Module) -> Iterator[_Chain]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
            if len(children) > 1 and not any(isinstance(child, _WITHOUT_FORWARD) for _, child in children):
                yield name, children


def _parts(blocks: Sequence[Named]) -> set[int]:
    return {id(part) for _, block in blocks for part in block.modules()}


def _is_compiled(module: nn.Module) -> bool:
    wrapped = type(module).__name__ == "OptimizedModule"  # whose import takes a second
    return wrapped or isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None
