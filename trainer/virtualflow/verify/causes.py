"""The usual cause of a difference, and what to do about it: told from where it appears first, and what differed.

Every cause named here was seen to make such a difference. It is likely, never certain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from virtualflow.verify.comparison import Difference
from virtualflow.verify.traces import BESIDE, Trace

Variation = Literal["nothing", "hash seed", "workers", "resume"]
"""In what two runs of one script were not the same: in nothing, in the seed of Python's hashes, in how they were
computed (by how many workers, which of them came and went, which steps were attempted twice), or in that one of them
was stopped and went on from its checkpoint."""


@dataclass(frozen=True)
class Cause:
    """What usually makes a difference, and what to do about it."""

    what: str
    remedy: str


_HASHES = Cause(
    "something is ordered by a set, or by hash() of a string, and that order changes with PYTHONHASHSEED",
    "sort it, for example sorted(set(words))",
)
_KEPT = Cause(
    "something outlives a virtual node and is no part of the model: a counter or a cache in forward, a hidden state "
    "that is carried on, a criterion with running state, a torch.Generator of your own, a micro-batch that is asked "
    "for before backward has run for the one before; or the inner loop changes the model",
    "let it follow from step.number and the data; draw from torch's global generator, which is seeded for each virtual "
    "node; clamp weights and the like after the inner loop",
)
_DATASET = Cause(
    "the dataset or collate_fn remembers what it has given: by a generator of its own, a counter, a place in a file",
    "let a sample follow from its index alone, and draw from the global generators of torch, numpy and random, which "
    "are seeded for each virtual node",
)
_UNSEEDED = Cause(
    "the script comes to something else each time, without anything being changed: by the time, by a generator that is "
    "not seeded, by the order in which a directory lists its files",
    "seed with torch.manual_seed(0) before the model is built, and sort what is listed",
)
_NAMED = Cause(
    "each run names something by itself: a folder that it makes, a time, the number of a process",
    "keep that name out of the state of what is given to vf.elastic(state=...), or let all runs have the same",
)
_STEP_CODE = Cause(
    "the code after a step does something else in some workers: under run.leader, by what only that worker has seen, "
    "or by a count of its own that begins anew in a worker that joins",
    "change the model in all workers alike, and by step.number and step.metrics",
)
_METRIC = Cause(
    "only what is logged differs: step.log gets a running value, such as the mean over the micro-batches so far",
    "log the value of the present micro-batch; all of a step are averaged for you",
)
_BUFFER = Cause(
    "a buffer changes by something besides its micro-batch, such as a count that is kept in Python",
    "let its new value follow from the micro-batch and its former value, or change it after the inner loop",
)
_DRAWS = Cause(
    "the inner loop draws another number of random numbers each time, or draws from another generator",
    "draw the same for every micro-batch, or let it follow from step.number",
)
_SAMPLES = Cause(
    "other samples were chosen",
    "give vf.elastic a fixed seed=, and let a dataset's length, and what a stream's shard gives, follow from their "
    "arguments alone",
)
_SCHEDULE = Cause(
    "the inner loop changes it, once for each micro-batch of this worker instead of once for each step",
    "give the scheduler to vf.elastic(..., scheduler=...), or step it after the inner loop",
)
_COUNT = Cause(
    "it follows from a count that no state_dict holds, such as one in a function that is given to LambdaLR: a worker "
    "that joins begins with a new one",
    "let the function follow from its argument, or keep the count in an object that is given to vf.elastic(state=...)",
)

_RESUMED = Cause(
    "no checkpoint holds something that the training needs, so it begins anew when the job resumes: a count, a running "
    "value, a cache made of weights",
    "keep it in a buffer of the model or in an object that is given to vf.elastic(state=...), or let it follow from "
    "step.number",
)

_UPDATE = Cause(
    "all gradients were equal, and the update was not: the inner loop has changed the model or the optimizer, or a "
    "device computes wrongly",
    "step optimizers, clamp weights and the like after the inner loop; if nothing of it is there, check once more on "
    "another machine",
)
_SUM = Cause(
    "all virtual nodes were equal, and their sum is not: this is a defect of VirtualFlow",
    "please report it, with the script",
)


def explain(difference: Difference, variation: Variation) -> Cause:
    """What usually makes such a difference."""
    if difference.name.startswith(BESIDE):
        return _beside(difference.name.removeprefix(BESIDE))
    if variation == "hash seed":
        return _HASHES
    if variation == "nothing":
        return _of_each_run(difference)
    if variation == "resume":
        return _RESUMED
    match difference.stage:
        case "start":
            return _of_each_run(difference)
        case "behind":
            return _STEP_CODE
        case "samples":
            return _SAMPLES
        case "data":
            return _DATASET
        case "node":
            return _of_node(difference.kinds)
        case "sum":
            return _SUM
        case "update":
            by_hand = difference.name.startswith(("optimizer's", "scheduler's")) and " of " not in difference.name
            if not by_hand:
                return _UPDATE
            return _SCHEDULE if difference.within is None else _COUNT


def _of_each_run(difference: Difference) -> Cause:
    is_name = any(value.startswith(("'", '"')) for value in difference.values)
    return _NAMED if is_name and difference.name.startswith("state of ") else _UNSEEDED


def _of_node(kinds: frozenset[str]) -> Cause:
    if kinds == {"metrics"}:
        return _METRIC
    if "gradients" in kinds:
        return _KEPT
    return _BUFFER if "buffers" in kinds else _DRAWS


def _beside(what: str) -> Cause:
    return Cause(
        f"the script keeps {what} beside the model: a worker that joins later begins with a new one",
        "make it part of the model (nn.ModuleDict), or make it after the training",
    )


def guess_variation(one: Trace, two: Trace) -> Variation:
    """In what two runs were not the same, as far as their traces tell."""
    if one.attempts != two.attempts or _assignment(one) != _assignment(two):
        return "workers"
    seeds = {opened.hash_seed for trace in (one, two) for opened in trace.opened.values()}
    if "" in seeds:  # each process has made one up
        return "workers"
    return "nothing" if len(seeds) == 1 else "hash seed"


def _assignment(trace: Trace) -> dict[tuple[int, int], str]:
    return {(step, node): worker for step, nodes in trace.nodes.items() for node, ((worker, _), _) in nodes.items()}


# Which runs of a script show whether its result depends on what it must not depend on. Pure.

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
    resumes_after: int | None = None
    """The step after which the job is stopped, and started again from its checkpoint."""


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
    if steps >= 2:
        at = max(1, min(2, steps - 1))
        trials.append(Trial(f"1 worker, resumed after step {at}", "resume", resumes_after=at))
    if steps >= 3:
        at = max(1, min(2, steps - 2))
        trials += [
            Trial(f"1 worker, a second joins after step {at}", "workers", most_workers=2, schedule=f"{at}:=2"),
            Trial("2 workers, one is killed and replaced", "workers", 2, 2, schedule=f"{at}:kill"),
        ]
    return trials
