"""The jobs' Workloads, as Kueue sees them: followed by a watch of their own where the operator is to follow Kueue.

The kind may not be there, or be installed later, so it is no business of kopf's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from virtualflow_operator.api import Object, Workload, read_workload
from virtualflow_operator.k8s.cache import Key, ObjectCache, key_of
from virtualflow_operator.k8s.client import KubeApi
from virtualflow_operator.k8s.errors import ApiError, NotFound
from virtualflow_operator.k8s.following import Following
from virtualflow_operator.k8s.relist import OURS
from virtualflow_operator.k8s.resources import WORKLOADS
from virtualflow_operator.settings import OperatorSettings

_UNKNOWN = "the Workloads have not been listed yet"


class WorkloadWatch(Following):
    """Knows the Workloads of every job.

    Args:
        api: the API server.
        wake: called with each job of which a Workload has changed; ``None``: it is known now whether there are any.
        settings: the operator's.
    """

    what, without = "Workloads", "no job is admitted by Kueue"
    resource, labels = WORKLOADS, OURS

    def __init__(self, api: KubeApi, wake: Callable[[Key | None], None], settings: OperatorSettings) -> None:
        super().__init__(api, settings, settings.admission.relist)
        self._wake = wake
        self._cache: ObjectCache[Workload] = ObjectCache(read_workload)
        self._names: dict[Key, set[str]] = {}
        """Of each job's Workloads; some may be gone."""
        self.trouble = _UNKNOWN
        """Why they are not known, in words; empty: they are."""
        self._barred = ""

    def of(self, key: Key) -> tuple[Workload, ...]:
        """The Workloads of a job."""
        entries = self._cache.entries
        found = [entries[key[0], name].value for name in self._names.get(key, ()) if (key[0], name) in entries]
        return tuple(sorted(found, key=lambda workload: workload.name))

    def take(self, body: Object) -> None:
        """A Workload was made or changed, as the API server says."""
        key = key_of(body)
        if key is None:
            return
        before, after = self._cache.put(body)
        self._names.setdefault(key, set()).add(body["metadata"]["name"])
        if before != after:
            self._wake(key)

    def lose(self, namespace: str, name: str, uid: str) -> None:
        """A Workload is gone."""
        known = self._cache.entries.get((namespace, name))
        if self._cache.remove(namespace, name, uid) and known is not None:
            self._note_gone(known.value)

    def replace(self, bodies: Collection[Object], begun: float, within: Callable[[Key], bool]) -> None:
        """These are all that there are."""
        self._barred = ""
        before = {place: entry.value for place, entry in self._cache.entries.items()}
        for place in self._cache.replace(bodies, begun, within):
            entry = self._cache.entries.get(place)
            key = key_of(entry.value.raw) if entry is not None else None
            if key is not None:
                self._names.setdefault(key, set()).add(place[1])
                self._wake(key)
            elif place in before:
                self._note_gone(before[place])

    def _note_gone(self, workload: Workload) -> None:
        key = key_of(workload.raw)
        if key is None:
            return
        names = self._names.get(key, set())
        names.discard(workload.name)
        if not names:
            self._names.pop(key, None)
        self._wake(key)

    def note_known(self) -> None:
        """Jobs that wait for it may be decided about."""
        if self.trouble != self._barred:
            self.trouble = self._barred
            self._wake(None)

    def note_barred(self, error: ApiError) -> None:
        """There is no Kueue here, or the operator may not ask."""
        why = "this cluster has no Workloads of Kueue" if isinstance(error, NotFound) else str(error)
        self._barred = f"{why} ({WORKLOADS.api_version}); install Kueue and the operator's rights, or remove the label"

    def forget(self) -> None:
        """They are not followed any more."""
        self._cache.entries.clear()
        self._names.clear()
        self.trouble = _UNKNOWN
