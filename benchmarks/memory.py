"""Plans of memory beside what one would do without: step times and peaks over budgets, on a device that is played.

``throttled_copies`` plays it: the CPU computes, and copies leave and return on two lanes beside that. Six families of
models take turns with what a plan makes of them for each budget: everything kept, each block recomputed by
``torch.utils.checkpoint``, and everything that autograd saves copied out and back, as ``save_on_cpu`` does.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from benchmarks.memory_models import CLASSES, FAMILIES, Family
from benchmarks.throttled_copies import Clock, ThrottledCopies
from virtualflow.memory import Action, BlockPlan, Budget, DoesNotFit, Plan, Planner, Point, Profile, profile_for
from virtualflow.memory.activations import ActivationSettings
from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.executor import Executor
from virtualflow.memory.activations.live_bytes import LiveBytes
from virtualflow.memory.activations.measuring import Probe, chain_profile

BANDWIDTH = 160e6
"""Of each lane, in bytes a second: to copy out all activations of ResNet-50 takes as long as 2.5 of its steps, as it
does on a V100 with 16 lanes of PCIe 3."""
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Budgets, as shares of what it takes to keep everything."""
MIDDLE = (0.7, 0.6, 0.5)
TRACED = 0.5
"""The budget under which the three resources are shown."""
TURNS, QUICK_TURNS = 5, 2
QUICK = ("resnet50", "gpt")
CPU = torch.device("cpu")
SETTINGS = ActivationSettings(probe=1 << 20, copies=1)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
Piece = tuple[str, str, float, float]
"""A resource, what it does, start and end."""


class Rig:
    """One model on the device, and ways to make a step of it: forward and backward.

    Args:
        family: of the model.
        clock: the device's.
    """

    def __init__(self, family: Family, clock: Clock) -> None:
        torch.manual_seed(0)
        self.clock = clock
        self.samples = family.samples()
        self.classes = torch.randint(CLASSES, (len(self.samples),))
        self.plain = family.build()
        self.planned = copy.deepcopy(self.plain)
        names = {id(module): name for name, module in self.planned.named_modules()}
        self.blocks, _ = find_blocks(self.planned, [names[id(block)] for block in self.planned.blocks])
        self.copies = ThrottledCopies(clock, BANDWIDTH)
        self.executor = Executor(self.planned, self.blocks, CPU, self.copies)

    def measure(self) -> Profile:
        """What plans are made from."""
        probe = Probe(self.planned, self.blocks, CPU, self.clock.now)
        self.executor.observer = probe
        self.executor.follow([BlockPlan(Action.RECOMPUTE, block) for block in range(len(self.blocks))])
        for _ in range(SETTINGS.warm_up + SETTINGS.samples):
            self._compute(self.planned)
            probe.end_micro_batch()
        self.executor.observer = None
        size = probe.size(len(self.samples), SETTINGS.warm_up)
        chain = chain_profile(probe, [size], self.copies, SETTINGS, optimizer=0)
        profile = profile_for(chain, len(self.samples))
        return replace(profile, out_bytes_per_second=BANDWIDTH, in_bytes_per_second=BANDWIDTH)

    # --- sides --------------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Plain PyTorch."""
        self._compute(self.plain)

    def recompute(self) -> None:
        """Each block under ``torch.utils.checkpoint``."""
        self._compute(self.plain, call=partial(checkpoint, use_reentrant=False))

    def swap(self) -> None:
        """As ``save_on_cpu`` does, but for parameters, which stay."""
        kept = {parameter.data_ptr() for parameter in self.plain.parameters()}

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            if tensor.data_ptr() in kept:
                return lambda: tensor
            with self.clock.stopped():
                dense = tensor.detach().clone()
            dtype, shape, stride = dense.dtype, dense.shape, dense.stride()
            host = self.copies.out(dense, lambda size: None)
            assert host is not None
            self.copies.reclaim()

            def unpack() -> Tensor:
                there = self.copies.back(host)
                self.copies.arrive(there)
                return torch.empty(0, dtype=dtype).set_(there.untyped_storage(), 0, shape, stride)

            return unpack

        with saved_tensors_hooks(pack, lambda unpack: unpack()):
            self._compute(self.plain)

    def follow(self, plan: Plan) -> Callable[[], None]:
        """What a plan says."""

        def run() -> None:
            self.executor.follow(plan.blocks, None, plan.waits)
            self._compute(self.planned)

        return run

    def _compute(self, model: nn.Module, **how: Any) -> None:
        model.zero_grad()
        self.executor.begin()
        F.cross_entropy(model(self.samples, **how), self.classes).backward()  # type: ignore[no-untyped-call]

    # --- what is measured ---------------------------------------------------------------------------------------------

    def seconds(self, side: Callable[[], None]) -> float:
        """Of the device, for a step."""
        torch.manual_seed(1)
        began = self.clock.now()
        side()
        return self.clock.now() - began

    def count(self, side: Callable[[], None], model: nn.Module) -> tuple[int, list[Tensor]]:
        """The most bytes on the device in a step, and the gradients."""
        self.copies.live = live = self._live(model)
        with live:
            self.seconds(side)
        self.copies.live = None
        return live.peak, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    def _live(self, model: nn.Module) -> LiveBytes:
        """What is on the device before a step is counted."""
        model.zero_grad()
        live = LiveBytes()
        live.add([*model.parameters(), *model.buffers(), self.samples, self.classes])
        return live

    def trace(self, plan: Plan) -> dict[str, Any]:
        """What the three resources do under a plan, and the most bytes on the device from each second on: as it was,
        and as the plan has it.
        """
        counted = Spans(self.clock)
        self.executor.observer = counted
        self.copies.live = counted.live = self._live(self.planned)
        with counted.live:  # to count takes time, so that this is another step than the one below
            self.seconds(self.follow(plan))
            counted.close()
        self.copies.live = None
        self.copies.carried.clear()
        spans = self.executor.observer = Spans(self.clock)
        began = self.clock.now()
        self.seconds(self.follow(plan))
        spans.close()
        self.executor.observer = None
        copied = [(f"copy-{each.lane}", "", each.start, each.end) for each in self.copies.carried]
        made = [*(("compute", kind, start, end) for kind, start, end in spans.pieces), *copied]
        told = [(span.resource, span.kind, span.start, span.end) for span in plan.timeline.spans]
        starts = [round(start - began, 5) for _, start, _ in spans.pieces]
        assert [kind for kind, _, _ in counted.pieces] == [kind for kind, _, _ in spans.pieces]
        return {
            "measured": _from(began, made),
            "predicted": _from(0.0, told),
            "memory": {
                "measured": list(zip(starts, counted.peaks, strict=True)),
                "predicted": [(round(second, 5), used) for second, used in plan.timeline.memory],
            },
        }


