"""Whether two machines compute the same bits: a digest of one small forward and backward pass, taken at the join.

The names of two devices say little about their bits: two types of machine may compute the same, and two machines with
the same name may not (the libraries beneath torch choose their kernels by features that torch does not tell of). So
each worker of a ``bitwise`` job computes the same small network on its own device, under the settings that hold for
the training, and tells the SHA-256 of everything that came out. It shows that two machines *differ*; that they are
equal it only makes likely: other shapes may take other kernels (docs/explanation/determinism.md).
"""

from __future__ import annotations

import hashlib
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger("virtualflow.worker")

_MULTIPLIER = 40_503
"""Odd, so that multiples of it run through all 16-bit numbers: the inputs need no generator of random numbers."""


def digest(device: torch.device) -> str:
    """SHA-256 (hex) over the outputs and gradients of the network on ``device``, as torch is set up at present.

    No generator of random numbers is used and nothing is kept. Takes some hundredths of a second. Empty where the
    device cannot compute it: such workers are told apart by the names of their devices alone.
    """
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            found = [*_vision(device), *_language(device), *_sums(device), *_halves(device)]
    except RuntimeError as error:
        logger.warning("the self-test of %s failed, so only the same type of device is admitted: %s", device, error)
        return ""
    digester = hashlib.sha256()
    for tensor in found:
        digester.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digester.hexdigest()


def _numbers(device: torch.device, *shape: int, start: int, scale: float = 1.0, grad: bool = True) -> Tensor:
    """Numbers in [-scale, scale) that every device gets exactly: 16-bit integers divided by a power of two."""
    count = torch.Size(shape).numel()
    integers = (torch.arange(start, start + count, dtype=torch.int64) * _MULTIPLIER) % 65_536 - 32_768
    tensor = (integers.to(torch.float32) * (scale / 32_768)).reshape(shape).to(device)
    return tensor.requires_grad_(grad)


def _with_gradients(output: Tensor, *leaves: Tensor) -> list[Tensor]:
    weights = _numbers(output.device, *output.shape, start=7, grad=False).to(output.dtype)
    return [output, *torch.autograd.grad((output * weights).sum(), leaves)]


def _vision(device: torch.device) -> list[Tensor]:
    images = _numbers(device, 8, 3, 31, 31, start=1, grad=False)
    first, second = (
        _numbers(device, 24, 3, 3, 3, start=2, scale=0.25),
        _numbers(device, 40, 24, 3, 3, start=3, scale=0.125),
    )
    gain, shift = _numbers(device, 24, start=4), _numbers(device, 24, start=5)
    weight, bias = _numbers(device, 10, 40, start=6, scale=0.25), _numbers(device, 10, start=8)
    mean, variance = torch.zeros(24, device=device), torch.ones(24, device=device)
    hidden = F.batch_norm(F.conv2d(images, first, padding=1), mean, variance, gain, shift, training=True)
    # Not the maximum: its backward pass has no deterministic kernel on every device.
    hidden = F.relu(F.conv2d(F.avg_pool2d(F.relu(hidden), 2), second, stride=2))
    logits = F.linear(hidden.mean((2, 3)), weight, bias)
    loss = F.cross_entropy(logits, torch.arange(8, device=device))
    return [logits, mean, variance, *_with_gradients(loss, first, second, gain, shift, weight, bias)]


def _language(device: torch.device) -> list[Tensor]:
    tokens = torch.arange(4 * 33).reshape(4, 33).mul(_MULTIPLIER).remainder(61).to(device)
    table = _numbers(device, 61, 72, start=9)
    gain, shift = _numbers(device, 72, start=10), _numbers(device, 72, start=11)
    inner, outer = _numbers(device, 216, 72, start=12, scale=0.25), _numbers(device, 72, 216, start=13, scale=0.125)
    hidden = F.layer_norm(F.embedding(tokens, table), (72,), gain, shift)
    query, key, value = (
        part.reshape(4, 33, 3, 24).transpose(1, 2) for part in torch.tensor_split(F.linear(hidden, inner), 3, dim=-1)
    )
    attended = torch.softmax(query @ key.transpose(-2, -1) / 8, dim=-1) @ value
    # Also as one kernel, where there is one; its choice of kernel is torch's.
    fused = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + (attended + fused).transpose(1, 2).reshape(4, 33, 72)
    output = F.linear(F.gelu(F.linear(hidden, inner)), outer)
    return _with_gradients(output, table, gain, shift, inner, outer)


def _sums(device: torch.device) -> list[Tensor]:
    left, right = _numbers(device, 193, 257, start=14), _numbers(device, 257, 129, start=15)
    product = left @ right
    curves = torch.tanh(product) + torch.sigmoid(product) + torch.exp(-product.abs()) + torch.log1p(product.square())
    long = _numbers(device, 65_537, start=16)
    totals = torch.stack([curves.sum(), curves.std(), curves.norm(), long.mul(1.1).sum(), torch.logsumexp(long, 0)])
    return _with_gradients(torch.cat([curves.flatten(), totals]), left, right, long)


def _halves(device: torch.device) -> list[Tensor]:
    """What mixed precision computes: products in bfloat16."""
    left, right = _numbers(device, 65, 96, start=17), _numbers(device, 33, 96, start=18)
    halves = F.linear(left.to(torch.bfloat16), right.to(torch.bfloat16)).float()
    return _with_gradients(halves, left, right)
