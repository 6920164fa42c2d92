"""Triton kernels that the report compares with what the library uses; only machines with a GPU have Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tree_of_eight(out, a, b, c, d, e, f, g, h, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < count
    ab = tl.load(a + at, mask=there) + tl.load(b + at, mask=there)
    cd = tl.load(c + at, mask=there) + tl.load(d + at, mask=there)
    ef = tl.load(e + at, mask=there) + tl.load(f + at, mask=there)
    gh = tl.load(g + at, mask=there) + tl.load(h + at, mask=there)
    tl.store(out + at, (ab + cd) + (ef + gh), mask=there)


def sum_of_eight(out: Tensor, leaves: list[Tensor], block: int = 1024) -> Tensor:
    """Eight tensors of one size added up in the shape of the tree, in one pass over memory."""
    _tree_of_eight[(triton.cdiv(out.numel(), block),)](out, *leaves, out.numel(), block=block)
    return out


@triton.jit
def _product(a, b, c, m, n, k, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr, group_rows: tl.constexpr):
    # Neighbouring programs work on neighbouring tiles, so that what they read is in the cache.
    tile, across = tl.program_id(0), tl.cdiv(n, bn)
    group = tile // (group_rows * across)
    rows = min(tl.cdiv(m, bm) - group * group_rows, group_rows)
    row = group * group_rows + (tile % (group_rows * across)) % rows
    column = (tile % (group_rows * across)) // rows
    at_m, at_n, at_k = row * bm + tl.arange(0, bm), column * bn + tl.arange(0, bn), tl.arange(0, bk)
    total = tl.zeros((bm, bn), tl.float32)
    for begin in range(0, k, bk):
        x = tl.load(a + at_m[:, None] * k + (begin + at_k)[None, :], mask=at_m[:, None] < m, other=0.0)
        y = tl.load(b + (begin + at_k)[:, None] * n + at_n[None, :], mask=at_n[None, :] < n, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(
        c + at_m[:, None] * n + at_n[None, :],
        total.to(c.dtype.element_ty),
        mask=(at_m < m)[:, None] & (at_n < n)[None, :],
    )


def fixed_tiles(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for contiguous matrices, in tiles and an order that do not depend on the number of rows.

    The inner size must be a multiple of 64.
    """
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    bm, bn, bk = (128, 256, 64) if a.dtype is torch.bfloat16 else (128, 128, 32)
    grid = (triton.cdiv(m, bm) * triton.cdiv(n, bn),)
    _product[grid](a, b, c, m, n, k, bm=bm, bn=bn, bk=bk, group_rows=8, num_warps=8, num_stages=3)
    return c
