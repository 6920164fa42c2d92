"""Gradients of bfloat16 parameters that are summed in single precision: plain torch's bits, whoever sums them."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from counted_memory import CountedMemory
from divided_models import Tower, data, run_on_data
from elastic_jobs import BEGUN_EARLY, EXCHANGE, ElasticJob, alone, die_here
from injected import injected
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly, slow
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.settings import ENV_VERIFY, ENV_WORKER
from virtualflow.reduction import FileMemory, block_norms, clip_by_norm, total_norm
from virtualflow.state import digests
from virtualflow.worker import setup

StartJob = Callable[..., ElasticJob]
STEPS, NODES = 5, 6
CLIP = 0.5

OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole in portions": {"clip_grad_norm": None},  # the optimizer steps what has come while others are on their way
    "whole by weights": {"weight": lambda batch: batch[0].abs().mean()},
    "optimizer": {"shard_optimizer": True},
    "parameters": {"shard": "parameters"},
    "parameters kept once": {"shard": "parameters", "redundancy": "none"},
    "hybrid": {"shard": "hybrid"},
    "partial": {"backward": vf.PartialBackward((1, 0.7, 0.4))},
    "partial optimizer": {"backward": vf.PartialBackward((1, 0.7, 0.4)), "shard_optimizer": True},
}


def tower() -> nn.Module:
    """In bfloat16, but for batch norms."""
    torch.manual_seed(1)
    model = Tower().bfloat16()
    for block in model.blocks:
        block.norm.float()
    return model


def train(how: str, dtype: str = "float32", victim: str = "", scratch: Path | None = None) -> tuple[str, float]:
    """Two epochs and a bit with a last batch that is short; tells the digest and the last loss."""
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    options = {"clip_grad_norm": CLIP, "reduce_dtype": getattr(torch, dtype, None), **OPTIONS[how]}
    stored: list[torch.dtype] = []
    store = FileMemory.store
    with ExitStack() as stack:
        if scratch is not None:
            options["memory"] = vf.Memory(scratch=scratch)
            stack.enter_context(injected(reduction={"offload_from": 1, "sums_on_device": 1}))
            stack.enter_context(
                mock.patch.object(
                    FileMemory, "store", lambda self, tensor: stored.append(tensor.dtype) or store(self, tensor)
                )
            )
        run = stack.enter_context(run_on_data(model, optimizer, STEPS, **options))
        for step in run:
            for x, y in step:
                loss = F.mse_loss(model(x.bfloat16()).float(), y)
                loss.backward()
                step.log(loss=loss)
                if victim and step.number == 3:
                    die_here(victim)
        training = run._context.training
        found = training.digest or digests.digest(model.state_dict()), step.metrics["loss"]
    assert set(stored) == (set() if scratch is None else {getattr(torch, dtype)})
    return found


# --- on all paths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "workers", "exchange", "leaves"),
    [
        ("whole", 3, "early", True),
        slow("whole", 2, "late", False),
        slow("whole in portions", 3, "early", False),
        slow("whole by weights", 5, "behind", False),
        slow("optimizer", 3, "early", True),
        nightly("optimizer", 2, "behind", False),
        nightly("optimizer", 5, "late", False),
        ("parameters", 3, "late", True),
        slow("parameters kept once", 2, "late", False),
        nightly("parameters", 5, "late", True),
        slow("partial", 3, "early", True),
        nightly("partial optimizer", 4, "behind", False),
    ],
)
def test_bits_are_those_of_one_worker_through_a_change(
    start_job: StartJob, how: str, workers: int, exchange: str, leaves: bool
) -> None:
    environment = {EXCHANGE: exchange, **({ENV_VERIFY: "1"} if how == "whole" else {})}
    job = start_job(train, how, workers=workers, hold=3 * leaves, environment=environment)
    if leaves:
        job.reach(3)
        job.drain("worker-1")
    outcomes = job.finish()
    ended = [outcome.value for name, outcome in outcomes.items() if not leaves or name != "worker-1"]
    undivided = how if "whole" in how else "partial" if "partial" in how else "whole"
    reference = alone(train, undivided)
    assert ended == [reference] * (workers - leaves)
    assert reference != alone(train, undivided, "its own")
    if "whole" in how and exchange != "late":
        assert any(BEGUN_EARLY in outcome.log for outcome in outcomes.values())


@pytest.mark.slow
def test_sums_of_a_workers_processes_travel_in_that_type_to_other_workers(start_job: StartJob) -> None:
    results = start_job(train, "hybrid", workers=2, processes=2).results()
    assert results == [alone(train, "whole")] * 4


@pytest.mark.parametrize("exchange", [slow("early"), slow("late")])
def test_what_a_killed_workers_peers_have_summed_is_kept_in_that_type(start_job: StartJob, exchange: str) -> None:
    job = start_job(train, "whole", "float32", "worker-1", workers=3, environment={EXCHANGE: exchange})
    results = job.results()
    assert results == [alone(train, "whole")] * len(results)


@pytest.mark.parametrize(("how", "workers"), [("whole", 1), slow("parameters kept once", 3)])
def test_sums_wait_in_files_in_that_type(start_job: StartJob, how: str, workers: int, tmp_path: Path) -> None:
    reference = alone(train, "whole")
    if workers == 1:
        assert alone(train, how, "float32", "", tmp_path) == reference
    else:
        job = start_job(train, how, "float32", "", tmp_path, workers=workers)
        assert job.results() == [reference] * workers


# --- in plain torch ---------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 19), nn.Tanh(), nn.Linear(19, 1)).bfloat16()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x.bfloat16()).float(), y)


def in_plain_torch(dtype: torch.dtype) -> list[list[Tensor]]:
    """The weights behind each step: the gradients of virtual nodes, cast and added up as the tree says."""

    def total(left: int, right: int, gradients: list[list[Tensor]]) -> list[Tensor]:
        if right - left == 1:
            return gradients[left]
        middle = (left + right) // 2
        pairs = zip(total(left, middle, gradients), total(middle, right, gradients), strict=True)
        return [one + other for one, other in pairs]

    model, found = small(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in batches():
        gradients = []
        for x, y in batch:
            copied = copy.deepcopy(model)
            loss_of(copied, x, y).backward()
            gradients.append([p.grad.to(dtype) * (len(x) / 4) for p in copied.parameters() if p.grad is not None])
        scale = 4 / sum(len(x) for x, _ in batch)
        sums = [tensor * scale for tensor in total(0, NODES, gradients)]
        clip_by_norm(sums, CLIP, total_norm(block_norms(sums, 4)))
        for parameter, summed in zip(model.parameters(), sums, strict=True):
            parameter.grad = summed.to(parameter.dtype)
        optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """An epoch as its order has it without shuffling."""
    x, y = data().tensors
    whole = [(x[:24], y[:24]), (x[24:48], y[24:48]), (x[48:], y[48:])]
    return [list(zip(one.chunk(NODES), other.chunk(NODES), strict=True)) for one, other in whole]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None], ids=str)
def test_bits_are_those_of_plain_torch_which_casts_and_adds_up(dtype: torch.dtype | None) -> None:
    model, found, shown = small(), [], set()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with run_on_data(model, optimizer, 3, shuffle=False, clip_grad_norm=CLIP, reduce_dtype=dtype) as run:
        for step in run:
            for x, y in step:
                loss_of(model, x, y).backward()
            found.append([parameter.detach().clone() for parameter in model.parameters()])
            shown |= {p.grad.dtype for p in model.parameters() if p.grad is not None}
    expected = in_plain_torch(dtype or torch.bfloat16)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert shown == {torch.bfloat16}, "of whose type a parameter's gradient must be"
    if dtype is not None:
        assert not all(map(torch.equal, found[-1], in_plain_torch(torch.bfloat16)[-1]))


def large_and_small(dtype: torch.dtype | None, **options: Any) -> float:
    """The sum of eight gradients, one of 256 and seven of 1."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    dataset = TensorDataset(torch.tensor([[256.0], *[[1.0]] * 7]))
    fixed: dict[str, Any] = {"batch_size": 8, "steps": 1, "virtual_nodes": 8, "shuffle": False}
    with vf.elastic(model, optimizer, dataset, reduce_dtype=dtype, **fixed, **options) as run:
        for step in run:
            for (x,) in step:
                model(x.bfloat16()).mean().backward()
    assert model.weight.grad is not None
    return 8 * float(model.weight.grad)


