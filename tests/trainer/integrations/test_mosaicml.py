"""MosaicML Streaming over virtual nodes: each sample once, in the same order, from any sample on, on any workers."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import augment, check_jobs, check_orders, check_resumption, check_shards, numbers, row_of
from elastic_jobs import ElasticJob

from tiers import needs
from virtualflow.errors import ConfigurationError

pytestmark = [
    pytest.mark.nightly,
    needs("streaming", "it needs numpy below 2.2 and a torchvision that fits torch: not in make test-all"),
]

SAMPLES = 46
COLUMNS = {"number": "int", "row": "ndarray:float32:3"}


def write(directory: Path, numbers: range, **options: Any) -> None:
    """Files with up to 8 samples."""
    from streaming import MDSWriter

    with MDSWriter(out=str(directory), columns=COLUMNS, size_limit=400, **options) as writer:
        for number in numbers:
            writer.write({"number": number, "row": np.array(row_of(number), np.float32)})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where samples are, some of them compressed."""
    write(tmp_path / "there" / "plain", range(30))
    write(tmp_path / "there" / "packed", range(30, SAMPLES), compression="zstd")
    return tmp_path / "there"


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": torch.tensor(sample["number"]), "row": augment(sample["row"].copy())}


def streams(directory: str | Path, local: str | Path) -> list[Any]:
    from streaming import Stream

    return [Stream(remote=str(Path(directory, name)), local=str(Path(local, name))) for name in ("plain", "packed")]


def opened(directory: str | Path, local: str | Path | None = None, **options: Any) -> Any:
    """What a worker opens; those of a machine fetch into one directory, unless another one is given."""
    from virtualflow.integrations.mosaicml import shards

    given = {"shuffle": True, "seed": 3, "transform": augmented, **options}
    return shards(*streams(directory, local or Path(directory).parent / "here"), **given)


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


def test_only_files_that_are_read_are_fetched(directory: Path, tmp_path: Path) -> None:
    def fetched() -> set[str]:
        return {str(path.relative_to(tmp_path / "own")) for path in (tmp_path / "own").rglob("*.mds")}

    one = opened(directory, tmp_path / "own", shuffle=False)
    assert fetched() == set(), "the index is all that is read to begin with"
    assert numbers(one, 0, 1, 0, SAMPLES - 1) == [SAMPLES - 1]
    assert len(fetched()) == 1, "nothing in front of the start is"
    assert numbers(one, 0, 1) == list(range(SAMPLES))
    shutil.rmtree(directory)
    assert numbers(one, 0, 1) == list(range(SAMPLES)), "what is there is fetched once"
    assert not list((tmp_path / "own").rglob("*.tmp"))


def test_a_download_that_is_tried_again_leaves_random_numbers_as_they_are(directory: Path, tmp_path: Path) -> None:
    def drawn(local: Path) -> list[tuple[int, float]]:
        random.seed(5)
        read = opened(directory, local, transform=lambda sample: (sample["number"], random.random()))
        return list(read.shard(index=0, count=1, epoch=0, start=0))

    undisturbed, tries = drawn(tmp_path / "one"), []

    from streaming.base.storage.download import LocalDownloader

    download = LocalDownloader._download_file_impl

    def fail_first(self: Any, remote: str, local: str, timeout: float) -> None:
        tries.append(remote)
        if tries.count(remote) == 1:
            raise OSError("not now")
        download(self, remote, local, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalDownloader, "_download_file_impl", fail_first)
        patch.setattr("streaming.base.util.sleep", lambda seconds: None)
        assert drawn(tmp_path / "two") == undisturbed
    assert tries


def test_what_would_count_samples_otherwise_is_refused(directory: Path, tmp_path: Path) -> None:
    from streaming import LocalDataset, MDSWriter, Stream

    from virtualflow.integrations.mosaicml import shards

    with pytest.raises(ConfigurationError, match="needs Streams, and not LocalDataset"):
        shards(LocalDataset(str(directory / "plain")))
    with pytest.raises(ConfigurationError, match="and not nothing"):
        shards()
    for weight in ({"repeat": 2.0}, {"choose": 3}, {"proportion": 0.5}):
        with pytest.raises(ConfigurationError, match="more than once or not at all"):
            shards(Stream(local=str(directory / "plain"), **weight))
    with MDSWriter(out=str(tmp_path / "pickled"), columns={"number": "pkl"}) as writer:
        writer.write({"number": 1})
    with pytest.raises(ValueError, match="unsafe type: pkl"):
        shards(Stream(local=str(tmp_path / "pickled")))
    assert numbers(shards(Stream(local=str(tmp_path / "pickled")), allow_unsafe_types=True), 0, 1) == [1]
