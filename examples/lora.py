"""Adapt a Llama to a text with LoRA, by Hugging Face's Trainer and PEFT, on any number of workers.

python examples/lora.py                                     a small Llama with random weights, on Python's documentation
virtualflow run --workers 2 examples/lora.py --steps 60     the same bits from two workers
virtualflow run examples/lora.py --base MODEL --text FILE   a real model, with its tokenizer

Only the adapters learn, and only they are in what the Trainer saves; it takes the extra `peft`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    default_data_collator,
)

from arguments import parser, steps_to_make
from charlm_task import CHARACTERS, CONTEXT, DEFAULT_TEXT_BYTES, docstrings
from virtualflow.integrations.transformers import ElasticTrainer

ACCUMULATED = 4  # micro-batches of a global batch: the virtual nodes
HELD_OUT = 0.02  # of the text


class Pieces(Dataset[dict[str, Tensor]]):
    """Tokens cut into pieces side by side, each of which the model is to predict from its own beginning."""

    def __init__(self, tokens: Tensor) -> None:
        self._pieces = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self._pieces[index].long()
        return {"input_ids": piece, "labels": piece}


def base_model(name: str | None) -> Any:
    """Return the model that stays as it is: one that was saved or published, or a small one with random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    config = LlamaConfig(
        vocab_size=CHARACTERS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def tokens(path: Path | None, base: str | None) -> Tensor:
    """Return the text at `path`, or Python's documentation, in the base model's tokens, or as bytes without one."""
    text = docstrings(DEFAULT_TEXT_BYTES) if path is None else path.read_bytes()
    if base is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tokenizer = AutoTokenizer.from_pretrained(base)
    return torch.tensor(tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"])


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    model = get_peft_model(
        base_model(args.base),
        LoraConfig(
            r=args.rank,
            lora_alpha=2 * args.rank,
            lora_dropout=0.05,
            target_modules="all-linear",
            # Random embeddings are no start for adapters alone.
            modules_to_save=None if args.base else ["embed_tokens", "lm_head"],
            task_type="CAUSAL_LM",
        ),
    )
    text = tokens(args.text, args.base)
    cut = int((1 - HELD_OUT) * len(text)) // CONTEXT * CONTEXT
    train, held_out = Pieces(text[:cut]), Pieces(text[cut:])
    training = TrainingArguments(
        str(args.out),
        max_steps=steps_to_make(args, len(train)),
        per_device_train_batch_size=args.batch_size // ACCUMULATED,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=20,
        save_steps=100,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ElasticTrainer(
        model, training, train_dataset=train, eval_dataset=held_out, data_collator=default_data_collator
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(str(args.out / "adapters"))
    if trainer.is_world_process_zero():
        trained, whole = model.get_nb_trainable_parameters()
        loss = trainer.evaluate()["eval_loss"]
        print(f"held-out loss {loss:.4f} nats a token, perplexity {math.exp(loss):.1f}")
        print(f"{trained:,} of {whole:,} parameters have learned; they are in {args.out / 'adapters'}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    arguments = parser(__doc__, epochs=None, steps=200, batch_size=32)
    arguments.add_argument(
        "--base", metavar="MODEL", help="a directory, or a name on the hub (default: random weights)"
    )
    arguments.add_argument("--text", type=Path, metavar="FILE", help="what to learn (default: Python's documentation)")
    arguments.add_argument("--rank", type=int, default=8, metavar="R", help="of the adapters (8)")
    arguments.add_argument("--learning-rate", type=float, default=5e-3, metavar="X", help="at its highest (0.005)")
    arguments.add_argument("--out", type=Path, default=Path("lora-out"), metavar="DIRECTORY", help="(lora-out)")
    arguments.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    args = arguments.parse_args()
    if args.batch_size % ACCUMULATED:
        arguments.error(f"--batch-size {args.batch_size} must be a multiple of {ACCUMULATED}")
    return args


if __name__ == "__main__":
    main()
