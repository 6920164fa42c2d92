"""What a model makes of a dataset: rows in its order on every worker, or files of rows that each worker writes.

A file holds the rows of one virtual node from a few global batches. So its name and its bytes follow from the model and
the data alone: whoever writes one again writes the same, and a worker that dies leaves nothing to be undone.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor, nn

from virtualflow._arguments import checked
from virtualflow.atomic_file import open_regular, read_regular, write_whole
from virtualflow.data import LoaderOptions, MicroBatch
from virtualflow.device import device_of
from virtualflow.errors import ConfigurationError, VirtualFlowError, show_errors_plainly
from virtualflow.state import NATIVE
from virtualflow.worker.evaluation import (
    Collected,
    Rows,
    RowSource,
    check_rows,
    each,
    go_through,
    in_order,
    join,
    loop_between_steps,
)
from virtualflow.worker.loading import Staging
from virtualflow.worker.settings import PredictionSettings

_CALL = "vf.predict"
_PLACES = "index"
"""The name of the rows' places among the tensors of a file."""
_MANIFEST = "prediction.json"
_MAX_MANIFEST = 64 << 20
"""Its bytes: enough for a million files."""


class _Manifest(msgspec.Struct, omit_defaults=True):
    """Whose files a folder holds, and which they are; these come last."""

    prediction: str
    """What names it: the same when a job is resumed in front of it."""
    rows: int = 0
    files: dict[str, int] = msgspec.field(default_factory=dict)
    """By name, how many rows it has; empty: they are not complete."""


@checked(_CALL, LoaderOptions.__annotations__)
def predict(
    model: nn.Module,
    dataset: Any,
    fn: Callable[[Any], Rows] | None = None,
    *,
    batch_size: int,
    to: str | Path | None = None,
    **loader: Unpack[LoaderOptions],
) -> Rows | None:
    """Return what the model makes of a dataset, in dataset order, the same on every worker; or write it to files.

    Who computes what, and where the call may stand, is as with :func:`virtualflow.evaluate`. The same rows come of any
    number of workers, bit for bit.

    Args:
        model: put into evaluation mode meanwhile.
        dataset: map-style, or iterable with a method ``shard``, as for :func:`virtualflow.evaluate`.
        fn: gets a collated micro-batch on the model's device and returns one row a sample: a tensor ``[n, ...]``, or a
            tuple, list or dict of them. Without it, the model gets a tensor as it is, the only part of a list, and a
            mapping as keywords.
        batch_size: samples at a time over all virtual nodes, divisible by their number.
        to: a folder that all workers share, for files in the format of safetensors. Each has the rows of one virtual
            node from a few batches: as ``rows``, or under the names or numbers of a dict or tuple, with their places in
            the dataset's order as ``index`` (int64 ``[n]``). When all rows are there, ``prediction.json`` names their
            ``files``; on return no worker needs the folder any more.
        **loader: passed through to the ``DataLoader``.

    Returns:
        The rows, on the CPU; nothing where they are written.

    Raises:
        ConfigurationError: the dataset, the sizes or the rows do not fit, or the folder holds something else.
        VirtualFlowError: a file cannot be written.
    """
    show_errors_plainly()
    device = Staging(device_of(model))
    origin = RowSource("the model", "pass fn=, which returns")
    if fn is not None:
        origin = RowSource("the function of vf.predict", "return")

    def compute(batch: MicroBatch, places: Tensor) -> tuple[Tensor, Rows]:
        data = device.move(batch).data
        rows = _call(model, data) if fn is None else fn(data)
        return places, each(check_rows(origin, rows, batch.size), Tensor.cpu)

    if to is None:
        collected = Collected(compute)
        go_through(_CALL, model, dataset, collected, batch_size=batch_size, **loader)
        return in_order(origin, collected.parts)
    loop = loop_between_steps(_CALL)
    if loop is None:
        files = _Files(Path(to), uuid.uuid4().hex, origin, compute, PredictionSettings())
    else:
        request, session = loop.context.request, loop.context.session
        samples = len(dataset) if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") else "stream"
        name = f"{loop.name_prediction()}-of-{samples}-by-{batch_size}-{request.virtual_nodes}"
        files = _Files(Path(to), name, origin, compute, request.settings.prediction, session.holds_lease)
    try:
        go_through(_CALL, model, dataset, files, batch_size=batch_size, **loader)
    finally:
        files.close()
    return None


def _call(model: nn.Module, data: Any) -> Any:
    if isinstance(data, Tensor):
        return model(data)
    if isinstance(data, Mapping):
        return model(**data)
    if isinstance(data, tuple | list) and len(data) == 1:
        return model(data[0])
    parts = f" of {len(data)} parts" if isinstance(data, tuple | list) else ""
    raise ConfigurationError(
        f"a batch is a {type(data).__name__}{parts}; pass fn=, which says what the model gets of it, such as "
        "fn=lambda batch: model(batch[0])"
    )


