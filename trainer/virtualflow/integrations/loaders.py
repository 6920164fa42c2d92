"""What the loaders of other libraries say of a training: its samples, their order, and how they come."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from virtualflow.data import LoaderOptions, derive_seed
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import VIRTUAL_NODES
from virtualflow.worker.run import Run


def virtual_nodes_of(batch_size: int, accumulated: int) -> int:
    """The virtual nodes of a global batch where nobody says: its micro-batches, or what divides it."""
    return accumulated if accumulated > 1 else math.gcd(batch_size, VIRTUAL_NODES)


def refuse_streams(dataset: Any, name: str) -> None:
    """See that a dataset has samples with numbers."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigurationError(
            f"{name} needs a dataset with __len__ and __getitem__; for a stream write the loop with vf.elastic"
        )


def fsdp_is_asked_for() -> bool:
    """Whether the environment asks Hugging Face's libraries for FSDP, as ``accelerate launch`` does."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").strip().lower() in ("1", "true", "t", "yes", "y", "on")


def refuse_saving(run: Run, setting: str) -> None:
    """See that nobody is to save a model of which no worker has all parameters.

    Args:
        setting: what a user is to do, so that nothing is saved.
    """
    if run._request.options.shards_parameters:
        raise ConfigurationError(
            f"no worker has the whole model to save where parameters are divided; {setting}, give a checkpoint "
            "directory, and read what is there by virtualflow export"
        )


def options_of(loader: Any) -> LoaderOptions:
    return {
        "num_workers": loader.num_workers,
        "collate_fn": seed_collate(loader.collate_fn),
        "pin_memory": loader.pin_memory,
        "prefetch_factor": loader.prefetch_factor,
        "worker_init_fn": loader.worker_init_fn,
        "timeout": loader.timeout,
    }


def seed_collate(collate: Any) -> Any:
    """A ``collate_fn`` that draws the same for a virtual node wherever it is loaded.

    transformers' collators with a ``seed`` (for masks of language models) keep a generator from batch to batch.
    """
    found = list(_seeded_within(collate))
    return SeededCollate(collate, found) if found else collate


@dataclass(frozen=True)
class SeededCollate:
    """Gives each collator within another one a new generator for each micro-batch."""

    collate: Any
    seeded: Sequence[Any]
    """Those with a seed of their own."""

    def __call__(self, samples: Any) -> Any:
        here = torch.initial_seed()  # the global generators are seeded for each virtual node
        for each in self.seeded:
            each.generator = each.get_generator(derive_seed("collate", each.seed, here))
        return self.collate(samples)


def _seeded_within(collate: Any) -> Iterator[Any]:
    if isinstance(collate, SeededCollate):
        return
    if hasattr(collate, "create_rng") and getattr(collate, "seed", None) is not None:
        yield collate
    inner = getattr(collate, "data_collator", None)  # of what removes columns before
    if inner is not None:
        yield from _seeded_within(inner)


def lend(loader: Any, samples: int) -> Any:
    """The first samples of a loader's dataset, collated."""
    return loader.collate_fn([loader.dataset[index] for index in range(min(samples, len(loader.dataset)))])


def order_of(loader: Any, batches: int | None = None) -> Callable[[int, int], Sequence[int]]:
    """The order of samples that a library's own loader has in an epoch.

    Args:
        loader: of a map-style dataset.
        batches: leave out what is behind so many of the loader's, as a last one that is not whole.
    """
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if sampler is None:
        raise ConfigurationError(
            f"{type(loader.batch_sampler).__name__} makes batches by itself, and a global batch is divided by the "
            "library; use a sampler of samples"
        )
    kept = None if batches is None else batches * loader.batch_sampler.batch_size

    def order(seed: int, epoch: int) -> Sequence[int]:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        return list(sampler)[:kept]

    return order


# Files dealt to the shards of an epoch: whole ones as far as they can be dealt evenly, and stripes of the rest.


class Part(NamedTuple):
    """What a shard has of a file: each ``step``-th sample from the ``offset``-th on."""

    file: int
    offset: int
    step: int


def deal(files: int, index: int, count: int) -> list[Part]:
    """What shard ``index`` of ``count`` has of ``files`` files."""
    whole, rest = files - files % count, files % count
    parts = [Part(file, 0, 1) for file in range(index, whole, count)]
    if rest:
        file = index % rest
        parts.append(Part(whole + file, index // rest, (count - file - 1) // rest + 1))
    return parts
