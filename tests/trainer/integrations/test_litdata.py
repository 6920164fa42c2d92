"""litData over virtual nodes: each sample once, in the same order, from any sample on, on any workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import augment, check_jobs, check_orders, check_resumption, check_shards, numbers, row_of
from elastic_jobs import ElasticJob

from tiers import needs
from virtualflow.errors import ConfigurationError

pytestmark = [
    pytest.mark.nightly,
    needs("litdata", "it needs a torchvision that fits torch: not in make test-all"),
]

SAMPLES = 46


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Seven chunks with up to 7 samples."""
    from litdata.streaming.cache import Cache

    cache = Cache(str(tmp_path / "chunks"), chunk_size=7)
    for number in range(SAMPLES):
        cache[number] = {"number": number, "row": row_of(number)}
    cache.done()
    cache.merge()
    return tmp_path / "chunks"


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": torch.tensor(sample["number"]), "row": augment(sample["row"])}


def stream(directory: str | Path, **options: Any) -> Any:
    from litdata import StreamingDataset

    return StreamingDataset(str(directory), **{"shuffle": True, "seed": 3, "transform": augmented, **options})


def opened(directory: str | Path, **options: Any) -> Any:
    from virtualflow.integrations.litdata import shards

    return shards(stream(directory, **options))


@pytest.mark.parametrize("loaders", [0, 1], ids=["in the worker", "in loader processes"])
def test_the_bits_are_the_same_on_any_workers_and_each_sample_counts_once(
    loaders: int, directory: Path, start_job: Callable[..., ElasticJob]
) -> None:
    check_jobs(opened, directory, start_job, loaders)


def test_a_job_goes_on_from_a_checkpoint_on_other_workers(
    directory: Path, start_job: Callable[..., ElasticJob]
) -> None:
    check_resumption(opened, directory, start_job)


def test_a_shard_can_be_read_from_any_sample_on(directory: Path) -> None:
    check_shards(partial(opened, directory), SAMPLES, counts=(1, 2, 4, 7, 8))


def test_each_epoch_and_each_seed_has_another_order(directory: Path) -> None:
    check_orders(partial(opened, directory), SAMPLES)


def test_a_part_of_a_dataset_is_read_as_the_library_reads_it(directory: Path) -> None:
    part = stream(directory, shuffle=False, subsample=0.4)
    wanted = [int(sample["number"]) for sample in part]
    assert numbers(opened(directory, shuffle=False, subsample=0.4), 0, 1) == wanted
    assert 0 < len(wanted) < SAMPLES


def test_nothing_in_front_of_the_start_is_read(directory: Path) -> None:
    seen: list[int] = []
    one = opened(directory, transform=lambda sample: seen.append(sample["number"]) or sample)
    order = numbers(one, 0, 1)
    seen.clear()
    assert numbers(one, 0, 1, 0, 30) == order[30:] == seen


def test_what_would_leave_out_samples_is_refused(directory: Path) -> None:
    from litdata import CombinedStreamingDataset

    from virtualflow.integrations.litdata import shards

    with pytest.raises(ConfigurationError, match="drop_last=True leaves out samples"):
        opened(directory, drop_last=True)
    with pytest.raises(ConfigurationError, match="not a CombinedStreamingDataset"):
        shards(CombinedStreamingDataset([stream(directory)], seed=1))
