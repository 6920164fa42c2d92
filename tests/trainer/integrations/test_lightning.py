"""Lightning's ``Trainer`` over virtual nodes: what it would come to by itself, and the same bits on any workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, alone
from jobs import run_job
from loop_scripts import Points
from torch.utils.data import DataLoader

import virtualflow as vf

pytest.importorskip("lightning", reason="needs lightning: make test-all installs it")

from lightning.pytorch import Callback, LightningModule
from lightning_scripts import Classifier, fit, train, train_divided

from virtualflow.integrations.lightning import Story
from virtualflow.state import digests

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::UserWarning")]


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_it_comes_to_what_the_trainer_comes_to(tmp_path: Path) -> None:
    options: dict[str, Any] = {"module": {"batch_norm": False}, "batch": 16, "accumulated": 1, "val_check_interval": 3}
    _, plain, wanted, _ = fit(str(tmp_path / "plain"), elastic=False, **options)
    _, elastic, found, _ = fit(str(tmp_path / "elastic"), **options)
    assert [(step, list(entry)) for step, entry in found.entries] == [(s, list(entry)) for s, entry in wanted.entries]
    for (_, one), (_, other) in zip(found.entries, wanted.entries, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(elastic.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert files(tmp_path / "elastic") == files(tmp_path / "plain")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"samples": 104, "module": {"batch_norm": False}},
        {"module": {"monitor": "val_loss"}},
        {"samples": 120, "limit_train_batches": 24, "max_steps": 14},
    ],
    ids=["whole steps", "less at the end", "by its plateau", "limited"],
)
def test_it_accumulates_as_the_trainer_does(options: dict[str, Any], tmp_path: Path) -> None:
    first, plain, _, _ = fit(str(tmp_path / "plain"), elastic=False, **options)
    second, elastic, _, _ = fit(str(tmp_path / "elastic"), **options)
    assert (second.global_step, second.current_epoch) == (first.global_step, first.current_epoch)
    for one, other in zip(elastic.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert second.optimizers[0].param_groups[0]["lr"] == first.optimizers[0].param_groups[0]["lr"]
    for name in ("train_loss_epoch", "hits"):
        torch.testing.assert_close(second.callback_metrics[name], first.callback_metrics[name])
    assert files(tmp_path / "elastic") == files(tmp_path / "plain")
    for name in ("last.ckpt", "steps/step=8.ckpt"):
        assert counts(tmp_path / "elastic" / name) == counts(tmp_path / "plain" / name)


def test_where_a_run_writes_is_no_part_of_its_result(tmp_path: Path) -> None:
    stories = []
    for _ in range(2):  # in one folder: the second makes new files beside those of the first
        trainer, _, _, _ = fit(str(tmp_path))
        stories.append(Story(trainer, trainer.fit_loop.epoch_loop.notes))
    one, two = (story.state_dict() for story in stories)
    assert one["versions"] != two["versions"]
    assert digests.content_hash(one["callbacks"]) != digests.content_hash(two["callbacks"])
    assert digests.content_hash(stories[0].result_dict()) == digests.content_hash(stories[1].result_dict())


def counts(checkpoint: Path) -> Any:
    """Where a checkpoint says that the training is, but for calls of zero_grad."""
    loops = torch.load(checkpoint, weights_only=False)["loops"]["fit_loop"]
    del loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["zero_grad"]
    return loops


@pytest.mark.parametrize(
    "options",
    [{"module": {"dropout": 0.3}}, {"samples": 99, "batch": 16, "accumulated": 1, "module": {"batch_norm": False}}],
    ids=["accumulated, with dropout", "a short last batch"],
)
def test_the_bits_are_the_same_on_any_workers_and_through_a_join_and_a_kill_of_the_leader(
    options: dict[str, Any], tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, str(tmp_path / "alone"), options)
    for workers in (2, 3):
        job = start_job(train, str(tmp_path / str(workers)), options, workers=workers)
        assert job.results() == [reference] * workers
    job = start_job(train, str(tmp_path / "changing"), options | {"victim": "worker-0"}, workers=2, hold=3)
    job.reach(3)
    job.join()
    outcomes = job.finish()
    assert [each.value for each in outcomes.values() if each.kind == "returned"] == [reference] * 2, outcomes
    assert outcomes["worker-0"].kind == "killed"
    for name in ("2", "3"):
        assert files(tmp_path / name) == files(tmp_path / "alone")


def test_a_callback_stops_all_workers_also_one_that_has_joined(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    """By the mean loss of an epoch, of which the joiner has not seen the first steps."""
    options = {"stops": True, "max_epochs": 9}
    reference = alone(train, str(tmp_path / "alone"), dict(options))
    assert "(18, 3," in reference.metrics
    job = start_job(train, str(tmp_path / "job"), options, workers=1, hold=4)
    job.reach(4)
    job.join()
    assert job.results() == [reference] * 2


def test_it_resumes_to_the_same_bits_and_the_trainer_reads_its_checkpoints(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, str(tmp_path / "whole"), {})
    checkpoint = str(tmp_path / "whole" / "steps" / "step=8.ckpt")
    resumed = alone(train, str(tmp_path / "alone"), {"resume": checkpoint})
    assert (resumed.digest, resumed.optimizer) == (reference.digest, reference.optimizer)
    job = start_job(train, str(tmp_path / "job"), {"resume": checkpoint}, workers=2)
    assert [result.digest for result in job.results()] == [reference.digest] * 2
    _, plain, _, _ = fit(
        str(tmp_path / "plain"), elastic=False, resume=str(tmp_path / "whole" / "last.ckpt"), max_epochs=4
    )
    assert plain.trainer.global_step == 24
    loaded = Classifier.load_from_checkpoint(tmp_path / "whole" / "last.ckpt")
    assert loaded.hparams["batch_norm"] is True


def test_a_second_fit_of_a_script_is_a_run_of_its_own_also_through_a_kill_in_it(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "cases" / "lightning_twice.py"
    undisturbed = run_job(tmp_path, "--workers", 1, script, interpreters=True)
    faulty = run_job(tmp_path, "--workers", 2, "--schedule", "3:kill,11:kill", script, interpreters=True)
    assert undisturbed.output.splitlines().count("fitted 8") == 2
    assert (faulty.bits, faulty.report["runs"]) == (undisturbed.bits, undisturbed.report["runs"])


class Looks(Callback):  # type: ignore[misc, unused-ignore]
    """At gradients that have not arrived."""

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        """Do nothing."""


class Clips(Classifier):
    """By itself."""

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"callbacks": [Looks()]}, "Looks has on_before_optimizer_step, which has no place between workers"),
        ({"max_time": "00:01:00:00"}, "Timer stops by the clock of one worker; set max_steps"),
        ({"overfit_batches": 2}, "overfit_batches changes the order"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs would change the data"),
        ({"val_check_interval": 5}, "val_check_interval is 5 batches, in the middle of a step of 4"),
        ({"max_epochs": -1}, "how long to train is open; pass max_epochs= or max_steps="),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_elastic_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigurationError, match=sentence) as caught:
        fit(str(tmp_path), **options)
    assert "\n" not in str(caught.value)


def test_divided_parameters_come_to_the_same_bits(tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train_divided, str(tmp_path / "alone"), None)
    job = start_job(train_divided, str(tmp_path / "three"), "parameters", workers=3)
    assert job.results() == [reference] * 3


def test_a_model_that_nobody_has_whole_is_not_to_be_saved(tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigurationError, match="divided; pass enable_checkpointing=False to the Trainer"):
        train_divided(str(tmp_path), "parameters", saves=True)


def test_the_type_of_sums_is_that_of_the_strategy(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from virtualflow.integrations.lightning import ElasticStrategy

    strategy = ElasticStrategy(reduce_dtype=torch.bfloat16)
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(vf.ConfigurationError, match=r"sums in reduce_dtype=torch.bfloat16 would lose bits"):
        trainer.fit(Classifier(), DataLoader(Points(96), batch_size=16))


def test_modules_that_step_or_clip_are_refused(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from virtualflow.integrations.lightning import ElasticStrategy

    def refused(module: LightningModule, sentence: str) -> None:
        trainer = pl.Trainer(
            accelerator="cpu", strategy=ElasticStrategy(), max_epochs=1, logger=False, enable_checkpointing=False
        )
        with pytest.raises(vf.ConfigurationError, match=sentence):
            trainer.fit(module, DataLoader(Points(96), batch_size=16))

    refused(Clips(), "Clips has configure_gradient_clipping, which has no place between workers")
    by_hand = Classifier()
    by_hand.automatic_optimization = False
    refused(by_hand, "steps one optimizer by itself; leave automatic_optimization on")
    nothing = Classifier()
    nothing.training_step = lambda batch, batch_idx: None
    refused(nothing, "training_step has returned None, and a micro-batch cannot be left out")
