"""Admission by Kueue: the Workloads by which a job asks for quota, and what it makes of what is admitted. Pure.

A satellite: only the operator's admissions load it, for the first job with the label of a queue of Kueue's.
"""

from virtualflow_operator.kueue.admission import KueueAdmission
from virtualflow_operator.kueue.workloads import (
    CreateWorkload,
    DeleteWorkload,
    Kueue,
    PatchWorkload,
    admitted_counts,
    chain_of,
    follows_kueue,
)
