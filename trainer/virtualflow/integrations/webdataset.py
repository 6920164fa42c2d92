"""WebDataset pipelines over virtual nodes: tar files dealt to them, and read from any sample on.

The user's pipeline is taken apart. What divides and shuffles is done here, on the positions of samples, before anything
is read; the stages behind it see the samples one by one, as they would in the pipeline. A tar file on a disk is indexed
by its headers, so that samples in front of ``start`` cost no reading and no decoding.
"""

from __future__ import annotations

import inspect
import io
import random
import re
import tarfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple

import webdataset as wds
from webdataset import filters, handlers, shardlists, tariterators
from webdataset.cache import FileCache, StreamingOpen
from webdataset.compat import check_empty

from virtualflow._arguments import checked
from virtualflow.data import derive_seed
from virtualflow.errors import ConfigurationError
from virtualflow.integrations.loaders import Part, deal

__all__ = ["shards"]

Stage = Callable[[Iterator[Any]], Iterator[Any]]

_DIVIDING = (shardlists.single_node_only, shardlists.split_by_node, shardlists.split_by_worker)
"""Stages that divide tar files among processes."""
_RAISING = (None, filters.reraise_exception, handlers.reraise_exception)
_ONE_BY_ONE = {
    getattr(filters, name).f
    for name in (
        *("associate", "decode", "extract_keys", "info", "log_keys", "map", "map_dict", "map_tuple"),
        *("rename", "rename_keys", "to_tuple", "xdecode"),
    )
}
"""Stages that make one sample of each."""
_META = re.compile(r"__[^/]*__($|/)")
"""Names of members that are no part of a sample, as WebDataset has it."""


@checked("shards")
def shards(dataset: wds.DataPipeline, *, seed: int = 0) -> _Shards:
    """Give a ``WebDataset`` (or ``DataPipeline``) to ``vf.elastic``.

    Args:
        dataset: tar files, shuffled or not, and what is done to each sample; without batches.
        seed: the order follows from it and from the epoch. Seeds inside the pipeline are not used.

    Raises:
        ConfigurationError: the pipeline has a stage whose samples would not be the same on any number of workers.
    """
    return _Shards(_take_apart(dataset), seed)


@dataclass(frozen=True)
class _Shuffle:
    size: int
    initial: int

    def __call__(self, items: Iterator[Any], *path: int | str) -> Iterator[Any]:
        rng = random.Random(derive_seed("webdataset", *path))
        shuffled: Iterator[Any] = filters.shuffle(self.size, initial=self.initial, rng=rng)(items)
        return shuffled


@dataclass
class _Pipeline:
    urls: list[str]
    order: list[_Shuffle] = field(default_factory=list)
    """Shuffles of the tar files."""
    opening: Stage = tariterators.url_opener
    """From urls to open streams."""
    files: dict[str, Any] = field(default_factory=dict)
    """``select_files`` and ``rename_files``."""
    grouping: Stage = tariterators.group_by_keys
    """From files to samples."""
    shuffles: list[_Shuffle] = field(default_factory=list)
    choosing: list[Stage] = field(default_factory=list)
    """Up to the last that leaves out samples, of which none may be counted before."""
    mapping: list[Stage] = field(default_factory=list)


class _Shards:
    def __init__(self, pipeline: _Pipeline, seed: int) -> None:
        self._pipeline = pipeline
        self._seed = seed
        self._counts: dict[str, int] = {}
        """Samples of each tar file whose headers have been read."""

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Any]:
        pipeline = self._pipeline
        urls = iter(pipeline.urls)
        for number, shuffle in enumerate(pipeline.order):
            urls = shuffle(urls, self._seed, epoch, "files", number)
        ordered = list(urls)
        parts = deal(len(ordered), index, count)
        found: Iterator[Callable[[], Any]] = chain.from_iterable(
            self._positions(ordered[part.file], part) for part in parts
        )
        for number, shuffle in enumerate(pipeline.shuffles):
            found = shuffle(found, self._seed, epoch, "samples", number, index)
        if not pipeline.choosing:
            _skip(found, start)
        samples = _run(pipeline.choosing, (read() for read in found))
        if pipeline.choosing:
            _skip(samples, start)
        return _one_by_one(pipeline.mapping, samples)

    def _positions(self, url: str, part: Part) -> Iterator[Callable[[], Any]]:
        tar = _Tar(url, self._pipeline)
        if url not in self._counts and tar.indexed:
            self._counts[url] = len(tar.samples)
        if url in self._counts:
            for position in range(part.offset, self._counts[url], part.step):
                yield partial(tar.read, position)
        else:
            for sample in islice(tar.stream(), part.offset, None, part.step):
                yield partial(_itself, sample)


class _Span(NamedTuple):
    offset: int
    size: int


