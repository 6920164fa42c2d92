"""Objects, their versions and their history: what the API server promises, without HTTP."""

from __future__ import annotations

import copy
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from fake_api import kinds, status
from fake_api.kinds import Kind
from fake_api.status import Object

_FIRST = 100
"""The version of an empty cluster; older ones are forgotten."""
_HISTORY = 20_000
"""Changes to be told to who comes back."""
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
Key = tuple[str | None, str]


@dataclass(frozen=True)
class Change:
    """One event of the history; ``former`` is the object before it."""

    version: int
    kind: Kind
    type: str
    item: Object
    former: Object | None


def merge(target: Any, patch: Any) -> Any:
    """Return the outcome of a JSON merge patch (RFC 7386); nothing is changed in place."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    outcome = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            outcome.pop(key, None)
        else:
            outcome[key] = merge(outcome.get(key), value)
    return outcome


class Store:
    """All objects of one cluster. Stored objects are never changed in place, so that they can be handed out."""

    def __init__(self) -> None:
        self.version = _FIRST
        self.kinds: dict[tuple[str, str, str], Kind] = {}
        self.history: deque[Change] = deque(maxlen=_HISTORY)
        self.oldest = _FIRST
        """The oldest resourceVersion that a watch may begin after."""
        self.listeners: list[Callable[[Change], None]] = []
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self._items: dict[Kind, dict[Key, Object]] = {}
        self._address = 0
        for kind in kinds.BUILT_IN:
            self.register(kind)
        for name in ("default", "kube-public", "kube-system"):
            self.create(kinds.NAMESPACES, None, {"metadata": {"name": name}})

    def register(self, kind: Kind) -> None:
        """Serve a kind."""
        self.kinds[kind.group, kind.version, kind.plural] = kind
        self._items.setdefault(kind, {})

    # Reading

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        found = self._items[kind].get((namespace, name))
        if found is None:
            raise status.not_found(kind.resource, name)
        return found

    def all(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        """Return the objects in the order of their names."""
        return [item for key, item in sorted(self._items[kind].items(), key=_order) if namespace in {None, key[0]}]

    def since(self, kind: Kind, version: int) -> list[Change]:
        """Return the kind's history after a version."""
        if version < self.oldest:
            raise status.expired(f"too old resource version: {version} ({self.oldest})")
        return [change for change in self.history if change.version > version and change.kind is kind]

    def forget_history(self) -> None:
        """Make every resourceVersion up to now too old, as compaction does."""
        self.version += 1
        self.oldest = self.version
        self.history.clear()

    # Writing

    def create(self, kind: Kind, namespace: str | None, body: Object, dry_run: bool = False) -> Object:
        item = copy.deepcopy(body)
        self._check_type(kind, item)
        metadata = item.setdefault("metadata", {})
        if kind.namespaced:
            if metadata.setdefault("namespace", namespace) != namespace:
                raise status.bad_request(
                    "the namespace of the provided object does not match the namespace of the request"
                )
            self.get(kinds.NAMESPACES, None, namespace or "")
        if metadata.get("resourceVersion"):
            raise status.bad_request("resourceVersion should not be set on objects to be created")
        for key in ("deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink"):
            metadata.pop(key, None)
        if kind.status and kind is not kinds.NODES:
            item.pop("status", None)
        kind.prepare(item)
        self._begin(kind, item)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.now().strftime(_FORMAT)}
        if kind.generation:
            metadata["generation"] = 1
        if found := kind.faults(item):
            raise status.invalid(kind.qualified, metadata.get("name") or "", found)
        if (namespace, metadata["name"]) in self._items[kind]:
            raise status.already_exists(kind.resource, metadata["name"])
        if kind is kinds.DEFINITIONS and not dry_run:
            self.register(Kind.of_definition(item))
            item["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
        return item if dry_run else self._commit(kind, None, item)

    def replace(
        self, kind: Kind, namespace: str | None, name: str, body: Object, part: str | None = None, dry_run: bool = False
    ) -> Object:
        """Put ``body`` in an object's place, or in that of its status (``part``)."""
        self._check_type(kind, body)
        metadata = body.get("metadata") or {}
        if metadata.get("name") != name:
            url = f"the name of the object ({metadata.get('name')}) does not match the name on the URL ({name})"
            raise status.bad_request(url)
        former = self.get(kind, namespace, name)
        if not metadata.get("resourceVersion") and (kind.custom or kind.group == "coordination.k8s.io"):
            cause = "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update"
            raise status.invalid(kind.qualified, name, [cause])
        return self._update(kind, former, copy.deepcopy(body), part, dry_run)

    def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Object, part: str | None = None, dry_run: bool = False
    ) -> Object:
        """Merge ``body`` into an object, or only its status into the object's (``part``)."""
        former = self.get(kind, namespace, name)
        merged = merge(former, body)
        if merged.get("apiVersion") != former["apiVersion"] or merged.get("kind") != former["kind"]:
            raise status.bad_request("the patch changes the type of the object")
        return self._update(kind, former, copy.deepcopy(merged), part, dry_run)

    def delete(
        self, kind: Kind, namespace: str | None, name: str, options: Object | None = None, dry_run: bool = False
    ) -> Object:
        """Delete an object, or begin to: pods with a node get their grace, finalizers theirs."""
        former = self.get(kind, namespace, name)
        options = options or {}
        metadata = former["metadata"]
        wanted = options.get("preconditions") or {}
        for key, words in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if wanted.get(key) and wanted[key] != metadata[key]:
                raise status.unmet(kind.qualified, name, words, wanted[key], metadata[key])
        if dry_run:
            return former
        grace = self._grace(kind, former, options.get("gracePeriodSeconds"))
        begun = metadata.get("deletionTimestamp")
        if kind is not kinds.PODS and not metadata.get("finalizers"):
            return self._remove(kind, former)
        if begun and grace >= metadata["deletionGracePeriodSeconds"]:
            return former
        end = self.now() + timedelta(seconds=grace)
        if begun:
            end = datetime.strptime(begun, _FORMAT) + timedelta(seconds=grace - metadata["deletionGracePeriodSeconds"])  # noqa: DTZ007
        mark = {"deletionTimestamp": end.strftime(_FORMAT), "deletionGracePeriodSeconds": grace}
        if "generation" in metadata and not begun:
            mark["generation"] = metadata["generation"] + 1
        return self._commit(kind, former, former | {"metadata": metadata | mark})

    def bind(self, pod: Object, node: str) -> Object:
        """Assign a pod to a node, as the scheduler does."""
        return self._commit(kinds.PODS, pod, pod | {"spec": pod["spec"] | {"nodeName": node}})

    def scale(self, kind: Kind, item: Object) -> Object:
        """Return an object's Scale."""
        assert kind.scale is not None
        selector = _at(item, kind.scale.get("labelSelectorPath", ".status.none"))
        metadata = {key: item["metadata"].get(key) for key in ("name", "namespace", "uid", "resourceVersion")}
        counted = {"replicas": _at(item, kind.scale["statusReplicasPath"]) or 0}
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": metadata | {"creationTimestamp": item["metadata"]["creationTimestamp"]},
            "spec": {"replicas": _at(item, kind.scale["specReplicasPath"]) or 0},
            "status": counted | ({"selector": selector} if selector else {}),
        }

    def rescale(self, kind: Kind, namespace: str | None, name: str, scale: Object) -> Object:
        """Set what an object's Scale wants, and return its new Scale."""
        assert kind.scale is not None
        former = self.get(kind, namespace, name)
        version = (scale.get("metadata") or {}).get("resourceVersion")
        patch: Any = (scale.get("spec") or {}).get("replicas", 0)
        for key in reversed(kind.scale["specReplicasPath"].strip(".").split(".")):
            patch = {key: patch}
        if version:
            patch["metadata"] = {"resourceVersion": version}
        return self.scale(kind, self._update(kind, former, merge(former, patch), None, False))

    def collect_garbage(self) -> None:
        """Delete in the background what none of its owners has outlived."""
        alive = {item["metadata"]["uid"] for items in self._items.values() for item in items.values()}
        for kind, items in self._items.items():
            for (namespace, name), item in tuple(items.items()):
                owners = item["metadata"].get("ownerReferences")
                going = item["metadata"].get("deletionTimestamp")
                if owners and not going and not any(owner["uid"] in alive for owner in owners):
                    self.delete(kind, namespace, name)

    # Inside

    def _check_type(self, kind: Kind, body: Object) -> None:
        for key, own in (("apiVersion", kind.api_version), ("kind", kind.kind)):
            if not kind.custom:
                body.setdefault(key, own)  # a typed decoder knows by the path
            if kind.custom and key == "kind" and body.get(key) not in {None, own}:
                cause = f'kind: Invalid value: "{body[key]}": must be {own}'
                raise status.invalid(kind.qualified, body["metadata"].get("name", ""), [cause])
            if body.get(key) != own:
                raise status.bad_request(f"{key} {body.get(key)!r} of the object does not match the expected {own!r}")

    def _begin(self, kind: Kind, item: Object) -> None:
        """Fill in what controllers and registries give a new object."""
        if kind is kinds.PODS:
            item["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        elif kind is kinds.NAMESPACES:
            item["status"] = {"phase": "Active"}
        elif kind.plural == "services" and item["spec"].get("type") == "ClusterIP":
            self._address += 1
            item["spec"].setdefault("clusterIP", f"10.0.{self._address // 250}.{self._address % 250 + 1}")
            item["status"] = {"loadBalancer": {}}

    def _update(self, kind: Kind, former: Object, item: Object, part: str | None, dry_run: bool) -> Object:
        own, metadata = former["metadata"], item.setdefault("metadata", {})
        name = own["name"]
        wanted = metadata.get("resourceVersion") or own["resourceVersion"]
        if metadata.get("uid", own["uid"]) != own["uid"]:
            raise status.unmet(kind.qualified, name, "UID", metadata["uid"], own["uid"])
        if wanted != own["resourceVersion"]:
            why = "the object has been modified; please apply your changes to the latest version and try again"
            raise status.conflict(kind.resource, name, why)
        if metadata.get("name", name) != name:
            raise status.bad_request("the name of the object cannot be changed")
        if part == "status":
            item = {key: value for key, value in former.items() if key != "status"} | (
                {"status": item["status"]} if "status" in item else {}
            )
        else:
            if kind.status:
                item.pop("status", None)
                item |= {"status": former["status"]} if "status" in former else {}
            kept = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")
            item["metadata"] = metadata | {key: own[key] for key in kept if key in own}
            for key in kept:
                if key not in own:
                    item["metadata"].pop(key, None)
        kind.prepare(item)
        item["metadata"] = item["metadata"] | {"resourceVersion": own["resourceVersion"]}
        if kind.namespaced:
            item["metadata"].setdefault("namespace", own["namespace"])
        if found := [*kind.faults(item), *_forbidden(kind, former, item)]:
            raise status.invalid(kind.qualified, name, found)
        if kind.generation and _content(item) != _content(former):
            item["metadata"]["generation"] = own["generation"] + 1
        return item if dry_run or item == former else self._commit(kind, former, item)

    def _grace(self, kind: Kind, item: Object, wanted: int | None) -> int:
        """Return the seconds that an object's deletion is put off by."""
        if kind is not kinds.PODS:
            return 0
        metadata, spec = item["metadata"], item["spec"]
        if not spec.get("nodeName") or item["status"].get("phase") in {"Succeeded", "Failed"}:
            return 0
        if wanted is None:
            wanted = metadata.get("deletionGracePeriodSeconds", spec["terminationGracePeriodSeconds"])
        return max(int(wanted), 0)

    def _commit(self, kind: Kind, former: Object | None, item: Object) -> Object:
        metadata = item["metadata"]
        going = metadata.get("deletionTimestamp") and not metadata.get("deletionGracePeriodSeconds")
        if going and not metadata.get("finalizers"):
            if kind is kinds.PODS and former is not None:
                self._store(kind, former, item)
            return self._remove(kind, item)
        return self._store(kind, former, item)

    def _store(self, kind: Kind, former: Object | None, item: Object) -> Object:
        metadata = item["metadata"]
        self.version += 1
        item = item | {"metadata": metadata | {"resourceVersion": str(self.version)}}
        self._items[kind][metadata.get("namespace"), metadata["name"]] = item
        self._tell(Change(self.version, kind, "MODIFIED" if former else "ADDED", item, former))
        return item

    def _remove(self, kind: Kind, item: Object) -> Object:
        metadata = item["metadata"]
        former = self._items[kind].pop((metadata.get("namespace"), metadata["name"]))
        self.version += 1
        item = item | {"metadata": metadata | {"resourceVersion": str(self.version)}}
        self._tell(Change(self.version, kind, "DELETED", item, former))
        if kind is kinds.NAMESPACES:
            for other, items in self._items.items():
                for namespace, name in tuple(items):
                    if namespace == metadata["name"]:
                        self._remove(other, items[namespace, name])
        return item

    def _tell(self, change: Change) -> None:
        if len(self.history) == self.history.maxlen:
            self.oldest = self.history[0].version
        self.history.append(change)
        for listener in tuple(self.listeners):
            listener(change)


def _order(entry: tuple[Key, Object]) -> Key:
    (namespace, name), _ = entry
    return (namespace or "", name)


def _at(item: Object, path: str) -> Any:
    value: Any = item
    for key in path.strip(".").split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _content(item: Object) -> Object:
    return {key: value for key, value in item.items() if key not in {"metadata", "status"}}


def _forbidden(kind: Kind, former: Object, item: Object) -> Iterator[str]:
    """Refuse what may not change in an existing object."""
    if kind is kinds.PODS:
        mutable = {"activeDeadlineSeconds", "tolerations", "containers", "initContainers"}
        before, after = former["spec"], item.get("spec") or {}
        if any(before.get(key) != after.get(key) for key in (before.keys() | after.keys()) - mutable):
            yield "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`"
    elif kind.plural == "services" and former["spec"].get("clusterIP") != item["spec"].get("clusterIP"):
        yield f'spec.clusterIPs[0]: Invalid value: "{item["spec"].get("clusterIP")}": may not change once set'
