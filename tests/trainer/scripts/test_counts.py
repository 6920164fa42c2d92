"""What a micro-batch counts by where samples are dropped, and buffers that count."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, Trained, alone, die_here, trained
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, TensorDataset, default_collate

import virtualflow as vf
from virtualflow.data import CountWatch
from virtualflow.data.counting import ALL, Count, count_samples
from virtualflow.errors import ConfigurationError
from virtualflow.step import choose_sums

SAMPLES, BAD = 16, {0, 1, 2, 5, 6, 7, 9}

# --- samples that are dropped -----------------------------------------------------------------------------------------


def rows(count: int) -> list[Tensor]:
    return [torch.zeros(count, 3), torch.zeros(count)]


@pytest.mark.parametrize(
    ("samples", "data", "expected"),
    [
        pytest.param([1, 2, 3, 4], rows(4), Count(rows=4), id="all are there"),
        pytest.param([1, None, 3, 4], rows(3), Count(kept=3, rows=3), id="what was None is not"),
        pytest.param([1, None, None, 4], rows(2), Count(kept=2, rows=2), id="as many tensors as are left"),
        pytest.param([None] * 4, None, Count(kept=0), id="nothing is left"),
        pytest.param([1, 2, 3, 4], [], Count(kept=0), id="nothing was wanted"),
        pytest.param([1, 2, 3, 4], rows(0), Count(kept=0, rows=0), id="no rows"),
        pytest.param([1, None, 3, 4], rows(4), Count(rows=4), id="another one took its place"),
        pytest.param([1, None, 3, 4], rows(2), Count(rows=2, missing=1), id="more were dropped"),
        pytest.param([1, None, 3, 4], [torch.zeros(9), torch.zeros(4)], Count(missing=1), id="tokens in a row"),
        pytest.param([1, 2, 3, 4], rows(3), Count(rows=3), id="fewer rows, and nobody says why"),
        pytest.param([1, 2, 3, 4], {"x": torch.zeros(3, 5), "n": torch.tensor(7)}, Count(rows=3), id="by name"),
        pytest.param([1, 2, 3, 4], [torch.zeros(2, 4, 5), torch.zeros(2, 4)], ALL, id="time steps first"),
        pytest.param([1, 2, 3, 4], [torch.zeros(0, 4) for _ in range(4)], ALL, id="one tensor a sample"),
        pytest.param([1, 2], pack_sequence([torch.zeros(3), torch.zeros(1)]), ALL, id="packed"),
        pytest.param([1, 2, 3, 4], {"graph": object(), "y": torch.zeros(3)}, ALL, id="of its own kind"),
        pytest.param([1, 2, 3, 4], {"tokens": torch.zeros(9), "ends": torch.zeros(4)}, ALL, id="flattened"),
    ],
)
def test_only_what_is_certain_is_counted(samples: list[Any], data: Any, expected: Count) -> None:
    assert count_samples(samples, data, len(samples)) == expected


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        pytest.param([(4, 4), (4, 3)], "collate_fn made 3 rows of 4 samples, and 4 another time", id="some dropped"),
        pytest.param([(4, 3), (4, 4)], "collate_fn made 3 rows of 4 samples, and 4 another time", id="from the start"),
        pytest.param([(4, 2), (4, 2), (2, 1)], None, id="pairs"),
        pytest.param([(4, 9), (4, 3), (4, 4)], None, id="time steps"),
        pytest.param([(4, None), (4, 3)], None, id="unknown before"),
    ],
)
def test_a_doubt_needs_rows_that_differ(seen: list[tuple[int, int | None]], sentence: str | None) -> None:
    watch = CountWatch()
    assert [watch.doubts(loaded, Count(rows=rows)) for loaded, rows in seen][-1] == sentence


class Unreadable(Dataset[Any]):
    """Some of whose samples are ``None``."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 8, generator=draw)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return None if index in BAD else (self.x[index], self.y[index])


def drop(samples: list[Any]) -> Any:
    left = [sample for sample in samples if sample is not None]
    return default_collate(left) if left else None


