"""How long survivors pause for a change of the digits job, on loopback: planned ones, and SIGKILLs."""

from __future__ import annotations

import argparse

from benchmarks.jobs import quantiles, run_job

SCHEDULES = ["15:=3,30:=2,45:=4,60:=2,75:=3,90:=1,105:=2", "15:kill,35:kill,55:kill,75:kill,95:kill"]


def main() -> None:
    """Run the schedules some times and print the pauses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    pauses: dict[str, list[float]] = {}
    steps: list[float] = []
    for _ in range(args.runs):
        for schedule in SCHEDULES:
            report, _ = run_job("--workers", 2, "--schedule", schedule, "examples/digits.py", "--steps", 120)
            steps.append(report["step_ms"])
            for change in report["changes"]:
                if change["pause_ms"] is not None:
                    pauses.setdefault(change["cause"], []).append(change["pause_ms"])
    print("pause of survivors, from the last step before a change to the first after it: median (10 % to 90 %)")
    planned = [pause for cause in ("join", "drain", "resize") for pause in pauses.get(cause, [])]
    for name, values in [("planned", planned), *sorted(pauses.items())]:
        if values:
            print(f"  {name:8} {quantiles(values):32} {len(values)} changes")
    print(f"  an undisturbed step takes {quantiles(steps)}")


if __name__ == "__main__":
    main()
