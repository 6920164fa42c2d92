"""How long a change of the workers holds up a job whose workers share the device."""

from __future__ import annotations

import statistics

from benchmarks.changes import kind_of
from benchmarks.gpu.parts import Note, Setting
from benchmarks.jobs import run_job

SCHEDULES = ("20:=2,40:=1,60:=2,80:=1", "20:kill,40:=2,60:kill,80:=2")
"""Between one and two workers; then SIGKILLs, each after the last one's replacement is in."""
STEPS = 100


def measure(setting: Setting, note: Note) -> None:
    """Run the schedules on the digits CNN, and on the large transformer."""
    names = ("digits",) if setting.small else ("digits", "large")
    schedules, steps = (("3:=1,6:=2",), 9) if setting.small else (SCHEDULES, STEPS)
    for name in names:
        found: dict[str, list[float]] = {}
        step_ms = []
        for schedule in schedules:
            workers = 1 if schedule == SCHEDULES[0] else 2
            script = ["benchmarks/gpu/training.py", name, "--device", setting.device, "--steps", steps]
            more = ["--small"] if setting.small else []
            report, _ = run_job("--workers", workers, "--schedule", schedule, *script, *more)
            step_ms.append(float(report["step_ms"]))
            for change in report["changes"]:
                if change["pause_ms"] is not None:
                    found.setdefault(kind_of(change), []).append(change["pause_ms"])
        for kind, pauses in found.items():
            note(
                {
                    "model": name,
                    "change": kind,
                    "changes": len(pauses),
                    "pause, ms (median)": statistics.median(pauses),
                    "shortest to longest": f"{min(pauses):.0f} to {max(pauses):.0f}",
                    "a step, ms": statistics.median(step_ms),
                }
            )
