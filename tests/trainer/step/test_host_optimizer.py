"""The optimizer in host memory: the bits of one on the device, its copies counted, and one place for a job's life.

The device is played: all tensors are on the CPU, whose arithmetic is the same in both places, and the host memory of
these tests counts what goes in and out, and has nothing but NaN in what has not arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_memory import CountedMemory
from elastic_jobs import trained
from habit_scripts import STEPS, loop, mlp, squares, start
from own_optimizers import Lion
from test_shares_at_any_break import Fault, Worker, enter, run
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import virtualflow as vf
from tiers import nightly
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.settings import ENV_OPTIMIZER_PLACEMENT
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.state import digests
from virtualflow.step import OptimizerOptions
from virtualflow.step.optimizer_step import OptimizerStep
from virtualflow.step.partial_step import HARMLESS
from virtualflow.step.placement import HostPlacement
from virtualflow.step.sharded_optimizer import Shards
from virtualflow.worker import setup

ON_HOST = vf.Memory(optimizer="host")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CountedMemory:
    """The CPU has memory beside it, as a device has."""
    counted = CountedMemory()
    monkeypatch.setattr(setup, "host_memory", lambda device: counted)
    return counted


# --- bits -------------------------------------------------------------------------------------------------------------


def hosted(made: list[CountedMemory], sharded: bool, make: str, clip: float | None) -> Worker:
    made.append(CountedMemory())
    return Worker(make, clip, copies=2 * sharded, host=made[-1])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    ("make", "clip"),
    [
        ("AdamW", 0.5),
        ("momentum", None),
        ("blocks", 0.5),
        nightly("AdamW", None),
        nightly("momentum", 0.5),
        nightly("blocks", None),
    ],
)
def test_the_bits_of_the_device_through_joins_and_kills(make: str, clip: float | None, sharded: bool) -> None:
    """Two of four are lost: one while it joins, and one in the next step, between its exchanges."""
    made: list[CountedMemory] = []
    entry, step = Fault(3, 4, "after", lost=True), Fault(1, 3, "before", lost=True)
    taken = run(make, clip, entry, step, None, partial(hosted, made, sharded))
    assert taken[0] >= entry.number
    assert taken[1] >= step.number
    assert len(made) == 4
    assert all(memory.brought for memory in made[:1]), "the one that lives from the beginning has stepped there"


def test_of_a_sharded_parameter_only_the_slices_that_are_kept_here_are_moved() -> None:
    parameter, memory = nn.Parameter(torch.randn(1_024)), CountedMemory()
    optimizer = torch.optim.AdamW([parameter], 0.01)
    shards = Shards(
        [parameter],
        optimizer,
        clip_norm=None,
        clip_value=None,
        reduction=ReductionSettings(norm_block=16, bucket=512),
        placement=HostPlacement(optimizer, memory, portion=64, norm_block=16),
        copies=1,
    )
    shards.enter(1, 4)
    assert len(shards.mine) == 6, "slices of eight runs"
    before = parameter.detach().clone()
    memory.moved = memory.brought = 0
    shards.prepare([torch.ones(256)], [True])
    shards.step()
    assert memory.moved == memory.brought == 4 * 256
    assert (parameter != before).nonzero().flatten().tolist() == [at for span in shards.mine for at in range(*span)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(lambda: {"clip_grad_norm": 0.05}, id="clipped by norm"),
        pytest.param(lambda: {"scaler": torch.amp.GradScaler("cpu"), "clip_grad_value": 0.01}, id="scaled"),
        pytest.param(lambda: {"shard_optimizer": True}, id="sharded"),
    ],
)
def test_a_whole_training_of_two_optimizers_and_a_scheduler(
    options: Callable[[], dict[str, Any]], memory: CountedMemory
) -> None:
    def train(**more: Any) -> Any:
        model = mlp()
        optimizers = [
            torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9),
            torch.optim.AdamW(model[2].parameters(), 0.02),
        ]
        chosen = {**options(), **more}
        scaler = chosen.get("scaler")

        def loss(x: Tensor, y: Tensor) -> Tensor:
            found = squares(model(x), y)
            return found if scaler is None else scaler.scale(found)  # type: ignore[no-any-return]

        with start(model, optimizers, scheduler=[StepLR(one, 2, 0.5) for one in optimizers], **chosen) as run:
            loop(run, model, loss=loss)
        return trained(run, model, optimizers)

    reference = train()
    assert memory.moved == 0
    assert train(memory=ON_HOST) == reference
    assert memory.moved > 0


def test_activations_may_have_a_plan_beside_it(memory: CountedMemory) -> None:
    def train(**more: Any) -> Any:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with start(model, optimizer, **more) as run:
            loop(run, model)
        return trained(run, model, optimizer)

    planned = vf.Memory("1GiB", "1GiB", activations="recompute", blocks=["0", "2"], optimizer="host")
    assert train(memory=planned) == train()
    assert memory.moved > 0


def test_one_that_needs_all_parameters_at_once_gets_them_at_once(memory: CountedMemory) -> None:
    def train(**more: Any) -> Any:
        model = mlp()
        optimizer = Lion(model.parameters(), 0.01, betas=(0.9, 0.99), norm="layer")
        with start(model, optimizer, **more) as run:
            loop(run, model)
        assert optimizer.calls == 0
        return trained(run, model, optimizer)

    assert train(memory=ON_HOST) == train()


# --- how it goes ------------------------------------------------------------------------------------------------------


class Recorded(CountedMemory):
    """Tells in which order things happen."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def store(self, tensor: Tensor) -> Tensor:
        self.events.append(f"out {tensor.numel()}")
        return super().store(tensor)

    def write(self, source: Tensor, target: Tensor) -> None:
        self.events.append(f"back {source.numel()}")
        super().write(source, target)


