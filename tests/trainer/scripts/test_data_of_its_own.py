"""Data that remembers what it has given, and data that each worker draws for itself, are found at the start."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from elastic_jobs import ElasticJob
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import virtualflow as vf
from tiers import needs
from virtualflow.data import LoaderOptions, MicroBatch, Source, open_source
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.loaders import seed_collate
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.worker import contents
from virtualflow.worker.contents import check_reading, describe_contents, other_contents


class Rows(Dataset[Any]):
    """A row is what ``draw`` makes of its number."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([float(index)]), "y": self.draw(index)}


class Stream:
    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Any]:
        for number in range(index + start * count, 40, count):
            yield torch.tensor([float(number) + self.draw(number)])


class Masks:
    """A ``collate_fn`` with a generator, as transformers' have one."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        x = torch.stack([row["x"] for row in rows])
        return {"x": x, "mask": torch.rand(x.shape, generator=self.generator)}


def of_torch() -> Callable[[int], Any]:
    generator = torch.Generator().manual_seed(0)
    return lambda index: torch.rand(1, generator=generator)


def of_numpy() -> Callable[[int], Any]:
    generator = np.random.default_rng(0)
    return lambda index: generator.standard_normal(2)


def of_python() -> Callable[[int], Any]:
    generator = random.Random(0)
    return lambda index: generator.random()


def a_counter() -> Callable[[int], Any]:
    given: list[int] = []

    def count(index: int) -> int:
        given.append(index)
        return len(given)

    return count


def opened(dataset: Any, **options: Any) -> Source:
    loader: LoaderOptions = options  # type: ignore[assignment]
    return open_source(
        dataset,
        batch_size=8,
        virtual_nodes=2,
        seed=0,
        shuffle=True,
        drop_last=False,
        epochs=3,
        options=loader,
    )


def read(dataset: Any, **options: Any) -> MicroBatch:
    """The first micro-batch, checked, and the one that follows."""
    source = opened(dataset, **options)
    try:
        source.assign(range(2), 0, 0)
        batch = source.fetch(0, 0, 0)
        check_reading(dataset, options.get("collate_fn"), source, batch, 0, 0)
        return source.fetch(0, 0, 1)
    finally:
        source.close()


@pytest.mark.parametrize(
    ("draw", "workers"), [(of_torch, 0), (of_numpy, 0), (of_python, 0), (a_counter, 0), (of_numpy, 2)]
)
def test_a_dataset_that_remembers_is_refused(draw: Callable[[], Any], workers: int) -> None:
    with pytest.raises(ConfigurationError, match=r"other data in \['y'\].*: the dataset \(Rows\) remembers"):
        read(Rows(draw()), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1, 2], ids=["in the process", "in one loader process", "in two"])
def test_a_collate_fn_with_a_generator_of_its_own_is_refused(workers: int) -> None:
    with pytest.raises(ConfigurationError, match=r"in \['mask'\].*: collate_fn \(Masks\) rem.*leave out its seed="):
        read(Rows(int), collate_fn=Masks(seed=3), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1], ids=["in the process", "in a loader process"])
def test_a_stream_that_remembers_is_refused(workers: int) -> None:
    with pytest.raises(ConfigurationError, match=r"in \[0\]|data when.*: the dataset \(Stream\) remembers"):
        read(Stream(of_python()), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1], ids=["in the process", "in loader processes"])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Rows(lambda index: torch.rand(1)), {}),
        (Rows(lambda index: [np.random.rand(), random.random()]), {}),
        (Rows(lambda index: float("nan")), {}),
        (Rows(int), {"collate_fn": Masks(seed=None)}),
        (Stream(lambda number: random.random()), {}),
        (TensorDataset(torch.rand(40, 2)), {}),
    ],
    ids=["torch", "numpy and random", "not a number", "collate_fn", "stream", "tensors"],
)
def test_data_that_draws_from_the_global_generators_is_read_on(
    dataset: Any, options: dict[str, Any], workers: int
) -> None:
    def alone() -> Any:
        source = opened(dataset, **options)
        source.assign(range(2), 0, 0)
        source.fetch(0, 0, 0)
        return source.fetch(0, 0, 1)

    checked, reference = read(dataset, num_workers=workers, **options), alone()
    assert str(checked.data) == str(reference.data)
    assert checked.samples == reference.samples


class Drawing:
    """As transformers' collators: with a seed it keeps a generator from batch to batch."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self.generator = seed, None

    def get_generator(self, seed: int) -> Any:
        return np.random.default_rng(seed)

    def create_rng(self) -> None:
        self.generator = self.get_generator(self.seed or 0)

    def __call__(self, rows: list[Any]) -> Any:
        if self.seed is not None and self.generator is None:
            self.create_rng()
        return {"mask": np.random.rand(8) if self.generator is None else self.generator.random(8)}


class Removing:
    """Removes columns before another one collates."""

    def __init__(self, data_collator: Any) -> None:
        self.data_collator = data_collator

    def __call__(self, rows: list[Any]) -> Any:
        return self.data_collator(rows)


