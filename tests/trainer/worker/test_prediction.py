"""``vf.predict``: every row once, in dataset order, as rows or as files, whatever happens to some workers meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, alone, die_here, trained
from injected import injected
from safetensors.torch import load_file
from test_evaluation import flatten
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import virtualflow as vf
from tiers import nightly
from virtualflow.protocol.settings import ENV_CHECKPOINT_DIR, ENV_WORKER

SIZE = 69
BATCH = 12  # six batches; the last one of 9 leaves virtual nodes with 2 and 1 samples
STEPS = 3  # files of batches 0, 1 to 3, and 4 to 5
X = torch.arange(SIZE * 3, dtype=torch.float32).view(SIZE, 3) / 100


class Striped:
    """The same samples as an iterable dataset: six shards of 12, 12, 12, 11, 11 and 11."""

    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Tensor]:
        for place in range(index + start * count, SIZE, count):
            yield X[place]


class Named(Dataset[dict[str, Tensor]]):
    """Samples that go to the model as keywords."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": X[index]}


def built() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), 0.05), TensorDataset(X, torch.arange(SIZE))


OUTPUTS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a tensor": lambda model, batch: model(batch[0]),
    "a tuple": lambda model, batch: (model(batch[0]), batch[1]),
    "a dict of a list": lambda model, batch: {"inner": [model(batch[0]).argmax(1) == 0, batch[1]], "at": batch[1]},
    "of a stream": lambda model, batch: (model(batch), (batch[:, 0] * 100 / 3).round().long()),
    "what is drawn": lambda model, batch: (torch.rand(len(batch[0])), batch[1]),
}


def read(folder: Path) -> dict[str, Tensor]:
    """The rows of a complete folder in their order, as the documents read them."""
    shards = [load_file(folder / name) for name in json.loads((folder / "prediction.json").read_text())["files"]]
    order = torch.cat([shard["index"] for shard in shards]).argsort()
    return {name: torch.cat([shard[name] for shard in shards])[order] for name in shards[0]}


def content(folder: Path) -> list[Any]:
    """All that a folder holds but the name of the prediction, which is another in each training."""
    manifest = json.loads((folder / "prediction.json").read_text())
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    assert sums.keys() == manifest["files"].keys()
    return [manifest["rows"], manifest["files"], sums]


def predict_twice(
    output: str,
    folder: str = "",
    victim: str = "",
    fatal_call: int = 0,
    drain: bool = False,
    steps: int = 4,
    sharded: bool = False,
) -> Any:
    """Predict after the second step and after the last; ``victim`` goes at its ``fatal_call`` of a function."""
    model, optimizer, dataset = built()
    found, calls = [], 0
    computed: list[tuple[int, ...]] = []

    def rows(batch: Any) -> Any:
        nonlocal calls
        assert not model.training
        assert not torch.is_grad_enabled()
        calls += 1
        if calls == fatal_call and victim in (os.environ.get(ENV_WORKER), "all"):
            if drain:
                signal.raise_signal(signal.SIGTERM)
            else:
                die_here(os.environ[ENV_WORKER])
        computed.append(tuple(batch[1].tolist()) if isinstance(batch, list) else ())
        return OUTPUTS[output](model, batch)

    def predict(number: int) -> None:
        computed.clear()
        to = f"{folder}/{number}" if folder else None
        data = Striped() if output == "of a stream" else dataset
        given = vf.predict(model, data, rows, batch_size=BATCH, to=to)
        found.append(flatten(given) if to is None else content(Path(to)))
        assert output == "of a stream" or len(set(computed)) == len(computed), "no worker computes a batch twice"
        assert model.training

    options: dict[str, Any] = {"batch_size": 12, "virtual_nodes": 6, "drop_last": True, "shard_optimizer": sharded}
    with injected(prediction={"steps": STEPS}), vf.elastic(model, optimizer, dataset, steps=steps, **options) as run:
        for step in run:
            for x, y in step:
                F.cross_entropy(model(x), y % 2).backward()
            if step.number == 2:
                predict(2)
        predict(steps)
    return trained(run, model, optimizer, found)


