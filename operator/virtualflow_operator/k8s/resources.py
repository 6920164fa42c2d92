"""The kinds of objects that the operator knows, and where the API server keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from virtualflow_operator.constants import GROUP, KUEUE_GROUP, KUEUE_VERSION, PLURAL, QUEUE_PLURAL, VERSION


@dataclass(frozen=True)
class Resource:
    """One kind of object: where the API server keeps it."""

    group: str
    """Empty: the core group."""
    version: str
    plural: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """The path of its group and version, where discovery answers."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of an object, or without a name of the collection; a namespace only bears on namespaced ones.

        Raises ValueError for a name that would lead to another path: an empty one deletes or lists a whole collection.
        """
        parts = [self.root]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", _segment(namespace)]
        parts.append(self.plural)
        if name is not None:
            if self.namespaced and namespace is None:
                raise ValueError(f"{self.plural}/{name} needs a namespace.")
            parts.append(_segment(name))
            if subresource is not None:
                parts.append(_segment(subresource))
        return "/".join(parts)


JOBS = Resource(GROUP, VERSION, PLURAL, namespaced=True)
QUEUES = Resource(GROUP, VERSION, QUEUE_PLURAL, namespaced=False)
PODS = Resource("", "v1", "pods", namespaced=True)
SERVICES = Resource("", "v1", "services", namespaced=True)
SECRETS = Resource("", "v1", "secrets", namespaced=True)
NODES = Resource("", "v1", "nodes", namespaced=False)
EVENTS = Resource("", "v1", "events", namespaced=True)
LEASES = Resource("coordination.k8s.io", "v1", "leases", namespaced=True)
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", namespaced=False)
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", namespaced=False)
PDBS = Resource("policy", "v1", "poddisruptionbudgets", namespaced=True)
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", namespaced=True)
WORKLOADS = Resource(KUEUE_GROUP, KUEUE_VERSION, "workloads", namespaced=True)
FLAVORS = Resource(KUEUE_GROUP, KUEUE_VERSION, "resourceflavors", namespaced=False)
PRIORITY_CLASSES = Resource(KUEUE_GROUP, KUEUE_VERSION, "workloadpriorityclasses", namespaced=False)


def _segment(part: str) -> str:
    """Return a part of a path, escaped; raises ValueError where escaping does not help."""
    if part in {"", ".", ".."}:
        raise ValueError(f"{part!r} cannot be the name of an object or a namespace.")
    return quote(part, safe="")
