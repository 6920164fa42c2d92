"""Lightning Fabric over virtual nodes: what it would come to by itself, and the same bits on any workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_jobs import ElasticJob, alone
from fabric_scripts import fresh, run, train, train_divided
from loop_scripts import Points, network
from torch.utils.data import DataLoader

import virtualflow as vf
from tiers import needs

pytestmark = [pytest.mark.nightly, needs("lightning")]

SHORT = {"samples": 99, "batch_norm": False}
"""With a last batch of three samples: most virtual nodes have none, and so do workers."""


@pytest.mark.parametrize("samples", [96, 99], ids=["whole batches", "a short last batch"])
def test_it_comes_to_what_fabric_comes_to(samples: int) -> None:
    options: dict[str, Any] = {"samples": samples, "batch_norm": False}
    plain, _, wanted = run(fresh(elastic=False), elastic=False, **options)
    elastic, _, found = run(fresh(), **options)
    assert found == pytest.approx(wanted, rel=1e-5)
    for one, other in zip(elastic.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"dropout": 0.3}, SHORT], ids=["with dropout", "a short last batch"])
def test_the_bits_are_the_same_on_any_workers_and_through_a_join_and_a_kill_of_the_leader(
    options: dict[str, Any], start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, options)
    for workers in (2, 3):
        assert start_job(train, options, workers=workers).results() == [reference] * workers
    job = start_job(train, options | {"victim": "worker-0"}, workers=2, hold=3)
    job.reach(3)
    job.join()
    outcomes = job.finish()
    assert [each.value for each in outcomes.values() if each.kind == "returned"] == [reference] * 2, outcomes
    assert outcomes["worker-0"].kind == "killed"


@pytest.mark.parametrize("options", [{"dropout": 0.3}, SHORT], ids=["with dropout", "a short last batch"])
def test_divided_parameters_come_to_the_same_bits(
    options: dict[str, Any], start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train_divided, options, None)
    for workers in (2, 3):
        assert start_job(train_divided, options, "parameters", workers=workers).results() == [reference] * workers


def test_the_type_of_sums_is_that_of_the_constructor() -> None:
    with pytest.raises(vf.ConfigurationError, match=r"sums in reduce_dtype=torch.bfloat16 would lose bits"):
        run(fresh(reduce_dtype=torch.bfloat16))


def test_a_model_that_nobody_has_whole_is_not_saved(tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    job = start_job(train_divided, {"saves": str(tmp_path)}, "parameters", workers=2)
    assert any("write a checkpoint, and read it by virtualflow export" in each.text for each in job.finish().values())


def test_it_goes_on_from_a_file_to_the_same_bits(tmp_path: Path, start_job: Callable[..., ElasticJob]) -> None:
    reference = alone(train, {"saves": str(tmp_path)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-16", "step-4", "step-8"]
    resume = {"resume": str(tmp_path / "step-8")}
    assert alone(train, resume) == reference
    assert start_job(train, resume, workers=2).results() == [reference] * 2


def loop(fabric: Any, *, step: bool = True) -> Any:
    """A loop that yields behind each of its micro-batches."""
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(Points(96), batch_size=16))
    for _ in fabric.strategy.epochs(1):
        for x, y in loader:
            fabric.backward(F.cross_entropy(model(x), y))
            if step:
                optimizer.step()
            yield model, optimizer, loader


def test_what_a_body_must_not_do_is_refused() -> None:
    def refused(sentence: str, act: Callable[..., Any], **options: Any) -> None:
        fabric = fresh()

        def go() -> None:
            for each in loop(fabric, **options):
                act(fabric, *each)

        with pytest.raises(vf.ConfigurationError, match=sentence) as caught:
            go()
        assert "\n" not in str(caught.value)
        fabric.strategy._loop.finish()

    refused(
        "clip_gradients is called with max_norm=1.0",
        lambda fabric, model, optimizer, loader: fabric.clip_gradients(model, optimizer, max_norm=1.0),
    )
    refused(
        "clip_gradients is called with clip_val=1.0",
        lambda fabric, model, optimizer, loader: fabric.clip_gradients(model, optimizer, clip_val=1.0),
    )
    refused(r"optimizer.step\(\) was not called for a micro-batch", lambda *each: None, step=False)
    refused(r"optimizer.step\(\) was called again", lambda fabric, model, optimizer, loader: optimizer.step())
    refused(
        r"fabric.save\(\) was called in the middle", lambda fabric, model, *each: fabric.save("x", {"model": model})
    )
    refused(r"backward\(\) was called behind", lambda fabric, *each: fabric.backward(torch.ones(())))
    refused("iterated over twice", lambda fabric, model, optimizer, loader: next(iter(loader)))


def test_what_cannot_be_elastic_is_refused() -> None:
    model = network()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[4])]
    with pytest.raises(vf.ConfigurationError, match="trains one module with one optimizer"):
        fresh().setup(model, *optimizers)
    with pytest.raises(vf.ConfigurationError, match=r"needs the module with its optimizer: fabric.setup"):
        fresh().setup_optimizers(optimizers[0])
    fabric = fresh()
    with pytest.raises(vf.ConfigurationError, match="set up the module with its optimizer"):
        next(fabric.strategy.epochs(1))
    with pytest.raises(vf.ConfigurationError, match=r"let the loop over the epochs be 'for epoch in"):
        next(iter(fabric.setup_dataloaders(DataLoader(Points(96), batch_size=16))))
