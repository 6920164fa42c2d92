"""Matrix products whose rows do not depend on how many are computed together: what equal bits cost between two splits.

A job keeps its bits when the *virtual nodes* stay. Another number of samples in each gives other bits, since a library
chooses another kernel for another number of rows. A kernel with fixed tiles does not (Thinking Machines Lab, "Defeating
nondeterminism in LLM inference", 2025). The gradient of a weight stays a sum over samples in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.parts import Note, Setting
from benchmarks.gpu.tree_sum import seconds

SPLITS = (2, 4, 8)
ROUNDS = 20
Product = Callable[[Tensor, Tensor], Tensor]


def measure(setting: Setting, note: Note) -> None:
    """Multiply batches whole and in parts, by the library's kernels and by those with fixed tiles."""
    device = torch.device(setting.device)
    width, rows = (64, (16,)) if setting.small else (4096, (64, 512, 8192))
    for dtype in (torch.bfloat16, torch.float32):
        weights = torch.randn(width, width, device=device).to(dtype)
        for count in rows:
            batch = torch.randn(count, width, device=device).to(dtype)
            theirs = seconds(lambda: torch.mm(batch, weights), device, ROUNDS)  # noqa: B023
            row = {
                "type": str(dtype).removeprefix("torch."),
                "rows": count,
                "torch, ms": 1_000 * theirs,
                "torch: equal in halves, quarters, eighths": _splits(torch.mm, batch, weights),
            }
            if device.type == "cuda":
                from benchmarks.gpu.fused_kernels import fixed_tiles

                took = seconds(lambda: fixed_tiles(batch, weights), device, ROUNDS)  # noqa: B023
                row["fixed tiles, ms"] = 1_000 * took
                row["fixed tiles: equal"] = _splits(fixed_tiles, batch, weights)
                row["fixed over torch"] = took / theirs
            out = torch.randn(count, width, device=device).to(dtype)
            halves = sum(x.t() @ y for x, y in zip(batch.chunk(2), out.chunk(2), strict=True))
            row["weights' gradient equal from halves"] = _word(torch.equal(batch.t() @ out, halves))  # type: ignore[arg-type]
            note(row)


def _splits(product: Product, batch: Tensor, weights: Tensor) -> str:
    whole = product(batch, weights)
    parts = (torch.cat([product(part.contiguous(), weights) for part in batch.chunk(count)]) for count in SPLITS)
    return ", ".join(_word(torch.equal(whole, joined)) for joined in parts)


def _word(equal: bool) -> str:
    return "yes" if equal else "no"
