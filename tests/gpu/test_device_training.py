"""A training on a device repeats its bits, in every precision that people train in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from device_models import SAMPLES, STEPS, adamw, images, loss_of, network, train
from torch import Tensor, nn

import virtualflow as vf
from virtualflow.device import probe_bits


def single(device: torch.device) -> str:
    model = network(device)
    return train(model, adamw(model), device, clip_grad_norm=1.0)


def autocast(device: torch.device) -> str:
    model = network(device)

    def compute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return loss_of(model, x, y)

    return train(model, adamw(model), device, compute=compute)


def scaled(device: torch.device) -> str:
    """Half precision on a GPU, with a scale that is too large at first, so that steps are left out."""
    model = network(device)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16

    def compute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return loss_of(model, x, y)

    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20 if device.type == "cuda" else 2.0**10)
    return train(model, adamw(model), device, compute=compute, scaler=scaler)


def halves(device: torch.device) -> str:
    """Parameters in bfloat16; batch norm's statistics are averaged in single precision."""
    model = network(device, torch.bfloat16)
    return train(model, adamw(model), device, data=images(torch.bfloat16))


def hosted(device: torch.device) -> str:
    """The optimizer on the host: parameters return to the device, and its state does not."""
    model = network(device)
    optimizer = adamw(model)
    digest = train(model, optimizer, device, clip_grad_norm=1.0, memory=vf.Memory(optimizer="host"))
    assert all(parameter.device.type == device.type for parameter in model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert {value.device.type for value in states} == {"cpu"}
    return digest


@pytest.mark.parametrize("training", [single, autocast, scaled, halves, hosted], ids=lambda training: training.__name__)
def test_a_training_gives_the_same_bits_again(training: Callable[[torch.device], str], device: torch.device) -> None:
    assert training(device) == training(device)


@pytest.mark.parametrize("activations", ["swap", "recompute"])
def test_a_plan_of_memory_gives_the_bits_of_none(
    activations: Literal["swap", "recompute"], device: torch.device
) -> None:
    planned, plain = network(device), network(device)
    found = train(planned, adamw(planned), device, memory=vf.Memory("1GiB", activations=activations))
    assert found == train(plain, adamw(plain), device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_compiled_model_gives_the_same_bits_again() -> None:
    device = torch.device("cuda")

    def once() -> str:
        torch.compiler.reset()
        model = network(device)
        compiled = torch.compile(model)
        return train(
            model, adamw(model), device, compute=lambda _, x, y: F.cross_entropy(compiled(x), y), drop_last=True
        )

    assert once() == once()


def test_micro_batches_sent_ahead_give_the_bits_of_those_that_the_script_moves(device: torch.device) -> None:
    found = set()
    for ahead in (True, False):
        model = network(device)
        found.add(train(model, adamw(model), device, ahead=ahead, epochs=2, steps=None))
    assert len(found) == 1


def test_a_training_goes_on_from_a_checkpoint_to_the_same_bits(device: torch.device, tmp_path: Path) -> None:
    digests = set()
    for steps in ((STEPS,), (2, STEPS)):
        directory = tmp_path / str(len(steps))
        for until in steps:
            model = network(device)
            found = train(model, adamw(model), device, steps=until, checkpoint=directory)
        digests.add(found)
        assert all(parameter.device.type == device.type for parameter in model.parameters())
    assert len(digests) == 1


def test_a_parameter_that_the_inner_loop_changes_is_found(device: torch.device) -> None:
    def compute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)  # type: ignore[index, union-attr, operator]
        return loss_of(model, x, y)

    model = network(device)
    with pytest.raises(vf.ConfigurationError, match=r"parameter 0\.weight"):
        train(model, adamw(model), device, compute=compute)


def test_every_sample_counts_once_in_an_epoch(device: torch.device) -> None:
    model, seen = network(device), []
    data = torch.utils.data.TensorDataset(*images().tensors, torch.arange(SAMPLES))
    options = {"batch_size": 16, "virtual_nodes": 4, "epochs": 2, "device": device}
    with vf.elastic(model, adamw(model), data, **options) as run:  # type: ignore[arg-type]
        for step in run:
            for x, y, index in step:
                assert {tensor.device.type for tensor in (x, y, index)} == {device.type}
                loss_of(model, x, y).backward()
                seen += index.tolist()
    assert [sorted(seen[:SAMPLES]), sorted(seen[SAMPLES:])] == [list(range(SAMPLES))] * 2


@pytest.mark.usefixtures("pinned")
def test_the_probe_of_bits_repeats(device: torch.device) -> None:
    found = probe_bits(device)
    assert found
    assert found == probe_bits(device)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a CUDA device with TF32",
)
@pytest.mark.usefixtures("pinned")
def test_the_probe_of_bits_sees_tf32() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    found = set()
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            found.add(probe_bits(torch.device("cuda")))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(found) == 2
