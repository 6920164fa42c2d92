"""What scripts do with the gradients of a virtual node: look at them, change them, compute them twice, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """A weight that is used twice, one that some virtual nodes do not use, two whose gradients share their memory, four
    whose gradients do so in part, and averaged buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=draw))
        self.sometimes = nn.Parameter(torch.randn(4, generator=draw))
        self.out = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.out.weight.copy_(torch.randn(2, 4, generator=draw))
        self.norm = nn.BatchNorm1d(4)
        self.shift, self.other_shift = (nn.Parameter(torch.randn(2, 2, generator=draw)) for _ in range(2))
        self.pieces = nn.ParameterList(torch.randn(size, generator=draw) / 64 for size in (1, 3, 3, 1))

    def forward(self, x: Tensor, node: int) -> Tensor:
        hidden = torch.tanh(self.norm(x @ self.weight) @ self.weight)
        hidden = hidden + (self.shift.view(-1) + self.other_shift.view(-1))
        hidden = hidden + (torch.cat((*self.pieces[:2],)) + torch.cat((*self.pieces[2:],)))
        return self.out(hidden + self.sometimes if node % 3 else hidden)


@dataclass
class Body:
    """What a script does with one micro-batch."""

    model: Model
    x: Tensor
    step: int
    node: int
    seen: list[Any]
    weigh: Callable[[float], None]

    def loss(self) -> Tensor:
        return self.model(self.x, self.node).square().mean()

    def norm(self) -> float:
        return float(sum(float(p.grad.norm()) for p in self.model.parameters() if p.grad is not None))


def plain(body: Body) -> None:
    body.loss().backward()


def zeroed_before(body: Body) -> None:
    body.model.zero_grad()
    body.loss().backward()


def zeroed_before_in_place(body: Body) -> None:
    body.model.zero_grad(set_to_none=False)
    body.loss().backward()


def zeroed_behind_late(body: Body) -> None:
    """Some virtual nodes are to count for nothing."""
    body.loss().backward()
    if body.step >= 4 and body.node % 3 == 1:
        body.model.zero_grad(set_to_none=body.node == 4)


def at_lower_precision(body: Body) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # the threads of this test would share its cache
        loss = body.loss()
    loss.backward()


def checkpointed(body: Body) -> None:
    """Activations are computed again, in a backward pass within the backward pass."""
    model, x = body.model, body.x.requires_grad_()
    hidden = checkpoint(lambda x: torch.tanh(x @ model.weight), x, use_reentrant=True)
    (model.out(hidden) @ model.out(x @ model.weight).T).mean().backward()


def norms_every_time(body: Body) -> None:
    body.loss().backward()
    body.seen.append((body.step, body.node, body.norm()))


def norms_now_and_then(body: Body) -> None:
    body.loss().backward()
    if body.step % 3 == 0:
        body.seen.append((body.step, body.node, body.norm()))


def norm_by_torch_late(body: Body) -> None:
    body.loss().backward()
    if body.step >= 4:
        total = nn.utils.get_total_norm([p.grad for p in body.model.parameters() if p.grad is not None])
        body.seen.append((body.step, body.node, float(total)))


def clipped(body: Body) -> None:
    body.loss().backward()
    nn.utils.clip_grad_norm_(body.model.parameters(), 0.01)


def clipped_late(body: Body) -> None:
    body.loss().backward()
    if body.step >= 4:
        nn.utils.clip_grad_norm_(body.model.parameters(), 0.01)


def clipped_in_one_node_late(body: Body) -> None:
    body.loss().backward()
    if body.step >= 4 and body.node == 5:
        nn.utils.clip_grad_value_(body.model.parameters(), 0.001)


def replaced(body: Body) -> None:
    body.loss().backward()
    for p in body.model.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5


def replaced_late(body: Body) -> None:
    replaced(body) if body.step == 4 else plain(body)


def forgotten(body: Body) -> None:
    body.loss().backward()
    body.model.weight.grad = None


def forgotten_late(body: Body) -> None:
    forgotten(body) if body.step == 4 else plain(body)


def twice(body: Body) -> None:
    loss = body.loss()
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def twice_late(body: Body) -> None:
    loss = body.loss()
    loss.backward(retain_graph=body.step >= 4)
    if body.step >= 4:
        loss.backward()


