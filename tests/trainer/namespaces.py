"""Network namespaces of tests: how one is made, and how a thread or a whole program lives in it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000
INSIDE = f"""
import ctypes, os, runpy, sys
namespace, what = sys.argv[1:3]
with open(namespace) as handle:
    if ctypes.CDLL(None).setns(handle.fileno(), {CLONE_NEWNET}) != 0:
        sys.exit(f"cannot enter {{namespace}}")
if what == "-m":
    sys.argv[:] = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(what, run_name="__main__")
"""
"""What a program does first that runs within a network namespace."""


def can_part_networks() -> bool:
    """Whether this process may make any: that takes root and iproute2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"vf-probe-{os.getpid()}"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", f"vf-probe-{os.getpid()}"], capture_output=True, check=False)
    return made.returncode == 0


def ip(*words: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def enter(namespace: str) -> None:
    """Move this thread, and no other one, into a network namespace."""
    with Path("/run/netns", namespace).open() as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
