"""Whether two runs of a script are the same, and where they begin to differ: traces, their comparison, usual causes.

A worker writes a trace, if its environment asks for one, and the command line reads it back (:mod:`traces`). It finds
the first difference (:mod:`comparison`), names what usually makes it, and decides which runs show whether a script is
sound (:mod:`causes`). What may enter: values and decisions about them, no torch, no process. Hashes are made where the
tensors are, in ``worker``.
"""

from virtualflow.verify.causes import AGAIN, REFERENCE, Cause, Trial, explain, guess_variation, plan_trials
from virtualflow.verify.comparison import (
    Difference,
    Incomparable,
    describe,
    describe_shortly,
    first_difference,
    other_surroundings,
)
from virtualflow.verify.traces import (
    BESIDE,
    Began,
    Committed,
    Computed,
    Opened,
    Record,
    Trace,
    encode,
    merge_trace,
    read_trace,
)