class _Tar:
    """A tar file: by its headers where it is on a disk and not compressed, else as a stream; opened when needed."""

    def __init__(self, url: str, pipeline: _Pipeline) -> None:
        self._url = url
        self._pipeline = pipeline

    @cached_property
    def _source(self) -> dict[str, Any]:
        source: dict[str, Any] = next(self._pipeline.opening(iter([{"url": self._url}])))
        weakref.finalize(self, source["stream"].close)  # its samples may wait in a shuffle for long
        return source

    @property
    def indexed(self) -> bool:
        file = self._source["stream"]
        if not isinstance(file, io.BufferedReader) or not file.seekable():
            return False
        try:
            tarfile.open(fileobj=file, mode="r:").close()
        except tarfile.ReadError:
            return False
        finally:
            file.seek(0)
        return True

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        return list(self._pipeline.grouping(self._members()))

    def _members(self) -> Iterator[dict[str, Any]]:
        """As ``tar_file_expander`` of WebDataset gives them, but for their bytes."""
        chosen, renamed = (self._pipeline.files.get(name) for name in ("select_files", "rename_files"))
        about = {"__url__": self._url}
        if self._source.get("local_path") is not None:
            about["__local_path__"] = self._source["local_path"]
        with tarfile.open(fileobj=self._source["stream"], mode="r:") as tar:
            for member in tar:
                if not member.isreg() or _META.match(member.name):
                    continue
                name = renamed(member.name) if renamed else member.name
                if chosen is None or chosen(name):
                    yield {"fname": name, "data": _Span(member.offset_data, member.size), **about}

    def read(self, position: int) -> dict[str, Any]:
        return {
            name: self._bytes(value) if isinstance(value, _Span) else value
            for name, value in self.samples[position].items()
        }

    def _bytes(self, span: _Span) -> bytes:
        file = self._source["stream"]
        file.seek(span.offset)
        read: bytes = file.read(span.size)
        if len(read) != span.size:
            raise OSError(f"{self._url} ends in the middle of a file")
        return read

    def stream(self) -> Iterator[dict[str, Any]]:
        return self._pipeline.grouping(tariterators.tar_file_expander(iter([self._source]), **self._pipeline.files))


def _itself(sample: Any) -> Any:
    return sample


def _skip(items: Iterator[Any], count: int) -> None:
    """Take ``count`` items now, and not when the first sample is asked for: random numbers are those of that one."""
    for _ in islice(items, count):
        pass


def _run(stages: Iterable[Stage], samples: Iterator[Any]) -> Iterator[Any]:
    for stage in stages:
        samples = stage(samples)
    return samples


def _one_by_one(stages: Iterable[Stage], samples: Iterator[Any]) -> Iterator[Any]:
    given = made = 0

    def giving() -> Iterator[Any]:
        nonlocal given
        for sample in samples:
            given += 1
            yield sample

    for made, sample in enumerate(_run(stages, giving()), 1):
        if made != given:
            break
        yield sample
    if made != given:
        raise ConfigurationError(
            "a stage of the WebDataset pipeline has left out a sample (a function of map() has returned None), so that "
            "its samples cannot be counted; leave out samples with select()"
        )


# --- what a pipeline is made of ---------------------------------------------------------------------------------------


def _take_apart(dataset: Any) -> _Pipeline:
    if not isinstance(dataset, wds.DataPipeline) or not dataset.pipeline:
        raise ConfigurationError(f"shards() needs a WebDataset or a DataPipeline, and not a {type(dataset).__name__}")
    if dataset.repetitions != 1 or dataset.nsamples > 0:
        raise ConfigurationError(
            "with_epoch() and repeat() make epochs that are not each sample once; leave them out, and say epochs= or "
            "steps= to vf.elastic"
        )
    first, *stages = dataset.pipeline
    if not isinstance(first, shardlists.SimpleShardList):
        raise ConfigurationError(
            f"the pipeline begins with a {type(first).__name__}, whose samples do not follow from the epoch; begin it "
            "with a list of tar files, without resampled=, and give the dataset itself, not a WebLoader"
        )
    pipeline = _Pipeline(list(first.urls))
    if first.seed is not None:
        pipeline.order.append(_Shuffle(len(first.urls), len(first.urls)))
    behind: list[tuple[Any, Stage]] = []
    reads = False
    for stage in stages:
        function = getattr(stage, "f", stage)
        given = _arguments(function, stage)
        if given.get("handler") not in _RAISING:
            raise ConfigurationError(
                "handler= leaves out what could not be read or decoded on one worker, and another would read it; leave "
                "it out, and choose samples with select()"
            )
        if function in _DIVIDING or function is check_empty:
            continue
        if function is filters.shuffle.f or isinstance(stage, filters.detshuffle):
            if given.get("rng") is not None:
                raise ConfigurationError(
                    "shuffle(rng=) draws from a generator of its own, with which a worker that joins would begin anew; "
                    "leave it out, and say shards(dataset, seed=)"
                )
            if given["bufsize"] > 0:
                shuffle = _Shuffle(int(given["bufsize"]), given["initial"])
                (pipeline.shuffles if reads else pipeline.order).append(shuffle)
        elif isinstance(stage, StreamingOpen | FileCache):
            pipeline.opening = stage
        elif function in (tariterators.tar_file_expander, tariterators.tarfile_samples):
            pipeline.files = {name: given[name] for name in ("select_files", "rename_files")}
            reads = True
        elif function is tariterators.group_by_keys:
            pipeline.grouping = stage
        elif reads and (function in _ONE_BY_ONE or function is filters.select.f):
            behind.append((function, stage))
        else:
            raise ConfigurationError(
                f"the pipeline has a stage {getattr(function, '__name__', type(stage).__name__).lstrip('_')}, of which "
                "it is not known that it makes one sample of each, the same on any worker; leave it out, or put it "
                "into map() or select(). Batches are made by vf.elastic"
            )
    if not reads:
        raise ConfigurationError("the pipeline reads no tar files; add tarfile_to_samples()")
    chosen = max((n for n, (function, _) in enumerate(behind, 1) if function is filters.select.f), default=0)
    pipeline.choosing = [stage for _, stage in behind[:chosen]]
    pipeline.mapping = [stage for _, stage in behind[chosen:]]
    return pipeline


def _arguments(function: Any, stage: Any) -> dict[str, Any]:
    if not isinstance(stage, filters.FilterFunction):
        return dict(getattr(stage, "__dict__", {}))
    try:
        bound = inspect.signature(function).bind_partial(None, *stage.args, **stage.kw)
    except ValueError:
        return {}  # of something built in, which does not say what it takes
    bound.apply_defaults()
    return bound.arguments
