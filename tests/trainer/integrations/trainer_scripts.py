"""Trainings with Hugging Face's ``Trainer``, from configurations with random weights; nothing is imported before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from elastic_jobs import Trained, die_here
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from virtualflow.state import digests

WORDS, PADDING = 64, 0


class Texts(Dataset[dict[str, Tensor]]):
    """Sentences of 3 to 23 words, each with a class."""

    def __init__(self, count: int, seed: int, *, longest: int = 23) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, longest + 1, (count,), generator=draw).tolist()
        self.rows = [torch.randint(3, WORDS, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.rows[index]
        return {"input_ids": words, "label": (words.sum() % 3).reshape(())}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded to the longest of a micro-batch; to predict the next word."""
    words = pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=PADDING)
    there = words != PADDING
    return {"input_ids": words, "attention_mask": there.long(), "labels": words.masked_fill(~there, -100)}


def collate_classes(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """To find the class."""
    return collate(rows) | {"labels": torch.stack([row["label"] for row in rows])}


def accuracy_of_words(predicted: Any) -> dict[str, float]:
    labels = predicted.label_ids[:, 1:]
    right = predicted.predictions.argmax(-1)[:, :-1] == labels
    return {"accuracy": float(right[labels != -100].mean())}


def accuracy_of_classes(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def llama() -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config), {"data_collator": collate, "compute_metrics": accuracy_of_words}


def bert() -> tuple[Any, dict[str, Any]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config), {
        "data_collator": collate_classes,
        "compute_metrics": accuracy_of_classes,
    }


def lora(dropout: float = 0.1) -> tuple[Any, dict[str, Any]]:
    from peft import LoraConfig, get_peft_model

    base, options = llama()
    adapters = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(base, adapters), options


def lora_without_dropout() -> tuple[Any, dict[str, Any]]:
    return lora(0.0)


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "llama": llama,
    "bert": bert,
    "lora": lora,
    "lora without dropout": lora_without_dropout,
}
BATCHES = {
    "llama": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "bert": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
}
BATCHES |= dict.fromkeys(("lora", "lora without dropout"), BATCHES["llama"])


def build(
    model_name: str,
    directory: Path,
    *,
    elastic: bool = True,
    callbacks: Any = (),
    trainer: Mapping[str, Any] | None = None,
    **changed: Any,
) -> Any:
    """A trainer of 18 steps: three epochs, the last batch of each short."""
    from transformers import Trainer, TrainingArguments

    from virtualflow.integrations.transformers import ElasticTrainer

    torch.manual_seed(0)
    model, options = MODELS[model_name]()
    arguments = {
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "load_best_model_at_end": True,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        **BATCHES[model_name],
        **changed,
    }
    return (ElasticTrainer if elastic else Trainer)(
        model,
        TrainingArguments(str(directory), **arguments),
        train_dataset=Texts(90, 1),
        eval_dataset=Texts(21, 2),
        callbacks=list(callbacks),
        **options,
        **(trainer or {}),
    )


def history(trainer: Any) -> list[dict[str, Any]]:
    """What was logged, but for how long it took, and what ``ElasticTrainer`` leaves out."""
    left_out = ("_runtime", "_per_second", "_time", "grad_norm", "total_flos")
    return [
        {name: entry[name] for name in sorted(entry) if not name.endswith(left_out)}
        for entry in trainer.state.log_history
    ]


def outcome(trainer: Any) -> Trained:
    """The bits of a training, and all that was logged."""
    optimizer = digests.optimizer_digest(trainer.optimizer)
    return Trained(digests.digest(trainer.model.state_dict()), optimizer, repr(history(trainer)))


def train(model_name: str, directory: str, victim: str = "", resume: str = "", **changed: Any) -> Trained:
    """A script: ``victim`` kills itself in the middle of its micro-batches of step 6."""
    trainer = build(model_name, Path(directory), **changed)
    compute_loss = trainer.compute_loss

    def deadly(*arguments: Any, **options: Any) -> Any:
        if victim and trainer._run is not None and trainer._run.completed_steps == 5:
            die_here(victim)
        return compute_loss(*arguments, **options)

    trainer.compute_loss = deadly
    trainer.train(resume_from_checkpoint=resume or None)
    return outcome(trainer)


def wrote(directory: Path) -> set[str]:
    """The checkpoints there."""
    return {name for name in os.listdir(directory) if name.startswith("checkpoint-")}


def train_divided(directory: str, shard: str | None) -> str:
    """What a training has told whose parameters nobody has all of."""
    options = {"shard": shard, "redundancy": "none"} if shard else {}
    changed = {"save_strategy": "no", "load_best_model_at_end": False}
    trainer = build("llama", Path(directory), trainer=options, **changed)
    trainer.train()
    return repr(history(trainer))
