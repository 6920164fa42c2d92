"""Updates of several members in this process: settings are honoured, and none of them changes a bit."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from meshes import mesh
from torch import Tensor, nn

from virtualflow.protocol import messages as m
from virtualflow.reduction import Overlap, Reducer, choose_summation, handover
from virtualflow.reduction.pipeline import Early
from virtualflow.reduction.settings import Exchange, ReductionSettings
from virtualflow.step import OptimizerOptions, Update
from virtualflow.transport.communicator import Communicator

NODES, SAMPLES = 4, 2
EARLY = Exchange("reduce-scatter", overlap=True)
RANGES = [range(3), range(3, 4)]
MODEL = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 1))


def weights_after_steps(communicator: Communicator, settings: ReductionSettings) -> tuple[list[Tensor], int]:
    """The weights after three steps, and how often messages were sent; the last step has fewer samples."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    update = Update(
        model,
        OptimizerOptions(optimizer),
        choose_summation(NODES, "bitwise"),
        micro_batch=SAMPLES,
        reduction=settings,
    )
    sent = 0

    def count(lane: Communicator) -> None:
        start = lane.start_messages

        def counting(messages: Any) -> Any:
            nonlocal sent
            sent += 1
            return start(messages)

        lane.start_messages = counting  # type: ignore[method-assign]

    count(communicator)
    count(communicator.beside)
    assigned = RANGES[communicator.rank]
    update.enter()
    for step in range(3):
        count = SAMPLES + (step < 2)
        update.begin(assigned, 3)
        for node in assigned:
            draw = torch.Generator().manual_seed(10 * step + node)
            if node == assigned[-1]:
                update.sync.expect_last(communicator, RANGES, count, NODES * count)
            else:
                update.sync.expect(count)
            x = torch.randn(count, 20, generator=draw)
            model(x).square().mean().backward()
            update.sync.take(count, {})
        reduced = update.synchronize(communicator, RANGES, step + 1, m.Generation(0, 0), more=True)
        update.apply(reduced, epoch_ends=False)
    update.close()
    return [value.clone() for value in model.state_dict().values()], sent


def run(settings: ReductionSettings) -> tuple[list[Tensor], int]:
    members = mesh(2)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda member: weights_after_steps(member, settings), members))
    for member in members:
        member.close()
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    return found[0]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(ReductionSettings(exchange=EARLY, bucket=1 << 20, one_by_one=1 << 30), id="one bucket"),
        pytest.param(ReductionSettings(exchange=EARLY, bucket=256, one_by_one=1 << 30), id="many buckets"),
        pytest.param(ReductionSettings(exchange=EARLY, bucket=256, one_by_one=0), id="one by one"),
        pytest.param(ReductionSettings(exchange=EARLY, bucket=256, alignment=64), id="another alignment"),
    ],
)
def test_an_injected_setting_is_honoured_and_gives_the_same_bits(settings: ReductionSettings) -> None:
    (wanted, never), (found, sent) = run(ReductionSettings()), run(settings)
    assert never == 3, "so little is gathered whole, in one trip a step"
    assert sent >= 3 * 2 * (1 if settings.bucket > 256 else 3)
    assert sent <= 3 * 2 * 2 or settings.bucket == 256
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


ONE_BY_ONE = ReductionSettings(exchange=EARLY, bucket=256, one_by_one=0)


def test_gradients_of_another_stream_are_taken_behind_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = run(ONE_BY_ONE)
    taken, give = set(), Early.give

    def noting(early: Early, place: int, tensor: Tensor, *, own: bool) -> Tensor:
        taken.add(place)
        return give(early, place, tensor, own=own)

    monkeypatch.setattr(Early, "give", noting)
    monkeypatch.setattr(handover, "_stream", lambda tensor: "of this thread" if tensor.dim() > 1 else "another")
    found, _ = run(ONE_BY_ONE)
    assert taken == {place for place, parameter in enumerate(MODEL.parameters()) if parameter.dim() > 1}
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize(("second", "hooked"), [("cpu", True), ("meta", False)])
def test_hooks_of_several_devices_would_run_at_the_same_time_and_are_not_registered(second: str, hooked: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(4, device=device)) for device in ("cpu", second)]
    summation = choose_summation(NODES, "bitwise")
    watching = Overlap(parameters, parameters, Reducer(summation, ONE_BY_ONE), ONE_BY_ONE)
    watching.begin(resumes=False)
    assert all(bool(parameter._post_accumulate_grad_hooks) == hooked for parameter in parameters)
    watching.close()
