"""Whether two runs of a script are the same, and where they begin to differ: traces, their comparison, usual causes.

A worker writes a trace (:mod:`records`), if its environment asks for one; the command line reads traces back
(:mod:`traces`), finds the first difference (:mod:`comparison`) and names what usually makes it (:mod:`causes`). Which
runs show whether a script is sound is decided here too (:mod:`trials`). What may enter: values and decisions about
them, no torch, no process. Hashes are made where the tensors are, in ``worker``.
"""

from virtualflow.verify.causes import Cause, Variation, explain, guess_variation
from virtualflow.verify.comparison import (
    Difference,
    Incomparable,
    describe,
    describe_shortly,
    first_difference,
    other_surroundings,
)
from virtualflow.verify.records import BESIDE, Began, Committed, Computed, Opened, Record, encode
from virtualflow.verify.traces import Trace, merge_trace, read_trace
from virtualflow.verify.trials import AGAIN, REFERENCE, Trial, plan_trials

__all__ = [
    "AGAIN",
    "BESIDE",
    "REFERENCE",
    "Began",
    "Cause",
    "Committed",
    "Computed",
    "Difference",
    "Incomparable",
    "Opened",
    "Record",
    "Trace",
    "Trial",
    "Variation",
    "describe",
    "describe_shortly",
    "encode",
    "explain",
    "first_difference",
    "guess_variation",
    "merge_trace",
    "other_surroundings",
    "plan_trials",
    "read_trace",
]
