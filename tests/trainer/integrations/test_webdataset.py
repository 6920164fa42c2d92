"""WebDataset pipelines over virtual nodes: each sample once, in the same order, from any sample on, on any workers."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import augment, check_jobs, check_resumption, check_shards, first, numbers, row_of
from elastic_jobs import ElasticJob

from tiers import needs
from virtualflow.errors import ConfigurationError

pytestmark = [pytest.mark.nightly, needs("webdataset")]

FILES = 6
SAMPLES = 45


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Six tar files with 5 to 10 samples each."""
    import webdataset as wds

    (tmp_path / "tars").mkdir()
    number = 0
    for file in range(FILES):
        with wds.TarWriter(str(tmp_path / f"tars/{file}.tar")) as tar:
            for _ in range(5 + file):
                tar.write({"__key__": f"s{number:03}", "cls": number, "row.json": row_of(number)})
                number += 1
    assert number == SAMPLES
    return tmp_path / "tars"


def raw(directory: str | Path, name: str = "{0..5}.tar", **options: Any) -> Any:
    import webdataset as wds

    return wds.WebDataset(f"{directory}/{name}", **{"shardshuffle": 100, **options})


def pipeline(directory: str | Path, **options: Any) -> Any:
    """As in a script: files and samples are shuffled, decoded, and augmented."""
    return raw(directory, **options).shuffle(6).decode().to_tuple("cls", "row.json").map_tuple(torch.tensor, augment)


def opened(directory: str | Path, **options: Any) -> Any:
    from virtualflow.integrations.webdataset import shards

    return shards(pipeline(directory, **options))


def chosen(directory: str | Path) -> Any:
    """Without the samples whose number can be divided by 4, and with augmentation in front of the choice."""
    from virtualflow.integrations.webdataset import shards

    dataset = raw(directory).decode().to_tuple("cls", "row.json").map_tuple(torch.tensor, augment)
    return shards(dataset.select(lambda sample: sample[0] % 4 != 0).shuffle(5))


@pytest.mark.parametrize("loaders", [0, 1], ids=["in the worker", "in loader processes"])
def test_the_bits_are_the_same_on_any_workers_and_each_sample_counts_once(
    loaders: int, directory: Path, start_job: Callable[..., ElasticJob]
) -> None:
    check_jobs(opened, directory, start_job, loaders)


def test_also_where_samples_are_left_out(directory: Path, start_job: Callable[..., ElasticJob]) -> None:
    check_jobs(chosen, directory, start_job)


def test_a_job_goes_on_from_a_checkpoint_on_other_workers(
    directory: Path, start_job: Callable[..., ElasticJob]
) -> None:
    check_resumption(opened, directory, start_job)


def test_a_shard_can_be_read_from_any_sample_on(directory: Path) -> None:
    check_shards(partial(opened, directory), SAMPLES, counts=(1, 2, 4, 5, 6, 8))


def test_each_epoch_and_each_seed_has_another_order(directory: Path) -> None:
    from virtualflow.integrations.webdataset import shards

    orders = [numbers(opened(directory), 0, 1, epoch) for epoch in range(3)]
    orders.append(numbers(shards(pipeline(directory), seed=1), 0, 1))
    assert len({tuple(order) for order in orders}) == 4
    assert numbers(shards(raw(directory, shardshuffle=False).decode().to_tuple("cls")), 0, 1) == list(range(SAMPLES))


def test_seeds_of_the_pipeline_and_the_process_do_not_matter(directory: Path) -> None:
    import webdataset as wds

    orders = []
    for seed in (1, 2):
        random.seed(seed)
        orders.append(first(opened(directory, seed=seed, detshuffle=seed == 1)))
    urls = wds.SimpleShardList(f"{directory}/{{0..5}}.tar")
    written_out = wds.DataPipeline(
        urls,
        wds.shuffle(100),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.shuffle(6),
        wds.decode(),
        wds.to_tuple("cls"),
    )
    from virtualflow.integrations.webdataset import shards

    assert orders == [orders[0], orders[0]]
    assert first(shards(written_out)) == orders[0]


@pytest.mark.parametrize("way", ["compressed", "through a pipe"])
def test_a_file_that_cannot_be_indexed_is_read_as_a_stream_to_the_same_samples(way: str, directory: Path) -> None:
    import webdataset as wds

    from virtualflow.integrations.webdataset import shards

    urls = []
    for file in range(FILES):
        if way == "compressed":
            with wds.TarWriter(str(directory / f"{file}.tar.gz")) as tar, tarfile.open(directory / f"{file}.tar") as of:
                for member in of:
                    tar.tarstream.addfile(member, of.extractfile(member))
            urls.append(str(directory / f"{file}.tar.gz"))
        else:
            urls.append(f"pipe:cat {directory}/{file}.tar")

    def streamed() -> Any:
        dataset = wds.WebDataset(urls, shardshuffle=100).shuffle(6).decode().to_tuple("cls", "row.json")
        return shards(dataset.map_tuple(torch.tensor, augment))

    check_shards(streamed, SAMPLES, counts=(1, 4))
    assert first(streamed()) == first(opened(directory))


