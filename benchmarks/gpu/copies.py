"""Activations copied to the host and back beside the computation: what that costs on a device, and what overlaps."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler_util import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.parts import Note, Setting, Wrong
from benchmarks.jobs import ROOT
from virtualflow.device import pin
from virtualflow.memory import Action, BlockPlan, Budget, DoesNotFit, Plan, Planner, profile_for
from virtualflow.memory.activations import ActivationSettings
from virtualflow.memory.activations.blocks import Named, find_blocks
from virtualflow.memory.activations.copies import Copies, StreamCopies
from virtualflow.memory.activations.executor import Executor
from virtualflow.memory.activations.measuring import Probe, chain_profile

SHARES = (0.7, 0.4)
"""Budgets, as shares of what it takes to keep everything."""
TURNS = 5
Interval = tuple[float, float]


class Rig:
    """A transformer on the device, and a step of it: forward and backward."""

    def __init__(self, width: int, layers: int, batch: int, device: torch.device) -> None:
        sys.path.append(str(ROOT / "examples"))
        from charlm_task import CHARACTERS, CONTEXT, CharacterModel

        torch.manual_seed(0)
        self.batch, self.device = batch, device
        self.model: nn.Module = CharacterModel(width, width // 64, layers).to(device)
        self.blocks: list[Named] = find_blocks(self.model, None)[0]
        self.x, self.y = (torch.randint(CHARACTERS, (batch, CONTEXT), device=device) for _ in range(2))

    def compute(self) -> None:
        """A step without an update; dropout draws the same every time."""
        torch.manual_seed(1)
        logits = self.model(self.x).transpose(1, 2)
        F.cross_entropy(logits.reshape(-1, logits.shape[-1]), self.y.reshape(-1)).backward()  # type: ignore[no-untyped-call]

    def checkpointed(self) -> None:
        """The same with every block under ``torch.utils.checkpoint``."""
        before = [(module, module.forward) for _, module in self.blocks]
        for module, forward in before:
            module.forward = partial(checkpoint, forward, use_reentrant=False)
        self.compute()
        for module, _ in before:
            del module.forward

    def gradients(self) -> list[Tensor]:
        """Of the last step."""
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def seconds(self, step: Callable[[], None], turns: int) -> float:
        """The median of a step's time, warm."""
        took = []
        for _ in range(turns + 2):
            self.model.zero_grad()
            self._wait()
            began = time.perf_counter()
            step()
            self._wait()
            took.append(time.perf_counter() - began)
        return statistics.median(took[2:])

    def peak(self, step: Callable[[], None]) -> int:
        """The most bytes of a step beyond the model; 0 on the CPU, which does not count."""
        self.model.zero_grad()
        if self.device.type != "cuda":
            step()
            return 0
        self._wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        self._wait()
        return torch.cuda.max_memory_allocated() - before

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Planned:
    """The rig's step under plans of memory."""

    def __init__(self, rig: Rig, copies: Copies) -> None:
        settings = ActivationSettings()
        self._rig = rig
        self.executor = Executor(rig.model, rig.blocks, rig.device, copies)
        probe = self.executor.observer = Probe(rig.model, rig.blocks, rig.device)
        self.executor.follow([BlockPlan(Action.RECOMPUTE, block) for block in range(len(rig.blocks))])
        for _ in range(settings.warm_up + settings.samples):
            rig.model.zero_grad()
            self.step()
            probe.end_micro_batch()
        self.executor.observer = None
        chain = chain_profile(probe, [probe.size(rig.batch, settings.warm_up)], copies, settings, optimizer=0)
        self.planner = Planner(profile_for(chain, rig.batch))

    def step(self) -> None:
        """One under the plan in force."""
        self.executor.begin()
        self._rig.compute()

    def follow(self, plan: Plan) -> list[Tensor]:
        """Put a plan in force; the gradients of its first step, in which it is found out what blocks share."""
        self.executor.follow(plan.blocks, None, plan.waits)
        self._rig.model.zero_grad()
        self.step()
        return self._rig.gradients()


def measure(setting: Setting, note: Note) -> None:
    """Keep, recompute, and plans for three budgets, with copies that are waited for and with copies on streams."""
    device = torch.device(setting.device)
    pinned = pin(1, "bitwise")
    rig = Rig(64, 3, 4, device) if setting.small else Rig(1024, 8, 128, device)
    turns = 2 if setting.small else TURNS
    keep = rig.peak(rig.compute)
    kept = rig.seconds(rig.compute, turns)
    expected = rig.gradients()
    note({"what": "keep all", "ms": 1_000 * kept, "over keeping": 1.0, "peak, MiB": keep / 2**20})
    again, least = rig.seconds(rig.checkpointed, turns), rig.peak(rig.checkpointed)
    note(_row("each block under `torch.utils.checkpoint`", again, kept, least))
    for copies in (*([StreamCopies(device)] if device.type == "cuda" else []), Copies(device)):
        how = "copies on streams" if isinstance(copies, StreamCopies) else "copies waited for"
        planned = Planned(rig, copies)
        plans: list[tuple[str, Plan]] = []
        for share in SHARES:
            try:
                plans.append(
                    (f"plan for {share:.0%}, {how}", planned.planner.plan(Budget(int(share * (keep or 1 << 30)))))
                )
            except DoesNotFit:
                continue
        plans.append((f"swap all, {how}", planned.planner.uniform(Action.SWAP, Budget(1 << 60))))
        for what, plan in plans:
            if not all(map(torch.equal, planned.follow(plan), expected)):
                raise Wrong(f"{what}: the plan has changed the result")
            took, peak = rig.seconds(planned.step, turns), rig.peak(planned.step)
            blocks = ", ".join(f"{plan.count(action)} {action.value}" for action in Action if plan.count(action))
            more = {
                "predicted, ms": 1_000 * plan.seconds,
                "predicted peak, MiB": plan.peak_bytes / 2**20,
                "blocks": blocks,
            }
            if device.type == "cuda":
                more["of the copies' time beside kernels"] = _overlap(planned.step)
            note({**_row(what, took, kept, peak), **more})
        planned.executor.close()
    pinned.undo()


def _row(what: str, seconds: float, kept: float, peak: int) -> dict[str, object]:
    return {"what": what, "ms": 1_000 * seconds, "over keeping": seconds / kept, "peak, MiB": peak / 2**20}


def _overlap(step: Callable[[], None]) -> str:
    """The share of the time of copies between host and device in which a kernel runs, too, from a profile."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    copies: list[Interval] = []
    kernels: list[Interval] = []
    for event in found.events() or ():
        if event.device_type == DeviceType.CUDA:
            copied = event.name.startswith("Memcpy") and ("HtoD" in event.name or "DtoH" in event.name)
            (copies if copied else kernels).append((event.time_range.start, event.time_range.end))
    whole = sum(end - start for start, end in copies)
    if whole < 100:  # microseconds: a handful of small ones, such as seeds
        return "none"
    return f"{_common(_union(copies), _union(kernels)) / sum(end - start for start, end in _union(copies)):.0%}"


def _union(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _common(left: list[Interval], right: list[Interval]) -> float:
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in left for c, d in right)
