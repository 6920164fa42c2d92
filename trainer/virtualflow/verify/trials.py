"""Which runs of a script show whether its result depends on what it must not depend on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from virtualflow.verify.causes import Variation

HASH_SEED = "0"
"""PYTHONHASHSEED of all trials but one."""

OTHER_HASH_SEED = "1"


@dataclass(frozen=True)
class Trial:
    """One run of a script; but for ``variation`` it is the same as the first."""

    name: str
    variation: Variation
    workers: int = 1
    most_workers: int = 1
    """Processes that may live at the same time."""
    schedule: str = ""
    """Faults, as ``virtualflow run --schedule`` takes them."""
    hash_seed: str = HASH_SEED
    repeated_step: int | None = None
    """Attempted twice."""


REFERENCE = Trial("1 worker", "nothing")
"""What all others are compared with."""

AGAIN = Trial("1 worker, again", "nothing")
"""Made when another hash seed shows a difference, to tell whether it was that."""


def plan_trials(virtual_nodes: int, steps: int, most_workers: int) -> list[Trial]:
    """What to run after the reference, what is quickest first.

    Args:
        virtual_nodes: of the job; at least 2.
        steps: how many each trial makes; a join takes one to be agreed upon and one to show, so it needs 3.
        most_workers: of any trial, however many virtual nodes there are; at least 2.
    """
    repeated, most = min(3, steps), min(virtual_nodes, most_workers)
    trials = [
        Trial("1 worker, another hash seed", "hash seed", hash_seed=OTHER_HASH_SEED),
        Trial(f"1 worker, step {repeated} made twice", "workers", repeated_step=repeated),
        Trial("2 workers", "workers", workers=2, most_workers=2),
    ]
    if most > 2:
        trials.append(Trial(f"{most} workers", "workers", workers=most, most_workers=most))
    if steps >= 3:
        at = max(1, min(2, steps - 2))
        trials += [
            Trial(f"1 worker, a second joins after step {at}", "workers", most_workers=2, schedule=f"{at}:=2"),
            Trial("2 workers, one is killed and replaced", "workers", 2, 2, schedule=f"{at}:kill"),
        ]
    return trials
