"""Memory that is freed is kept for the next step, by the environment that the launcher and the image give workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from virtualflow.launcher.training_program import ALLOCATOR_ENVIRONMENT
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


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="no GNU C library"
)
def test_memory_is_kept_from_step_to_step() -> None:
    assert _faults(**ALLOCATOR_ENVIRONMENT) < _PAGES / 10
    assert _faults(MALLOC_TRIM_THRESHOLD_="131072") > _PAGES, "otherwise this shows nothing"


_HUGE_PAGES = """
import re, torch

kept = torch.ones(64 << 20)
print(re.search(r"AnonHugePages: *([0-9]+) kB", open("/proc/self/smaps_rollup").read())[1])
"""


def _huge_pages_on_request() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[madvise]" in setting.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not _huge_pages_on_request(), reason="the kernel gives huge pages always or never")
def test_tensors_lie_in_huge_pages() -> None:
    environment = {**os.environ, **ALLOCATOR_ENVIRONMENT}
    command = [sys.executable, "-c", _HUGE_PAGES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 128 << 10, "of a tensor of 256 MB"


_HOLES = """
import ctypes
from virtualflow.device import FreedMemory
from virtualflow.device.memory_gauge import status_bytes

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
freed = FreedMemory(most=64 << 20)
assert not freed.limit()

def fill(count):
    found = [ctypes.c_void_p(library.malloc(1 << 20)) for _ in range(count)]
    for block in found:
        ctypes.memset(block, 1, 1 << 20)
    return found

for _ in range(2):
    blocks = fill(200)
    full = status_bytes()["RssAnon"]
    for block in blocks[:100:2]:
        library.free(block)
    few = freed.limit()
    for block in blocks[100:199:2]:
        library.free(block)
    print(few, freed.limit(), freed.limit(), (full - status_bytes()["RssAnon"]) >> 20)
    blocks = blocks[1::2]
    for block in blocks[:-1]:
        library.free(block)
    freed.limit()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="no GNU C library"
)
def test_what_is_freed_between_what_stays_is_given_back_where_it_is_much() -> None:
    """50 MB are below the limit, 100 MB are not; nothing of it lies at the end of the heap."""
    environment = {**os.environ, **ALLOCATOR_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _HOLES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    for line in done.stdout.splitlines():
        few, much, again, megabytes = line.split()
        assert (few, much, again) == ("False", "True", "False")
        assert 90 <= int(megabytes) <= 110
    assert len(done.stdout.splitlines()) == 2


def test_the_image_says_the_same_as_the_launcher() -> None:
    stage = (ROOT / "Dockerfile").read_text().partition("AS trainer\n")[2].partition("\nFROM")[0]
    assert dict(re.findall(r"((?:MALLOC|GLIBC)_\w+)=(\S+)", stage)) == ALLOCATOR_ENVIRONMENT
    assert dict(re.findall(r"(CUBLAS_\w+)=(\S+)", stage)) == {ENV_CUBLAS_WORKSPACE: CUBLAS_WORKSPACE}