def build(sizes: Sequence[int], memory: CountedMemory, optimizer: Callable[..., torch.optim.Optimizer]) -> Any:
    model = nn.Module()
    model.values = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])
    made = optimizer(model.parameters())
    reduction = ReductionSettings(norm_block=16, bucket=64)
    return model, OptimizerStep(model, OptimizerOptions(made, host=memory), reduction), made


def test_the_next_parameters_come_while_some_are_stepped() -> None:
    memory = Recorded()
    model, step, optimizer = build([10, 11, 4, 12], memory, partial(torch.optim.SGD, lr=0.5, momentum=0.9))
    homes = {id(parameter): parameter.data_ptr() for parameter in model.parameters()}

    def told(optimizer: torch.optim.Optimizer, *rest: object) -> None:
        parameters = optimizer.param_groups[0]["params"]
        moved = [p.numel() for p in parameters if p.data_ptr() != homes[id(p)]]
        assert moved == [p.numel() for p in parameters if p.grad is not None], "only what is on the host is stepped"
        memory.events.append(f"step {moved}")

    told.__dict__[HARMLESS] = True
    optimizer.register_step_pre_hook(told)
    step.step([torch.ones(10), torch.ones(11), None, torch.ones(12)])
    step.commit([None] * 4)
    assert memory.events == [
        *("out 10", "out 11", "step [10]", "back 10", "out 12", "step [11]", "back 11", "step [12]", "back 12")
    ]
    assert [float(parameter[0].detach()) for parameter in model.parameters()] == [0.5, 0.5, 1.0, 0.5]
    assert {id(parameter): parameter.data_ptr() for parameter in model.parameters()} == homes


