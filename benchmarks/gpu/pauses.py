"""How long a change of the workers holds up a job whose workers share the device."""

from __future__ import annotations

import statistics

from benchmarks.changes import kind_of
from benchmarks.gpu.parts import Note, Setting
from benchmarks.jobs import run_job

SCHEDULES = {
    "digits": ("20:=2,40:=1,60:=2,80:=1", "20:=2,40:kill,60:=2,80:kill"),
    "large": ("10:=2,20:=1,30:=2,40:kill",),
}
"""From one worker to two and back; and SIGKILLs, each after the last one's replacement is in."""
STEPS = {"digits": 100, "large": 50}


def measure(setting: Setting, note: Note) -> None:
    """Run the schedules on the digits CNN, and on the large transformer."""
    for name, usual in ({"digits": ("3:=2,6:=1",)} if setting.small else SCHEDULES).items():
        found: dict[str, list[float]] = {}
        step_ms = []
        for schedule in usual:
            steps = 9 if setting.small else STEPS[name]
            script = ["benchmarks/gpu/training.py", name, "--device", setting.device, "--steps", steps]
            more = ["--small"] if setting.small else []
            report, _ = run_job("--workers", 1, "--schedule", schedule, *script, *more)
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