def thrown_away(body: Body) -> None:
    """As sharpness-aware training does: of two backward passes, the second one's gradients count."""
    body.loss().backward()
    body.model.zero_grad()
    body.loss().sin().backward()


def thrown_away_late(body: Body) -> None:
    thrown_away(body) if body.step >= 4 else plain(body)


def in_two_halves(body: Body) -> None:
    """Gradient accumulation within a virtual node."""
    for half in (body.x[:2], body.x[1:]):
        body.model(half, body.node).square().mean().backward()


def graph(body: Body) -> None:
    """A penalty on the gradient, through ``.grad``."""
    body.loss().backward(create_graph=True)
    assert body.model.weight.grad is not None
    body.model.weight.grad.square().sum().backward()


def graph_late(body: Body) -> None:
    if body.step >= 4:
        graph(body)
    else:
        plain(body)


def graph_without_use(body: Body) -> None:
    body.loss().backward(create_graph=True)


def own_hook(body: Body) -> None:
    def look(parameter: Tensor) -> None:
        assert parameter.grad is not None
        body.seen.append((body.step, body.node, float(parameter.grad.sum())))

    handle = body.model.weight.register_post_accumulate_grad_hook(look)
    body.loss().backward()
    handle.remove()


def own_hook_that_changes_late(body: Body) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    handle = body.model.weight.register_post_accumulate_grad_hook(halve) if body.step >= 4 else None
    body.loss().backward()
    if handle is not None:
        handle.remove()


def own_hook_from_before(body: Body) -> None:
    """It comes before the library's, so it sees gradients as they are."""
    body.loss().backward()


def frozen_by_turns(body: Body) -> None:
    body.loss().backward()


def frozen_behind(body: Body) -> None:
    """As adversaries do it: what is frozen behind the backward pass has a gradient."""
    body.model.out.requires_grad_(True)
    body.loss().backward()
    body.model.out.requires_grad_(False)


def frozen_by_choice(body: Body) -> None:
    """Each virtual node trains other parameters, and the step after one has found them as its first left them."""
    if body.step % 2:
        body.model.out.requires_grad_(body.node % 3 != 2)
        body.model.weight.requires_grad_(body.node % 4 != 0)
    body.loss().backward()


def weight(body: Body) -> float:
    """One of them weighs nothing."""
    return 0.3 * ((body.node * body.step + 1) % 5)


def weighed(body: Body) -> None:
    body.weigh(weight(body))
    body.loss().backward()


def weighed_late(body: Body) -> None:
    weighed(body) if body.step >= 4 else plain(body)


def weighed_behind(body: Body) -> None:
    body.loss().backward()
    body.weigh(weight(body))


def weighed_behind_late(body: Body) -> None:
    weighed_behind(body) if body.step >= 4 else plain(body)


SCRIPTS: dict[Callable[[Body], None], tuple[bool, bool]] = {
    plain: (True, False),
    weighed: (True, False),
    weighed_behind: (False, False),
    weighed_behind_late: (True, True),
    zeroed_before: (True, False),
    zeroed_before_in_place: (True, False),
    zeroed_behind_late: (True, True),
    at_lower_precision: (True, False),
    checkpointed: (False, False),
    norms_every_time: (True, False),
    norms_now_and_then: (True, True),
    **({norm_by_torch_late: (True, True)} if hasattr(nn.utils, "get_total_norm") else {}),  # since torch 2.6
    clipped: (False, False),
    clipped_late: (True, True),
    clipped_in_one_node_late: (True, True),
    replaced_late: (True, True),
    forgotten_late: (True, True),
    twice: (False, False),
    twice_late: (True, True),
    thrown_away_late: (True, True),
    in_two_halves: (False, False),
    graph: (False, False),
    graph_late: (True, True),
    graph_without_use: (True, False),
    own_hook: (True, False),
    own_hook_that_changes_late: (True, True),
    own_hook_from_before: (True, False),
    frozen_by_turns: (True, False),
    frozen_behind: (True, False),
    frozen_by_choice: (True, False),
}
"""Whether anything is added up hot, and whether an attempt is repeated (alone)."""