class _Files:
    """Writes rows to a folder. Implements `Collector`.

    Raises:
        ConfigurationError: the folder holds something else.
    """

    def __init__(
        self,
        folder: Path,
        prediction: str,
        origin: RowSource,
        compute: Callable[[MicroBatch, Tensor], tuple[Tensor, Rows]],
        settings: PredictionSettings,
        holds_lease: Callable[[], bool] = lambda: True,
    ) -> None:
        self.steps = 1
        self.compute = compute
        self._folder, self._origin, self._settings = folder, origin, settings
        self._manifest = _Manifest(prediction)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritten(folder, error) from error
        # Looked for first: what other workers write of this prediction comes behind their manifest.
        found = self._find()
        there = self._read()
        if there is None and found is not None:
            raise self._taken()
        # They are about to be written again. A worker that others have gone on without may come late to a folder that
        # they have completed.
        if there is not None and there.prediction == prediction and there.files and holds_lease():
            there = None
        self._claim(there)

    def share(self, first: int, node: int, computed: Sequence[tuple[Tensor, Rows]]) -> Any:
        tensors = {_PLACES: torch.cat([places for places, _ in computed])}
        for name, rows in _named(join(self._origin, [rows for _, rows in computed])):
            if name in tensors:
                raise ConfigurationError(f"{self._origin.giver} returned two tensors or more named {name}; rename one")
            if rows.dtype not in NATIVE:
                raise ConfigurationError(f"{self._origin.giver} returned {rows.dtype}, which safetensors does not hold")
            tensors[name] = rows.contiguous()  # it may be laid out as images are
        file = f"batch-{first:08d}-node-{node:04d}.safetensors"
        content = save(tensors)
        self._claim(self._read())
        self._write(file, content)
        return file, len(tensors[_PLACES]), sum(tensor.nbytes for tensor in tensors.values()), len(content)

    def take(self, shared: Mapping[int, tuple[str, int, int, int]]) -> None:
        begins = not self._manifest.files
        for file, rows, _, length in shared.values():
            self._manifest.files[file] = rows
            if self._length_of(file) != length:
                raise ConfigurationError(
                    f"{self._folder} has no {file} of {length:,} bytes, which a worker has written; give vf.predict a "
                    "folder that all workers share"
                )
        if begins:
            size = sum(size for _, _, size, _ in shared.values())
            self.steps = max(1, min(self._settings.steps, self._settings.bytes // max(1, size)))

    def complete(self) -> bool:
        """Say that all rows are there. Every worker says the same, so it is said if any of them lives."""
        self._manifest.rows = sum(self._manifest.files.values())
        if not self._manifest.rows:
            raise ConfigurationError("the dataset is empty; give one with at least 1 sample")
        there = self._read()
        if there is None or there.prediction != self._manifest.prediction:
            raise self._taken()
        self._write(_MANIFEST, msgspec.json.encode(self._manifest))
        return True

    def close(self) -> None:
        """Leave the folder to others if the call fails before it has rows; a worker that goes on claims it again."""
        if self._manifest.files:
            return
        with suppress(OSError, ConfigurationError):
            there = self._read()
            if there is not None and there.prediction == self._manifest.prediction and self._find() is None:
                (self._folder / _MANIFEST).unlink()

    def _claim(self, there: _Manifest | None) -> None:
        """See that the folder, with what is ``there``, is of this prediction."""
        if there is None:
            self._write(_MANIFEST, msgspec.json.encode(_Manifest(self._manifest.prediction)))
        elif there.prediction != self._manifest.prediction:
            raise self._taken()

    def _find(self) -> Path | None:
        return next(self._folder.glob("*.safetensors"), None)

    def _length_of(self, file: str) -> int | None:
        """Bytes of a file, as it is and not as a network file system remembers it."""
        try:
            with open_regular(self._folder / file) as opened:
                return os.fstat(opened.fileno()).st_size
        except OSError:
            return None

    def _read(self) -> _Manifest | None:
        path = self._folder / _MANIFEST
        try:
            return msgspec.json.decode(read_regular(path, _MAX_MANIFEST), type=_Manifest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError(f"{path} cannot be read ({error}); give vf.predict another folder") from error

    def _write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        try:
            write_whole(path, content, durable=True)
        except OSError as error:
            raise _unwritten(path, error) from error

    def _taken(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._folder} holds another prediction, or other files of safetensors; give vf.predict an empty "
            "or new folder (workers share one inside the with block of vf.elastic)"
        )


def _unwritten(path: Path, error: OSError) -> VirtualFlowError:
    return VirtualFlowError(f"vf.predict cannot write {path}: {error.strerror or error}")


def _named(rows: Rows, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in rows; those in nests have the names on the way to them, with dots between."""
    if isinstance(rows, Tensor):
        yield name or "rows", rows
        return
    for part, value in rows.items() if isinstance(rows, dict) else enumerate(rows):
        yield from _named(value, f"{name}.{part}" if name else str(part))
