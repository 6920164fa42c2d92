"""How much each block of a model computes, in whole numbers that are the same wherever they are counted.

Times would not be: they differ from worker to worker and from run to run, and on what is counted here depends which
parameters get gradients.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from virtualflow.errors import ConfigurationError, describe


def work_of(model: nn.Module, blocks: Sequence[nn.Module], of: Any) -> tuple[int, ...]:
    """What each block counts beside the others, without a common divisor.

    Args:
        of: see :class:`~virtualflow.step.partial_backward.PartialBackward`.

    Raises:
        ConfigurationError: the model does not run with that example, or computes nothing in its blocks.
    """
    if isinstance(of, str):
        counted = [1 if of == "blocks" else sum(each.numel() for each in block.parameters()) for block in blocks]
    else:
        counted = _operations(model, blocks, of)
    if not any(counted):
        raise ConfigurationError(
            f"vf.PartialBackward(of=...) found no matrix product and no convolution in the {len(blocks)} blocks of the "
            'model; pass of="parameters", or leave it out'
        )
    divisor = math.gcd(*counted)
    return tuple(each // divisor for each in counted)


def _operations(model: nn.Module, blocks: Sequence[nn.Module], example: Any) -> list[int]:
    """Floating-point operations of each block's forward pass, however often it is called.

    A copy of the model runs without data (on torch's meta device), so nothing is computed, and the model, its buffers
    and its random streams stay as they are. On that device attention is always made of matrix products, whatever
    kernels others have for it.
    """
    named = isinstance(example, Mapping)
    options = dict(example) if named else {}
    arguments = () if named else example if isinstance(example, tuple) else (example,)
    counted = [0] * len(blocks)
    try:
        running, of_it = _without_data(model, blocks)
        flops = FlopCounterMode(display=False)
        for number, block in enumerate(of_it):
            block.register_forward_pre_hook(_adding(counted, number, -1, flops))
            block.register_forward_hook(_adding(counted, number, 1, flops))
        with torch.no_grad(), torch.random.fork_rng(devices=()), torch.device("meta"), flops:
            running(*_moved(arguments), **_moved(options))
    # What copying a user's model, or its forward pass, raises where there are no values or the example is a wrong one.
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigurationError(
            f"the model does not run with the example of vf.PartialBackward(of=...) on the meta device, where nothing "
            f'has values: {describe(error)}; pass what the model is called with, or of="parameters"'
        ) from error
    return counted


def _without_data(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """Copies on the meta device, without hooks."""
    known: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        there = tensor.detach().to("meta")
        known[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                known[id(value)] = value.detach().to("meta")
            elif name.endswith("_hooks") and isinstance(value, dict):
                known[id(value)] = OrderedDict()
    running, of_it = copy.deepcopy((model, list(blocks)), known)
    return running, of_it


def _adding(counted: list[int], number: int, sign: int, flops: FlopCounterMode) -> Any:
    def add(*_: Any) -> None:
        counted[number] += sign * flops.get_total_flops()

    return add


def _moved(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, tree)