def test_portions_that_are_taken_back_leave_no_trace() -> None:
    memory = CountedMemory()
    model, step, optimizer = build([10, 11, 12], memory, partial(torch.optim.AdamW, lr=0.1))

    def bits() -> tuple[str, str]:
        return digests.digest(model.state_dict()), digests.optimizer_digest(optimizer)

    for _ in range(2):
        step.step([torch.ones(size) for size in (10, 11, 12)])
        step.commit([None] * 3)
    before = bits()
    assert step.portion is not None
    step.portion({2: torch.ones(12), 0: torch.ones(10)})
    assert bits() != before
    step.undo()
    assert bits() == before


def test_a_state_that_is_there_before_the_first_step_moves_too() -> None:
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.state[parameter] = {"mean": torch.zeros(3), "rows": [torch.zeros(2), 7]}
    kept = optimizer.state[parameter]["mean"]
    HostPlacement(optimizer, CountedMemory(), portion=1, norm_block=16)
    state = optimizer.state[parameter]
    assert state["mean"] is kept, "what is there is not copied"
    assert state["rows"][1] == 7
    assert all(tensor.device.type == "cpu" for tensor in (state["mean"], state["rows"][0]))


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_update_copies_gradients_and_values_out_and_values_back(clip: float | None, memory: CountedMemory) -> None:
    model = mlp()
    size = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with start(model, optimizer, memory=ON_HOST, clip_grad_norm=clip) as run:
        loop(run, model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (memory.moved, memory.brought) == (STEPS * 2 * size, STEPS * size), "gradients and values go, values come"


# --- one place for a job's life ---------------------------------------------------------------------------------------


def train(checkpoints: Path, steps: int, place: vf.Memory | None = None) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with start(model, optimizer, checkpoint=checkpoints, steps=steps, memory=place) as run:
        loop(run, model)
    return trained(run, model, optimizer)


OTHER_PLACE = r"the optimizer is on the .* here and on the .* there"


def test_a_checkpoint_of_the_other_place_is_refused(tmp_path: Path, memory: CountedMemory) -> None:
    train(tmp_path, 2, ON_HOST)
    with pytest.raises(VirtualFlowError, match=OTHER_PLACE):
        train(tmp_path, 4)
    resumed = train(tmp_path, 4, ON_HOST)
    for path in tmp_path.iterdir():
        path.rename(path.with_name(f"former-{path.name}"))
    assert train(tmp_path, 4, ON_HOST) == resumed


def test_the_place_that_the_job_names_goes_before_the_scripts(
    tmp_path: Path, memory: CountedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 2, ON_HOST)
    monkeypatch.setenv(ENV_OPTIMIZER_PLACEMENT, "Device")
    with pytest.raises(VirtualFlowError, match=OTHER_PLACE):
        train(tmp_path, 4, ON_HOST)
    monkeypatch.setenv(ENV_OPTIMIZER_PLACEMENT, "Host")
    moved = memory.moved
    train(tmp_path, 4)
    assert memory.moved > moved


def test_members_with_different_places_end_with_a_sentence() -> None:
    signatures: list[dict[str, Any]] = [{"placement": "host"}, {}]
    workers = [Worker("AdamW", None, copies=0, signature=signature) for signature in signatures]
    workers[0].state.has_state = True
    with pytest.raises(ConfigurationError, match="the optimizer is on the host here and on the device there"):
        enter(workers)


@pytest.mark.parametrize(
    ("say", "sentence"),
    [
        (vf.Memory, "says nothing"),
        (lambda: vf.Memory(optimizer="disk"), "optimizer is 'disk'; it must be one of"),  # type: ignore[arg-type]
        (lambda: vf.Memory(optimizer="host", activations="swap"), "pass device="),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(say: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        say()


def test_parameters_that_share_memory_are_refused() -> None:
    model = mlp()
    model[2].bias = nn.Parameter(model[2].weight.detach().view(-1)[:3])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigurationError, match="in the same memory"), start(model, optimizer, memory=ON_HOST):
        pass


def test_an_optimizer_that_only_a_device_can_step_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    with pytest.raises(ConfigurationError, match="capturable=True"), start(model, optimizer, memory=ON_HOST):
        pass