def _from(began: float, pieces: Iterable[Piece]) -> list[Piece]:
    """From then on; to ten microseconds."""
    return [(lane, kind, round(start - began, 5), round(end - began, 5)) for lane, kind, start, end in pieces]


class Spans:
    """An observer that notes what is computed when."""

    def __init__(self, clock: Clock) -> None:
        self.pieces: list[tuple[str, float, float]] = []
        self.live: LiveBytes | None = None
        """Counts what is on the device, if somebody wants to know,"""
        self.peaks: list[int] = []
        """and the most bytes in each piece."""
        self._clock = clock
        self._open: tuple[str, float] | None = None

    def begin(self, *_: object) -> None:
        """A block's forward pass begins."""
        self._turn("forward")

    def saved(self, *_: object) -> None:
        """Autograd has saved a tensor."""

    def beside(self, block: int, do: Callable[[], Any]) -> Any:
        """What the plan asks for beside computing."""
        return do()

    def end(self, *_: object) -> None:
        """The forward pass is over."""
        self.close()

    def reach(self, point: Point) -> None:
        """The backward pass begins with a block, or computes it again."""
        self._turn(point.kind)

    def recomputed(self) -> None:
        """A segment has been computed again."""
        self._turn("backward")

    def close(self) -> None:
        """Nothing is computed."""
        if self._open is not None:
            self.pieces.append((*self._open, self._clock.now()))
            if self.live is not None:
                self.peaks.append(self.live.peak)
                self.live.peak = self.live.now
        self._open = None

    def _turn(self, kind: str) -> None:
        self.close()
        self._open = kind, self._clock.now()


def planned(rig: Rig, keep: int) -> dict[float, Plan]:
    """The plan for each budget into which anything fits."""
    planner = Planner(rig.measure())
    plans = {}
    for share in SHARES:
        with suppress(DoesNotFit):
            plans[share] = planner.plan(Budget(int(share * keep), 1 << 40))
    return plans


