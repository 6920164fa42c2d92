"""Pods of others: what they request on the nodes of queues, followed by a watch of their own.

kopf keeps one watch a kind, and that one sees the jobs' own pods only, so that a cluster with many thousands of others
costs nothing. This one runs while there is a queue that counts a resource.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from virtualflow_operator.api import Object
from virtualflow_operator.constants import LABEL_JOB
from virtualflow_operator.k8s.cache import Key, Store
from virtualflow_operator.k8s.client import KubeApi
from virtualflow_operator.k8s.errors import ApiError
from virtualflow_operator.k8s.following import Following
from virtualflow_operator.k8s.resources import PODS
from virtualflow_operator.settings import OperatorSettings

NOT_OURS = f"!{LABEL_JOB}"
TAKING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of pods that take something of a node."""


class ForeignPodWatch(Following):
    """Keeps ``store.foreign_pods`` as the cluster is, as long as somebody wants to know.

    Args:
        api: the API server.
        store: where they go.
        wake: called when what others take has changed, or is known for the first time.
        settings: the operator's.
    """

    what, without = "pods of others", "queues do not count them"
    resource, labels, fields = PODS, NOT_OURS, TAKING

    def __init__(self, api: KubeApi, store: Store, wake: Callable[[], None], settings: OperatorSettings) -> None:
        super().__init__(api, settings, settings.sharing.relist)
        self._store, self._wake = store, wake

    def take(self, body: Object) -> None:
        """A pod was made or changed."""
        before, after = self._store.foreign_pods.put(body)
        if before != after:
            self._wake()

    def lose(self, namespace: str, name: str, uid: str) -> None:
        """A pod is gone, or has ended."""
        if self._store.foreign_pods.remove(namespace, name, uid):
            self._wake()

    def replace(self, bodies: Collection[Object], begun: float, within: Callable[[Key], bool]) -> None:
        """These are all that there are."""
        if self._store.foreign_pods.replace(bodies, begun, within):
            self._wake()

    def note_known(self) -> None:
        """Queues may decide."""
        if not self._store.foreign_pods_known:
            self._store.foreign_pods_known = True
            self._wake()

    def note_barred(self, error: ApiError) -> None:
        """Who may not look at them does not count them."""

    def forget(self) -> None:
        """They are not followed any more."""
        self._store.foreign_pods_known = False
        self._store.foreign_pods.entries.clear()
