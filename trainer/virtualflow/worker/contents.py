"""What the dataset holds: the same in all workers, and the same whenever it is read.

Two things go wrong before the first step, in silence. A split or an order of files that nobody has seeded gives each
worker samples of its own: each hashes a few of them, and all compare (``membership``). A dataset or ``collate_fn`` that
draws from a generator of its own gives other samples to whoever reads other ones before: the first micro-batch is read
a second time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from virtualflow.data import MicroBatch, Source
from virtualflow.errors import ConfigurationError
from virtualflow.state import content_hash

_PLAIN = (bool, int, float, complex, str, bytes)
_ARRAYS = (Tensor, np.ndarray, np.generic)
_CONTAINERS = (Mapping, list, tuple)
_DEPTH = 8

# How workers find at the start that they do not have the same data.

SAMPLES = 8
"""Of a map-style dataset that are hashed, from its first to its last."""
SECONDS = 1.0
"""After so long no further one is read."""
INDICES = 10_000_000
"""Of a ``Subset`` that are hashed; a longer one is compared by its samples only."""


# --- the same in all workers ------------------------------------------------------------------------------------------


def describe_contents(dataset: Any, source: Source, *, samples: int) -> dict[str, str]:
    """Hashes of what all workers must have alike, by what it is called.

    What cannot be read or takes too long is not there, so it is no difference if only some have it.
    """
    found, subset, began = {}, dataset, time.monotonic()
    while isinstance(subset, Subset):
        if len(subset.indices) <= INDICES:
            found[f"what the {type(subset).__name__} has chosen"] = content_hash(np.asarray(subset.indices))
        subset = subset.dataset
    for index in sorted({place * (samples - 1) // max(1, SAMPLES - 1) for place in range(SAMPLES)}):
        if time.monotonic() - began > SECONDS:
            break
        seen = source.look(index, describe_sample)
        if seen is not None:
            found[f"sample {index} of the dataset"] = seen
    return found


def describe_sample(sample: Any) -> str | None:
    """A hash of the tensors, arrays, numbers and texts of a sample; ``None``: it has none."""
    found = dict(_contents(sample, "", _DEPTH))
    return content_hash(found) if found else None


def other_contents(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """A sentence that says what two workers do not have alike, and what to do; ``None``: nothing that is known."""
    for name, value in here.items():
        if there.get(name, value) != value:
            return (
                f"the workers train on different data: {name} is not the same in all of them; seed what "
                "draws a split or an order (random_split(..., generator=torch.Generator().manual_seed(0)), "
                "random_state=0), and sort what os.listdir or glob gives"
            )
    return None


# --- the same whenever it is read -------------------------------------------------------------------------------------


def check_reading(dataset: Any, collate: Any, source: Source, batch: MicroBatch, epoch: int, epoch_step: int) -> None:
    pair = source.read_again(batch, epoch, epoch_step)
    if pair is None:
        return
    one, other = (dict(_contents(each.data, "", _DEPTH)) for each in pair)
    names = [name for name in one if name in other and content_hash(one[name]) != content_hash(other[name])]
    if not names and one.keys() == other.keys():
        return
    place = names[0] if names else next(iter(one.keys() ^ other.keys()))
    given = f"the dataset ({type(dataset).__name__})"
    if collate is not None and collate is not default_collate:
        of_collate = f"collate_fn ({getattr(collate, '__name__', type(collate).__name__)})"
        alike = source.steps_per_epoch is not None and all(
            source.look(index, describe_sample) is not None for index in batch.samples
        )
        given = of_collate if alike else f"{given}, or {of_collate},"
    hint = ", or leave out its seed=" if getattr(collate, "seed", None) is not None else ""
    raise ConfigurationError(
        f"virtual node {batch.virtual_node} got other data{f' in {place}' if place else ''} when it was loaded again: "
        f"{given} remembers what it has given (by a generator of its own, a counter, a place in a file); draw from the "
        "global generators of torch, numpy and random, which are seeded for each virtual node, or let what is drawn "
        f"follow from the sample's index{hint}"
    )


def _contents(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The tensors, arrays, numbers and texts in containers and in attributes of objects, each with its place."""
    if isinstance(value, _ARRAYS + _PLAIN):
        yield place, value
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for key, of in value.items():
            yield from _contents(of, f"{place}[{key!r}]", depth - 1)
    elif hasattr(type(value), "__array_interface__"):  # such as an image
        yield place, np.asarray(value)
    elif isinstance(value, list | tuple) and all(isinstance(of, _PLAIN) for of in value):
        yield place, value
    elif isinstance(value, list | tuple):
        for number, of in enumerate(value):
            yield from _contents(of, f"{place}[{number}]", depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        for name, of in vars(value).items():
            if isinstance(of, _ARRAYS + _CONTAINERS + _PLAIN):
                yield from _contents(of, f"{place}.{name}", min(depth - 1, 2))
