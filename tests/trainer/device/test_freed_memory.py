"""Memory that is freed is kept for the next step, by the environment that the launcher and the image give workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from virtualflow.launcher.settings import KEEP_FREED_MEMORY
from virtualflow.protocol.settings import CUBLAS_WORKSPACE, ENV_CUBLAS_WORKSPACE

ROOT = Path(__file__).parents[3]
_SCRIPT = """
import resource
import torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    return [torch.ones(2_000_000) for _ in range(16)]

for _ in range(4):
    step()
before = faults()
for _ in range(4):
    step()
print(faults() - before)
"""
_PAGES = 16 * 8_000_000 // 4096
"""Of what a step of the script makes and frees."""


def _faults(**environment: str) -> int:
    given = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(
        command, env={**given, **environment}, capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="no GNU C library"
)
def test_memory_is_kept_from_step_to_step() -> None:
    assert _faults(**KEEP_FREED_MEMORY) < _PAGES / 10
    assert _faults(MALLOC_TRIM_THRESHOLD_="131072") > _PAGES, "otherwise this shows nothing"


def test_the_image_says_the_same_as_the_launcher() -> None:
    stage = (ROOT / "Dockerfile").read_text().partition("AS trainer\n")[2].partition("\nFROM")[0]
    assert dict(re.findall(r"(MALLOC_\w+)=(\d+)", stage)) == KEEP_FREED_MEMORY
    assert dict(re.findall(r"(CUBLAS_\w+)=(\S+)", stage)) == {ENV_CUBLAS_WORKSPACE: CUBLAS_WORKSPACE}
