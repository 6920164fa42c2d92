"""What cannot be done is refused with one clear sentence, alone and among workers, and nobody is left waiting."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, alone
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import virtualflow as vf
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.worker.options import fused_sgd_steps


class Shardless(IterableDataset[tuple[Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter([(torch.zeros(3),)] * 8)


class Looked(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0] > 0).long()).sum(1)


def second() -> bool:
    """Whether this is the second worker of a job."""
    return os.environ.get(ENV_WORKER) == "worker-1"


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def start(model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Any = None, **options: Any) -> Any:
    dataset = dataset or TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    return vf.elastic(model, optimizer, dataset, **{"batch_size": 8, "steps": 4, "virtual_nodes": 4, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    with start(model, optimizer, **options) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()


def a_closure() -> None:
    model = linear()
    train(model, torch.optim.LBFGS(model.parameters()))


def a_fused_sgd_of_halves() -> None:
    if fused_sgd_steps(torch.bfloat16):
        pytest.skip("this torch steps them")
    model = linear().to(torch.bfloat16)
    train(model, torch.optim.SGD(model.parameters(), 0.1, fused=True))


def a_parameter_that_is_not_the_models() -> None:
    model = linear()
    train(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))], 0.1))


def neither_epochs_nor_steps() -> None:
    model = linear()
    train(model, sgd(model), steps=None)


def a_plateau_without_its_metric() -> None:
    model = linear()
    optimizer = sgd(model)
    train(model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def a_stream_without_shards() -> None:
    model = linear()
    train(model, sgd(model), dataset=Shardless())


def a_sparse_gradient() -> None:
    torch.manual_seed(0)
    model = Looked()
    train(model, sgd(model))


def a_forgotten_backward() -> None:
    model = linear()
    with start(model, sgd(model)) as run:
        for step in run:
            for (x,) in step:
                step.log(loss=model(x).square().mean())


def a_step_left_early() -> None:
    model = linear()
    with start(model, sgd(model)) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
                if step.number == 2:
                    break


def a_step_that_is_not_iterated() -> None:
    model = linear()
    with start(model, sgd(model)) as run:
        for _ in run:
            pass


def a_step_iterated_twice() -> None:
    model = linear()
    with start(model, sgd(model)) as run:
        for step in run:
            for _ in range(2):
                for (x,) in step:
                    model(x).square().mean().backward()


def a_run_within_a_run() -> None:
    model = linear()
    with start(model, sgd(model)) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
            train(model, sgd(model))


def a_log_outside_of_the_micro_batches() -> None:
    model = linear()
    with start(model, sgd(model)) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
            step.log(loss=1.0)


def a_run_outside_of_its_with_block() -> None:
    model = linear()
    next(iter(start(model, sgd(model))))


def an_unseeded_model() -> None:
    torch.manual_seed(7 if second() else 8)
    model = nn.Linear(3, 1)
    train(model, sgd(model))


def another_architecture() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2 if second() else 1)
    train(model, sgd(model))


def another_optimizer() -> None:
    model = linear()
    train(model, torch.optim.AdamW(model.parameters()) if second() else sgd(model))


def another_freezing() -> None:
    model = linear()
    with start(model, sgd(model)) as run:
        for step in run:
            model.get_parameter("bias").requires_grad_(not (second() and step.number == 2))
            for (x,) in step:
                model(x).square().mean().backward()


def an_evaluation_by_one() -> None:
    model = linear()
    dataset = TensorDataset(torch.zeros(8, 3))
    with start(model, sgd(model)) as run:
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
            if run.leader:
                vf.evaluate(model, dataset, lambda batch: model(batch[0]), batch_size=8)


def a_loop_left_by_a_counter_of_its_own() -> None:
    model = linear()
    with start(model, sgd(model)) as run:
        for count, step in enumerate(run, start=1 if second() else 0):  # as in one that has joined after the first step
            for (x,) in step:
                model(x).square().mean().backward()
            if count == 2:
                break


ALONE: list[tuple[Callable[[], None], type[Exception], str]] = [
    (a_closure, ConfigurationError, "LBFGS evaluates the loss several times .* use an optimizer"),
    (
        a_fused_sgd_of_halves,
        ConfigurationError,
        "leaves parameters of torch.bfloat16 as they are.*leave out fused=True",
    ),
    (a_parameter_that_is_not_the_models, ConfigurationError, "a parameter that is not the model's.* make it part of"),
    (neither_epochs_nor_steps, ConfigurationError, "how long to train is open; pass epochs=, steps= or both"),
    (a_plateau_without_its_metric, ConfigurationError, 'pass scheduler_interval="manual"'),
    (a_stream_without_shards, ConfigurationError, "Shardless has no indices.*give it a method"),
    (a_sparse_gradient, ConfigurationError, "parameter table.weight has a sparse gradient.*sparse=False"),
    (a_forgotten_backward, ConfigurationError, r"no parameter got a gradient.*call loss.backward\(\)"),
    (a_step_left_early, VirtualFlowError, "a step was left before its end; iterate over all its micro-batches"),
    (a_step_that_is_not_iterated, VirtualFlowError, "a step was left before its end; iterate over all"),
    (a_step_iterated_twice, VirtualFlowError, "step 1 was iterated over twice; take the next one from the run"),
    (a_run_within_a_run, VirtualFlowError, "a run is active already; leave its with block before the next"),
    (a_log_outside_of_the_micro_batches, VirtualFlowError, "step.log belongs into the loop over the micro-batches"),
    (a_run_outside_of_its_with_block, VirtualFlowError, "iterate over the run inside its with block"),
]

TOGETHER: list[tuple[Callable[[], None], type[Exception], str]] = [
    (an_unseeded_model, ConfigurationError, "parameters differ between workers at the start; seed before building it"),
    (another_architecture, ConfigurationError, r"do not run the same: parameter weight is \[1, 3\] here and \[2, 3\]"),
    (
        another_optimizer,
        ConfigurationError,
        "do not run the same: the optimizer is SGD here and AdamW there|AdamW here",
    ),
    (another_freezing, VirtualFlowError, "trainable parameters differ between workers in this step; freeze and"),
    (an_evaluation_by_one, VirtualFlowError, "every worker must call vf.evaluate at the same step"),
    (
        a_loop_left_by_a_counter_of_its_own,
        VirtualFlowError,
        "worker left the loop (after step 2|over the steps), and others go on; end the training by steps=",
    ),
    (a_parameter_that_is_not_the_models, ConfigurationError, "a parameter that is not the model's"),
    (a_stream_without_shards, ConfigurationError, "Shardless has no indices"),
    (a_sparse_gradient, ConfigurationError, "parameter table.weight has a sparse gradient"),
    (a_forgotten_backward, ConfigurationError, "no parameter got a gradient in this step"),
    (a_step_left_early, VirtualFlowError, "a step was left before its end"),
    (a_step_iterated_twice, VirtualFlowError, "step 1 was iterated over twice"),
    (a_run_within_a_run, VirtualFlowError, "a run is active already"),
]


def a_second_that_cannot_be_set_up() -> None:
    model = linear()
    train(model, sgd(model), steps=None if second() else 4)


def test_one_that_fails_before_its_self_test_is_heard(start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(a_second_that_cannot_be_set_up, workers=1, hold=2)
    job.reach(2)
    job.start_worker()
    job.wait_for(lambda status: status.phase == "failed", "the word of the second")
    ended = {name: outcome.kind for name, outcome in job.finish().items()}
    assert ended == {"worker-0": "JobFailed", "worker-1": "ConfigurationError"}
    assert "how long to train is open" in (job.status().error or "")


def named(case: Any) -> str | None:
    return case.__name__.replace("_", " ") if isinstance(case, Callable) and not isinstance(case, type) else ""


def assert_is_one_sentence(text: str) -> None:
    assert "\n" not in text
    assert len(text) < 400
    assert not text.removesuffix("...").endswith(".")


@pytest.mark.parametrize(("script", "kind", "sentence"), [pytest.param(*case, id=named(case[0])) for case in ALONE])
def test_alone_it_is_refused(script: Callable[[], None], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(VirtualFlowError, match=sentence) as caught:
        alone(script)
    assert caught.type is kind
    assert_is_one_sentence(str(caught.value))
    # The next one begins as if nothing had been.
    model = linear()
    train(model, sgd(model), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "kind", "sentence"), [pytest.param(*case, id=named(case[0])) for case in TOGETHER])
def test_among_workers_it_ends_the_job(
    script: Callable[[], None],
    kind: type[Exception],
    sentence: str,
    start_job: Callable[..., ElasticJob],
) -> None:
    job = start_job(script, workers=2)
    ended = {name: (outcome.kind, outcome.text) for name, outcome in job.finish().items()}
    told = [text for name, text in ended.values() if name == kind.__name__]
    # Both find out for themselves, or one does and the other hears of it.
    assert told, ended
    for text in told:
        assert re.search(sentence, text), ended
        assert_is_one_sentence(text)
    assert {name for name, _ in ended.values()} <= {kind.__name__, "JobFailed"}, ended
    status = job.status()
    assert status.phase == "failed"
    assert status.error is not None
    assert re.search(sentence, status.error), status.error
