"""What the watches have told, by key: jobs, their pods and services, and nodes.

A cache, not the truth: an event may be missed, so what a list says replaces it now and then, and what the API server
answers to a write counts as news. An older version of an object never takes a newer one's place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from virtualflow_operator.api import (
    ForeignPod,
    Node,
    Object,
    Pod,
    Queue,
    Service,
    read_foreign_pod,
    read_node,
    read_pod,
    read_queue,
    read_service,
)
from virtualflow_operator.constants import LABEL_JOB, WORKER

Key = tuple[str, str]
"""Namespace and name of a job."""
V = TypeVar("V")

_REMEMBERED = 600.0
"""Seconds for which a deleted object is remembered: a list that began before must not bring it back."""


def queue_key(name: str) -> Key:
    """The key of a queue in the work-queue; no job has an empty namespace."""
    return ("", name)


def key_of(body: Mapping[str, Any]) -> Key | None:
    """The job that a pod or service belongs to by its label; ``None``: no job's."""
    metadata = body.get("metadata") or {}
    job = (metadata.get("labels") or {}).get(LABEL_JOB)
    return (metadata.get("namespace") or "", job) if job else None


def _version(body: Mapping[str, Any]) -> int:
    text = str((body.get("metadata") or {}).get("resourceVersion") or "")
    return int(text) if text.isdigit() else 0


@dataclass
class _Entry(Generic[V]):
    value: V
    version: int
    uid: str
    at: float


class Listed(NamedTuple, Generic[V]):
    """An object of a list, without what nobody reads: ten thousand pods as they are listed take 200 MiB."""

    place: Key
    uid: str
    version: int
    value: V


@dataclass
class ObjectCache(Generic[V]):
    """Objects of one kind, by namespace and name."""

    read: Callable[[Object], V]
    concerned: Callable[[Object], bool] = lambda _: True
    """Whether an object of a list is to be taken in."""
    entries: dict[Key, _Entry[V]] = field(default_factory=dict)
    deleted: dict[str, float] = field(default_factory=dict)

    def listed(self, body: Object) -> Listed[V] | None:
        """What a list tells of an object; what is known of this very version is not read again. ``None``: nothing."""
        if not self.concerned(body):
            return None
        metadata = body["metadata"]
        place, uid = (metadata.get("namespace") or "", metadata["name"]), metadata.get("uid") or ""
        version, known = _version(body), self.entries.get(place)
        same = known is not None and version > 0 and (uid, version) == (known.uid, known.version)
        return Listed(place, uid, version, known.value if known is not None and same else self.read(body))

    def put(self, body: Object) -> tuple[V | None, V | None]:
        """Take in a version of an object; what was known before, and the newest now (``None``: it is deleted)."""
        one = self.listed(body)
        return self._put(one) if one is not None else (None, None)

    def _put(self, one: Listed[V]) -> tuple[V | None, V | None]:
        key, uid, version, value = one
        known = self.entries.get(key)
        if uid in self.deleted:
            return (known.value if known else None), (known.value if known else None)
        if known is not None and version < known.version:  # also of a former object of that name
            return known.value, known.value
        entry = _Entry(value, version, uid, time.monotonic())
        self.entries[key] = entry
        return (known.value if known is not None and known.uid == uid else None), entry.value

    def remove(self, namespace: str, name: str, uid: str = "") -> bool:
        """Forget an object that was deleted; one of the same name and another uid stays."""
        if uid:
            self.deleted[uid] = time.monotonic()
        known = self.entries.get((namespace, name))
        if known is None or (uid and known.uid != uid):
            return False
        self.deleted[known.uid] = time.monotonic()
        del self.entries[(namespace, name)]
        return True

    def replace(self, objects: Iterable[Listed[V] | None], begun: float, within: Callable[[Key], bool]) -> set[Key]:
        """Take in a list that was asked for at ``begun`` (monotonic); the keys of what has changed.

        Args:
            objects: all that exist, as far as ``within`` covers them.
            begun: objects that are newer than that may be missing in the list.
            within: which keys the list speaks of.
        """
        now = time.monotonic()
        self.deleted = {uid: at for uid, at in self.deleted.items() if at > now - _REMEMBERED}
        listed, changed = set(), set()
        for one in objects:
            if one is None:
                continue
            listed.add(one.place)
            before, after = self._put(one)
            if before != after:
                changed.add(one.place)
        for key, entry in list(self.entries.items()):
            if key not in listed and entry.at < begun and within(key):
                self.deleted[entry.uid] = now
                del self.entries[key]
                changed.add(key)
        return changed


