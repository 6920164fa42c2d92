"""Buffers that count: what the virtual nodes of a step add to one is added up, and not averaged.

``vf.elastic(buffers={"seen": "sum"})`` names them. Each virtual node tells its own change in its worker's step header,
and all workers add the changes up in the order of the tree: the same bits for any number of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from virtualflow.errors import ConfigurationError
from virtualflow.reduction import Summation
from virtualflow.step.header import StepHeader, numbered

BufferKind = Literal["sum"]
"""What becomes of a buffer's changes in a step: they are added up."""

_ARGUMENT = "vf.elastic(buffers=...)"


def choose_sums(model: nn.Module, kinds: Mapping[str, BufferKind] | None) -> tuple[str, ...]:
    """The names of the buffers whose changes are added up, in the model's order.

    Args:
        kinds: what a script says, by names or patterns such as ``"*.load"``.

    Raises:
        ConfigurationError: a name, a kind or a type does not fit.
    """
    given: Any = {} if kinds is None else kinds
    if not isinstance(given, Mapping):
        raise ConfigurationError(f'{_ARGUMENT} got {given!r}; it takes a dict such as {{"seen": "sum"}}')
    buffers = dict(model.named_buffers())
    chosen = set[str]()
    for pattern, kind in given.items():
        if kind != "sum":
            raise ConfigurationError(f'{_ARGUMENT}: the kind of {pattern!r} is {kind!r}; it must be "sum"')
        found = [name for name in buffers if name == pattern or fnmatchcase(name, str(pattern))]
        if not found:
            close = get_close_matches(str(pattern), buffers, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(buffers) or 'none'}"
            raise ConfigurationError(f"{_ARGUMENT}: the model has no buffer {pattern!r}; {hint}")
        chosen.update(found)
    for name in chosen:
        dtype = buffers[name].dtype
        if dtype is torch.bool or (dtype.is_floating_point and dtype.itemsize == 1):
            raise ConfigurationError(f"{_ARGUMENT}: buffer {name} is of {dtype}, which cannot be added up")
    return tuple(name for name in buffers if name in chosen)


def add_up_changes(
    templates: Sequence[Tensor],
    summation: Summation,
    headers: Sequence[StepHeader],
    holdings: Sequence[Sequence[int]] | None,
) -> list[Tensor]:
    """The sums of all virtual nodes' changes, on the host.

    Args:
        templates: one for each buffer, of its shape and the type of its changes.
        holdings: the virtual nodes of their records, ascending; ``None``: the records are in the order to add them up.
    """
    told = [changes for header in headers for changes in header.summed]
    parts = {
        (node, node + 1): _read(templates, changes)
        for node, changes in zip(numbered(len(told), holdings), told, strict=True)
    }
    return summation.add_up(parts, lambda left, right: [a + b for a, b in zip(left, right, strict=True)])


def write_changes(templates: Sequence[Tensor], changes: Sequence[Tensor | None]) -> bytes:
    """One virtual node's, for a header; ``None`` where it changed nothing."""
    raw = b""
    for template, change in zip(templates, changes, strict=True):
        if change is None:
            raw += bytes(template.nbytes)
        else:
            raw += change.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _read(templates: Sequence[Tensor], raw: bytes) -> list[Tensor]:
    found, at = [], 0
    for template in templates:
        part = bytearray(raw[at : at + template.nbytes])
        at += template.nbytes
        flat = torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
        found.append(flat.view(template.dtype).view(template.shape))
    return found
