"""Optimizers as a script may have its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Its constructor takes more than parameters. (Chen et al. 2023, arXiv 2302.06675.)"""

    def __init__(self, parameters: Any, lr: float, *, betas: tuple[float, float], norm: str = "none") -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})
        self.norm = norm
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                update = (state["mean"] * first + parameter.grad * (1 - first)).sign_()
                if self.norm == "layer":
                    update *= parameter.norm() / update.norm()
                parameter.sub_(update, alpha=group["lr"])
                state["mean"].mul_(second).add_(parameter.grad, alpha=1 - second)


class BlockwiseMomentum(torch.optim.Optimizer):
    """Keeps its momentum in 8 bits, with one scale for each block; counts steps in a tensor of one dimension.

    (Block-wise quantisation: Dettmers et al. 2022, arXiv 2110.02861.)
    """

    def __init__(self, parameters: Any, lr: float, *, block: int) -> None:
        super().__init__(parameters, {"lr": lr, "block": block})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, block = self.state[parameter], group["block"]
                if not state:
                    state["codes"] = torch.zeros(parameter.shape, dtype=torch.int8)
                    state["scales"] = torch.zeros(-(-parameter.numel() // block), dtype=parameter.dtype)
                    state["step"] = torch.zeros(1)
                    state["codebook"] = torch.linspace(-1, 1, 16)
                momentum = _blocks(state["codes"], block).to(parameter.dtype) * state["scales"][:, None] / 127
                momentum = momentum.mul_(0.9).add_(_blocks(parameter.grad, block))
                state["scales"] = momentum.abs().amax(1)
                codes = (momentum / state["scales"].clamp(min=1e-12)[:, None] * 127).round_().to(torch.int8)
                state["codes"] = codes.view(-1)[: parameter.numel()].view(parameter.shape)
                state["step"] += 1
                parameter.sub_(momentum.view(-1)[: parameter.numel()].view(parameter.shape), alpha=group["lr"])


def _blocks(tensor: Tensor, block: int) -> Tensor:
    """``[blocks, block]``, filled up with zeros."""
    flat = tensor.reshape(-1)
    return torch.cat([flat, flat.new_zeros(-len(flat) % block)]).view(-1, block)