# --- one process ------------------------------------------------------------------------------------------------------


def straight(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part) for part in X.split(7)])
    model.train()
    return found


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(list(X), id="tensors"),
        pytest.param(TensorDataset(X), id="lists of one"),
        pytest.param(Named(), id="keywords"),
        pytest.param(Striped(), id="a stream"),
    ],
)
@pytest.mark.parametrize("written", [False, True], ids=["returned", "written"])
def test_without_a_run_one_process_predicts_all(dataset: Any, written: bool, tmp_path: Path) -> None:
    model, _, _ = built()
    model[2].train(False)  # modes come back as they were, one by one
    folder = tmp_path / "new" / "predictions" if written else None
    rows = vf.predict(model, dataset, batch_size=7, to=folder)
    if folder is not None:
        assert rows is None
        assert read(folder)["index"].tolist() == list(range(SIZE))
        rows = read(folder)["rows"]
    assert model.training
    assert not model[2].training
    assert torch.equal(rows, straight(model))


@pytest.mark.parametrize("output", OUTPUTS)
def test_files_hold_what_is_returned_in_the_order_of_the_dataset(output: str, tmp_path: Path) -> None:
    def rows_of(name: str) -> Any:
        return [read(tmp_path / name / str(number))[key] for number in (2, 4) for key in KEYS[output]]

    def leaves(values: Any) -> list[Any]:
        return [values] if isinstance(values[0], str) else [leaf for value in values for leaf in leaves(value)]

    returned = alone(predict_twice, output)
    alone(predict_twice, output, str(tmp_path / "written"))
    if output == "what is drawn":  # of each exchange anew, so other numbers, and as many of them
        assert len(set(rows_of("written")[0].tolist())) == SIZE
        return
    assert [flatten(rows) for rows in rows_of("written")] == leaves(returned.metrics)
    if output in ("a tuple", "of a stream"):
        assert returned.metrics[0][1] == ["torch.int64", list(range(SIZE))]


KEYS = {
    "a tensor": ["rows"],
    "a tuple": ["0", "1"],
    "a dict of a list": ["at", "inner.0", "inner.1"],
    "of a stream": ["0", "1"],
    "what is drawn": ["0"],
}
"""The names of the tensors in a file."""


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        pytest.param({}, [0, 1, 5], id="four"),
        pytest.param({"steps": 16}, [0, 1], id="as many as there are"),
        pytest.param({"steps": 2}, [0, 1, 3, 5], id="two"),
        pytest.param({"bytes": 5_000}, [0, 1, 4], id="of the size of three"),
        pytest.param({"bytes": 1}, [0, 1, 2, 3, 4, 5], id="one at least"),
    ],
)
def test_a_file_ends_at_a_number_of_batches_or_bytes(
    limits: dict[str, int], batches: list[int], tmp_path: Path
) -> None:
    model, optimizer, dataset = built()
    with (
        injected(prediction=limits),
        vf.elastic(model, optimizer, dataset, batch_size=12, steps=1, virtual_nodes=6) as run,
    ):
        for step in run:
            for x, y in step:
                F.cross_entropy(model(x), y % 2).backward()
        vf.predict(model, list(X), lambda batch: batch.repeat(1, 10), batch_size=BATCH, to=tmp_path)
    rows = read(tmp_path)["rows"]
    assert torch.equal(rows, X.repeat(1, 10))
    first = {int(path.name.split("-")[1]) for path in tmp_path.glob("*.safetensors")}
    assert sorted(first) == batches


