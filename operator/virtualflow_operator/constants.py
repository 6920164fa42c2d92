"""Names that the operator shares with the API server, its users and other programs; each stands here once."""

GROUP = "virtualflow.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "VirtualFlowJob"
PLURAL = "virtualflowjobs"
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
LABEL_KIND = f"{GROUP}/device-kind"
"""Which kind of device a worker was made for, where its queue tells them apart."""
LABEL_LODGER = f"{GROUP}/lodger"
"""On a worker without a device of its own: the uid of its job."""
ANNOTATION_HOST = f"{GROUP}/host"
"""On the same: namespace and name of the job on whose devices it computes."""
ANNOTATION_TEMPLATE = f"{GROUP}/template-hash"
HOSTNAME = "kubernetes.io/hostname"
"""The label that tells nodes apart."""
ANNOTATION_CONTAINER = "kubectl.kubernetes.io/default-container"
"""Which container trains; kubectl logs and exec go there too."""

# Kueue's, as its API has them.
KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_VERSION = "v1beta2"
LABEL_KUEUE_QUEUE = f"{KUEUE_GROUP}/queue-name"
"""On a job: the LocalQueue by which Kueue is to admit it."""
LABEL_KUEUE_PRIORITY = f"{KUEUE_GROUP}/priority-class"
"""On a job: its WorkloadPriorityClass."""
LABEL_KUEUE_JOB = f"{KUEUE_GROUP}/job-uid"
ANNOTATION_KUEUE_ELASTIC = f"{KUEUE_GROUP}/elastic-job"
"""On a job and its Workloads, ``true``: it grows by Workloads that replace one another."""
ANNOTATION_KUEUE_REPLACES = f"{KUEUE_GROUP}/workload-slice-replacement-for"
"""On a Workload: namespace and name of the one whose place it takes once it is admitted."""
ANNOTATION_KUEUE_SLICE = f"{KUEUE_GROUP}/workload-slice-name"
"""On a Workload: the first of those that replace one another."""
ANNOTATION_POD_SETS = f"{GROUP}/pod-sets-hash"
"""On a Workload: what of the job's pods Kueue has to admit anew when it changes."""

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
IDENTITY_VOLUME = "virtualflow-identity"
"""The volume with the Secret of a pod's identity; a pod without one is in plaintext."""
IDENTITY_MOUNT = "/virtualflow/identity"
CHECKPOINT_VOLUME = "virtualflow-checkpoints"
CHECKPOINT_MOUNT = "/virtualflow/checkpoints"
TURNS_VOLUME = "virtualflow-turns"
TURNS_MOUNT = "/virtualflow/turns"
TURNS_SOCKET = "socket"
"""Where a node's turn server listens, in its directory."""
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