def test_what_is_indexed_is_what_webdataset_reads(tmp_path: Path) -> None:
    from virtualflow.integrations.webdataset import shards

    def add(tar: tarfile.TarFile, name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.type = len(data) if kind == tarfile.REGTYPE else 0, kind
        tar.addfile(member, BytesIO(data))

    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        add(tar, "in", kind=tarfile.DIRTYPE)
        add(tar, "__meta__.json")
        for name in ("in/a.JPG", "in/a.seg.png", "in/b.jpg", "in/c.txt", "in/b.cls", "x" * 150 + ".jpg", "no-suffix"):
            add(tar, name, name.encode())
        add(tar, "in/empty.jpg", b"")
    options: dict[str, Any] = {
        "shardshuffle": False,
        "select_files": lambda name: "txt" not in name,
        "rename_files": lambda name: name.replace("in/", "out/"),
    }
    dataset = raw(tmp_path, "0.tar", **options)
    assert list(shards(dataset).shard(0, 1, 0, 0)) == list(dataset)


def test_samples_in_front_of_the_start_are_neither_read_nor_decoded(directory: Path) -> None:
    from virtualflow.integrations.webdataset import shards

    seen: list[int] = []
    dataset = raw(directory).shuffle(6).decode().to_tuple("cls").map_tuple(lambda number: seen.append(number) or number)
    one = shards(dataset)
    order = numbers(one, 0, 1)
    seen.clear()
    (directory / "0.tar").write_bytes((directory / "0.tar").read_bytes()[:512])  # its first header is left
    left = [n for n in order if n >= 5]  # those of the other files
    start = next(n for n in range(SAMPLES) if all(number in left for number in order[n:]))
    assert numbers(one, 0, 1, 0, start) == order[start:] == seen


def test_a_file_that_ends_too_early_is_an_error(directory: Path) -> None:
    path = directory / "5.tar"
    with tarfile.open(path) as tar:
        end = max(member.offset_data for member in tar) + 1
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises((OSError, tarfile.TarError)):
        numbers(opened(directory), 0, 1)


def batched(dataset: Any) -> Any:
    return dataset.batched(4)


def repeated(dataset: Any) -> Any:
    return dataset.with_epoch(100)


def sliced(dataset: Any) -> Any:
    return dataset.slice(4)


def thinned(dataset: Any) -> Any:
    return dataset.rsample(0.5)


def with_a_generator(dataset: Any) -> Any:
    return dataset.shuffle(5, rng=random.Random(1))


def with_a_handler(dataset: Any) -> Any:
    import webdataset as wds

    return dataset.decode(handler=wds.warn_and_continue)


def composed(dataset: Any) -> Any:
    return dataset.compose(each)


def each(samples: Any) -> Any:
    yield from samples


def in_a_loader(dataset: Any) -> Any:
    import webdataset as wds

    return wds.WebLoader(dataset)


def not_a_dataset(dataset: Any) -> Any:
    return "some.tar"


def without_reading(dataset: Any) -> Any:
    import webdataset as wds

    return wds.DataPipeline(wds.SimpleShardList("0.tar"))


def resampled(dataset: Any) -> Any:
    import webdataset as wds

    return wds.WebDataset("0.tar", resampled=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (batched, "has a stage batched, of which it is not known .* Batches are made by vf.elastic"),
        (repeated, "leave them out, and say epochs= or steps= to vf.elastic"),
        (sliced, "has a stage islice, of which it is not known"),
        (thinned, "has a stage rsample, of which it is not known"),
        (with_a_generator, "draws from a generator of its own"),
        (with_a_handler, "handler= leaves out what could not be read or decoded on one worker"),
        (composed, "has a stage each, of which it is not known"),
        (in_a_loader, "begins with a DataLoader, .* give the dataset itself, not a WebLoader"),
        (resampled, "begins with a ResampledShards, .* without resampled="),
        (not_a_dataset, "needs a WebDataset or a DataPipeline, and not a str"),
        (without_reading, "reads no tar files; add tarfile_to_samples"),
    ],
)
def test_what_would_not_be_the_same_on_any_workers_is_refused(
    change: Callable[[Any], Any], sentence: str, directory: Path
) -> None:
    from virtualflow.integrations.webdataset import shards

    with pytest.raises(ConfigurationError, match=sentence):
        shards(change(raw(directory)))


@pytest.mark.parametrize("left_out", [3, SAMPLES - 1], ids=["one", "the last"])
def test_a_map_that_leaves_out_samples_ends_the_training_with_a_sentence(left_out: int, directory: Path) -> None:
    from virtualflow.integrations.webdataset import shards

    dataset = raw(directory, shardshuffle=False).decode().map(lambda s: None if s["cls"] == left_out else s)
    with pytest.raises(ConfigurationError, match=r"a stage .* has left out a sample .* with select\(\)"):
        numbers(shards(dataset.to_tuple("cls")), 0, 1)
