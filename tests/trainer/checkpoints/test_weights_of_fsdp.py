"""What torch's FSDP2 has written is read as the page on checkpoints says: whole, or by each worker what it keeps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from cases.fsdp_writer import build
from elastic_jobs import ElasticJob, alone
from injected import injected
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.state import digests

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "checkpoints.md"
WRITER = Path(__file__).parents[1] / "cases" / "fsdp_writer.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp") / "fsdp.dcp"
    subprocess.run([sys.executable, WRITER, folder], check=True, timeout=240)
    return folder


def block_of_page(language: str, word: str) -> str:
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return found


def read_whole(folder: str) -> nn.Module:
    model = build()
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    block = block_of_page("py", "fsdp.dcp").replace('"fsdp.dcp"', repr(folder))
    exec(block, {"model": model, "dcp": dcp})
    return model


def read_by_modules(folder: str) -> nn.Module:
    names: dict[str, Any] = {}
    exec(block_of_page("python", "def read_from"), names)
    with torch.device("meta"):
        model = build()
    names["read_from"](folder, model)
    return model


def train(folder: str, shard: str | None) -> str:
    model = read_by_modules(folder) if shard else read_whole(folder)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = TensorDataset(torch.linspace(-1, 1, 24 * 5).reshape(24, 5), torch.linspace(0, 1, 24).reshape(24, 1))
    options: dict[str, Any] = {"shard": shard, "redundancy": "none"} if shard else {}
    with (
        injected(reduction={"norm_block": 4, "bucket": 256}),
        vf.elastic(model, optimizer, data, batch_size=12, steps=4, virtual_nodes=4, **options) as run,
    ):
        for step in run:
            for x, y in step:
                F.mse_loss(model(x), y).backward()
        return run._context.training.digest or digests.digest(model.state_dict())


def test_the_whole_model_is_what_was_written(written: Path) -> None:
    assert digests.digest(read_whole(str(written)).state_dict()) == digests.digest(build().state_dict())


def test_workers_that_read_what_they_keep_come_to_the_bits_of_one_that_reads_all(
    written: Path, start_job: Callable[..., ElasticJob]
) -> None:
    reference = alone(train, str(written), None)
    assert start_job(train, str(written), "parameters", workers=3).results() == [reference] * 3
