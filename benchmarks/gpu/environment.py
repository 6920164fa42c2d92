"""What there is: the device, its driver, the libraries, and the switches that change bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import torch

from benchmarks.gpu.parts import Note, Setting
from benchmarks.gpu.runner import DEVICES
from benchmarks.results import Machine

SWITCHES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def measure(setting: Setting, note: Note) -> None:
    """Note it; the number of devices first."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    note({"what": DEVICES, "value": count})
    facts: dict[str, object] = {"Python": sys.version.split()[0], "torch": torch.__version__}
    if count:
        free, whole = torch.cuda.mem_get_info(0)
        facts |= {
            "device": torch.cuda.get_device_name(0),
            "compute capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
            "memory": f"{whole / 2**30:.1f} GiB, {free / 2**30:.1f} of them free",
            "driver": _driver(),
            "CUDA of torch": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
            "TF32 in matrix products, in convolutions": f"{_tf32()}, {torch.backends.cudnn.allow_tf32}",
        }
    machine = Machine.here()
    facts |= {"CPU": machine.cpu, "cores": machine.cores, "memory of the host": f"{machine.memory_gib} GiB"}
    facts |= {name: os.environ[name] for name in SWITCHES if name in os.environ}
    for what, value in facts.items():
        note({"what": what, "value": str(value)})


def _tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown (no nvidia-smi here)"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.split("\n")[0].strip() or "unknown"
