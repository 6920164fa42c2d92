"""A training that goes on from a checkpoint, with other arguments than before: what differs, and what counts.

A checkpoint remembers how optimizer and scheduler were built when the training began. Whoever resumes compares that
with how they are built now, before the checkpoint's state replaces it: so what moves in a training is no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, OneCycleLR, SequentialLR

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.wording import counted
from virtualflow.state import optimizers_of, schedulers_of

Built = dict[str, str]
"""How optimizers and schedulers were built: values in words, by what they are called."""

_SHOWN = 4
"""Differences that a sentence names."""
_LENGTH = 200
"""Characters of a value."""
_DERIVED = {
    *(
        "_last_lr",
        "base_lrs",
        "last_epoch",
        "_step_count",
        "_get_lr_called_within_step",
        "_initial_step",
        "_is_initial",
    ),
    "_schedule_phases",
}
"""What a scheduler counts, has from the optimizer, or follows from its other values."""


def describe_built(optimizer: torch.optim.Optimizer, scheduler: Any) -> Built:
    built = {"the optimizer": " + ".join(type(part).__name__ for part in optimizers_of(optimizer))}
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        where = f" of group {number}" if len(groups) > 1 else ""
        for key, value in group.items():
            # A scheduler has changed lr, and has noted what was given.
            if key == "params" or (key == "lr" and "initial_lr" in group):
                continue
            for _, words in _values("", value):
                built[f"{'lr' if key == 'initial_lr' else key}{where}"] = words
    parts = schedulers_of(scheduler)
    built["the scheduler"] = " + ".join(type(part).__name__ for part in parts) or "none"
    for part in parts:
        for name, words in _values(type(part).__name__, part.state_dict()):
            built.setdefault(name, words)
    return built


def _values(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in _DERIVED:
                yield from _values(f"{name}.{key}", each)
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for place, each in enumerate(value):
            yield from _values(f"{name}[{place}]", each)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)[:_LENGTH]
    elif isinstance(value, list | tuple) and all(isinstance(each, bool | int | float | str) for each in value):
        yield name, repr([*value])[:_LENGTH]


def compare(here: Built, there: Built) -> str | None:
    """What counts where a script builds its optimizer or scheduler otherwise than the checkpoint's; ``None``: nowhere.

    Args:
        there: how they were when the training of the checkpoint began; empty: it does not say.
    """
    if not there:
        return None
    kind = "the scheduler"
    if here[kind] != there.get(kind):
        raise ConfigurationError(
            f"{kind} is {here[kind]} here and {there.get(kind)} in the checkpoint; use the one of the checkpoint, or "
            "another checkpoint directory"
        )
    differing = [name for name in here if name in there and here[name] != there[name]]
    if not differing:
        return None
    said = [f"{name} is {here[name]} in the script and {there[name]} in the checkpoint" for name in differing[:_SHOWN]]
    if len(differing) > _SHOWN:
        said.append(f"{counted(len(differing) - _SHOWN, 'other value')} likewise")
    by_hand = (
        ""
        if here[kind] != "none"
        else (', or set them in the loop, before the micro-batches of a step, as optimizer.param_groups[0]["lr"] = ...')
    )
    return (
        f"{'; '.join(said)}: what the checkpoint has counts; to train with the script's values, begin anew in another "
        f"checkpoint directory, from the weights that virtualflow export gives{by_hand}"
    )


def check_schedule(scheduler: Any, steps: int, last: int, what: str, resumed: bool) -> None:
    """Check that no schedule ends before the training."""
    for part in schedulers_of(scheduler):
        ended = _ends_early(part, steps)
        if ended is None:
            continue
        of = f"{ended.total_steps} {what}s (total_steps={ended.total_steps})"
        if resumed:
            raise ConfigurationError(
                f"the OneCycleLR of the checkpoint ends after {of}, and this training is to go on to {what} {last}; a "
                "cycle cannot be made longer, so train on in another checkpoint directory, with a new cycle and the "
                "weights that virtualflow export gives"
            )
        raise ConfigurationError(
            f"OneCycleLR ends after {of}, and this training goes to {what} {last}; make it with total_steps={last}"
        )


def _ends_early(scheduler: Any, steps: int) -> OneCycleLR | None:
    if isinstance(scheduler, OneCycleLR):
        return scheduler if scheduler.last_epoch + steps > scheduler.total_steps else None
    if isinstance(scheduler, ChainedScheduler):
        return next(filter(None, (_ends_early(part, steps) for part in scheduler._schedulers)), None)
    if isinstance(scheduler, SequentialLR):
        last, begins = scheduler.last_epoch + steps, [0, *scheduler._milestones]
        for part, begin, end in zip(scheduler._schedulers, begins, [*begins[1:], last + 1], strict=True):
            if isinstance(part, OneCycleLR) and min(last, end - 1) - begin > part.total_steps:
                return part
    return None
