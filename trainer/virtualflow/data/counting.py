"""How many samples a micro-batch counts by, where ``collate_fn`` has left out some of those that were loaded.

Only what is certain is counted. A sample that the dataset gave as ``None`` cannot be in a micro-batch, and a
micro-batch without any rows holds none. Everything else is a doubt: fewer rows than samples may be time steps, packed
sequences or pairs, so the script is to say what they weigh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Count(NamedTuple):
    """What is known of a micro-batch that a ``collate_fn`` of the script's own has made."""

    kept: int | None = None
    """Samples that it holds; ``None``: as many as were loaded, as far as is known."""
    rows: int | None = None
    """The first dimension that all of its tensors have in common, if they do."""
    missing: int = 0
    """Samples that the dataset gave as ``None``, while nothing certain follows from that."""


ALL = Count()
"""Of a micro-batch that is torch's own work: it holds what was loaded."""


def count_samples(samples: Any, data: Any, loaded: int) -> Count:
    if data is None or (isinstance(data, list | tuple | dict) and not data):
        return Count(kept=0)
    rows = _common_rows(data, loaded)
    missing = sum(sample is None for sample in samples) if isinstance(samples, list | tuple) else 0
    if missing:
        if rows == loaded - missing:
            return Count(kept=rows, rows=rows)
        return Count(rows=rows) if rows == loaded else Count(rows=rows, missing=missing)  # others took their place
    if isinstance(data, list | tuple) and len(data) == loaded and all(isinstance(part, Tensor) for part in data):
        return ALL  # as likely one tensor a sample
    return Count(kept=0, rows=0) if rows == 0 else Count(rows=rows)


def _common_rows(data: Any, loaded: int) -> int | None:
    shapes = list(_shapes(data))
    if not shapes or any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape]
    wide = [shape for shape in known if len(shape) > 1]
    rows = {shape[0] for shape in known}
    if len(rows) != 1 or (wide and rows != {loaded} and all(shape[1] == loaded for shape in wide)):
        return None  # in the second case, time steps come first
    return rows.pop()


def _shapes(data: Any) -> Iterator[tuple[int, ...] | None]:
    """Of all tensors in lists, tuples and dicts; ``None`` for what has no rows, or cannot be looked into."""
    if isinstance(data, Tensor):
        yield None if data.is_nested or data.is_sparse else tuple(data.shape)
    elif isinstance(data, PackedSequence):
        yield None
    elif isinstance(data, Mapping):
        for part in data.values():
            yield from _shapes(part)
    elif isinstance(data, list | tuple):
        for part in data:
            yield from _shapes(part)
    elif not isinstance(data, str | bytes | int | float | bool | None):
        yield None


class CountWatch:
    """Finds micro-batches of which nobody knows how many samples they hold."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        """By the number that was loaded, the rows of the first micro-batch of so many."""
        self._certain = True
        """Whether no micro-batch had more rows than samples: else rows are something else."""

    def doubts(self, loaded: int, count: Count) -> str | None:
        if count.missing:
            return f"the dataset gave {count.missing} of {loaded} samples as None"
        rows = count.rows
        if rows is None or not self._certain or count.kept is not None:
            return None
        self._certain = rows <= loaded
        first = self._rows.setdefault(loaded, rows)
        if first == rows or not self._certain:
            return None
        return f"collate_fn made {min(first, rows)} rows of {loaded} samples, and {max(first, rows)} another time"
