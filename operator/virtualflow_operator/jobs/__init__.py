"""What is to be done for one job, given the job, its pods and its coordinator's status: pure decisions, and the
manifests that they ask for.
"""

from virtualflow_operator.jobs.actions import (
    AdmissionAction,
    CheckTemplates,
    CreatePod,
    CreateService,
    DeleteJob,
    DeletePod,
    EventMessage,
    IssueIdentity,
    JobPlan,
    PointService,
    ReadEvents,
)
from virtualflow_operator.jobs.admission import AT_ONCE, Admission
from virtualflow_operator.jobs.job_status_builder import is_progress
from virtualflow_operator.jobs.pod_classification import find_worker
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.jobs.scene import PodEvent, Scene, TemplateVerdict
