"""What the jobs of a campaign have shown, all together. Pure but for reading and writing its files."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faults.kinds import KINDS


@dataclass
class JobFindings:
    """What one job has shown."""

    seed: int
    strikes: list[tuple[list[str], float]] = field(default_factory=list)
    """Kinds of the faults that came at once, and the longest time in seconds between two steps from then on until the
    job had recovered."""
    generations: int = 0
    """Those that made a step."""
    steps: int = 0
    digests: int = 0
    repeated: int = 0
    lineages: int = 0
    anew: int = 0
    """Times that nobody with the state was left, and a checkpoint counted."""
    checkpoints: int = 0
    begun_from: int = 0
    late: int = 0
    """Checkpoints that appeared between their writer's look and its rename, beside a newer generation's: harmless."""
    left_behind: int = 0
    """Checkpoints that did not appear, because a newer generation had gone on."""
    wrong: list[str] = field(default_factory=list)
    commit: str = ""
    """Of the code that ran."""

    @property
    def faults(self) -> int:
        """How many it has gone through."""
        return sum(len(kinds) for kinds, _ in self.strikes)


class CampaignReport:
    """All jobs so far: a line of JSON each in one file, so that an interrupted campaign goes on, and a summary."""

    def __init__(self, path: Path) -> None:
        self.path, self._lines = path, path.with_suffix(".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.jobs: list[JobFindings] = []
        if self._lines.exists():
            self.jobs = [JobFindings(**json.loads(line)) for line in self._lines.read_text().splitlines()]

    @property
    def faults(self) -> int:
        """How many all jobs have gone through."""
        return sum(job.faults for job in self.jobs)

    @property
    def wrong(self) -> list[str]:
        """In sentences."""
        return [f"seed {job.seed}: {sentence}" for job in self.jobs for sentence in job.wrong]

    def add(self, job: JobFindings) -> None:
        """Count one more, and write everything."""
        self.jobs.append(job)
        with self._lines.open("a") as file:
            file.write(json.dumps(asdict(job)) + "\n")
        self.path.write_text(json.dumps(self.summary(), indent=1) + "\n")

    def summary(self) -> dict[str, Any]:
        """What is known by now."""
        names = ("steps", "digests", "repeated", "anew", "checkpoints", "begun_from", "late", "left_behind")
        sums = {name: sum(getattr(job, name) for job in self.jobs) for name in ("generations", *names)}
        return {
            "jobs": len(self.jobs),
            "faults": self.faults,
            **sums,
            "lineages": max((job.lineages for job in self.jobs), default=0),
            "kinds": self._kinds(),
            "commits": sorted({job.commit for job in self.jobs}),
            "wrong": self.wrong,
        }

    def _kinds(self) -> dict[str, dict[str, float]]:
        pauses: dict[str, list[float]] = defaultdict(list)
        together: dict[str, int] = defaultdict(int)
        for job in self.jobs:
            for kinds, pause in job.strikes:
                for kind in kinds:
                    pauses[kind].append(pause)
                    together[kind] += len(kinds) > 1
        return {
            kind: {
                "faults": len(pauses[kind]),
                "with_another": together[kind],
                "median_pause": round(statistics.median(pauses[kind]), 2),
                "longest_pause": round(max(pauses[kind]), 2),
            }
            for kind in KINDS
            if kind in pauses
        }

    def table(self) -> str:
        """Markdown."""
        found = self.summary()
        lines = ["| fault | times | with another | median pause (s) | longest pause (s) |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for kind, row in found["kinds"].items():
            pauses = f"{row['median_pause']:.1f} | {row['longest_pause']:.1f}"
            lines.append(f"| {KINDS[kind][1]} | {row['faults']} | {row['with_another']} | {pauses} |")
        lines += [
            "",
            f"{found['faults']} faults in {found['jobs']} jobs with {found['steps']} steps in {found['generations']} "
            f"generations: {found['digests']} digests compared, {found['repeated']} steps repeated, {found['anew']} "
            f"times begun from a checkpoint; {found['checkpoints']} checkpoints, {found['left_behind']} of writers "
            f"that were left behind did not appear; {len(found['wrong'])} things wrong",
            *found["wrong"],
        ]
        return "\n".join(lines) + "\n"