class Store:
    def __init__(self) -> None:
        self.jobs: ObjectCache[Object] = ObjectCache(lambda body: body)
        self.pods: ObjectCache[tuple[Key, Pod]] = ObjectCache(
            lambda body: (_must(key_of(body)), read_pod(body)), lambda body: key_of(body) is not None
        )
        self.services: ObjectCache[tuple[Key, Service]] = ObjectCache(
            lambda body: (_must(key_of(body)), read_service(body)), lambda body: key_of(body) is not None
        )
        self.nodes: ObjectCache[Node] = ObjectCache(read_node)
        self.queues: ObjectCache[Queue] = ObjectCache(read_queue)
        self.foreign_pods: ObjectCache[ForeignPod] = ObjectCache(read_foreign_pod)
        """Pods of others; only kept while a queue counts what they take."""
        self.foreign_pods_known = False
        """Whether they were listed once: before that, nodes look emptier than they are."""
        self.nodes_known = True
        self._pods_of: dict[Key, dict[str, Pod]] = {}
        self._former: dict[Key, dict[str, tuple[float, Pod]]] = {}
        self._lost_at: dict[Key, float] = {}
        self._jobs_on: dict[str, set[Key]] = {}
        self._gone_nodes: dict[str, float] = {}

    def job(self, key: Key) -> Object | None:
        entry = self.jobs.entries.get(key)
        return entry.value if entry is not None else None

    def queue(self, name: str) -> Queue | None:
        entry = self.queues.entries.get(("", name))
        return entry.value if entry is not None else None

    def pods_of(self, key: Key) -> tuple[Pod, ...]:
        return tuple(self._pods_of.get(key, {}).values())

    def crowds_of(self, key: Key) -> Mapping[str, int]:
        """Living workers of all jobs on each node where that job has pods."""
        nodes = {pod.node for pod in self.pods_of(key) if pod.node}
        return {
            node: sum(
                pod.node == node and pod.role == WORKER and pod.live
                for job in self._jobs_on.get(node, ())
                for pod in self._pods_of.get(job, {}).values()
            )
            for node in nodes
        }

    def former_of(self, key: Key) -> tuple[Pod, ...]:
        """Pods that had ended when they were deleted; of one name the last."""
        return tuple(pod for at, pod in self._former.get(key, {}).values() if _is_remembered(at, pod))

    def loses(self, key: Key) -> bool:
        """Whether something of the job's is going or went lately; perhaps because the job itself is deleted."""
        lost_at = self._lost_at.get(key)
        recently = lost_at is not None and lost_at > time.monotonic() - _REMEMBERED
        return recently or any(pod.terminating for pod in self.pods_of(key))

    def service_of(self, key: Key, name: str) -> Service | None:
        entry = self.services.entries.get((key[0], name))
        return entry.value[1] if entry is not None and entry.value[0] == key else None

    def node_map(self) -> Mapping[str, Node] | None:
        """Nodes by name, those that are known to be deleted too; ``None``: the operator may not look at them."""
        if not self.nodes_known:
            return None
        gone = {name: Node(name, gone=True) for name in self._gone_nodes}
        return gone | {entry.value.name: entry.value for entry in self.nodes.entries.values()}

    def put_pod(self, body: Object) -> Key | None:
        """Take in a pod; the job that it concerns if anything that matters has changed."""
        if key_of(body) is None:
            return None
        metadata = body["metadata"]
        former = self.pods.entries.get((metadata.get("namespace") or "", metadata["name"]))
        before, after = self.pods.put(body)
        if after is None:
            return None
        key, pod = after
        if before is not None and before[1].owner and not pod.owner:
            self._lost_at[key] = time.monotonic()  # its job may be about to leave it
        if former is not None and former.value[0] != key:
            self._drop(former.value[0], pod.name)  # its label was changed
        self._pods_of.setdefault(key, {})[pod.name] = pod
        if pod.node:
            self._jobs_on.setdefault(pod.node, set()).add(key)
        return key if before != after else None

    def remove_pod(self, namespace: str, name: str, uid: str = "") -> Key | None:
        known = self.pods.entries.get((namespace, name))
        if known is None or not self.pods.remove(namespace, name, uid):
            if uid:
                self.pods.deleted[uid] = time.monotonic()
            return None
        key = known.value[0]
        self._drop(key, name)
        self._note_former(*known.value)
        return key

    def replace_pods(
        self, pods: Iterable[Listed[tuple[Key, Pod]] | None], begun: float, within: Callable[[Key], bool]
    ) -> set[Key]:
        before = {place: entry.value for place, entry in self.pods.entries.items()}
        changed = self.pods.replace(pods, begun, within)
        concerned: set[Key] = set()
        for place in changed:
            entry = self.pods.entries.get(place)
            if entry is None:
                key, former = before[place]
                self._drop(key, place[1])
                self._note_former(key, former)
            else:
                key, pod = entry.value
                self._pods_of.setdefault(key, {})[pod.name] = pod
                if pod.node:
                    self._jobs_on.setdefault(pod.node, set()).add(key)
            concerned.add(key)
        return concerned

    def replace_services(
        self, services: Iterable[Listed[tuple[Key, Service]] | None], begun: float, within: Callable[[Key], bool]
    ) -> set[Key]:
        before = {place: entry.value[0] for place, entry in self.services.entries.items()}
        changed = self.services.replace(services, begun, within)
        entries = self.services.entries
        gone = {before[place] for place in changed if place not in entries}
        self._lost_at |= dict.fromkeys(gone, time.monotonic())
        return gone | {entries[place].value[0] for place in changed if place in entries}

    def remove_service(self, namespace: str, name: str, uid: str = "") -> Key | None:
        known = self.services.entries.get((namespace, name))
        if known is None or not self.services.remove(namespace, name, uid):
            return None
        key = known.value[0]
        self._lost_at[key] = time.monotonic()
        return key

    def put_node(self, body: Object) -> set[Key]:
        """Take in a node; the jobs that have pods there, if anything that matters has changed."""
        name = body["metadata"]["name"]
        self._gone_nodes.pop(name, None)
        before, after = self.nodes.put(body)
        return set(self._jobs_on.get(name, ())) if before != after else set()

    def remove_node(self, name: str, uid: str = "") -> set[Key]:
        if not self.nodes.remove("", name, uid):
            return set()
        return self._note_gone({name})

    def replace_nodes(self, nodes: Iterable[Listed[Node] | None], begun: float) -> set[Key]:
        """Take in a list of nodes; the jobs that are concerned. Pods that were on others before it began are lost."""
        changed = {name for _, name in self.nodes.replace(nodes, begun, lambda _: True)}
        here = {name for _, name in self.nodes.entries}
        placed = {entry.value[1].node for entry in self.pods.entries.values() if entry.at < begun}
        concerned = self._note_gone({name for name in placed | changed if name and name not in here})
        return concerned.union(*(self._jobs_on.get(name, set()) for name in changed))

    def _note_gone(self, names: set[str]) -> set[Key]:
        now = time.monotonic()
        self._gone_nodes = {name: at for name, at in self._gone_nodes.items() if at > now - _REMEMBERED}
        self._gone_nodes |= dict.fromkeys(names, now)
        return set().union(*(self._jobs_on.pop(name, set()) for name in names))

    def forget_job(self, key: Key) -> None:
        self._former.pop(key, None)
        self._lost_at.pop(key, None)
        for keys in self._jobs_on.values():
            keys.discard(key)

    def _note_former(self, key: Key, pod: Pod) -> None:
        """A pod was deleted: how it ended may be told before the coordinator tells it."""
        self._lost_at[key] = now = time.monotonic()
        former = {name: entry for name, entry in self._former.get(key, {}).items() if _is_remembered(*entry)}
        former.pop(pod.name, None)  # a namesake's end says nothing of this one's
        if pod.finished:
            former[pod.name] = (now, pod)
        if former:
            self._former[key] = former
        else:
            self._former.pop(key, None)

    def _drop(self, key: Key, name: str) -> None:
        pods = self._pods_of.get(key, {})
        pods.pop(name, None)
        if not pods:
            self._pods_of.pop(key, None)


def _is_remembered(at: float, pod: Pod) -> bool:
    """For a while, or as long as its job where it saw the end of the training."""
    return pod.saw_the_end or at > time.monotonic() - _REMEMBERED


def _must(key: Key | None) -> Key:
    assert key is not None, "only objects with a job's label are taken in"
    return key
