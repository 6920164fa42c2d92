"""Memory that is freed is kept for the next step, and given back at the end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import resource
import torch
from virtualflow.allocation import keep_freed_memory
from virtualflow.settings import AllocationSettings

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    return [torch.ones(2_000_000) for _ in range(16)]

let_go = keep_freed_memory(AllocationSettings())
for _ in range(4):
    step()
before = faults()
for _ in range(4):
    step()
during = faults() - before
let_go()
before = faults()
step()
print(during, faults() - before)
"""
_PAGES = 16 * 8_000_000 // 4096
"""Of what a step of the script makes and frees."""


def _faults(**environment: str) -> list[int]:
    given = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**given, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="no GNU C library"
)
def test_memory_is_kept_while_a_run_lasts_and_given_back_after_it() -> None:
    during, after = _faults()
    assert during < _PAGES / 10
    assert after > _PAGES / 2


def test_a_users_own_choice_is_left_alone() -> None:
    during, _ = _faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert during > _PAGES
