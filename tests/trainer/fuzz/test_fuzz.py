"""A few hundred inputs for each reader with every change; ``make fuzz`` gives them a million."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator

import pytest

from fuzz.mutations import mutated
from fuzz.readers import KEPT, Reader, readers
from fuzz.run import Found, try_reader, try_server

INPUTS = 300
GROWTH = 512 * 1024
"""Bytes, a tenth of what the inputs have together: what caches keep."""
NAMES = (
    *("messages of workers", "messages to workers", "headers of hellos", "statuses", "termination messages"),
    *("plain frames", "sealed frames", "certificates", "names in certificates", "signatures", "rendezvous keys"),
    *("manifests of checkpoints", "headers of states", "packed states", "traces", "reports", "device profiles"),
    *("jobs of the API server", "queues of the API server", "quantities", "times"),
    *("manifests", "manifests for a cluster"),
)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Reader]]:
    with readers(tmp_path_factory.mktemp("inputs")) as found:
        yield {reader.name: reader for reader in found}


def test_each_reader_is_tried(known: dict[str, Reader]) -> None:
    assert tuple(known) == NAMES
    assert {folder.name for folder in KEPT.iterdir()} <= {*NAMES, "requests", "messages"}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_comes_is_read_or_refused_and_nothing_of_it_stays(known: dict[str, Reader], name: str) -> None:
    reader = known[name]
    count = round(INPUTS * max(reader.share, 0.1))
    try_reader(reader, count, seed=1)  # what is made once is there
    gc.collect()
    tracemalloc.start()
    try:
        outcome = try_reader(reader, count, seed=2)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert outcome.read + outcome.refused == count + len(reader.seeds) + len(reader.kept)
    assert kept < GROWTH


@pytest.mark.parametrize("kind", ["requests", "messages"])
def test_a_coordinator_serves_on_whatever_comes(kind: str) -> None:
    assert try_server(kind, INPUTS, seed=1).read > 0


def test_an_input_that_breaks_a_reader_is_found_and_named() -> None:
    def read(said: bytes) -> None:
        if b"\xff" in said:
            raise KeyError("it has no such key")

    with pytest.raises(Found, match="a reader: KeyError: 'it has no such key'") as found:
        try_reader(Reader("a reader", read, [b"a seed"], (ValueError,)), 1_000, seed=1)
    assert b"\xff" in found.value.said


def test_a_seed_decides_the_inputs() -> None:
    def drawn(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [mutated(rng, [b'{"a": [1, 2]}', b"a: b\n"]) for _ in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
