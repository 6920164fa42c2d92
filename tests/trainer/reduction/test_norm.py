"""The norm of a gradient does not depend on who has which part of it, and clips as torch's does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from virtualflow.reduction import block_norms, clip_by_norm, count_blocks, total_norm

BLOCK = 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def drawn(numels: list[int], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    scales = torch.randn(len(numels), generator=draw).exp()
    return [(torch.randn(n, generator=draw) * scale).to(dtype) for n, scale in zip(numels, scales, strict=True)]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def shares(gradients: list[Tensor], cuts: list[int]) -> Iterator[list[Tensor]]:
    """What each of several workers has, who are parted before the blocks of these numbers; in memory of their own."""
    blocks = [(gradient, at) for gradient in gradients for at in range(0, gradient.numel(), BLOCK)]
    for begin, end in zip([0, *cuts], [*cuts, len(blocks)], strict=True):
        mine: list[Tensor] = []
        last: Tensor | None = None
        for gradient, at in blocks[begin:end]:
            stretch = gradient.view(-1)[at : at + BLOCK]
            if gradient is last:
                mine[-1] = torch.cat([mine[-1], stretch])
            else:
                # Behind an odd element: nothing is to depend on where in memory it lies.
                mine.append(torch.cat([torch.zeros_like(stretch[:1]), stretch])[1:])
            last = gradient
        yield mine


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.data())
def test_shares_cut_between_blocks_make_the_norm_of_the_whole(dtype: torch.dtype, numels: list[int], data: Any) -> None:
    gradients = drawn(numels, sum(numels), dtype)
    count = sum(count_blocks(numel, BLOCK) for numel in numels)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    whole = block_norms(gradients, BLOCK)
    assert whole.shape == (count,)
    assert whole.dtype == torch.float64
    parts = [block_norms(mine, BLOCK) for mine in shares(gradients, cuts)]
    assert bits(torch.cat(parts)) == bits(whole)
    reference = math.sqrt(math.fsum(float(g.to(torch.complex128).abs().square().sum()) for g in gradients))
    assert float(total_norm(whole)) == pytest.approx(reference, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_blocks_at_once_have_the_norms_of_one_after_the_other(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (gradient,) = drawn([40 * 4_096 + 5], 1, dtype)
        found = block_norms([gradient], 4_096)
    finally:
        torch.set_num_threads(before)
    one_by_one = torch.cat([block_norms([stretch], 4_096) for stretch in torch.split(gradient, 4_096)])
    assert bits(found) == bits(one_by_one)


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(["flat", "rows", "columns"]), st.integers(0, 5 * BLOCK)),
        max_size=6,
    )
)
def test_whatever_is_there_each_block_has_the_norm_of_its_elements_alone(
    kinds: list[tuple[torch.dtype, str, int]],
) -> None:
    gradients: list[Tensor] = []
    for seed, (dtype, layout, numel) in enumerate(kinds):
        (flat,) = drawn([2 * numel], seed, dtype)
        gradients.append({"flat": flat, "rows": flat.view(2, -1), "columns": flat.view(-1, 2).t()}[layout])
    one_by_one = [
        torch.linalg.vector_norm(
            block.clone(), dtype=torch.float32 if block.dtype in (torch.float16, torch.bfloat16) else None
        )
        for gradient in gradients
        for block in gradient.reshape(-1).split(BLOCK)
        if block.numel()
    ]
    expected = torch.stack([norm.to(torch.float64) for norm in one_by_one]) if one_by_one else torch.zeros(0)
    assert bits(block_norms(gradients, BLOCK)) == bits(expected)


@given(st.lists(st.floats(0.0, 1e100), max_size=20))
def test_squares_are_added_in_pairs(norms: list[float]) -> None:
    squares = [norm * norm for norm in norms]
    while len(squares) > 1:
        squares += [0.0] * (len(squares) % 2)
        squares = [left + right for left, right in zip(squares[::2], squares[1::2], strict=True)]
    # torch's root of a double may be the neighbour of the right one.
    root = torch.tensor(sum(squares), dtype=torch.float64).sqrt()
    assert bits(total_norm(torch.tensor(norms, dtype=torch.float64))) == bits(root)


CLIPPED = {
    "below the limit": ([0.5, -0.25], [0.125]),
    "above it": ([3.0, -4.0, 1e-3], [12.0]),
    "nothing but zeros": ([0.0, 0.0], [0.0]),
    "an infinite element": ([1.0, math.inf], [2.0, -0.5]),
    "one that is no number": ([1.0, math.nan], [2.0]),
    "squares too large for their type": ([1e30, 1e30], [1.0]),
}


@pytest.mark.parametrize("given_values", CLIPPED.values(), ids=CLIPPED)
def test_a_gradient_is_clipped_as_torch_does(given_values: tuple[list[float], ...]) -> None:
    parameters = [nn.Parameter(torch.zeros(len(values))) for values in given_values]
    gradients = [torch.tensor(values) for values in given_values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 1.5)
    clip_by_norm(gradients, 1.5, total_norm(block_norms(gradients, BLOCK)))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, equal_nan=True, rtol=1e-6, atol=0.0)


def test_a_norm_beyond_half_precision_is_a_number() -> None:
    gradients = [torch.full((1_000,), 10_000.0, dtype=torch.float16)]
    norm = total_norm(block_norms(gradients, BLOCK))
    assert float(norm) == pytest.approx(1e4 * math.sqrt(1_000))
    clip_by_norm(gradients, 1e4, norm)
    torch.testing.assert_close(gradients[0], torch.full_like(gradients[0], 1e4 / math.sqrt(1_000)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_is_scaled_alike_alone_and_among_others(dtype: torch.dtype) -> None:
    for seed in range(20):
        (many,) = drawn([33], seed, dtype)
        alone = [element.clone() for element in many]
        norm = total_norm(block_norms([many], BLOCK))
        clip_by_norm([many], 0.7, norm)
        clip_by_norm(alone, 0.7, norm)
        assert bits(torch.stack(alone)) == bits(many)
