"""A gradient that is there when a micro-batch ends counts, whoever has frozen its parameter since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.errors import ConfigurationError
from virtualflow.step.buffers import Switches

STEPS = 6


class Adversaries:
    """A generator and a discriminator that does not learn from the generator's loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.both = nn.ModuleDict({"G": nn.Linear(4, 8), "D": nn.Linear(8, 1)})
        self.optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in self.both.children()]
        self.data = TensorDataset(torch.randn(96, 4), torch.randn(96, 8))

    def backward(self, z: Tensor, real: Tensor, *, back: bool) -> None:
        generator, discriminator = self.both["G"], self.both["D"]
        discriminator.requires_grad_(True)
        fake = generator(z)
        (F.softplus(discriminator(fake.detach())).mean() + F.softplus(-discriminator(real)).mean()).backward()
        discriminator.requires_grad_(False)
        F.softplus(-discriminator(fake)).mean().backward()
        if back:
            discriminator.requires_grad_(True)


@pytest.mark.parametrize("back", [False, True], ids=["left frozen", "switched back"])
def test_adversaries_that_are_frozen_by_turns_train_as_in_plain_torch(back: bool) -> None:
    plain, ours = Adversaries(), Adversaries()
    for first in range(0, 96, 16):
        for optimizer in plain.optimizers:
            optimizer.zero_grad()
        plain.backward(*plain.data[first : first + 16], back=back)
        for optimizer in plain.optimizers:
            optimizer.step()
    with vf.elastic(ours.both, ours.optimizers, ours.data, batch_size=16, steps=STEPS, shuffle=False) as run:
        for step in run:
            for z, real in step:
                ours.backward(z, real, back=back)
    for (name, here), there in zip(ours.both.named_parameters(), plain.both.parameters(), strict=True):
        torch.testing.assert_close(here, there, msg=lambda text, name=name: f"{name}: {text}")
        assert here.requires_grad == there.requires_grad


def a_choice_that_is_made_now_and_then(dies: str = "") -> Trained:
    """Each virtual node chooses in some steps which blocks it trains; the first one's choice holds meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    data = TensorDataset(torch.randn(48, 6), torch.randn(48, 1))
    with vf.elastic(model, optimizer, data, batch_size=12, steps=8, virtual_nodes=6) as run:
        for step in run:
            for x, y in step:
                if step.number % 3 == 1:
                    for block in model[:5]:
                        block.requires_grad_(bool(torch.rand(()) < 0.5))
                F.mse_loss(model(x), y).backward()
                if step.number == 7:
                    die_here(dies)
    return trained(run, model, optimizer, more=tuple(p.requires_grad for p in model.parameters()))


def test_what_virtual_nodes_choose_to_train_depends_on_no_worker(start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(a_choice_that_is_made_now_and_then)
    assert len(set(reference.more)) == 2, "all are frozen, or none: nothing was chosen"
    job = start_job(a_choice_that_is_made_now_and_then, "worker-1", workers=2, hold=2)
    job.reach(2)
    job.join()  # between two choices, of which it has made none
    assert [each.value for each in job.finish().values() if each.kind == "returned"] == [reference] * 2


def test_a_parameter_that_is_frozen_between_steps_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = TensorDataset(torch.randn(24, 3))
    biases = []
    with vf.elastic(model, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=8, steps=3) as run:
        for step in run:
            model.bias.requires_grad_(step.number == 2)
            for (x,) in step:
                model(x).square().mean().backward()
            biases.append(model.bias.item())
    assert biases[0] != biases[1] == biases[2]


def test_a_loss_that_freezes_blocks_in_layer_major_order_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))

    def loss(output: Tensor) -> Tensor:
        model[0].requires_grad_(False)
        return output.square().mean()

    def train() -> None:
        memory = vf.Memory(device="1GiB", order="layer-major")
        data, optimizer = TensorDataset(torch.randn(16, 3)), torch.optim.SGD(model.parameters(), 0.1)
        with vf.elastic(model, optimizer, data, batch_size=8, steps=1, memory=memory) as run:
            for step in run:
                step.layer_major(loss)

    with pytest.raises(ConfigurationError, match=r"has frozen parameter 0\.weight, and in layer-major order"):
        train()


def test_each_virtual_node_begins_with_what_the_step_began_with() -> None:
    model = nn.Linear(3, 1)
    switches = Switches(list(model.named_parameters()))
    switches.begin()
    assert switches.put_back() == frozenset()
    model.bias.requires_grad_(False)
    assert switches.put_back() == {1}
    assert model.bias.requires_grad
    assert switches.state == {}
    switches.commit(frozenset({1}))
    assert switches.state == {"bias": False}
    joiner = nn.Linear(3, 1)
    Switches(list(joiner.named_parameters())).restore(switches.state)
    assert (joiner.weight.requires_grad, joiner.bias.requires_grad) == (True, False)
