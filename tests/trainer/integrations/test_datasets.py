"""Hugging Face's datasets over virtual nodes: each sample once, in one order, from any sample on, on any workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import augment, check_jobs, check_resumption, check_shards, first, numbers, row_of
from elastic_jobs import ElasticJob

from tiers import needs
from virtualflow.errors import ConfigurationError

pytestmark = [pytest.mark.nightly, needs("datasets")]

FILES = 6
SAMPLES = 46


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Six Parquet files with 7 or 8 samples each."""
    import datasets

    (tmp_path / "parquet").mkdir()
    rows = [{"number": number, "row": row_of(number)} for number in range(SAMPLES)]
    for file in range(FILES):
        datasets.Dataset.from_list(rows).shard(FILES, file).to_parquet(tmp_path / f"parquet/{file}.parquet")
    return tmp_path / "parquet"


def stream(directory: str | Path) -> Any:
    import datasets

    files = [f"{directory}/{file}.parquet" for file in range(FILES)]
    options = {"split": "train", "cache_dir": f"{directory}/cache"}
    return datasets.load_dataset("parquet", data_files=files, streaming=True, **options)


def augmented(sample: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(sample["number"]), augment(sample["row"])


def mixed(directory: str | Path) -> Any:
    """Shuffled and augmented behind the library."""
    from virtualflow.integrations.datasets import shards

    return shards(stream(directory), shuffle=5, transform=augmented)


def shuffled(directory: str | Path) -> Any:
    """Shuffled and mapped by the library."""
    from virtualflow.integrations.datasets import shards

    # Not of Parquet files: the library then waits for five seconds at the end of each pass.
    dataset = map_style(directory).with_format(None).to_iterable_dataset(FILES).shuffle(seed=3, buffer_size=6)
    return shards(dataset.map(lambda sample: {"row": sample["row"]}).with_format("torch"))


def filtered(directory: str | Path) -> Any:
    from virtualflow.integrations.datasets import shards

    return shards(stream(directory).filter(lambda sample: sample["number"] % 4 != 0), transform=augmented)


def map_style(directory: str | Path) -> Any:
    """A ``Dataset``, as it is."""
    import datasets

    files = [f"{directory}/{file}.parquet" for file in range(FILES)]
    return datasets.Dataset.from_parquet(files, cache_dir=f"{directory}/cache").with_format("torch")


@pytest.mark.parametrize(
    ("opened", "loaders"),
    [(mixed, 0), (mixed, 1), (shuffled, 0), (shuffled, 1), (filtered, 0), (map_style, 0), (map_style, 1)],
    ids=lambda value: value.__name__ if callable(value) else f"{value} loader processes",
)
def test_the_bits_are_the_same_on_any_workers_and_each_sample_counts_once(
    opened: Callable[[str], Any], loaders: int, directory: Path, start_job: Callable[..., ElasticJob]
) -> None:
    check_jobs(opened, directory, start_job, loaders)


@pytest.mark.parametrize("opened", [mixed, shuffled, map_style], ids=lambda value: value.__name__)
def test_a_job_goes_on_from_a_checkpoint_on_other_workers(
    opened: Callable[[str], Any], directory: Path, start_job: Callable[..., ElasticJob]
) -> None:
    check_resumption(opened, directory, start_job)


@pytest.mark.parametrize("opened", [mixed, shuffled], ids=lambda value: value.__name__)
def test_a_shard_can_be_read_from_any_sample_on(opened: Callable[[str], Any], directory: Path) -> None:
    check_shards(partial(opened, str(directory)), SAMPLES, counts=(1, 2, 4, 6, 12))


def test_each_epoch_and_each_seed_has_another_order(directory: Path) -> None:
    from virtualflow.integrations.datasets import shards

    dataset = stream(directory)
    orders = [numbers(shards(dataset, shuffle=20, seed=seed), 0, 1, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert numbers(shards(dataset), 0, 1) == list(range(SAMPLES))


@pytest.mark.parametrize("form", [None, "torch"])
def test_samples_are_those_of_the_library(form: str | None, directory: Path) -> None:
    from virtualflow.integrations.datasets import shards

    dataset = stream(directory).map(lambda sample: {"text": str(sample["number"]), "words": [1] * sample["number"]})
    dataset = dataset.with_format(form)
    pairs = list(zip(shards(dataset).shard(0, 1, 0, 0), dataset, strict=True))
    assert len(pairs) == SAMPLES
    for one, other in pairs:
        assert list(one) == list(other)
        for name, value in other.items():
            assert type(one[name]) is type(value), name
            assert getattr(one[name], "dtype", None) == getattr(value, "dtype", None), name
            assert np.array_equal(one[name], value), name


def test_what_is_done_last_is_not_done_to_samples_in_front_of_the_start(directory: Path) -> None:
    from virtualflow.integrations.datasets import shards

    seen: list[int] = []
    one = shards(stream(directory), shuffle=5, transform=lambda sample: seen.append(sample["number"]) or sample)
    order = numbers(one, 0, 1)
    seen.clear()
    assert numbers(one, 0, 1, 0, 20) == order[20:] == seen


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(())], ids=["random", "numpy", "torch"]
)
def test_what_draws_at_random_while_it_reads_ends_the_training_with_a_sentence(
    draw: Callable[[], Any], directory: Path
) -> None:
    from virtualflow.integrations.datasets import shards

    dataset = stream(directory).map(lambda sample: {"number": sample["number"] + 0 * int(draw())})
    with pytest.raises(ConfigurationError, match=r"draws from the global .* give what is random as .*transform="):
        first(shards(dataset))


def without_a_seed(dataset: Any) -> Any:
    return dataset.shuffle(buffer_size=5).map(lambda sample: sample)


def interleaved_without_a_seed(dataset: Any) -> Any:
    import datasets

    return datasets.interleave_datasets([dataset, dataset], probabilities=[0.5, 0.5])


def divided(dataset: Any) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, rank=0, world_size=2)


def of_indices(dataset: Any) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"number": [1]})


def of_several_splits(dataset: Any) -> Any:
    import datasets

    return datasets.IterableDatasetDict({"train": dataset})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_a_seed, r"without a seed, .* say shuffle\(seed=\)"),
        (interleaved_without_a_seed, r"without a seed, .* interleave_datasets\(seed=\)"),
        (divided, "divides the samples among processes, .* leave it out"),
        (of_indices, "give it to vf.elastic itself"),
        (of_several_splits, "not a IterableDatasetDict; of several splits, give one"),
    ],
)
def test_what_would_not_be_the_same_on_any_workers_is_refused(
    change: Callable[[Any], Any], sentence: str, directory: Path
) -> None:
    import datasets

    from virtualflow.integrations.datasets import shards

    with pytest.raises(ConfigurationError, match=sentence):
        shards(change(stream(directory)))
    seeded = datasets.interleave_datasets([stream(directory)] * 2, probabilities=[0.5, 0.5], seed=1).shuffle(seed=2**60)
    assert shards(seeded)
