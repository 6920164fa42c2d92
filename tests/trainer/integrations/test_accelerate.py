"""``Accelerator`` over virtual nodes: what it would come to by itself, and the same bits on any workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate_scripts import fresh, run, train, train_divided
from elastic_jobs import ElasticJob, alone
from loop_scripts import Points, network
from torch.utils.data import DataLoader

import virtualflow as vf
from tiers import needs

pytestmark = [pytest.mark.nightly, needs("accelerate")]

SHORT = {"samples": 99, "batch": 16, "batch_norm": False}
"""With a last batch of three samples: most virtual nodes have none, and so do workers."""


@pytest.mark.parametrize(
    ("accumulation", "options"),
    [(4, {}), (4, {"samples": 104, "batch_norm": False}), (1, {"batch": 16, "batch_norm": False}), (1, SHORT)],
    ids=["accumulated", "accumulated, with less at the end", "batches in slices", "a short last batch"],
)
def test_it_comes_to_what_accelerate_comes_to(accumulation: int, options: dict[str, Any]) -> None:
    plain, _, wanted = run(fresh(elastic=False, gradient_accumulation_steps=accumulation), elastic=False, **options)
    elastic, _, found = run(fresh(gradient_accumulation_steps=accumulation), **options)
    assert found == pytest.approx(wanted, rel=1e-5)
    for one, other in zip(elastic.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("accumulation", "options"),
    [(4, {"dropout": 0.3}), (1, SHORT)],
    ids=["accumulated, with dropout", "a short last batch"],
)
def test_the_bits_are_the_same_on_any_workers_and_through_a_join_and_a_kill_of_the_leader(
    accumulation: int, options: dict[str, Any], start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, options, accumulation)
    for workers in (2, 3):
        assert start_job(train, options, accumulation, workers=workers).results() == [reference] * workers
    job = start_job(train, options | {"victim": "worker-0"}, accumulation, workers=2, hold=3)
    job.reach(3)
    job.join()
    outcomes = job.finish()
    assert [each.value for each in outcomes.values() if each.kind == "returned"] == [reference] * 2, outcomes
    assert outcomes["worker-0"].kind == "killed"


def test_divided_parameters_come_to_the_same_bits(start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train_divided, SHORT, None)
    for workers in (2, 3):
        assert start_job(train_divided, SHORT, "parameters", workers=workers).results() == [reference] * workers


def test_a_state_of_a_model_that_nobody_has_whole_is_not_saved(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    job = start_job(train_divided, SHORT | {"saves": str(tmp_path)}, "parameters", workers=2)
    assert any("write a checkpoint, and read it by virtualflow export" in each.text for each in job.finish().values())


def test_the_type_of_sums_is_that_of_the_constructor() -> None:
    with pytest.raises(vf.ConfigurationError, match=r"sums in reduce_dtype=torch.bfloat16 would lose bits"):
        run(fresh(reduce_dtype=torch.bfloat16))


def test_fsdp_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    sentence = r'FSDP divides the model over processes that stay; .* pass shard="parameters" to ElasticAccelerator'
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(vf.ConfigurationError, match=sentence):
        fresh(fsdp_plugin=plugin)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(vf.ConfigurationError, match=sentence):
        fresh()


def test_it_goes_on_from_a_state_to_the_same_bits(tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train, {"saves": str(tmp_path)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-16", "step-4", "step-8"]
    resumed = alone(train, {"resume": str(tmp_path / "step-8")})
    assert resumed == reference
    assert start_job(train, {"resume": str(tmp_path / "step-8")}, workers=2).results() == [reference] * 2
    (tmp_path / "step-4" / "virtualflow.json").write_text(json.dumps({"step": 4, "steps_per_epoch": 7}))
    with pytest.raises(vf.ConfigurationError, match="has 7 steps in an epoch, and this training 6"):
        train({"resume": str(tmp_path / "step-4")})
    (tmp_path / "step-4" / "virtualflow.json").unlink()
    with pytest.raises(vf.ConfigurationError, match=r"has no virtualflow.json, so nobody knows how far it is"):
        train({"resume": str(tmp_path / "step-4")})


def test_states_are_numbered_and_written_by_the_leader(tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    found = start_job(number, str(tmp_path), workers=2).results()
    assert sorted(found) == [(False, 2), (True, 2)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0", "checkpoint_1"]


def number(directory: str) -> Any:
    """Save behind each epoch; whether this worker led, and how many there are."""
    from accelerate.utils import ProjectConfiguration

    accelerator = fresh(project_config=ProjectConfiguration(directory, automatic_checkpoint_naming=True))
    for _ in loop(accelerator, epochs=2):
        led = accelerator.is_main_process
        if accelerator.run.completed_steps == 6 * (accelerator.save_iteration + 1):
            accelerator.save_state()
    return led, accelerator.save_iteration


def loop(accelerator: Any, *, epochs: int = 1, step: bool = True) -> Any:
    """A loop that yields behind each of its micro-batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Points(96), batch_size=4))
    for _ in accelerator.epochs(epochs):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            if step:
                optimizer.step()
            yield model, optimizer, loader
    accelerator.end_training()


