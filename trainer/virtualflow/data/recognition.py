"""What is given in place of a dataset, by mistake, is recognised before anything is read of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from virtualflow.errors import ConfigurationError


def check_dataset(dataset: Any) -> None:
    """Check that ``dataset`` is something that has samples.

    Raises:
        ConfigurationError: it is something else that people have at hand.
    """
    instead = _instead(dataset)
    if instead is not None:
        raise ConfigurationError(f"the dataset is {instead}")


def _instead(dataset: Any) -> str | None:
    """What it is and what to give, if it is no dataset."""
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        return (
            "a DataLoader, which makes batches, as the library does itself; give the dataset that it was made of "
            "(loader.dataset), with batch_size=, shuffle=, collate_fn= and num_workers= beside it"
        )
    if dataset is None or isinstance(dataset, str | bytes | int | float):
        return f"{dataset!r:.60}; give an object with samples: dataset[index] is one, and len(dataset) their number"
    if isinstance(dataset, type):
        return f"the class {dataset.__name__}; give an object of it: {dataset.__name__}(...)"
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(repr(key) for key in [*dataset][:4])
        return (
            f"a {name} with the keys {keys or '(none)'}, not samples by index; give one of its datasets, such as "
            'data["train"], or TensorDataset(*data.values()) if they are columns'
        )
    if hasattr(dataset, "iloc"):
        return (
            f"a {name} of pandas, whose [index] is a column or a label; give "
            "TensorDataset(torch.tensor(frame.values)), "
            "or a dataset of your own whose __getitem__ returns what it makes of frame.iloc[index]"
        )
    if isinstance(dataset, Iterator) and not hasattr(dataset, "shard"):
        return (
            f"a {name}, which can be gone through once; give a list of its samples, or a dataset of your own, with "
            "__getitem__ and __len__ or with shard(index, count, epoch, start)"
        )
    if isinstance(dataset, tuple) and _are_columns(dataset):
        return (
            f"a tuple of {len(dataset)} {type(dataset[0]).__name__}s, one for each column; give "
            "torch.utils.data.TensorDataset(*columns), whose samples are their rows"
        )
    return None


def _are_columns(given: tuple[Any, ...]) -> bool:
    """Whether they are tensors or arrays with as many rows each, and more than there are of them."""
    lengths = {shape[0] if (shape := getattr(each, "shape", ())) else 0 for each in given}
    return len(lengths) == 1 and lengths.pop() > len(given) > 1