def growing(batch: Tensor) -> Tensor:
    return torch.zeros(len(batch), 1 + int(batch[0, 0] > 1))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        pytest.param(lambda batch: batch.mean(), r"shape \[\] for 11 samples; return one row a sample", id="a mean"),
        pytest.param(lambda batch: batch[:1], r"shape \[1, 3\] for 11 samples", id="too few rows"),
        pytest.param(lambda batch: "cat", "the function of vf.predict returned a str; return a tensor", id="no tensor"),
        pytest.param(lambda batch: (batch, [None]), "returned a NoneType; return a tensor", id="none inside"),
        pytest.param(growing, r"the form \[1\] for one batch and \[2\] for another", id="of other lengths"),
    ],
)
@pytest.mark.parametrize("written", [False, True], ids=["returned", "written"])
def test_rows_that_cannot_be_put_in_order_are_refused(
    function: Callable[[Any], Any], sentence: str, written: bool, tmp_path: Path
) -> None:
    model, _, _ = built()
    with pytest.raises(vf.ConfigurationError, match=sentence):
        vf.predict(model, list(X), function, batch_size=11, to=tmp_path if written else None)
    assert model.training


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        pytest.param(lambda batch: {"index": batch}, "two tensors or more named index; rename one", id="its own name"),
        pytest.param(lambda batch: {"a.0": batch, "a": (batch,)}, "named a.0; rename one", id="one name twice"),
        pytest.param(lambda batch: batch.to(torch.complex128), "torch.complex128, which safetensors", id="complex"),
    ],
)
def test_rows_that_files_cannot_hold_are_refused(function: Callable[[Any], Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigurationError, match=sentence):
        vf.predict(built()[0], list(X), function, batch_size=11, to=tmp_path)


class Summing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class Nothing(Striped):
    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize(
    ("model", "dataset", "sentence"),
    [
        pytest.param(built()[0], built()[2], "a batch is a list of 2 parts; pass fn=", id="samples of two parts"),
        pytest.param(Summing(), list(X), r"the model returned .* shape \[\] .*; pass fn=, which returns", id="a sum"),
        pytest.param(built()[0], iter(X), "which can be gone through once", id="an iterator"),
        pytest.param(built()[0], Nothing(), "the dataset is empty", id="no sample"),
    ],
)
@pytest.mark.parametrize("written", [False, True], ids=["returned", "written"])
def test_what_cannot_be_predicted_is_refused(
    model: nn.Module, dataset: Any, sentence: str, written: bool, tmp_path: Path
) -> None:
    with pytest.raises(vf.ConfigurationError, match=sentence):
        vf.predict(model, dataset, batch_size=11, to=tmp_path if written else None)


def a_prediction(folder: Path) -> None:
    vf.predict(built()[0], list(X), batch_size=11, to=folder)


def part_of_a_prediction(folder: Path) -> None:
    def stop(batch: Tensor) -> Tensor:
        if batch[0, 0] > 1:
            raise KeyboardInterrupt
        return batch

    with pytest.raises(KeyboardInterrupt):
        vf.predict(built()[0], list(X), stop, batch_size=11, to=folder)
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert "files" not in json.loads((folder / "prediction.json").read_text())


def weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"dear")


