"""Hugging Face's ``Trainer`` over virtual nodes: what it would come to by itself, and the same bits on any workers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, alone
from trainer_scripts import build, history, outcome, train, train_divided, wrote

import virtualflow as vf
from tiers import needs
from virtualflow.state import digests

pytestmark = [pytest.mark.nightly, needs("transformers")]


def assert_close(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Two histories, to rounding."""
    assert [entry.keys() for entry in found] == [entry.keys() for entry in wanted]
    for one, other in zip(found, wanted, strict=True):
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=1e-5), (name, one, other)


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        ("llama", {}),
        ("llama", {"max_steps": 10, "max_grad_norm": 0.1, "bf16": True, "dataloader_drop_last": True}),
        ("bert", {}),
        (
            "bert",
            {
                "dataloader_drop_last": True,
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "metric_for_best_model": "loss",
                "label_smoothing_factor": 0.1,
            },
        ),
    ],
    ids=["llama", "llama, clipped in bfloat16", "bert", "bert, by epochs and by its plateau"],
)
def test_it_comes_to_what_the_trainer_comes_to(model: str, changed: dict[str, Any], tmp_path: Path) -> None:
    trainers = [build(model, tmp_path / kind, elastic=kind == "elastic", **changed) for kind in ("plain", "elastic")]
    plain, elastic = [trainer.train() for trainer in trainers]
    close = 2e-2 if changed.get("bf16") else 1e-5
    assert elastic.global_step == plain.global_step
    assert elastic.training_loss == pytest.approx(plain.training_loss, rel=close)
    assert wrote(tmp_path / "elastic") == wrote(tmp_path / "plain")
    if changed.get("bf16"):
        return
    assert_close(history(trainers[1]), history(trainers[0]))
    for one, other in zip(trainers[1].model.parameters(), trainers[0].model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_the_bits_are_the_same_on_three_workers_and_through_a_join_and_a_kill_of_the_leader(
    model: str, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, model, str(tmp_path / "alone"))
    job = start_job(train, model, str(tmp_path / "three"), workers=3)
    assert job.results() == [reference] * 3
    job = start_job(train, model, str(tmp_path / "changing"), "worker-0", workers=2, hold=3)
    job.reach(3)
    job.join()
    outcomes = job.finish()
    assert [each.value for each in outcomes.values() if each.kind == "returned"] == [reference] * 2, outcomes
    assert outcomes["worker-0"].kind == "killed"
    assert wrote(tmp_path / "changing") == wrote(tmp_path / "three") == wrote(tmp_path / "alone")


def test_dropout_draws_the_same_in_any_worker(tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train_with_dropout, str(tmp_path / "alone"))
    assert start_job(train_with_dropout, str(tmp_path / "two"), workers=2).results() == [reference] * 2


def train_with_dropout(directory: str) -> Any:
    trainer = build("bert", Path(directory), max_steps=4)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    trainer.train()
    return outcome(trainer)


def test_it_resumes_from_its_checkpoints_to_the_same_bits_and_the_trainer_does_too(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, "llama", str(tmp_path / "whole"))
    for name in ("alone", "job", "plain"):
        shutil.copytree(tmp_path / "whole" / "checkpoint-8", tmp_path / name / "checkpoint-8")
    checkpoint = {name: str(tmp_path / name / "checkpoint-8") for name in ("alone", "job", "plain")}
    resumed = alone(train, "llama", str(tmp_path / "alone"), "", checkpoint["alone"])
    assert resumed.digest == reference.digest
    job = start_job(train, "llama", str(tmp_path / "job"), "", checkpoint["job"], workers=1, hold=11)
    job.reach(11)
    job.join()
    assert [result.digest for result in job.results()] == [reference.digest] * 2
    plain = build("llama", tmp_path / "plain", elastic=False)
    plain.train(resume_from_checkpoint=checkpoint["plain"])
    whole = build("llama", tmp_path / "again")
    whole.train()
    for one, other in zip(plain.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_it_goes_on_from_the_newest_checkpoint_that_is_complete(tmp_path: Path) -> None:
    reference = alone(train, "bert", str(tmp_path))
    for newest in ("checkpoint-18", "checkpoint-16"):
        (tmp_path / newest / "trainer_state.json").unlink()
    trainer = build("bert", tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert outcome(trainer).digest == reference.digest
    # All is done: there is nothing to go on with.
    again = build("bert", tmp_path)
    assert again.train(resume_from_checkpoint=True).global_step == 18
    assert digests.digest(again.model.state_dict()) == reference.digest
    with pytest.raises(vf.ConfigurationError, match="has no complete checkpoint; leave out resume_from_checkpoint"):
        build("bert", tmp_path / "nowhere").train(resume_from_checkpoint=True)


def test_where_a_run_writes_is_no_part_of_its_result(tmp_path: Path) -> None:
    from virtualflow.integrations.transformers import Story

    stories = []
    for name in ("one", "two"):
        trainer = build("bert", tmp_path / name)
        trainer.train()
        assert trainer.state.best_model_checkpoint.startswith(str(tmp_path / name))
        stories.append(Story(trainer))
    assert stories[0].state_dict() != stories[1].state_dict()
    assert stories[0].result_dict() == stories[1].result_dict()


def test_what_it_saves_is_loaded_without_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = build("llama", tmp_path, max_steps=4)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert digests.digest(loaded.state_dict()) == digests.digest(trainer.model.state_dict())
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (4, trainer.state.epoch)


def stop_early(directory: str) -> Any:
    """No evaluation counts as better, so that it stops at the third."""
    from transformers import EarlyStoppingCallback

    callbacks = [EarlyStoppingCallback(2, early_stopping_threshold=1e9)]
    trainer = build(
        "bert", Path(directory), callbacks=callbacks, metric_for_best_model="loss", eval_steps=3, save_steps=3
    )
    result = trainer.train()
    return result.global_step, digests.digest(trainer.model.state_dict())


def test_a_callback_stops_all_workers_also_one_that_has_joined(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(stop_early, str(tmp_path / "alone"))
    assert reference[0] == 9
    job = start_job(stop_early, str(tmp_path / "job"), workers=1, hold=4)
    job.reach(4)
    job.join()
    assert job.results() == [reference] * 2


def events(directory: str) -> Any:
    """The events of a training, and which of them the leader has seen as such."""
    from transformers import TrainerCallback

    seen: list[tuple[str, int, bool]] = []

    class Notes(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Of what one cares for."""

    def note(name: str) -> Any:
        def on_event(self: Any, args: Any, state: Any, control: Any, **options: Any) -> None:
            seen.append((name, state.global_step, state.is_world_process_zero))

        return on_event

    for name in ("train_begin", "epoch_begin", "step_begin", "step_end", "evaluate", "save", "epoch_end", "train_end"):
        setattr(Notes, f"on_{name}", note(name))
    build("bert", Path(directory), callbacks=[Notes()], num_train_epochs=1).train()
    return tuple(seen)


def test_callbacks_hear_what_the_trainer_tells_them_and_one_worker_leads(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    found = alone(events, str(tmp_path / "alone"))
    told = [("train_begin", 0), ("epoch_begin", 0)]
    for step in range(1, 7):
        told += [("step_begin", step - 1), ("step_end", step)]
        told += [("evaluate", step), ("save", step)] if step in (4, 6) else []
    # The last step is saved twice by nobody: at its end all that was due was done.
    assert [event[:2] for event in found] == [*told, ("epoch_end", 6), ("train_end", 6)]
    assert all(leads for *_, leads in found)
    both = start_job(events, str(tmp_path / "two"), workers=2).results()
    ends = [[leads for name, _, leads in seen if name == "step_end"] for seen in both]
    assert sorted(ends) == [[False] * 6, [True] * 6]
    begun = [[leads for name, _, leads in seen if name == "train_begin"] for seen in both]
    assert sorted(begun, key=len) == [[False], [False, True]]


def test_divided_parameters_come_to_the_same_bits(tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train_divided, str(tmp_path / "alone"), None)
    job = start_job(train_divided, str(tmp_path / "three"), "parameters", workers=3)
    assert job.results() == [reference] * 3


def test_the_type_of_sums_is_that_of_the_constructor(tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigurationError, match=r"sums in reduce_dtype=torch.bfloat16 would lose bits"):
        build("bert", tmp_path, trainer={"reduce_dtype": torch.bfloat16}).train()


def test_a_model_that_nobody_has_whole_is_not_to_be_saved(tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigurationError, match='divided; set save_strategy="no", give a checkpoint directory'):
        build("llama", tmp_path, trainer={"shard": "parameters"}).train()


def test_fsdp_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build("bert", tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(vf.ConfigurationError, match=r'fsdp divides .*; .* pass shard="parameters" to ElasticTrainer'):
        trainer.train()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"fp16": True}, "fp16 needs a scaler .* use bf16=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size would change the result"),
        ({"eval_on_start": True}, r"eval_on_start is .* call trainer.evaluate\(\) before train"),
        ({"ignore_data_skip": True}, "ignore_data_skip would use samples twice"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen counts the tokens of one worker"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_elastic_is_refused(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigurationError, match=sentence) as caught:
        build("bert", tmp_path, **changed).train()
    assert "\n" not in str(caught.value)


def test_a_callback_between_micro_batches_is_refused(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Looks(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """At gradients that have not arrived."""

        def on_pre_optimizer_step(self, *arguments: Any, **options: Any) -> None:
            """Do nothing."""

    with pytest.raises(vf.ConfigurationError, match="Looks has on_pre_optimizer_step, which has no place"):
        build("bert", tmp_path, callbacks=[Looks()]).train()
