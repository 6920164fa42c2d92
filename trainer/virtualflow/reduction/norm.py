"""The norm of a whole gradient, which does not depend on who has which part of it.

A gradient is cut into blocks of a fixed number of elements; the last block of each parameter has what is left, so that
none spans two. Each block has one number, its norm, computed from its elements alone. The squares of these numbers are
added up in double precision, in pairs: in the order of the parameters and of the blocks within them, whoever computed
them. So whoever has all of a gradient comes to the same bits as several who have a share each, as long as no block is
cut. What a gradient of which length gets is fixed; torch's norm of norms goes by whole parameters instead, and
``torch.linalg.vector_norm`` of a large one by threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_DOUBLES = (torch.float64, torch.complex128)


def count_blocks(elements: int, block: int) -> int:
    """How many blocks so many elements of one parameter make."""
    return -(-elements // block)


def block_norms(gradients: Sequence[Tensor], block: int) -> Tensor:
    """The norm of each block, float64 ``[blocks]`` on the device of the first gradient.

    Args:
        gradients: whole ones, or stretches that begin at a multiple of ``block`` and end at one or at the end of the
            parameter; in the order of the parameters. Complex elements count by their absolute values.
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    device = gradients[0].device
    pieces: list[tuple[Tensor | None, Tensor | None]] = []  # of each gradient its whole blocks, and what is left
    for gradient in gradients:
        size = gradient.numel()
        whole = size // block * block
        flat = gradient.detach() if not whole and gradient.is_contiguous() else gradient.detach().reshape(-1)
        rest = flat[whole:] if whole else flat
        pieces.append((flat[:whole].view(-1, block) if whole else None, rest if whole < size else None))
    of_rests = iter(_norms([left for _, left in pieces if left is not None], device))
    norms = [torch.zeros(0, dtype=torch.float64, device=device)]
    for blocks, left in pieces:
        if blocks is not None:
            of_blocks = torch.linalg.vector_norm(blocks, dim=1, dtype=_precision(blocks))
            norms.append(of_blocks.to(device, torch.float64))
        if left is not None:
            norms.append(next(of_rests))
    return torch.cat(norms)


def _precision(gradient: Tensor) -> torch.dtype | None:
    """In which a norm is computed, if not in the gradient's own."""
    # A norm in half precision would have three digits, and end at 65504.
    return torch.float32 if gradient.dtype in _HALVES else None


def _norms(gradients: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The norm of each, float64 ``[1]``. On the CPU one call for many computes the same bits as one for each."""
    if not gradients:
        return []
    found: Sequence[Tensor]
    if all(gradient.is_cpu and _precision(gradient) is None for gradient in gradients):
        found = torch._foreach_norm(list(gradients))
    else:
        found = [torch.linalg.vector_norm(gradient, dtype=_precision(gradient)) for gradient in gradients]
    return torch.split(torch.stack([norm.to(device) for norm in found]).to(torch.float64), 1)


def total_norm(norms: Tensor) -> Tensor:
    """The norm of what has blocks of these norms, float64 ``[]``.

    Args:
        norms: float64 ``[blocks]``, as :func:`block_norms` returns them, of all parameters that have a gradient.
    """
    squares = norms.square()
    if len(squares) > 1:
        squares = torch.nn.functional.pad(squares, (0, (1 << (len(squares) - 1).bit_length()) - len(squares)))
    while len(squares) > 1:
        squares = squares.view(-1, 2).sum(dim=1)
    return squares.sum().sqrt()  # of one or none


def clip_by_norm(gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """Scale gradients in place so that their norm is at most ``most``, as ``torch.nn.utils.clip_grad_norm_`` does.

    A norm that is infinite makes them 0 (and NaN where they are infinite), one that is NaN makes all of them NaN.

    Args:
        most: the norm that is not to be exceeded.
        norm: of all, float64 ``[]`` (:func:`total_norm`).
    """
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient.detach())
    for (device, dtype), tensors in alike.items():
        # In the precision in which torch multiplies: a factor of a higher one would be rounded where there are several
        # elements and not where there is one.
        torch._foreach_mul_(tensors, factor.to(device, torch.float64 if dtype in _DOUBLES else torch.float32))