def no_manifest(folder: Path) -> None:
    (folder / "prediction.json").write_text("[]")


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        (a_prediction, "holds another prediction, or other files of safetensors; give vf.predict an empty or new"),
        (
            part_of_a_prediction,
            "holds another prediction, or other files of safetensors; give vf.predict an empty or new",
        ),
        (weights, "holds another prediction, or other files of safetensors; give vf.predict an empty or new folder"),
        (no_manifest, r"prediction.json cannot be read \(.*\); give vf.predict another folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_that_holds_something_else_stays_as_it_is(
    before: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    before(tmp_path)
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(vf.ConfigurationError, match=sentence):
        a_prediction(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == there


def test_a_prediction_that_has_written_no_rows_keeps_no_other_out(tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigurationError, match="returned a str"):
        vf.predict(built()[0], list(X), lambda batch: "cat", batch_size=11, to=tmp_path)
    a_prediction(tmp_path)
    assert torch.equal(read(tmp_path)["index"], torch.arange(SIZE))


def test_images_that_are_laid_out_by_channels_are_written(tmp_path: Path) -> None:
    images = torch.rand(9, 3, 4, 4)

    def as_it_is(batch: Tensor) -> Tensor:
        return batch.to(memory_format=torch.channels_last)

    vf.predict(built()[0], list(images), as_it_is, batch_size=3, to=tmp_path)
    assert torch.equal(read(tmp_path)["rows"], images)


@pytest.mark.parametrize(
    ("spoil", "error", "sentence"),
    [
        pytest.param(
            lambda path: [each.unlink() for each in path.glob("*.safetensors")],
            vf.ConfigurationError,
            "has no batch-00000000-node-0000.safetensors of .* give vf.predict a folder that all workers share",
            id="a file of another worker's is not to be seen",
        ),
        pytest.param(
            lambda path: os.truncate(path / "batch-00000000-node-0000.safetensors", 99),
            vf.ConfigurationError,
            "has no batch-00000000-node-0000.safetensors of [0-9]{3} bytes, which a worker has written",
            id="a file is short",
        ),
        pytest.param(
            lambda path: (path / "prediction.json").write_text('{"prediction": "other"}'),
            vf.ConfigurationError,
            "holds another prediction",
            id="another prediction has taken it",
        ),
        pytest.param(
            lambda path: (path / "batch-00000001-node-0000.safetensors").mkdir(),
            vf.VirtualFlowError,
            "vf.predict cannot write .*batch-00000001-node-0000.safetensors: Is a directory",
            id="no place to write",
        ),
    ],
)
def test_a_folder_that_is_spoiled_meanwhile_is_one_sentence(
    spoil: Callable[[Path], Any], error: type[Exception], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from virtualflow.worker import prediction

    real, spoiled = prediction.write_whole, []

    def write(path: Path, content: bytes, **options: Any) -> None:
        real(path, content, **options)
        if path.suffix == ".safetensors" and not spoiled:
            spoiled.append(spoil(tmp_path))

    monkeypatch.setattr(prediction, "write_whole", write)
    with pytest.raises(error, match=sentence):
        a_prediction(tmp_path)


def test_a_folder_is_kept_from_others_before_it_has_a_file(tmp_path: Path) -> None:
    begun = []

    def rows(batch: Tensor) -> Tensor:
        if not begun:
            begun.append(True)
            with pytest.raises(vf.ConfigurationError, match="holds another prediction"):
                a_prediction(tmp_path)
        return torch.ones(len(batch))

    vf.predict(built()[0], list(X), rows, batch_size=11, to=tmp_path)
    assert torch.equal(read(tmp_path)["rows"], torch.ones(SIZE))


def test_nothing_is_written_to_a_folder_that_another_prediction_has_taken(tmp_path: Path) -> None:
    taken = json.dumps({"prediction": "other"}).encode()

    def rows(batch: Tensor) -> Tensor:
        (tmp_path / "prediction.json").write_bytes(taken)
        return batch

    with pytest.raises(vf.ConfigurationError, match="holds another prediction"):
        vf.predict(built()[0], list(X), rows, batch_size=11, to=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"prediction.json": taken}


def test_a_prediction_that_is_made_again_is_not_complete_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))  # the name of a resumed job's is the same
    a_prediction(tmp_path)
    there, model = content(tmp_path), built()[0]

    def rows(batch: Tensor) -> Any:
        assert "files" not in json.loads((tmp_path / "prediction.json").read_text())
        return model(batch)

    vf.predict(model, list(X), rows, batch_size=11, to=tmp_path)
    assert content(tmp_path) == there


def test_the_disk_has_a_file_and_its_name_before_others_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from virtualflow.worker import prediction

    synced: set[tuple[int, int]] = set()
    named: set[str] = set()
    sync, share = os.fsync, prediction._Files.share

    def note(descriptor: int) -> None:
        sync(descriptor)
        found = os.fstat(descriptor)
        synced.add((found.st_ino, found.st_size))
        if found.st_ino == tmp_path.stat().st_ino:
            named.update(path.name for path in tmp_path.iterdir())

    def check(path: Path) -> None:
        assert (path.stat().st_ino, path.stat().st_size) in synced
        assert path.name in named

    def checked(files: Any, *arguments: Any) -> Any:
        told = share(files, *arguments)
        check(tmp_path / told[0])
        return told

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(prediction._Files, "share", checked)
    a_prediction(tmp_path)
    check(tmp_path / "prediction.json")


def test_a_prediction_has_the_name_of_its_place_and_its_sizes_whatever_was_exchanged_before(tmp_path: Path) -> None:
    def names(folder: Path, evaluations: int) -> list[str]:
        model, optimizer, dataset = built()

        def predict(name: str, batch_size: int = BATCH) -> str:
            for _ in range(evaluations):
                vf.evaluate(model, list(X), lambda batch: batch, batch_size=BATCH)
            vf.predict(model, list(X), batch_size=batch_size, to=folder / name)
            told = json.loads((folder / name / "prediction.json").read_text())["prediction"]
            assert told.startswith(f"{run.id}-")
            return str(told.removeprefix(f"{run.id}-"))

        found = []
        with vf.elastic(model, optimizer, dataset, batch_size=12, steps=2, virtual_nodes=6) as run:
            for step in run:
                for x, y in step:
                    F.cross_entropy(model(x), y % 2).backward()
                found.append(predict(f"{step.number}"))
            return [*found, predict("end"), predict("more", 6)]

    wanted = ["1-1-of-69-by-12-6", "2-1-of-69-by-12-6", "2-end-1-of-69-by-12-6", "2-end-2-of-69-by-6-6"]
    assert names(tmp_path / "few", 0) == names(tmp_path / "many", 2) == wanted


# --- several workers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("written", [False, True], ids=["returned", "written"])
@pytest.mark.parametrize(
    ("output", "workers"),
    [("a tuple", 4), ("of a stream", 2), *(nightly(each, n) for each in OUTPUTS for n in (3, 5))],
)
def test_any_number_of_workers_predicts_the_same(
    output: str, workers: int, written: bool, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    folders = [str(tmp_path / name) if written else "" for name in ("alone", "together")]
    reference = alone(predict_twice, output, folders[0])
    assert start_job(predict_twice, output, folders[1], workers=workers).results() == [reference] * workers


@pytest.mark.slow
@pytest.mark.parametrize("output", ["a tuple", nightly("of a stream"), nightly("what is drawn")])
@pytest.mark.parametrize("fatal_call", [6, *map(nightly, (1, 2, 8, 9, 12, 24))], ids=lambda call: f"call {call}")
def test_a_worker_killed_during_a_prediction_does_not_show(
    output: str, fatal_call: int, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    # Two nodes on each of three workers: calls 1 and 2 are before the first exchange, 3 to 8 before the second.
    reference = alone(predict_twice, output, str(tmp_path / "alone"))
    job = start_job(predict_twice, output, str(tmp_path / "together"), "worker-1", fatal_call, workers=3)
    assert job.results() == [reference] * 2


@pytest.mark.slow
@pytest.mark.parametrize("written", [True, nightly(False)], ids=["written", "returned"])
def test_a_worker_drained_during_a_prediction_leaves_in_it(
    written: bool, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    folders = [str(tmp_path / name) if written else "" for name in ("alone", "together")]
    reference = alone(predict_twice, "a tensor", folders[0])
    outcomes = start_job(predict_twice, "a tensor", folders[1], "worker-2", 5, True, workers=3).finish()
    assert [outcomes[f"worker-{n}"].value for n in (0, 1)] == [reference] * 2
    assert outcomes["worker-2"].kind == "Drained"


@pytest.mark.slow
def test_a_job_that_grows_between_predictions_predicts_the_same(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(predict_twice, "a tuple", str(tmp_path / "alone"), "", 0, False, 6)
    job = start_job(predict_twice, "a tuple", str(tmp_path / "together"), "", 0, False, 6, workers=2, hold=3)
    job.reach(3)
    job.join(2)
    values = job.results()
    assert [value.metrics for value in values] == [reference.metrics] * 2 + [reference.metrics[1:]] * 2
    assert {value.digest for value in values} == {reference.digest}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole optimizer", "sharded optimizer"])
def test_a_job_that_died_in_a_prediction_makes_it_whole_when_it_is_resumed(
    sharded: bool, tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    """The training is complete then, so the job that goes on only predicts."""
    reference = alone(predict_twice, "a tuple", str(tmp_path / "alone"))
    folder, environment = tmp_path / "together", {ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints")}
    # Twelve calls of each worker after step 2; in the last files there is one more when they die.
    job = start_job(
        predict_twice, "a tuple", str(folder), "all", 18 + 5, False, 4, sharded, workers=2, environment=environment
    )
    for name in list(job.workers):
        job.await_end(name)
    assert "files" not in json.loads((folder / "4" / "prediction.json").read_text())
    assert list((folder / "4").glob("*.safetensors"))
    again = ("a tuple", str(folder), "", 0, False, 4, sharded)
    values = start_job(predict_twice, *again, workers=3, environment=environment).results()
    assert [value.metrics for value in values] == [reference.metrics[1:]] * 3


def wait_until_there(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def predict_once(folder: str, steps: int = 6) -> int:
    """Predict after step 2; one call of the function waits for the test."""
    model, optimizer, dataset = built()
    base = Path(folder)

    def rows(batch: Any) -> Tensor:
        (base / f"begun-{os.environ[ENV_WORKER]}").touch()
        wait_until_there(base / "go")
        return model(batch[0])

    options: dict[str, Any] = {"batch_size": 12, "virtual_nodes": 6, "drop_last": True}
    with injected(prediction={"steps": 1}), vf.elastic(model, optimizer, dataset, steps=steps, **options) as run:
        for step in run:
            for x, y in step:
                F.cross_entropy(model(x), y % 2).backward()
            if step.number == 2:
                vf.predict(model, dataset, rows, batch_size=BATCH, to=base / "out")
        return run.completed_steps


@pytest.mark.slow
def test_a_job_that_is_stopped_in_a_prediction_makes_it_whole_first(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    environment = {ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints")}
    job = start_job(predict_once, str(tmp_path), workers=2, environment=environment)
    begun = [tmp_path / f"begun-{name}" for name in job.workers]
    job.wait_for(lambda _: all(path.exists() for path in begun), "a prediction on all workers")
    job.call("stop", reason="the job is suspended")
    job.wait_for(lambda status: status.prepared, "a plan to stop")
    (tmp_path / "go").touch()
    assert {outcome.kind for outcome in job.finish().values()} <= {"Drained", "JobEnded"}
    assert read(tmp_path / "out")["index"].tolist() == list(range(SIZE))


def predict_and_look(folder: str) -> bool:
    """Whether no worker needs the folder when the call has returned; all but the first come later to their end."""
    from virtualflow.worker import prediction

    model, optimizer, dataset = built()
    base, worker, complete = Path(folder), os.environ[ENV_WORKER], prediction._Files.complete

    def last(files: Any) -> Any:
        if worker != "worker-0":
            wait_until_there(base / "worker-0")
        told = complete(files)
        (base / worker).touch()
        return told

    prediction._Files.complete = last  # type: ignore[method-assign]
    with vf.elastic(model, optimizer, dataset, batch_size=12, steps=1, virtual_nodes=6) as run:
        for step in run:
            for x, y in step:
                F.cross_entropy(model(x), y % 2).backward()
        vf.predict(model, list(X), batch_size=BATCH, to=base / "out")
        return all((base / name).exists() for name in ("worker-0", "worker-1", "worker-2"))


@pytest.mark.slow
def test_no_worker_needs_the_folder_of_a_prediction_that_has_returned(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    assert start_job(predict_and_look, str(tmp_path), workers=3).results() == [True] * 3


def on_the_leader() -> None:
    model, optimizer, dataset = built()
    with vf.elastic(model, optimizer, dataset, batch_size=12, steps=2, virtual_nodes=6) as run:
        for step in run:
            for x, y in step:
                F.cross_entropy(model(x), y % 2).backward()
            if run.leader:
                vf.predict(model, list(X), batch_size=BATCH)


@pytest.mark.slow
def test_a_prediction_by_the_leader_alone_is_one_sentence_everywhere(start_job: Callable[..., ElasticJob]) -> None:
    outcomes = start_job(on_the_leader, workers=2).finish()
    assert all(outcome.kind in ("VirtualFlowError", "JobFailed") for outcome in outcomes.values()), outcomes
    assert any("and vf.predict alike" in outcome.text for outcome in outcomes.values()), outcomes
