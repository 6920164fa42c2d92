"""A mean over tokens is that of plain PyTorch over the whole batch, and has the same bits whoever computes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import BEGUN_EARLY, EXCHANGE, ElasticJob, Trained, alone, die_here, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_TRACE_DIR, ENV_VERIFY
from virtualflow.step import SpotChecker

BATCH, NODES, EPOCHS = 16, 8, 3
WORDS, LENGTH, PADDING = 11, 6, -100


def sentences() -> TensorDataset:
    """Of 0 to 6 words; the micro-batches of two virtual nodes have none at all."""
    draw = torch.Generator().manual_seed(5)
    words = torch.randint(0, WORDS, (44, LENGTH), generator=draw)
    lengths = torch.randint(0, LENGTH + 1, (44, 1), generator=draw)
    lengths[2:4] = lengths[36:38] = 0
    return TensorDataset(words, words.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= lengths, PADDING))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, WORDS)).double()
    return model, torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)


def tokens(y: Tensor) -> Tensor:
    return (y != PADDING).sum()


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over its tokens; over none it is not a number."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PADDING)


def train(how: str, victim: str = "", **options: Any) -> Trained:
    model, optimizer = build()
    if how == "function":
        options["weight"] = lambda batch: tokens(batch[1])
    if how == "by layers":
        options["memory"] = vf.Memory("1GiB", order="layer-major")
    fixed: dict[str, Any] = {"batch_size": BATCH, "virtual_nodes": NODES, "epochs": EPOCHS, "clip_grad_norm": 0.5}
    losses = []
    with vf.elastic(model, optimizer, sentences(), shuffle=False, **fixed, **options) as run:
        for step in run:
            if how == "by layers":

                def loss_of_node(logits: Tensor, y: Tensor) -> Tensor:
                    step.weight(tokens(y))  # noqa: B023
                    return cross_entropy(logits, y)

                step.layer_major(loss_of_node)
            for x, y in [] if how == "by layers" else step:
                if how == "before":
                    step.weight(tokens(y))
                loss = cross_entropy(model(x), y)
                loss.backward()
                if how == "behind":
                    step.weight(int(tokens(y)))
                step.log(loss=loss)
                if step.number == 6:
                    die_here(victim)
            losses.append(step.metrics["loss"])
    return trained(run, model, optimizer, losses, {name: value.clone() for name, value in model.state_dict().items()})


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """The same with the sum over all tokens of a batch, over ``num_items_in_batch``."""
    model, optimizer = build()
    losses = []
    for _ in range(EPOCHS):
        for x, y in zip(*(part.split(BATCH) for part in sentences().tensors), strict=True):
            num_items_in_batch = tokens(y)
            logits = model(x).flatten(0, 1)
            loss = F.cross_entropy(logits, y.flatten(), ignore_index=PADDING, reduction="sum") / num_items_in_batch
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("how", "reproducibility"),
    [
        ("function", "bitwise"),
        ("before", "statistical"),
        ("behind", "bitwise"),
        ("by layers", "bitwise"),
        nightly("before", "bitwise"),
        *(nightly(how, "statistical") for how in ("function", "behind", "by layers")),
    ],
)
def test_it_is_plain_pytorch_with_num_items_in_batch(how: str, reproducibility: str) -> None:
    losses, weights = plain()
    found = alone(lambda: train(how, reproducibility=reproducibility))
    torch.testing.assert_close(found.metrics, losses, rtol=1e-9, atol=0)
    for name, value in weights.items():
        # The factor of the clipping is torch's, in single precision.
        torch.testing.assert_close(found.more[name], value, rtol=1e-6, atol=1e-9)


def test_a_mean_over_samples_is_another_one() -> None:
    losses, _ = plain()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(alone(train, "not at all").metrics, losses, rtol=1e-3, atol=0)


def in_a_job(how: str, victim: str) -> Trained:
    found = train(how, victim)
    return Trained(found.digest, found.optimizer, repr(found.metrics[-3:]))


@pytest.mark.parametrize("how", ["before", *(nightly(how) for how in ("function", "behind"))])
def test_the_bits_are_the_same_through_a_join_and_a_kill_with_every_step_checked(
    how: str, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(in_a_job, how, "")
    job = start_job(in_a_job, how, "worker-1", workers=2, hold=2, environment={EXCHANGE: "early", ENV_VERIFY: "1"})
    job.reach(2)
    job.join()
    outcomes = job.finish()
    results = [outcome.value for outcome in outcomes.values() if outcome.kind == "returned"]
    assert results == [reference] * 2, outcomes
    begun = sum(outcome.log.count(BEGUN_EARLY) for outcome in outcomes.values())
    assert begun if how != "behind" else not begun


@pytest.mark.nightly
def test_a_trace_has_the_weights_and_changes_nothing(tmp_path: Path) -> None:
    traced = alone(in_a_job, "before", "", environment={ENV_TRACE_DIR: str(tmp_path)})
    assert traced == alone(in_a_job, "before", "")
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    weights = [line["metrics"]["its weight"] for line in lines if "its weight" in line.get("metrics", {})]
    assert len(weights) == 3 * EPOCHS * NODES
    assert sum(map(float, weights)) == EPOCHS * int(tokens(sentences().tensors[1]))


def test_a_weight_that_is_another_one_on_the_worker_that_checks_is_found() -> None:
    model, _ = build()
    checker = SpotChecker(model, seed=1, virtual_nodes=NODES, sample=1.0)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    values = []
    for weight in (None, 3.0, 4.0, 3.0):
        checker.note(weight)
        values.append(checker.value)
    assert values[1] == values[3]
    assert len(set(values)) == 3


# --- what is refused --------------------------------------------------------------------------------------------------


def weigh(use: Callable[[Any, int], object], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Train with something done before each micro-batch, given its number; and behind the loop, given -1."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = TensorDataset(torch.ones(8, 3, dtype=dtype))
    with vf.elastic(model, optimizer, dataset, batch_size=8, virtual_nodes=4, steps=2, **options) as run:
        for step in run:
            for number, (x,) in enumerate(step):
                use(step, number)
                model(x).square().mean().backward()
            use(step, -1)


def each(value: Any) -> Callable[[Any, int], object]:
    return lambda step, number: step.weight(value) if number >= 0 else None


REFUSED: dict[str, tuple[Callable[[Any, int], object], dict[str, Any], str]] = {
    "less than nothing": (each(-1), {}, "is to weigh -1; its weight is one number from 0"),
    "no number": (each(float("nan")), {}, "is to weigh nan; its weight is one number from 0"),
    "two numbers": (each(torch.ones(2)), {}, "is to weigh tensor.*; its weight is one number from 0"),
    "none": (each(None), {}, "is to weigh None; its weight is one number from 0"),
    "all nothing": (each(0), {}, "all micro-batches of a step weigh nothing"),
    "some": (
        lambda step, number: step.weight(1) if number == 1 else None,
        {},
        "called for 1 of the 4 micro-batches",
    ),
    "half precision": (each(5), {"dtype": torch.float16}, "is of torch.float16, in which"),
    "behind the loop": (lambda step, number: step.weight(1), {}, "step.weight belongs into the loop"),
    "a function": (lambda step, number: None, {"weight": lambda batch: -len(batch[0])}, "is to weigh -2"),
}


@pytest.mark.parametrize(("use", "options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_mean_is_refused(use: Callable[[Any, int], object], options: Any, sentence: str) -> None:
    with pytest.raises(vf.VirtualFlowError, match=sentence) as caught:
        weigh(use, **options)
    assert "\n" not in str(caught.value)
