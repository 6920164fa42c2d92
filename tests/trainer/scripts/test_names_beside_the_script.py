"""Modules beside a script are the script's: not ours, whatever their names are, and not hidden from it either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import LIMIT, ROOT

TAKEN = ("aiohttp", "attr", "idna", "mimetypes", "msgspec", "netrc", "rich", "stringprep", "xxhash", "yaml", "yarl")
"""What the library imports and a plain script of torch does not."""

SCRIPT = """
import attr  # the script's own
import torch, torch.nn.functional as F, virtualflow as vf
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
with vf.elastic(model, optimizer, data, batch_size=16, steps=4) as run:
    for step in run:
        for x, y in step:
            F.mse_loss(model(x), y).backward()
import attr as again, yarl
print(attr.MINE, again.MINE, yarl.MINE)
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text("MINE = 'mine'\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "more"),
    [
        pytest.param(["virtualflow", "run", "--plain"], {"PYTHONPATH": "."}, id="run"),
        pytest.param(["virtualflow", "check", "--workers", "2"], {}, id="check", marks=pytest.mark.nightly),
        pytest.param(["virtualflow", "explain"], {}, id="explain", marks=pytest.mark.nightly),
    ],
)
def test_a_script_beside_modules_of_any_name_is_run_and_finds_its_own(
    beside: Path, words: list[str], more: dict[str, str]
) -> None:
    path = os.pathsep.join([str(ROOT / "trainer"), *more.values()])
    done = subprocess.run(
        [sys.executable, "-m", *words, "train.py"],
        cwd=beside,
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(beside)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert words[1] != "run" or "mine mine mine" in done.stdout