def test_a_training_may_end_by_a_break(start_job: Callable[..., ElasticJob]) -> None:
    assert start_job(stop_early, workers=2).results() == [4, 4]


def stop_early() -> int:
    """Leave both loops behind step 4."""
    accelerator = fresh()
    for _ in loop(accelerator, epochs=3):
        if accelerator.run.completed_steps == 4:
            break
    accelerator.end_training()
    return int(accelerator._loop.place["step"])


def test_what_a_body_must_not_do_is_refused() -> None:
    def refused(sentence: str, accelerator: Any, act: Callable[[Any], Any], **options: Any) -> None:
        def go() -> None:
            for each in loop(accelerator, **options):
                act(each)

        with pytest.raises(vf.ConfigurationError, match=sentence) as caught:
            go()
        assert "\n" not in str(caught.value)
        accelerator.end_training()

    accelerator = fresh()
    refused("clip_grad_norm_ is called with max_norm=1.0", accelerator, lambda each: clip(accelerator, each))
    refused(r"optimizer.step\(\) was not called for a micro-batch", fresh(), lambda each: None, step=False)
    refused(r"optimizer.step\(\) was called again", fresh(), lambda each: each[1].step())
    other = fresh()
    refused(r"save_state\(\) was called in the middle of a step", other, lambda each: other.save_state("nowhere"))
    third = fresh()
    refused(r"backward\(\) was called behind optimizer.step", third, lambda each: third.backward(torch.ones(())))
    refused("iterated over twice", fresh(), lambda each: next(iter(each[2])))
    fourth = fresh()
    refused("skip_first_batches would skip samples twice", fourth, lambda each: fourth.skip_first_batches(each[2], 1))


def clip(accelerator: Any, each: Any) -> None:
    """Otherwise than it was said at first."""
    accelerator.clip_grad_norm_(each[0].parameters(), 1.0)


def test_what_cannot_be_elastic_is_refused() -> None:
    for options, sentence in (
        ({"step_scheduler_with_optimizer": False}, "step_scheduler_with_optimizer=False would step the scheduler"),
    ):
        with pytest.raises(vf.ConfigurationError, match=sentence):
            fresh(**options)
    accelerator = fresh()
    with pytest.raises(vf.ConfigurationError, match="prepare the model, its optimizer and its DataLoader"):
        next(iter(accelerator.epochs(1)))
    model = network()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[4])]
    with pytest.raises(vf.ConfigurationError, match="steps one optimizer; give it all parameters in groups"):
        accelerator.prepare(model, *optimizers)
    loader = fresh().prepare(DataLoader(Points(96), batch_size=4))
    with pytest.raises(vf.ConfigurationError, match=r"let the loop over the epochs be 'for epoch in"):
        next(iter(loader))