def measure(family: Family, turns: int, clock: Clock, *, traced: bool) -> dict[str, Any]:
    """All that is told of a family.

    In each turn the model is measured anew, planned, and makes a step of every kind.
    """
    rig = Rig(family, clock)
    # Else one step or another would pay for a pass of Python's collector over all that was imported.
    gc.collect()
    gc.freeze()
    others: dict[str, Callable[[], None]] = {"keep": rig.keep, "recompute": rig.recompute, "swap": rig.swap}
    peaks: dict[str, int] = {}
    for name, side in others.items():
        peaks[name], bits = rig.count(side, rig.plain)
        if name == "keep":
            expected = bits
    keep = peaks["keep"]
    took: dict[str, list[float]] = {name: [] for name in others}
    budgets: dict[float, dict[str, Any]] = {}
    for turn in range(turns):
        plans = planned(rig, keep)
        if turn == 0:
            for share, plan in plans.items():
                rig.follow(plan)()  # the first micro-batch of a plan finds out what blocks share
                peak, bits = rig.count(rig.follow(plan), rig.planned)
                assert all(map(torch.equal, bits, expected)), "a plan has changed the result"
                blocks = {action.value: plan.count(action) for action in Action}
                counted = {"predicted_peak": plan.peak_bytes, "counted_peak": peak}
                budgets[share] = {"share": share, **blocks, **counted, "predicted": [], "measured": []}
        for name, side in others.items():
            took[name].append(rig.seconds(side))
        for share, plan in plans.items():
            if share in budgets:
                rig.follow(plan)()
                budgets[share]["predicted"].append(plan.seconds)
                budgets[share]["measured"].append(rig.seconds(rig.follow(plan)))
    return {
        "family": family.name,
        "about": family.about,
        "blocks": len(rig.blocks),
        "keep_bytes": keep,
        "shares": {name: peak / keep for name, peak in peaks.items()},
        "seconds": took,
        "budgets": list(budgets.values()),
        "trace": rig.trace(plans[TRACED]) if traced and TRACED in plans else None,
    }


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a family: medians over turns."""
    seconds = {name: statistics.median(took) for name, took in found["seconds"].items()}
    budgets = {each["share"]: each for each in found["budgets"]}
    plan = {share: statistics.median(each["measured"]) for share, each in budgets.items()}
    best = {
        share: min((seconds[name] for name, needs in found["shares"].items() if needs <= share), default=None)
        for share in plan
    }
    closeness = [statistics.median(map(truediv, each["predicted"], each["measured"])) for each in budgets.values()]
    peaks = [each["predicted_peak"] / each["counted_peak"] for each in budgets.values()]
    return {
        "model": f"{found['family']}, {found['about']}",
        "blocks": found["blocks"],
        "keep_mb": found["keep_bytes"] / 1e6,
        "keep_ms": 1_000 * seconds["keep"],
        "recompute": seconds["recompute"] / seconds["keep"],
        "recompute_share": found["shares"]["recompute"],
        "swap": seconds["swap"] / seconds["keep"],
        "swap_share": found["shares"]["swap"],
        "plan": {f"{share:.0%}": took / seconds["keep"] for share, took in plan.items()},
        "least_share": min(plan),
        "over_best": max(took / best[share] for share, took in plan.items() if best[share] is not None),
        "middle": [seconds["recompute"] / plan[share] for share in MIDDLE if share in plan],
        "predicted": [min(closeness), max(closeness)],
        "peaks": [min(peaks), max(peaks)],
    }


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="two families, and few turns")
    parser.add_argument("--wall", action="store_true", help="by the clock on the wall: for a machine at rest")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    # Memory that is freed stays with the process, as it stays with a device's allocator.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    clock = Clock(wall=args.wall)
    turns = QUICK_TURNS if args.quick else TURNS
    found: list[dict[str, Any]] = []
    for name in args.families or (QUICK if args.quick else FAMILIES):
        found.append(measure(FAMILIES[name], turns, clock, traced=not found))
        print("  " + json.dumps(summary(found[-1])), flush=True)
    if args.json:
        rows = [summary(each) for each in found]
        settings = {"bytes_per_second": BANDWIDTH, "turns": turns, "wall": args.wall}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows, "families": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
