"""Pinning what changes bits on one machine, and describing what differs between machines; how many processors it has.

See docs/explanation/determinism.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor

from virtualflow.protocol.settings import CUBLAS_WORKSPACE, ENV_CUBLAS_WORKSPACE, Reproducibility
from virtualflow.protocol.versions import NUMERICS, PROTOCOL
from virtualflow.protocol.wording import counted

logger = logging.getLogger("virtualflow.worker")

_CPU_SWITCHES = ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that make CPU libraries choose other kernels."""


_CUDA_SWITCHES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLASLT_WORKSPACE_SIZE")
"""The same for CUDA's: the first two turn TF32 on or off over the head of the script, the third limits the choice of
kernels. The rest of what a script sets (TF32, reduced sums of halves) is the same in all workers."""


@dataclass(frozen=True)
class Pinned:
    """What was in force before :func:`pin`, to be put back when the run is over."""

    threads: int
    deterministic: bool
    warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    fill_memory: bool

    def undo(self) -> None:
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.utils.deterministic.fill_uninitialized_memory = self.fill_memory  # type: ignore[attr-defined]


def pin(threads: int, reproducibility: Reproducibility) -> Pinned:
    """Pin the number of threads and, where bits count, refuse kernels whose results vary from call to call."""
    before = Pinned(
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    torch.set_num_threads(threads)
    if reproducibility == "bitwise":
        os.environ.setdefault(ENV_CUBLAS_WORKSPACE, CUBLAS_WORKSPACE)
        torch.use_deterministic_algorithms(True)
        # Else every kernel's output is filled with NaN before it is computed, which takes 4 % of a small model's step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    return before


def fingerprint(threads: int, reproducibility: Reproducibility) -> str:
    """What must be equal on all workers whatever their devices are, for people to read."""
    # What workers exchange among themselves has a fixed layout, which is not negotiated.
    version = f"torch {torch.__version__.split('+')[0]}, protocol {PROTOCOL}"
    if reproducibility == "statistical":
        return version
    # Of PYTHONHASHSEED, which cannot be changed any more: an enumerated set of strings is another one in each process.
    strings = hash("virtualflow") & 0xFFFF
    return f"{version}, numerics {NUMERICS}, {counted(threads, 'thread')}, hashes {strings:04x}"


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model is; one without parameters counts as on the CPU."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def device_name(device: torch.device) -> str:
    """What the device calls itself: a GPU's name, or the model of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine() or "cpu"
    return device.type


def describe_device(device: torch.device) -> str:
    """The device and what is known to make its kernels differ, for people to read; equal bits may still differ."""
    if device.type == "cuda":
        parts = [device_name(device), f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]  # type: ignore[no-untyped-call]
        parts += [f"{name}={os.environ[name]}" for name in _CUDA_SWITCHES if os.environ.get(name)]
    else:
        parts = [device.type, f"CPU capability {torch.backends.cpu.get_cpu_capability()}"]
        parts += [f"{name}={os.environ[name]}" for name in _CPU_SWITCHES if os.environ.get(name)]
    return ", ".join(parts)


# How many processors there are for a process.

_CGROUPS = Path("/sys/fs/cgroup")


def count_processors(cgroups: Path = _CGROUPS) -> int:
    """Those that this process may run on, and no more than its container is granted; at least 1.

    Args:
        cgroups: where the container's own control group is mounted (version 1 or 2); a process outside of containers
            finds no limit there.
    """
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(there, int(_granted(cgroups))))


def has_spare_processor(device: torch.device, workers: int) -> bool:
    """Whether a thread that exchanges takes nothing from those that compute.

    Args:
        device: that computes; an accelerator leaves the processors to others.
        workers: that may be on this machine, each with as many threads as this one; nobody knows, so it is all of them.
    """
    return device.type != "cpu" or count_processors() > workers * torch.get_num_threads()


def _granted(cgroups: Path) -> float:
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((cgroups / file).read_text() for file in files).split()
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
    return float(1 << 20)


# Whether two machines compute the same bits: a digest of one small forward and backward pass, taken at the join.
#
# The names of two devices say little about their bits: two types of machine may compute the same, and two machines with
# the same name may not (the libraries beneath torch choose their kernels by features that torch does not tell of). So
# each worker of a ``bitwise`` job computes the same small network on its own device, under the settings that hold for
# the training, and tells the SHA-256 of everything that came out. It shows that two machines *differ*; that they are
# equal it only makes likely: other shapes may take other kernels (docs/explanation/determinism.md).

_MULTIPLIER = 40_503
"""Odd, so that multiples of it run through all 16-bit numbers: the inputs need no generator of random numbers."""


def probe_bits(device: torch.device) -> str:
    """SHA-256 (hex) over the outputs and gradients of the network on ``device``, as torch is set up at present.

    No generator of random numbers is used and nothing is kept. Takes some hundredths of a second. Empty where the
    device cannot compute it: such workers are told apart by the names of their devices alone.
    """
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            found = [*_vision(device), *_language(device), *_sums(device), *_halves(device)]
    except RuntimeError as error:
        logger.warning("the self-test of %s failed, so only the same type of device is admitted: %s", device, error)
        return ""
    digester = hashlib.sha256()
    for tensor in found:
        digester.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digester.hexdigest()


def _numbers(device: torch.device, *shape: int, start: int, scale: float = 1.0, grad: bool = True) -> Tensor:
    """Numbers in [-scale, scale) that every device gets exactly: 16-bit integers divided by a power of two."""
    count = torch.Size(shape).numel()
    integers = (torch.arange(start, start + count, dtype=torch.int64) * _MULTIPLIER) % 65_536 - 32_768
    tensor = (integers.to(torch.float32) * (scale / 32_768)).reshape(shape).to(device)
    return tensor.requires_grad_(grad)


def _with_gradients(output: Tensor, *leaves: Tensor) -> list[Tensor]:
    weights = _numbers(output.device, *output.shape, start=7, grad=False).to(output.dtype)
    return [output, *torch.autograd.grad((output * weights).sum(), leaves)]


def _vision(device: torch.device) -> list[Tensor]:
    images = _numbers(device, 8, 3, 31, 31, start=1, grad=False)
    first, second = (
        _numbers(device, 24, 3, 3, 3, start=2, scale=0.25),
        _numbers(device, 40, 24, 3, 3, start=3, scale=0.125),
    )
    gain, shift = _numbers(device, 24, start=4), _numbers(device, 24, start=5)
    weight, bias = _numbers(device, 10, 40, start=6, scale=0.25), _numbers(device, 10, start=8)
    mean, variance = (make(24, dtype=torch.float32, device=device) for make in (torch.zeros, torch.ones))
    hidden = F.batch_norm(F.conv2d(images, first, padding=1), mean, variance, gain, shift, training=True)
    # Not the maximum: its backward pass has no deterministic kernel on every device.
    hidden = F.relu(F.conv2d(F.avg_pool2d(F.relu(hidden), 2), second, stride=2))
    logits = F.linear(hidden.mean((2, 3)), weight, bias)
    loss = F.cross_entropy(logits, torch.arange(8, device=device))
    return [logits, mean, variance, *_with_gradients(loss, first, second, gain, shift, weight, bias)]


def _language(device: torch.device) -> list[Tensor]:
    tokens = torch.arange(4 * 33).reshape(4, 33).mul(_MULTIPLIER).remainder(61).to(device)
    table = _numbers(device, 61, 72, start=9)
    gain, shift = _numbers(device, 72, start=10), _numbers(device, 72, start=11)
    inner, outer = _numbers(device, 216, 72, start=12, scale=0.25), _numbers(device, 72, 216, start=13, scale=0.125)
    hidden = F.layer_norm(F.embedding(tokens, table), (72,), gain, shift)
    query, key, value = (
        part.reshape(4, 33, 3, 24).transpose(1, 2) for part in torch.tensor_split(F.linear(hidden, inner), 3, dim=-1)
    )
    attended = torch.softmax(query @ key.transpose(-2, -1) / 8, dim=-1) @ value
    # Also as one kernel, where there is one; its choice of kernel is torch's.
    fused = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + (attended + fused).transpose(1, 2).reshape(4, 33, 72)
    output = F.linear(F.gelu(F.linear(hidden, inner)), outer)
    return _with_gradients(output, table, gain, shift, inner, outer)


def _sums(device: torch.device) -> list[Tensor]:
    left, right = _numbers(device, 193, 257, start=14), _numbers(device, 257, 129, start=15)
    product = left @ right
    curves = torch.tanh(product) + torch.sigmoid(product) + torch.exp(-product.abs()) + torch.log1p(product.square())
    long = _numbers(device, 65_537, start=16)
    totals = torch.stack([curves.sum(), curves.std(), curves.norm(), long.mul(1.1).sum(), torch.logsumexp(long, 0)])
    return _with_gradients(torch.cat([curves.flatten(), totals]), left, right, long)


def _halves(device: torch.device) -> list[Tensor]:
    """What mixed precision computes: products in bfloat16."""
    left, right = _numbers(device, 65, 96, start=17), _numbers(device, 33, 96, start=18)
    halves = F.linear(left.to(torch.bfloat16), right.to(torch.bfloat16)).float()
    return _with_gradients(halves, left, right)
