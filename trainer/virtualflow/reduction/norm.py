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
        block: elements of a block.
    """
    device = gradients[0].device if gradients else None
    norms = [torch.zeros(0, dtype=torch.float64, device=device)]
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        # A norm in half precision would have three digits, and end at 65504.
        dtype = torch.float32 if flat.dtype in _HALVES else None
        whole = len(flat) // block * block
        if whole:
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, block), dim=1, dtype=dtype))
        if whole < len(flat):
            norms.append(torch.linalg.vector_norm(flat[whole:], dtype=dtype).view(1))
    return torch.cat([norm.to(device, torch.float64) for norm in norms])


def total_norm(norms: Tensor) -> Tensor:
    """The norm of what has blocks of these norms, float64 ``[]``.

    Args:
        norms: float64 ``[blocks]``, as :func:`block_norms` returns them, of all parameters that have a gradient.
    """
    squares = norms.square()
    while len(squares) > 1:
        if len(squares) % 2:
            squares = torch.cat([squares, squares.new_zeros(1)])
        squares = squares[0::2] + squares[1::2]
    return squares.sum().sqrt()  # of one or none


def clip_by_norm(gradients: Sequence[Tensor], most: float, norm: Tensor) -> None:
    """Scale gradients in place so that their norm is at most ``most``, as ``torch.nn.utils.clip_grad_norm_`` does.

    A norm that is infinite makes them 0 (and NaN where they are infinite), one that is NaN makes all of them NaN.

    Args:
        gradients: all of them, or any part.
        most: the norm that is not to be exceeded.
        norm: of all, float64 ``[]`` (:func:`total_norm`).
    """
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        # In the precision in which torch multiplies: a factor of a higher one would be rounded where there are several
        # elements and not where there is one.
        precise = torch.float64 if gradient.dtype in _DOUBLES else torch.float32
        gradient.detach().mul_(factor.to(gradient.device, precise))
