"""The workloads of ``examples/workloads``: one digest on any workers and through a kill, and models of the known sizes.

That of LoRA is in ``integrations/test_peft``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from jobs import ROOT, run_job

import programs
from tiers import needs

FOLDER = ROOT / "examples" / "workloads"
STEPS = 12


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The workload of that name, imported; others import modules of other folders under these names."""
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module(request.param)
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(ROOT / "examples") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("resnet", ""),
        ("diffusion", ""),
        ("pretraining", "--data"),
        pytest.param("bert", "--out", marks=needs("transformers")),
    ],
)
def test_a_workload_comes_to_one_digest_on_one_and_two_workers_and_through_a_kill(
    name: str, place: str, tmp_path: Path
) -> None:
    found = []
    for side, options in {"one": (1,), "two": (2,), "killed": (2, "--schedule", "4:kill,8:=3")}.items():
        directory = tmp_path / side
        directory.mkdir()
        where = (place, directory / "written") if place else ()
        done = run_job(directory, "--workers", *options, FOLDER / f"{name}.py", "--steps", STEPS, *where)
        (last,) = [line for line in done.output.splitlines() if line.startswith(f"step {STEPS}: ")]
        assert " parameters" in done.output
        found.append((done.bits, last))
        assert ("lost" in [change["cause"] for change in done.report["changes"]]) == (side == "killed")
    assert found == [found[0]] * 3


@pytest.mark.parametrize("module", ["resnet"], indirect=True)
def test_the_full_resnet_is_resnet_50(module: Any) -> None:
    with torch.device("meta"):
        model = module.build("full", classes=1000)
        logits = model(torch.empty(2, 3, 224, 224))
    assert sum(each.numel() for each in model.parameters()) == 25_557_032, "as torchvision counts them"
    assert logits.shape == (2, 1000)


@pytest.mark.parametrize("module", ["diffusion"], indirect=True)
@pytest.mark.parametrize(("size", "shape"), [("small", (2, 1, 8, 8)), ("full", (2, 3, 64, 64))])
def test_a_unet_says_of_each_pixel_what_is_noise(module: Any, size: str, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = module.UNet(channels=shape[1], widths=module.WIDTHS[size])
        assert model(torch.empty(shape), torch.empty(shape[0])).shape == shape


@pytest.mark.parametrize("module", ["pretraining"], indirect=True)
def test_shards_hold_every_window_once_and_go_on_in_their_middle(module: Any, tmp_path: Path) -> None:
    files = []
    for number in range(4):
        files.append(tmp_path / f"shard-{number}.txt")
        files[-1].write_bytes(bytes(32 + (7 * number + place) % 90 for place in range(64 * 5 + 1)))
    source = module.TextShards(files)
    whole = [torch.cat(list(pair)).tolist() for pair in source.shard(0, 1, 0, 0)]
    parts = [torch.cat(list(pair)).tolist() for index in range(2) for pair in source.shard(index, 2, 0, 0)]
    assert sorted(parts) == sorted(whole)
    assert len(whole) == 20
    x, y = next(iter(source.shard(1, 2, 3, 4)))
    assert torch.equal(x[1:], y[:-1])
    assert torch.equal(x, [pair[0] for pair in source.shard(1, 2, 3, 0)][4])
    again = [torch.cat(list(pair)).tolist() for pair in source.shard(0, 1, 1, 0)]
    assert again != whole, "another epoch has another order"
    assert sorted(again) == sorted(whole)


@pytest.mark.parametrize("module", ["pretraining"], indirect=True)
def test_files_that_virtual_nodes_cannot_share_are_refused(module: Any, tmp_path: Path) -> None:
    (tmp_path / "shard-0.txt").write_bytes(bytes(200))
    with pytest.raises(SystemExit, match="1 files are not for 8 virtual nodes: choose a number that divides"):
        next(module.TextShards([tmp_path / "shard-0.txt"]).shard(0, 8, 0, 0))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet", "--size full", "--size full takes --data FOLDER, with train/CLASS"),
        ("pretraining", "--size full", "--size full takes --data FOLDER, with shard-"),
        pytest.param(
            *("bert", "--batch-size 20", "--batch-size 20 must be a multiple of 8"),
            marks=[pytest.mark.nightly, needs("transformers")],
        ),
    ],
)
def test_bad_arguments_of_a_workload_get_one_clear_line(name: str, arguments: str, message: str) -> None:
    done = programs.run([sys.executable, str(FOLDER / f"{name}.py"), *arguments.split()], timeout=120)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
