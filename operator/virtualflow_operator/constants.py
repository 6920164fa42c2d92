"""Names that the operator shares with the API server, its users and other programs; each stands here once."""

GROUP = "virtualflow.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "VirtualFlowJob"
PLURAL = "virtualflowjobs"
QUEUE_KIND = "VirtualFlowQueue"
QUEUE_PLURAL = "virtualflowqueues"
MANAGER = f"{GROUP}/operator"
"""``spec.managedBy`` of the jobs that this operator takes care of, and the component of its events."""

# Labels: the conventions of app.kubernetes.io, and our own for what they do not know.
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_PART_OF = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_JOB = f"{GROUP}/job"
"""The name of the job that a pod or service belongs to; all of the operator's objects bear it."""
LABEL_ROLE = f"{GROUP}/role"
"""``worker`` or ``coordinator``."""
LABEL_GROUP = f"{GROUP}/worker-group"
LABEL_ORDINAL = f"{GROUP}/ordinal"
LABEL_ATTEMPT = f"{GROUP}/attempt"
"""Which attempt at the job a pod belongs to; counted from 0."""
LABEL_CAPACITY = f"{GROUP}/capacity"
"""``on-demand`` or ``spot``: which nodes a worker was made for, where its job tells them apart."""
ANNOTATION_TEMPLATE = f"{GROUP}/template-hash"
ANNOTATION_CONTAINER = "kubectl.kubernetes.io/default-container"
"""Which container trains; kubectl logs and exec go there too."""

APP_NAME = "virtualflow"
MANAGED_BY = "virtualflow-operator"
WORKER = "worker"
COORDINATOR = "coordinator"
ON_DEMAND = "on-demand"
SPOT = "spot"

COORDINATOR_PORT = 7700
COORDINATOR_PORT_NAME = "coordinator"
TOKEN_KEY = "token"
"""The key in a job's Secret."""
CHECKPOINT_VOLUME = "virtualflow-checkpoints"
CHECKPOINT_MOUNT = "/virtualflow/checkpoints"
TERMINATION_LOG = "/dev/termination-log"

TERMINATION_TAINTS = (
    # AWS node termination handler
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "aws-node-termination-handler/rebalance-recommendation",
    # GKE: preemption and maintenance of the machine
    "cloud.google.com/impending-node-termination",
    # Karpenter: v1, and before
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    # Cluster autoscaler, once it has decided
    "ToBeDeletedByClusterAutoscaler",
    # Azure node termination handlers, and what cloud providers set for machines that are switched off
    "aks-node-termination-handler/preempt",
    "node.cloudprovider.kubernetes.io/shutdown",
)
"""Taints by which well-known programs announce that a node will go; more by ``--extra-taints``."""
