"""One digest, however many processes share the device, and whatever happens to them."""

from __future__ import annotations

from benchmarks.gpu.parts import Note, Setting, Wrong
from benchmarks.jobs import run_job

RUNS: tuple[tuple[str, int, str], ...] = (
    ("one process", 1, ""),
    ("a resize and a kill", 2, "8:=4,16:kill,24:=2"),
    ("two processes", 2, ""),
    ("four processes", 4, ""),
)
"""What is told, how many workers begin, and what happens to them."""
STEPS = 32


def measure(setting: Setting, note: Note) -> None:
    """Run them for a CNN with batch norm and dropout and for a transformer; compare the digests."""
    runs = RUNS if not setting.small else (RUNS[0], ("a kill and a new worker", 2, "3:kill,6:=2"))
    names = ("digits",) if setting.small else ("digits", "charlm")
    steps = 8 if setting.small else STEPS
    differ = []
    for name in names:
        digests = set()
        for title, workers, schedule in runs:
            more = ["--schedule", schedule] if schedule else []
            script = ["benchmarks/gpu/training.py", name, "--device", setting.device, "--steps", steps]
            report, _ = run_job("--workers", workers, *more, *script, *(["--small"] if setting.small else []))
            digests.add((report["digest"], report["optimizer_digest"]))
            note(
                {
                    "model": name,
                    "run": title,
                    "schedule": f"`{schedule}`" if schedule else "",
                    "digest": f"`{report['digest'][:12]}`",
                    "repeated steps": report["repeated_steps"],
                    "seconds": report["seconds"],
                }
            )
        if len(digests) > 1:
            differ.append(name)
    if differ:
        raise Wrong(f"the digests of {' and '.join(differ)} differ between numbers of processes")
