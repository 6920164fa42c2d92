"""The bandwidth of the additions that the tree makes of gradients, beside that of a copy on the same device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.parts import Note, Setting, Wrong
from virtualflow.reduction import Accumulator, choose_summation

ROUNDS = 20
LEAVES = 8


def seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median time of a piece of work, warm."""
    for _ in range(3):
        work()
    taken = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1_000)
        else:
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def gradients(elements: int, count: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """``count`` tensors of random numbers with so many elements together, of sizes as a model has them."""
    third = elements // (3 * count) // 64 * 64  # a size that is no multiple of a vector is added number by number
    sizes = [elements // count + (third if place % 2 else -third) for place in range(count)]
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def measure(setting: Setting, note: Note) -> None:
    """Copy, add lists of tensors, and add up eight leaves as the library does; and in one pass, as it could where all
    of them are there at once.
    """
    device = torch.device(setting.device)
    elements, rounds = (1 << 16, 3) if setting.small else (1 << 28, ROUNDS)
    for dtype in (torch.float32, torch.bfloat16):
        size = elements * dtype.itemsize
        copied = _copy(size, device, rounds)
        added = _addition(elements, device, dtype, rounds)
        tree = _tree(elements // LEAVES, device, dtype, rounds)
        rows = [("a copy", copied), ("one addition", added), (f"the tree over {LEAVES} leaves", tree)]
        if device.type == "cuda":
            fused = _fused(elements // LEAVES, device, dtype, rounds)
            rows.append(("the same in one Triton kernel, counted alike", fused))
        for what, rate in rows:
            note(
                {
                    "type": str(dtype).removeprefix("torch."),
                    "what": what,
                    "MiB a side": size / 2**20,
                    "GB/s": rate / 1e9,
                    "of the copy": rate / copied,
                }
            )


def _copy(size: int, device: torch.device, rounds: int) -> float:
    """Bytes read and written a second by a copy of so many bytes."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / seconds(lambda: target.copy_(source), device, rounds)


def _addition(elements: int, device: torch.device, dtype: torch.dtype, rounds: int) -> float:
    """Bytes read and written a second by one addition of all tensors."""
    left, right = (gradients(elements, 128, device, dtype) for _ in range(2))
    size = sum(tensor.nbytes for tensor in left)
    return 3 * size / seconds(lambda: torch._foreach_add_(left, right), device, rounds)


def _tree(elements: int, device: torch.device, dtype: torch.dtype, rounds: int) -> float:
    """Bytes a second of a whole sum over the leaves; gradients are taken over in place, so they are made anew."""
    leaves = [gradients(elements, 128, device, dtype) for _ in range(LEAVES)]
    size = sum(tensor.nbytes for tensor in leaves[0])

    def add_up() -> None:
        accumulator = Accumulator(choose_summation(LEAVES, "bitwise"))
        for node, leaf in enumerate(leaves):
            accumulator.add(node, list(leaf))

    return 3 * (LEAVES - 1) * size / seconds(add_up, device, rounds)


def _fused(elements: int, device: torch.device, dtype: torch.dtype, rounds: int) -> float:
    """The same as :func:`_tree` in one pass over all leaves."""
    from benchmarks.gpu.fused_kernels import sum_of_eight

    leaves = [torch.randn(elements, device=device).to(dtype) for _ in range(LEAVES)]
    out = torch.empty_like(leaves[0])
    ab, cd, ef, gh = (leaves[n] + leaves[n + 1] for n in range(0, LEAVES, 2))
    if not torch.equal(sum_of_eight(out, leaves), (ab + cd) + (ef + gh)):
        raise Wrong("one kernel and the additions of the tree come to other bits")
    return 3 * (LEAVES - 1) * out.nbytes / seconds(lambda: sum_of_eight(out, leaves), device, rounds)