def one_by_one_statistically(dtype: torch.dtype) -> float:
    return large_and_small(dtype, reproducibility="statistical", max_fused=1)


def test_small_gradients_are_not_lost_beside_a_large_one() -> None:
    assert large_and_small(None) == 262, "256 + 1 is 256 in bfloat16"
    assert large_and_small(torch.float32) == 264, "263 is none of its numbers"


@pytest.mark.parametrize("workers", [2, slow(3)])
def test_a_statistical_job_sums_in_that_type_too(start_job: StartJob, workers: int) -> None:
    job = start_job(one_by_one_statistically, torch.float32, workers=workers)
    assert job.results() == [264] * workers


# --- on the host, and in layer-major order ---------------------------------------------------------------------------


def elsewhere(memory: vf.Memory | None) -> str:
    """Train with the optimizer on the host, or in layer-major order."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    x, y = data().tensors
    dataset = TensorDataset(x.bfloat16(), y)
    options: dict[str, Any] = {"clip_grad_norm": CLIP, "reduce_dtype": torch.float32, "memory": memory}
    with vf.elastic(model, optimizer, dataset, batch_size=24, steps=STEPS, virtual_nodes=NODES, **options) as run:
        for step in run:
            if memory is not None and memory.layer_major:
                step.layer_major(lambda output, target: F.mse_loss(output.float(), target))
                continue
            for inputs, target in step:
                F.mse_loss(model(inputs).float(), target).backward()
    return digests.digest(model.state_dict())


def test_in_layer_major_order_the_bits_are_the_same() -> None:
    assert elsewhere(vf.Memory(1 << 20, order="layer-major")) == elsewhere(None)


def test_with_the_optimizer_on_the_host_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, counted = elsewhere(None), CountedMemory()
    monkeypatch.setattr(setup, "host_memory", lambda device: counted)
    assert elsewhere(vf.Memory(optimizer="host")) == expected
    assert counted.brought


# --- where nothing is narrower ----------------------------------------------------------------------------------------


def plain(dtype: torch.dtype | None) -> str:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    with run_on_data(model, torch.optim.SGD(model.parameters(), 0.1), 3, reduce_dtype=dtype) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
        assert "reduce_dtype" not in run._context.membership._signature
    return digests.digest(model.state_dict())


def test_in_the_parameters_own_type_all_is_as_without_it() -> None:
    assert plain(torch.float32) == plain(None)


def count_by_tokens(dtype: torch.dtype | None) -> None:
    model = nn.Linear(4, 1, dtype=torch.float16)
    with run_on_data(model, torch.optim.SGD(model.parameters(), 0.1), 1, reduce_dtype=dtype) as run:
        for step in run:
            for x, y in step:
                step.weight(50_000)  # 12,500 times a gradient is beyond what float16 holds
                F.mse_loss(model(x.half()).float(), y + 5).backward()
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()


def test_what_counts_by_tokens_overflows_in_float16_alone() -> None:
    count_by_tokens(torch.float32)
    with pytest.raises(ConfigurationError, match=r"overflows; .* or pass reduce_dtype=torch.float32 to vf.elastic"):
        count_by_tokens(None)


# --- refused ----------------------------------------------------------------------------------------------------------


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 1, dtype=torch.float64))


def scaler() -> Any:
    return torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (small, {"reduce_dtype": "float32"}, "reduce_dtype is 'float32'; it must be a floating-point type of torch"),
        (small, {"reduce_dtype": torch.int64}, "reduce_dtype is torch.int64; it must be a floating-point type"),
        (
            mixed,
            {"reduce_dtype": torch.float32},
            "parameter 1.weight is of torch.float64, and sums in reduce_dtype=torch.float32 would lose bits",
        ),
        (small, {"reduce_dtype": torch.float16}, "parameter 0.weight is of torch.bfloat16.* would lose bits"),
        (
            lambda: small().float(),
            {"reduce_dtype": torch.bfloat16},
            "parameter 0.weight is of torch.float32.* name a type that holds those of all parameters",
        ),
        (
            small,
            {"reduce_dtype": torch.float32, "scaler": scaler()},
            "a GradScaler unscales the gradient of 0.weight in torch.bfloat16.* leave out reduce_dtype",
        ),
    ],
    ids=["text", "whole numbers", "wider", "other halves", "narrower sums", "scaler"],
)
def test_what_would_lose_bits_is_refused_by_name(
    make: Callable[[], nn.Module], options: dict[str, Any], sentence: str
) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigurationError, match=sentence) as caught, run_on_data(model, optimizer, 1, **options):
        pass
    assert "\n" not in str(caught.value)


def saved(directory: Path, steps: int, dtype: torch.dtype | None) -> str:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    with run_on_data(model, optimizer, steps, reduce_dtype=dtype, checkpoint=directory) as run:
        for step in run:
            for x, y in step:
                loss_of(model, x, y).backward()
    return digests.digest(model.state_dict())


def test_a_checkpoint_is_of_one_type_of_sums(tmp_path: Path) -> None:
    saved(tmp_path / "first", 2, torch.float32)
    with pytest.raises(VirtualFlowError, match=r"gradients are summed in .* here and in .* there"):
        saved(tmp_path / "first", STEPS, None)
    assert saved(tmp_path / "first", STEPS, torch.float32) == saved(tmp_path / "second", STEPS, torch.float32)


def differing(worker: dict[str, torch.dtype | None]) -> None:
    model = small()
    dtype = worker[os.environ[ENV_WORKER]]
    with run_on_data(model, torch.optim.SGD(model.parameters(), 0.1), 2, reduce_dtype=dtype) as run:
        for step in run:
            for x, y in step:
                loss_of(model, x, y).backward()


@pytest.mark.slow
def test_a_worker_that_sums_in_another_type_is_refused(start_job: StartJob) -> None:
    job = start_job(differing, {"worker-0": torch.float32, "worker-1": None}, workers=2)
    outcomes = job.finish().values()
    sentence = (
        r"gradients are summed in (float32|the parameters' types) here and in .* there \(vf.elastic\(reduce_dtype"
    )
    assert any(re.search(sentence, outcome.text) for outcome in outcomes), outcomes
