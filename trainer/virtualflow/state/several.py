"""Several optimizers or schedulers of one training, as one: nothing else has to ask how many there are.

A script may divide its parameters among optimizers (SGD for a table, AdamW for the rest), each with a scheduler of its
own. They are stepped in the order in which they were given, and a state has the parts of all. One that is given alone
stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted

_PARTS = "virtualflow.parts"
"""In a state: what each of several has for itself. No state of a single one has an entry of that name."""


def join_optimizers(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """What a script gives as its optimizer, as one."""
    if not isinstance(given, list | tuple):
        return given  # type: ignore[return-value]
    for part in given:
        if not isinstance(part, torch.optim.Optimizer):
            raise ConfigurationError(
                f"the list of optimizers holds a {type(part).__name__}; give vf.elastic one optimizer or a list of them"
            )
    if not given:
        raise ConfigurationError("the list of optimizers is empty; give vf.elastic at least one")
    return given[0] if len(given) == 1 else Optimizers(given)


def optimizers_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Those that it stands for, in their order."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else (optimizer,)


def join_schedulers(given: Any) -> Any:
    """What a script gives as its scheduler, as one; ``None`` for none, also in a list, where an optimizer has none."""
    if not isinstance(given, list | tuple):
        return given
    parts = [part for part in given if part is not None]
    return Schedulers(parts) if len(parts) > 1 else next(iter(parts), None)


def schedulers_of(scheduler: Any) -> tuple[Any, ...]:
    """Those that it stands for, in their order."""
    if isinstance(scheduler, Schedulers):
        return scheduler.parts
    return () if scheduler is None else (scheduler,)


class Optimizers(torch.optim.Optimizer):
    """Several optimizers of different parameters, which look like one that has the groups of all."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        # Not torch's own: it keeps groups and states here, and lets hooks hear of steps that its parts tell of anyway.
        self.parts = tuple(parts)
        self._states = _States(self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all, which loading a state makes anew."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        return self._states

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """As that of one optimizer, whose parameters are numbered on from part to part.

        One more entry has what is left of each: the number of its groups, entries of its state that belong to no
        parameter, and what else it says.
        """
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        rest: list[dict[str, Any]] = []
        for part, first in zip(self.parts, self._firsts(), strict=True):
            own = part.state_dict()
            states |= {first + n: of for n, of in own["state"].items() if isinstance(n, int)}
            groups += [{**group, "params": [first + n for n in group["params"]]} for group in own["param_groups"]]
            rest.append(
                {
                    "groups": len(own["param_groups"]),
                    "state": {name: of for name, of in own["state"].items() if not isinstance(name, int)},
                    "other": {name: of for name, of in own.items() if name not in ("state", "param_groups")},
                }
            )
        return {"state": states, "param_groups": groups, _PARTS: rest}

    def divide(self, saved: dict[str, Any]) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], range]]:
        """Each part, what it may load of a :meth:`state_dict`, and the numbers of its parameters in that."""
        groups = list(saved["param_groups"])
        for part, first, rest in zip(self.parts, self._firsts(), saved[_PARTS], strict=True):
            own, groups = groups[: rest["groups"]], groups[rest["groups"] :]
            numbers = range(first, first + sum(len(group["params"]) for group in own))
            states = {n - first: of for n, of in saved["state"].items() if n in numbers}
            own = [{**group, "params": [n - first for n in group["params"]]} for group in own]
            yield part, {**rest["other"], "state": {**states, **rest["state"]}, "param_groups": own}, numbers

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, own, _ in self.divide(state_dict):
            part.load_state_dict(own)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def _firsts(self) -> list[int]:
        counts = [sum(len(group["params"]) for group in part.param_groups) for part in self.parts]
        return [sum(counts[:n]) for n in range(len(counts))]


class _States(MutableMapping[Tensor, Any]):
    """The states of all parameters; others' keys are the business of their optimizer."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._owners = {
            parameter: part for part in parts for group in part.param_groups for parameter in group["params"]
        }

    def __getitem__(self, parameter: Tensor) -> Any:
        states = self._owners[parameter].state
        if parameter not in states:
            raise KeyError(parameter)  # and not an empty one, which a defaultdict would make
        return states[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._owners[parameter].state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owners[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([parameter for parameter, part in self._owners.items() if parameter in part.state])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        for parameter in self:
            del self[parameter]


class Schedulers:
    """Several schedulers, as one."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {_PARTS: [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state_dict[_PARTS], strict=True):
            part.load_state_dict(saved)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    return " + ".join(type(part).__qualname__ for part in optimizers_of(optimizer))


def misfit(optimizer: torch.optim.Optimizer, scheduler: Any, tree: dict[str, Any]) -> str | None:
    """A sentence that says how the optimizers and schedulers of a captured state are others than these, by number."""
    here = [len(part.param_groups) for part in optimizers_of(optimizer)]
    saved = tree["optimizer"]
    there = [part["groups"] for part in saved.get(_PARTS, ())] or [len(saved["param_groups"])]
    if (len(here) > 1 or len(there) > 1) and here != there:
        return (
            f"this process has {counted(len(here), 'optimizer')} of {_listed(here)} parameter groups, and the state "
            f"is of {counted(len(there), 'optimizer')} of {_listed(there)}; give vf.elastic the same list everywhere"
        )
    ours, theirs = len(schedulers_of(scheduler)), len((tree["scheduler"] or {}).get(_PARTS, (None,)))
    if scheduler is not None and tree["scheduler"] and ours != theirs:
        return (
            f"this process has {counted(ours, 'scheduler')} and the state is of {theirs}; give vf.elastic the same "
            "list everywhere"
        )
    return None


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
