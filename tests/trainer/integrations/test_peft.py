"""PEFT's adapters trained by ``ElasticTrainer``: the base weights stay, and what is saved is the adapters."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, Trained, alone
from jobs import ROOT, run_job
from safetensors import safe_open
from trainer_scripts import MODELS, WORDS, build, train, wrote

from tiers import needs
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_CHECKPOINT_STEPS
from virtualflow.state import digests
from virtualflow.state.checkpoint_format import find_by_path, load

pytestmark = [pytest.mark.nightly, needs("transformers"), needs("peft")]

SENTENCE = "the quick brown fox jumps over the lazy dog "


def names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return sorted(tensors.keys())


def test_it_comes_to_what_the_trainer_comes_to_and_leaves_the_base_weights_alone(tmp_path: Path) -> None:
    kinds = ("plain", "elastic")
    trainers = [build("lora without dropout", tmp_path / kind, elastic=kind == "elastic") for kind in kinds]
    base = {name: tensor.clone() for name, tensor in trainers[1].model.named_parameters() if not tensor.requires_grad}
    plain, elastic = [trainer.train() for trainer in trainers]
    assert elastic.training_loss == pytest.approx(plain.training_loss, rel=1e-5)
    for (name, one), other in zip(trainers[1].model.named_parameters(), trainers[0].model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        assert name not in base or torch.equal(one, base[name])
    assert len(base) > 0
    assert any("lora_B" in name and one.any() for name, one in trainers[1].model.named_parameters()), "they learn"


def test_the_bits_are_the_same_on_one_to_three_workers_and_through_a_join_and_a_kill_of_the_leader(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, "lora", str(tmp_path / "alone"))
    for workers in (1, 2, 3):
        job = start_job(train, "lora", str(tmp_path / str(workers)), workers=workers)
        assert job.results() == [reference] * workers
    job = start_job(train, "lora", str(tmp_path / "changing"), "worker-0", workers=2, hold=3)
    job.reach(3)
    job.join()
    outcomes = job.finish()
    assert [each.value for each in outcomes.values() if each.kind == "returned"] == [reference] * 2, outcomes
    assert outcomes["worker-0"].kind == "killed"
    assert wrote(tmp_path / "changing") == wrote(tmp_path / "3") == wrote(tmp_path / "alone")


def train_to_the_end(directory: str, resume: str = "") -> Trained:
    """The weights of the last step, not those that were the best."""
    return train("lora", directory, "", resume, load_best_model_at_end=False)


def test_checkpoints_of_the_trainer_are_adapters_only_and_it_goes_on_from_them_to_the_same_bits(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train_to_the_end, str(tmp_path / "whole"))
    saved = tmp_path / "whole" / "checkpoint-8"
    assert all("lora_" in name for name in names_in(saved / "adapter_model.safetensors"))
    assert not list(saved.glob("model*")) + list(saved.glob("pytorch_model*"))
    shutil.copytree(saved, tmp_path / "job" / "checkpoint-8")
    resumed = str(tmp_path / "job" / "checkpoint-8")
    job = start_job(train_to_the_end, str(tmp_path / "job"), resumed, workers=1, hold=11)
    job.reach(11)
    job.join()
    assert [result.digest for result in job.results()] == [reference.digest] * 2


def test_what_it_saves_is_loaded_without_it(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = build("lora", tmp_path, max_steps=4)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    torch.manual_seed(0)
    base, _ = MODELS["llama"]()
    loaded = PeftModel.from_pretrained(base, tmp_path / "final")
    assert digests.digest(loaded.state_dict()) == digests.digest(trainer.model.state_dict())


def test_the_librarys_own_checkpoints_hold_the_base_weights_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    environment = {ENV_CHECKPOINT_DIR: str(own), ENV_CHECKPOINT_STEPS: "4"}
    reference = alone(train, "lora", str(tmp_path / "first"), environment=environment)
    newest = find_by_path(own, print)
    assert newest is not None
    names = load(newest)["parameters"]
    assert any("lora_A" in name for name in names)
    assert any("embed_tokens" in name for name in names)
    again = alone(train, "lora", str(tmp_path / "second"), environment=environment)
    assert again.digest == reference.digest, "it begins at the end of the first"


def test_the_example_comes_to_one_digest_through_a_kill_and_a_resize(tmp_path: Path) -> None:
    script = ROOT / "examples" / "lora.py"
    arguments = ("--steps", 12, "--batch-size", 16, "--text", text(tmp_path))
    found = []
    for number, options in enumerate((("--workers", 1), ("--workers", 2, "--schedule", "3:kill,6:=3"))):
        (tmp_path / str(number)).mkdir()
        done = run_job(tmp_path / str(number), *options, script, *arguments, "--out", tmp_path / str(number) / "out")
        assert "parameters have learned" in done.output + done.errors
        found.append(done.bits)
        assert (tmp_path / str(number) / "out" / "adapters" / "adapter_model.safetensors").exists()
    assert found[0] == found[1]


def test_the_example_adapts_a_model_that_was_saved(tmp_path: Path) -> None:
    base = tmp_path / "base"
    torch.manual_seed(0)
    MODELS["llama"]()[0].save_pretrained(base)
    tokenizer().save_pretrained(base)
    done = run_job(
        tmp_path,
        *("--workers", 1, ROOT / "examples" / "lora.py", "--base", base, "--text", text(tmp_path)),
        *("--steps", 4, "--batch-size", 8, "--out", tmp_path / "out"),
    )
    assert "parameters have learned" in done.output + done.errors
    names = names_in(tmp_path / "out" / "adapters" / "adapter_model.safetensors")
    assert all("lora_" in name for name in names), "with a base of its own no embedding is trained"


def text(directory: Path) -> Path:
    path = directory / "text.txt"
    path.write_text(SENTENCE * 300)
    return path


def tokenizer() -> Any:
    """One that knows words of the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["?", *sorted(set(SENTENCE.split()))])}
    assert len(words) <= WORDS
    fast = Tokenizer(models.WordLevel(words, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="?")