def train_on_the_rest(**options: Any) -> tuple[Tensor, float]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    given: dict[str, Any] = {"batch_size": 16, "steps": 1, "shuffle": False, "collate_fn": drop, **options}
    with vf.elastic(model, optimizer, Unreadable(), **given) as run:
        for step in run:
            for batch in step:
                if batch is not None:
                    loss = F.mse_loss(model(batch[0]), batch[1])
                    loss.backward()
                    step.log(loss=loss)
    return model.weight.detach(), step.metrics["loss"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="counted"),
        pytest.param({"num_workers": 1}, id="in a loader process"),
        pytest.param({"weight": lambda batch: len(batch[0])}, id="told"),
        pytest.param({"reproducibility": "statistical"}, id="fused"),
    ],
)
def test_a_step_is_a_mean_over_the_samples_that_are_left(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    data, model = Unreadable(), nn.Linear(8, 1)
    left = [index for index in range(SAMPLES) if index not in BAD]
    loss = F.mse_loss(model(data.x[left]), data.y[left])
    loss.backward()
    assert model.weight.grad is not None
    weight, logged = train_on_the_rest(**options)
    torch.testing.assert_close(weight, model.weight.detach() - model.weight.grad)
    assert logged == pytest.approx(loss.item())


def test_a_step_of_which_nothing_is_left_says_so() -> None:
    with pytest.raises(ConfigurationError, match="no samples at all; check the dataset's shards, and what collate_fn"):
        train_on_the_rest(collate_fn=lambda samples: None)


def test_a_collate_fn_that_drops_in_secret_is_doubted_once(caplog: pytest.LogCaptureFixture) -> None:
    def secretive(samples: list[Any]) -> Any:
        return default_collate(samples[: 2 - (float(samples[0][0]) > 0.5)])

    model = nn.Linear(1, 1)
    data = TensorDataset(torch.linspace(0, 1, 16)[:, None])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        caplog.at_level(logging.WARNING, "virtualflow"),
        vf.elastic(model, optimizer, data, batch_size=16, steps=2, shuffle=False, collate_fn=secretive) as run,
    ):
        for step in run:
            for (x,) in step:
                model(x).square().mean().backward()
    (told,) = [record.message for record in caplog.records if "collate_fn" in record.message]
    assert told.startswith("collate_fn made 1 rows of 2 samples, and 2 another time, and a micro-batch counts by")
    assert "weight=lambda batch: len(batch[0])" in told


# --- buffers that count -----------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts the samples that it has seen, and which of its outputs was the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.register_buffer("load", torch.zeros(4))
        self.register_buffer("shares", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.int16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        chosen = torch.bincount(y.argmax(-1), minlength=4)
        self.load += chosen / 3
        self.shares += chosen / len(x)
        self.seen += len(x)
        self.replaced = self.replaced + 1
        return y


WHOLE = ("seen", "replaced")
SUMS = {"seen": "sum", "load": "sum", "share*": "sum", "replaced": "sum"}


def count(buffers: dict[str, Any] | None = None, dies: str = "") -> Trained:
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = TensorDataset(torch.randn(48, 6), torch.randn(48, 4))
    with vf.elastic(model, optimizer, data, batch_size=12, epochs=2, virtual_nodes=6, buffers=buffers) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
                if step.number == 6 and run.completed_steps == 5:
                    die_here(dies)
    return trained(run, model, optimizer, more=[model.get_buffer(name).sum().item() for name in ("load", *WHOLE)])


def test_named_buffers_count_what_all_virtual_nodes_add() -> None:
    assert count(SUMS).more == [pytest.approx(96 / 3), 96, 2 * 4 * 6]
    assert count().more == [pytest.approx(96 / 3 / 6), 96 / 6, 2 * 4]


def test_sums_have_the_same_bits_when_a_worker_joins_and_another_is_killed(
    start_job: Callable[..., ElasticJob],
) -> None:
    reference = alone(count, SUMS)
    job = start_job(count, SUMS, "worker-1", workers=2, hold=2)
    job.reach(2)
    job.join()
    assert [each.value for each in job.finish().values() if each.kind == "returned"] == [reference] * 2


def test_a_whole_number_that_changes_unnamed_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "virtualflow"):
        count({"load": "sum"})
        count(SUMS)
    (told,) = [record.message for record in caplog.records if "have no mean" in record.message]
    assert told.startswith("the forward pass changes the buffers replaced, seen, which have no mean: of each step the")
    assert 'buffers={"replaced": "sum"}' in told


def test_a_number_of_the_scripts_own_module_that_becomes_a_mean_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "virtualflow"):
        count({name: kind for name, kind in SUMS.items() if name != "load"})
        count(SUMS)
    (told,) = [record.message for record in caplog.records if "the mean over" in record.message]
    assert told.startswith("the forward pass changes the buffer load, of which the mean over the step's virtual nodes")
    assert 'buffers={"load": "sum"}' in told


@pytest.mark.parametrize("module", [nn.BatchNorm1d(6), type("MyNorm", (nn.BatchNorm1d,), {})(6)])
def test_statistics_of_torchs_own_modules_are_no_news(module: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(module, nn.Linear(6, 4))
    data = TensorDataset(torch.randn(48, 6), torch.randn(48, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with (
        caplog.at_level(logging.INFO, "virtualflow"),
        vf.elastic(model, optimizer, data, batch_size=24, steps=2, virtual_nodes=2) as run,
    ):
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
    assert not [record.message for record in caplog.records if "forward pass" in record.message]


@pytest.mark.parametrize(
    ("buffers", "sentence"),
    [
        pytest.param({"sen": "sum"}, "no buffer 'sen'; did you mean 'seen'", id="a name"),
        pytest.param({"*.load": "sum"}, r"no buffer '\*.load'; did you mean 'load'", id="a pattern"),
        pytest.param({"seen": "mean"}, "the kind of 'seen' is 'mean'; it must be \"sum\"", id="a kind"),
        pytest.param({"flags": "sum"}, "buffer flags is of torch.bool, which cannot be added up", id="a type"),
        pytest.param(["seen"], "it takes a dict such as", id="a list"),
    ],
)
def test_what_names_no_sum_is_refused_by_name(buffers: Any, sentence: str) -> None:
    model = Counting()
    model.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ConfigurationError, match=sentence):
        choose_sums(model, buffers)