@pytest.mark.parametrize("workers", [0, 1], ids=["in the process", "in a loader process"])
def test_a_collator_whose_seed_is_known_draws_by_the_virtual_node(workers: int) -> None:
    masks = {}
    for seed in (3, 4):
        collate = seed_collate(Removing(Drawing(seed)))
        first, again = (read(Rows(int), collate_fn=collate, num_workers=workers) for _ in range(2))
        assert np.array_equal(first.data["mask"], again.data["mask"])
        masks[seed] = first.data["mask"]
    assert not np.array_equal(masks[3], masks[4]), "the seed counts"
    assert seed_collate(collate) is collate
    plain = Removing(Drawing(None))
    assert seed_collate(plain) is plain


@needs("transformers")
def test_transformers_masks_follow_from_the_seed_and_the_virtual_node() -> None:
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *map(str, range(40))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
    )
    collate = seed_collate(DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=42))
    rows = [{"input_ids": list(range(3, 35))}]

    def masked(node: int) -> Tensor:
        torch.manual_seed(node)
        found: Tensor = collate(rows)["labels"]
        return found

    masks = [masked(node) for node in (0, 1, 0)]
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


# --- another one in each worker ---------------------------------------------------------------------------------------


def described(dataset: Any, workers: int = 0, *, seconds: float = 600.0) -> dict[str, str]:
    source = opened(dataset, num_workers=workers)
    try:
        with patch.object(contents, "SECONDS", seconds):
            return describe_contents(dataset, source, samples=len(dataset))
    finally:
        source.close()


def files(seed: int | None) -> Rows:
    order = [f"{number}.png" for number in range(40)]
    if seed is not None:
        random.Random(seed).shuffle(order)
    return Rows(lambda index: order[index])


def split(seed: int) -> Subset[Any]:
    return random_split(files(None), [30, 10], generator=torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize("workers", [0, 1], ids=["in the process", "in a loader process"])
def test_another_order_of_files_is_another_dataset(workers: int) -> None:
    one, same, other = (described(files(seed), workers) for seed in (1, 1, 2))
    assert len(one) == contents.SAMPLES
    assert other_contents(one, same) is None
    assert "different data: sample" in str(other_contents(one, other))
    assert "sort what os.listdir" in str(other_contents(one, other))


def test_another_split_is_named() -> None:
    one, other = described(split(1)), described(split(2))
    assert str(other_contents(one, other)).startswith("the workers train on different data: what the Subset has chosen")
    assert other_contents(one, described(split(1))) is None


def test_random_augmentation_and_samples_that_cannot_be_read_are_no_difference() -> None:
    def awkward(index: int) -> Any:
        if index % 2:
            raise OSError("no such file")
        return os.urandom(8)

    assert described(Rows(awkward)) == {}
    before = torch.get_rng_state(), random.getstate()
    assert described(Rows(lambda index: torch.rand(1))) == described(Rows(lambda index: torch.rand(1)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_a_slow_dataset_is_not_looked_at_for_long_and_what_only_one_has_seen_is_no_difference() -> None:
    few = described(files(1), seconds=0.0)
    assert len(few) <= 1
    assert other_contents(few, described(files(1))) is None
    assert other_contents(described(files(1)), few) is None


def with_a_split_of_its_own() -> None:
    torch.manual_seed(int(os.environ[ENV_WORKER][-1]))
    train, _ = random_split(TensorDataset(torch.randn(40, 2, generator=torch.Generator().manual_seed(0))), [32, 8])
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with vf.elastic(model, torch.optim.SGD(model.parameters(), 0.1), train, batch_size=8, steps=4) as run:
        for step in run:
            for (x,) in step:
                model(x).sum().backward()


def test_workers_with_splits_of_their_own_are_refused_before_the_first_step(
    start_job: Callable[..., ElasticJob],
) -> None:
    job = start_job(with_a_split_of_its_own, workers=2)
    told = [outcome.text for outcome in job.finish().values() if outcome.kind == "ConfigurationError"]
    assert told
    assert all("what the Subset has chosen is not the same" in text for text in told)
    assert job.status().step == 0


def with_a_remembering_dataset(kept: bool) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    dataset = Rows(of_python() if kept else int)
    with vf.elastic(model, torch.optim.SGD(model.parameters(), 0.001), dataset, batch_size=8, steps=4) as run:
        for step in run:
            for batch in step:
                (model(batch["x"]) * batch["y"]).sum().backward()
    return model.weight.detach()


def test_a_job_reads_its_first_micro_batch_twice(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(with_a_remembering_dataset, True, workers=1)
    (outcome,) = job.finish().values()
    assert "the dataset (Rows) remembers what it has given" in outcome.text
    reference = with_a_remembering_dataset(False)
    (found,) = start_job(with_a_remembering_dataset, False, workers=1).results()
    assert torch.equal(found, reference)
