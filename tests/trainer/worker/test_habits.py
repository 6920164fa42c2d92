"""What people write: it comes to equal bits, or is refused within a few steps by a sentence that says what to do.

The rows are those of docs/reference/scripts.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import habit_scripts as habits
import pytest
import torch
from elastic_jobs import ElasticJob, alone
from torch import nn
from torch.optim import optimizer as base

import virtualflow as vf
from tiers import nightly
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.step import Attempt, Guard, is_separable
from virtualflow.step.guard import GuardSettings

EQUAL = [
    habits.weights_that_decay_after_the_step,
    habits.an_average_of_weights_that_travels,
    habits.a_criterion_within_the_model,
    habits.gradients_zeroed_before_backward,
    habits.weights_put_back_to_the_bit,
    habits.synchronized_batch_norm,
    habits.a_learning_rate_set_by_the_step_number,
    habits.activation_checkpointing_with_batch_norm,
]

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        habits.weights_clamped_in_the_inner_loop,
        "parameter 0.weight: it has changed between the micro-batches.*move",
    ),
    (
        habits.weights_clamped_through_data_in_the_inner_loop,
        "parameter 0.weight: it has changed between the micro",
    ),
    (habits.an_embedding_with_a_largest_norm, "parameter 0.weight: it has changed between the micro-batches"),
    (
        habits.code_before_the_micro_batches_that_changes_the_model,
        "code before the micro-batches of a step.*; move",
    ),
    (
        habits.weights_changed_after_the_step_of_a_sharded_optimizer,
        "with shard_optimizer, code after a step must not",
    ),
    (habits.the_optimizer_stepped_in_the_inner_loop, r"has called SGD.step\(\).*; remove the call"),
    (habits.the_optimizer_stepped_after_the_step, r"has called SGD.step\(\).*; remove the call"),
    (habits.a_scaler_stepped_by_the_script, r"has called GradScaler.step\(\).*pass scaler= to vf.elastic"),
    (habits.a_learning_rate_set_from_each_loss, "sets the learning rate.* once a step, from step.number, or after"),
    (habits.a_second_optimizer_stepped_by_the_script, r"an optimizer \(Adam\) that the library does not know"),
    (
        habits.an_average_of_weights,
        'in ema, which a worker that joins .* pass it to vf.elastic: state={"ema": ema}',
    ),
    (habits.gradients_zeroed_after_backward, "no parameter got a gradient in this step"),
    (habits.a_scheduler_stepped_by_the_script, "pass it to vf.elastic as scheduler="),
    (
        habits.a_parameter_group_added_later,
        r"groups hold \[2, 2\] parameters and held \[2\].*from the start, and freeze",
    ),
    (habits.a_lazy_module, "0.weight has no shape yet.*run the model on one batch before"),
]

COMPARED = [
    habits.a_mean_that_begins_with_the_first_value,
    habits.a_python_counter_in_forward,
    habits.a_criterion_with_running_state,
    habits.a_generator_of_its_own,
    habits.a_hidden_state_carried_on,
]
"""What shows only when a virtual node is computed twice."""


def named(script: Callable[..., Any]) -> str:
    return script.__name__.replace("_", " ")


@pytest.mark.slow
@pytest.mark.parametrize("script", EQUAL, ids=named)
def test_it_gives_the_same_bits(script: Callable[[], Any], start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(script)
    job = start_job(script, workers=2, hold=2)
    job.reach(2)
    job.join()
    assert job.results() == [reference, reference], "worker-1 is killed in step 6"


def test_code_after_a_step_counts_once_for_a_survivor_that_was_one_exchange_behind(
    start_job: Callable[..., ElasticJob],
) -> None:
    script = habits.an_average_of_weights_that_travels
    assert start_job(habits.one_behind, script.__name__, workers=2).results() == [alone(script)]


def test_a_checkpoint_has_what_code_after_its_step_has_done(tmp_path: Path) -> None:
    train, policy = habits.an_average_of_weights_that_travels, vf.CheckpointPolicy(tmp_path, every_steps=1)
    train(checkpoint=policy, steps=3)
    assert train(checkpoint=policy) == train()


def test_a_checkpoint_counts_where_the_same_is_kept_beside_the_model(tmp_path: Path) -> None:
    train, policy = habits.weights_that_decay_after_the_step, vf.CheckpointPolicy(tmp_path, every_steps=1)
    train(checkpoint=policy, steps=3, state={"teacher": nn.Linear(1, 1)})
    with pytest.raises(ConfigurationError, match="state holds nothing here and teacher there"):
        train(checkpoint=policy)


def test_what_has_no_state_cannot_travel() -> None:
    with pytest.raises(
        ConfigurationError, match="state holds ema, a list, which has no state_dict and load_state_dict"
    ):
        habits.an_average_of_weights_that_travels(state={"ema": []})


@pytest.mark.parametrize(("script", "sentence"), REFUSED, ids=lambda value: named(value) if callable(value) else "")
def test_it_is_refused(script: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(VirtualFlowError, match=sentence) as caught:
        alone(script)
    assert caught.type is ConfigurationError
    assert "\n" not in str(caught.value)
    alone(habits.gradients_zeroed_before_backward)  # The next one begins as if nothing had been.


@pytest.mark.parametrize(
    "script", [COMPARED[0], *(nightly(script, id=named(script)) for script in COMPARED[1:])], ids=named
)
def test_what_a_micro_batch_leaves_for_the_next_is_found_in_the_first_step(
    script: Callable[[], Any], start_job: Callable[..., ElasticJob]
) -> None:
    job = start_job(script, workers=2)
    ended = {name: (outcome.kind, outcome.text) for name, outcome in job.finish().items()}
    told = [text for kind, text in ended.values() if kind == "ConfigurationError"]
    assert told, ended
    for text in told:
        assert re.match("the gradient of [a-z0-9._]+ was another one when .* make it a buffer of the model, or", text)
    assert job.status().step == 0


def test_a_worker_of_one_virtual_node_finds_it_in_a_later_step(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(habits.a_mean_that_begins_with_the_first_value, 2, workers=2)
    told = [outcome.text for outcome in job.finish().values() if outcome.kind == "ConfigurationError"]
    assert told, "in the first step it cannot show: the mean of a value with itself is that value"
    assert all("was another one when a virtual node was computed again" in text for text in told)


@pytest.mark.slow
def test_a_loop_left_by_a_counter_is_found_when_others_go_on(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(habits.a_loop_left_by_enumerate, workers=2, hold=2)
    job.reach(2)
    job.join()
    told = [outcome.text for outcome in job.finish().values() if outcome.kind == "VirtualFlowError"]
    assert told
    assert all("others go on; end the training by steps=, step.number or step.metrics" in text for text in told)


def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def backward_once_more(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.cat([p.flatten() for p in model.parameters()]).norm().backward()


def give_noise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def read_norm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("after", "warned"),
    [
        (clip, 1),
        (backward_once_more, 1),
        (give_noise, 1),
        (read_norm, 0),
        (lambda model, optimizer: optimizer.zero_grad(), 0),
        (lambda model, optimizer: optimizer.zero_grad(set_to_none=False), 0),
    ],
    ids=["clipped", "backward", "replaced", "read", "none", "zeroed"],
)
def test_gradients_changed_after_the_step_are_told_of_once(
    after: Callable[[nn.Module, torch.optim.Optimizer], None], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = habits.mlp()
    optimizer = habits.sgd(model)
    with caplog.at_level(logging.WARNING, "virtualflow"), habits.start(model, optimizer) as run:
        habits.loop(run, model, after=lambda step: after(model, optimizer))
    told = [record.message for record in caplog.records if "clip_grad_norm=" in record.message]
    assert len(told) == warned
    assert all("gradient of 0.weight after the step" in text for text in told)


ATTEMPT = Attempt(1)


def guard_of(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: int) -> Guard:
    return Guard(
        model,
        optimizer,
        travels=lambda _: False,
        schedulers=(),
        sharded=False,
        divided=False,
        settings=GuardSettings(**settings),
        warn=lambda _: None,
    )


@pytest.mark.parametrize("through_data", [False, True], ids=["counted by torch", "not counted"])
def test_a_change_in_a_late_step_is_found_within_the_steps_between_two_looks(through_data: bool) -> None:
    model = nn.Linear(3, 1)
    guard = guard_of(model, torch.optim.SGD(model.parameters(), 0.1), first=1, every=7)
    found = None
    for attempt in range(1, 40):
        guard.begin(ATTEMPT)
        if attempt >= 9:
            target = model.weight.data if through_data else model.weight.detach()
            target.add_(1.0)
        try:
            guard.computed(ATTEMPT)
        except ConfigurationError:
            found = attempt
            break
    guard.close()
    assert found == (14 if through_data else 10)


def test_a_change_that_is_put_back_before_the_last_virtual_node_is_found_in_the_next_attempt() -> None:
    model = nn.Linear(3, 1)
    guard = guard_of(model, torch.optim.SGD(model.parameters(), 0.1), first=1, every=100)
    before = model.weight.detach().clone()
    guard.begin(ATTEMPT)
    guard.computed(ATTEMPT)

    def compute_three() -> None:
        guard.begin(ATTEMPT)
        guard.check()
        model.weight.detach().add_(1.0)
        guard.check()
        model.weight.detach().copy_(before)
        guard.computed(ATTEMPT)

    compute_three()
    with pytest.raises(ConfigurationError, match="between the micro-batches"):
        compute_three()
    guard.close()


@pytest.mark.parametrize("call", ["step.log", "run.log"])
def test_a_number_with_an_endless_name_is_refused_by_a_sentence(call: str) -> None:
    def script() -> None:
        model = nn.Linear(3, 1)
        data = torch.utils.data.TensorDataset(torch.ones(4, 3))
        with vf.elastic(
            model, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=4, steps=1, virtual_nodes=2
        ) as run:
            for step in run:
                for (x,) in step:
                    loss = model(x).sum()
                    loss.backward()
                    step.log(**{"m" * (254 if call == "step.log" else 253): loss})
                run.log(**{"m" * 254: 1.0})

    with pytest.raises(ConfigurationError, match=rf"{call} got a name of 254 characters .*give names of at most 253"):
        script()


def test_watching_optimizers_leaves_them_separable_and_ends_with_the_run() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = guard_of(model, optimizer)
    assert is_separable(optimizer, block=4_096)
    guard.place = "inner loop"
    with pytest.raises(ConfigurationError):
        optimizer.step()
    guard.place = "library"
    optimizer.step()
    guard.close()
    assert not base._global_optimizer_pre_hooks
