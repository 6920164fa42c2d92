"""Randomness follows from a path, and from nothing that happened in the process before."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.data.rng import derive_seed, seed_process, seed_samples, seed_stream_sample, seed_virtual_node

paths = st.lists(st.integers() | st.text(), max_size=5).map(tuple)


def draw() -> tuple[float, ...]:
    return (float(torch.rand(())), float(torch.randn(())), random.random(), float(np.random.rand()))


@given(paths, paths)
def test_different_paths_give_different_seeds(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)
    assert 0 <= derive_seed(*one) < 2**63


@pytest.mark.parametrize(
    ("path", "seed"),
    [
        (("sample", 0, 0, 0), 1003578952191148420),
        (("virtual-node", 42, 1, 7), 4393176359776462131),
        (("a", -1), 9097212860474329251),
    ],
    ids=["sample", "virtual node", "negative number"],
)
def test_a_seed_is_the_same_on_every_machine_for_ever(path: tuple[int | str, ...], seed: int) -> None:
    assert derive_seed(*path) == seed


@pytest.mark.parametrize("part", [True, 1.0, None, np.int64(1)], ids=["bool", "float", "None", "numpy"])
def test_a_path_of_anything_but_int_and_str_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match="derived from int and str"):
        derive_seed("sample", part)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seed", "path"),
    [
        (lambda: seed_virtual_node(3, 5, 2), ("virtual-node", 3, 5, 2)),
        (lambda: seed_samples(3, 5, 2, 4), ("samples", 3, 5, 2, 4)),
        (lambda: seed_samples(-3, 5, 2, 4), ("samples", -3, 5, 2, 4)),
        (lambda: seed_stream_sample(3, 5, 2, 9), ("stream", 3, 5, 2, 9)),
    ],
    ids=["virtual node", "samples", "samples of a negative seed", "stream sample"],
)
def test_a_stream_is_that_of_its_path(seed: Callable[[], None], path: tuple[int | str, ...]) -> None:
    draw()
    seed()
    drawn = draw()
    seed_process(derive_seed(*path))
    assert draw() == drawn
    assert draw() != drawn


@given(st.integers())
def test_any_integer_seeds_every_global_generator(value: int) -> None:
    seed_process(value)
    first = draw()
    draw()
    seed_process(value)
    assert draw() == first


def test_torch_is_seeded_as_by_manual_seed() -> None:
    seed_process(1234)
    drawn = torch.rand(3)
    torch.manual_seed(1234)
    assert torch.equal(torch.rand(3), drawn)
