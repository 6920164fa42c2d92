"""Tell which of two sentences comes first with a BERT, by Hugging Face's Trainer, on any number of workers.

python examples/workloads/bert.py                             a tiny BERT with random weights, on Python's documentation
virtualflow run --workers 2 examples/workloads/bert.py        the same bits from two workers
virtualflow run examples/workloads/bert.py --size full --data mrpc    BERT base, fine-tuned on a task of GLUE

The small task is in the manner of GLUE's pairs: the first two sentences of a documentation string, as they stand (1) or
the other way round (0). It takes the extra `transformers`; the full size also `datasets`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

import above  # noqa: F401 - what follows is there
from charlm_task import docstrings_in, standard_library
from virtualflow.integrations.transformers import ElasticTrainer
from workload import LINES, Length, parse_arguments, tell, tell_parameters

LENGTHS = {"small": Length(steps=160, batch_size=64), "full": Length(steps=345, batch_size=32)}
LEARNING_RATE = {"small": 1e-3, "full": 3e-5}
ACCUMULATED = 8  # micro-batches of a global batch: the virtual nodes
PAIRS, TESTED = 2_400, 400  # of sentences, and how many of them are tested on
WORDS, LONGEST = 2_000, 64  # that the tiny BERT knows, and that it reads of a pair
PADDING, UNKNOWN, BEGIN, BETWEEN, SPECIAL = 0, 1, 2, 3, 4
HUB = "google-bert/bert-base-uncased"

Sample = dict[str, Tensor]


def pairs() -> list[tuple[str, str]]:
    """Return the first two sentences of each of the standard library's documentation strings that has so many."""
    found: list[tuple[str, str]] = []
    for file in standard_library():
        try:
            texts = [*docstrings_in(ast.parse(file.read_bytes()))]
        except (SyntaxError, ValueError):  # templates and deliberately broken sources
            continue
        for text in texts:
            sentences = [" ".join(each.split()) for each in re.split(r"(?<=[.!?:])\s+(?=[A-Z])|\n\s*\n", text)]
            first, second, *_ = [each for each in sentences if len(each.split()) >= 3] + ["", ""]
            if second:
                found.append((first, second))
        if len(found) >= PAIRS:
            break
    return found[:PAIRS]


class Ordered(Dataset[Sample]):
    """Each pair of sentences twice: as it stands, and the other way round."""

    def __init__(self, pairs: list[tuple[str, str]], words: dict[str, int]) -> None:
        self._pairs = [[numbers(sentence, words) for sentence in pair] for pair in pairs]

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    def __getitem__(self, index: int) -> Sample:
        label = index % 2
        first, second = self._pairs[index // 2] if label else reversed(self._pairs[index // 2])
        ids = [BEGIN, *first, BETWEEN, *second, BETWEEN]
        segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        return {
            "input_ids": torch.tensor(ids[:LONGEST]),
            "token_type_ids": torch.tensor(segments[:LONGEST]),
            "labels": torch.tensor(label),
        }


def split(sentence: str) -> list[str]:
    """Return the words and signs of a sentence."""
    return re.findall(r"\w+|[^\w\s]", sentence.lower())


def numbers(sentence: str, words: dict[str, int]) -> list[int]:
    """Return the words of a sentence as the tiny BERT knows them: half of what it reads at most."""
    return [words.get(word, UNKNOWN) for word in split(sentence)][: LONGEST // 2 - 2]


def pad(samples: list[Sample]) -> Sample:
    """Make a micro-batch, as long as its longest pair."""
    columns = {
        name: pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=PADDING)
        for name in ("input_ids", "token_type_ids")
    }
    labels = torch.stack([sample["labels"] for sample in samples])
    return columns | {"attention_mask": (columns["input_ids"] != PADDING).long(), "labels": labels}


def small() -> tuple[Any, Any, Any, Any]:
    """Return (model, training set, test set, what makes a micro-batch)."""
    found = pairs()
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    test, train = ([found[place] for place in part] for part in (order[:TESTED], order[TESTED:]))
    counts = Counter(word for pair in train for sentence in pair for word in split(sentence))
    common = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - SPECIAL]
    words = {word: number for number, word in enumerate(common, start=SPECIAL)}
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LONGEST,
        num_labels=2,
    )
    return BertForSequenceClassification(config), Ordered(train, words), Ordered(test, words), pad


def full(task: str) -> tuple[Any, Any, Any, Any]:
    """Return the same of BERT base and a task of GLUE whose samples are pairs of sentences."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, DataCollatorWithPadding

    tokenizer = AutoTokenizer.from_pretrained(HUB)
    data = load_dataset("nyu-mll/glue", task)
    data = data.map(lambda rows: tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), batched=True)
    data = data.remove_columns(["sentence1", "sentence2", "idx"])
    model = BertForSequenceClassification.from_pretrained(HUB, num_labels=2)
    return model, data["train"], data["validation"], DataCollatorWithPadding(tokenizer)


class Tell(TrainerCallback):  # type: ignore[misc]  # seen as Any: it is an extra
    """Prints how good the model is by now."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Called by the Trainer on every worker."""
        if state.is_world_process_zero:
            tell(state.global_step, "test accuracy", metrics["eval_accuracy"])


def main() -> None:
    args = parse_arguments(
        __doc__, LENGTHS, "of --size full: mrpc, rte or wnli", out=("bert-out", "where the model is saved")
    )
    if args.batch_size % ACCUMULATED:
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of {ACCUMULATED}")
    torch.manual_seed(0)
    model, train, test, collate = small() if args.size == "small" else full(args.data or "mrpc")
    every = max(1, args.steps // LINES)
    training = TrainingArguments(
        args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size // ACCUMULATED,
        gradient_accumulation_steps=ACCUMULATED,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=LEARNING_RATE[args.size],
        lr_scheduler_type="linear",
        warmup_steps=args.steps // 10,
        eval_strategy="steps",
        eval_steps=every,
        logging_steps=every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ElasticTrainer(
        model,
        training,
        train_dataset=train,
        eval_dataset=test,
        data_collator=collate,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        callbacks=[Tell()],
    )
    trainer.train()
    trainer.save_model(args.out)
    if trainer.is_world_process_zero():
        tell_parameters(model)


if __name__ == "__main__":
    main()
