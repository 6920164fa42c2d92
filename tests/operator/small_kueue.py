"""Kueue for the small cluster: it keeps Workloads, has quota to give, and takes no write that the real one refuses.

What is refused is what the webhook of Kueue's Workloads and the rules of their schema say (pkg/webhooks and
apis/kueue/v1beta2 of Kueue); and no quota may come back while there are pods that it was for.
"""

from __future__ import annotations

import copy
from typing import Any

from fake_api.store import merge
from scenes import SETTINGS
from small_cluster import Body, Cluster
from small_operator import Operator

from virtualflow_operator.api import PodAdditions, Workload, format_time, read_pod, read_workload
from virtualflow_operator.constants import (
    ANNOTATION_KUEUE_ELASTIC,
    ANNOTATION_KUEUE_REPLACES,
    COORDINATOR,
    LABEL_KUEUE_QUEUE,
    WORKER,
)
from virtualflow_operator.jobs.actions import Action
from virtualflow_operator.jobs.admission import AT_ONCE, Admission
from virtualflow_operator.kueue import CreateWorkload, DeleteWorkload, Kueue, KueueAdmission, PatchWorkload
from virtualflow_operator.queues import QueueAdmission

FLAVOR = PodAdditions({"pool": "reserved"}, ({"key": "reserved", "operator": "Exists"},))


def condition(body: Body, kind: str) -> Body:
    found = [c for c in body.get("status", {}).get("conditions") or [] if c["type"] == kind]
    return found[0] if found else {}


def holds(body: Body, kind: str) -> bool:
    return condition(body, kind).get("status") == "True"


def counts(body: Body) -> dict[str, int]:
    """How many workers of each group a Workload that has quota keeps it for."""
    reclaimed = {entry["name"]: entry["count"] for entry in body["status"].get("reclaimablePods") or []}
    asked = {entry["name"]: entry["count"] for entry in body["spec"]["podSets"]}
    given = {entry["name"]: entry["count"] for entry in body["status"]["admission"]["podSetAssignments"]}
    kept = {name: min(given[name], asked[name] - reclaimed.get(name, 0)) for name in given}
    return {name: count for name, count in kept.items() if name != COORDINATOR}


class SmallKueue:
    """The Workloads of one job, and so much quota (in workers) for them."""

    def __init__(self, cluster: Cluster, quota: int) -> None:
        self.cluster, self.quota = cluster, quota
        self.workloads: dict[str, Body] = {}
        self.checked = False
        """Whether an admission check stands between quota and admission."""
        self.made = 0

    # --- its API ---

    def create(self, manifest: Body) -> None:
        name = manifest["metadata"]["name"]
        if name in self.workloads:
            return
        body = copy.deepcopy(manifest)
        self.made += 1
        body["metadata"] |= {
            "uid": f"workload-{self.made}",
            "resourceVersion": self.cluster.bump(),
            "generation": 1,
            "creationTimestamp": format_time(self.cluster.now),
        }
        body["status"] = {}
        self._check_spec(body)
        replaces = body["metadata"]["annotations"].get(ANNOTATION_KUEUE_REPLACES)
        assert not self.pods() or replaces, "pods before quota"
        if replaces:
            old = self.workloads.get(replaces.partition("/")[2])
            both = [one["metadata"]["annotations"] for one in (body, old) if one is not None]
            assert all(found.get(ANNOTATION_KUEUE_ELASTIC) == "true" for found in both), (
                "elastic ones replace one another"
            )
        self.workloads[name] = body

    def patch(self, action: PatchWorkload) -> None:
        old = self.workloads.get(action.name)
        if old is None or old["metadata"]["resourceVersion"] != action.body["metadata"]["resourceVersion"]:
            return  # a conflict: the operator looks again
        new = merge(copy.deepcopy(old), copy.deepcopy(action.body))
        assert (new["status"] == old["status"]) or (action.subresource == "status"), "a status by its subresource"
        assert (new["spec"] == old["spec"]) or (action.subresource is None), "a spec not by the subresource"
        self._check_spec(new)
        self._check_update(old, new)
        self._keep(new)

    def delete(self, action: DeleteWorkload) -> None:
        body = self.workloads.get(action.name)
        if body is None or body["metadata"]["uid"] != action.uid:
            return
        if holds(body, "QuotaReserved") and not holds(body, "Finished") and not self._replaced(body):
            assert not self.pods(), "its quota is given back while its pods are there"
        del self.workloads[action.name]

    def _keep(self, body: Body) -> None:
        body["metadata"]["resourceVersion"] = self.cluster.bump()
        self.workloads[body["metadata"]["name"]] = body

    def _replaced(self, body: Body) -> bool:
        key = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
        others = (b for b in self.workloads.values() if holds(b, "QuotaReserved"))
        return any(b["metadata"]["annotations"].get(ANNOTATION_KUEUE_REPLACES) == key for b in others)

    def _check_spec(self, body: Body) -> None:
        sets = body["spec"]["podSets"]
        elastic = body["metadata"]["annotations"].get(ANNOTATION_KUEUE_ELASTIC) == "true"
        variable = [entry for entry in sets if "minCount" in entry]
        assert len(variable) <= 1, "one pod set may have a minCount"
        assert not (variable and elastic), "no minCount in an elastic job"
        assert all(1 <= entry["minCount"] <= entry["count"] for entry in variable)
        assert all(entry["count"] >= 0 and entry["template"]["spec"]["containers"] for entry in sets)
        assert len({entry["name"] for entry in sets}) == len(sets)
        sizes = {entry["name"]: entry["count"] for entry in sets}
        for entry in body["status"].get("reclaimablePods") or []:
            assert entry["count"] <= sizes[entry["name"]], "not more than there are"

    def _check_update(self, old: Body, new: Body) -> None:
        before, after = holds(old, "QuotaReserved"), holds(new, "QuotaReserved")
        if before:
            assert len(old["spec"]["podSets"]) == len(new["spec"]["podSets"])
            for was, now in zip(old["spec"]["podSets"], new["spec"]["podSets"], strict=True):
                assert now["count"] <= was["count"], "quota does not grow by a write"
                assert was | {"count": 0} == now | {"count": 0}, "pod sets are immutable while quota is reserved"
        if before and after:
            assert old["spec"]["queueName"] == new["spec"]["queueName"], "so is the queue"
            assert old["status"]["admission"] == new["status"]["admission"], "so is the admission"
            known = {e["name"]: e["count"] for e in old["status"].get("reclaimablePods") or []}
            said = {e["name"]: e["count"] for e in new["status"].get("reclaimablePods") or []}
            assert all(said[name] >= count for name, count in known.items()), "nothing is reclaimed a second time"
        if before and not holds(new, "Finished") and after:
            kept = counts(new)
            for group, count in self.pods().items():
                assert count <= max(kept.get(group, 0), sum(kept.values()) == 1 and count), "there are pods for it yet"
        elif before:
            assert not self.pods(), "its quota is given back while its pods are there"
        assert after <= before, "nobody but Kueue gives quota"
        assert not (new["status"].get("admission") and not after), "no admission without quota"

    def pods(self) -> dict[str, int]:
        """Workers that have not ended, by group."""
        found: dict[str, int] = {}
        for pod in map(read_pod, self.cluster.pods.values()):
            if pod.role == WORKER and not pod.finished:
                found[pod.group] = found.get(pod.group, 0) + 1
        return found

    # --- what it does by itself ---

    def _set(self, body: Body, **conditions: tuple[str, str]) -> None:
        known = {c["type"]: c for c in body["status"].get("conditions") or []}
        for kind, (truth, reason) in conditions.items():
            known[kind] = {
                "type": kind, "status": truth, "reason": reason, "message": f"{kind} by {reason}",
                "lastTransitionTime": format_time(self.cluster.now),
            }  # fmt: skip
        body["status"]["conditions"] = list(known.values())

    def _free(self) -> int:
        reserved = [b for b in self.workloads.values() if holds(b, "QuotaReserved") and not holds(b, "Finished")]
        return self.quota - sum(sum(counts(body).values()) for body in reserved if not self._replaced(body))

    def schedule(self) -> None:
        """Give quota to the oldest that fits; finish what was replaced; admit what its checks let through."""
        for body in [copy.deepcopy(b) for b in self.workloads.values()]:
            changed = self._finish_if_replaced(body) or self._admit_if_checked(body) or self._reserve(body)
            if changed:
                self._keep(body)

    def _finish_if_replaced(self, body: Body) -> bool:
        if holds(body, "Finished") or not (holds(body, "QuotaReserved") and self._replaced(body)):
            return False
        self._set(body, Finished=("True", "WorkloadSliceReplaced"))
        return True

    def _admit_if_checked(self, body: Body) -> bool:
        if self.checked or holds(body, "Admitted") or not holds(body, "QuotaReserved") or holds(body, "Finished"):
            return False
        self._set(body, Admitted=("True", "Admitted"))
        return True

    def _reserve(self, body: Body) -> bool:
        gone = holds(body, "Finished") or body["spec"].get("active") is False
        if gone or holds(body, "QuotaReserved") or condition(body, "Requeued").get("status") == "False":
            return False
        replaces = body["metadata"]["annotations"].get(ANNOTATION_KUEUE_REPLACES, "").partition("/")[2]
        old = self.workloads.get(replaces)
        has = sum(counts(old).values()) if old is not None and holds(old, "QuotaReserved") else 0
        reclaimed = {entry["name"]: entry["count"] for entry in body["status"].get("reclaimablePods") or []}
        given = {e["name"]: e["count"] - reclaimed.get(e["name"], 0) for e in body["spec"]["podSets"]}
        over = sum(count for name, count in given.items() if name != COORDINATOR) - has - self._free()
        variable = next((entry for entry in body["spec"]["podSets"] if "minCount" in entry), None)
        if over > 0 and variable is not None and given[variable["name"]] - over >= variable["minCount"]:
            given[variable["name"]] -= over
            over = 0
        if over > 0:
            if condition(body, "QuotaReserved"):
                return False
            self._set(body, QuotaReserved=("False", "Pending"))
            return True
        assignments = [{"name": name, "count": count, "flavors": {"cpu": "gpus"}} for name, count in given.items()]
        body["status"]["admission"] = {"clusterQueue": "gpus", "podSetAssignments": assignments}
        self._set(body, QuotaReserved=("True", "QuotaReserved"), Evicted=("False", "QuotaReserved"))
        if not self.checked:
            self._set(body, Admitted=("True", "Admitted"))
        return True

    def evict(self, reason: str = "Preempted") -> None:
        """Take back what is given."""
        for body in [copy.deepcopy(b) for b in self.workloads.values()]:
            if holds(body, "QuotaReserved") and not holds(body, "Finished") and not holds(body, "Evicted"):
                self._set(body, Evicted=("True", reason))
                self._keep(body)

    def activate(self, active: bool) -> None:
        """Switch the job's Workloads on or off, as an administrator does."""
        for body in [copy.deepcopy(b) for b in self.workloads.values()]:
            if body["spec"].get("active", True) == active:
                continue
            body["spec"]["active"] = active
            if not active and not holds(body, "Evicted"):
                self._set(body, Evicted=("True", "Deactivated"))
            self._keep(body)

    def requeue(self) -> None:
        """Whatever they waited for has come."""
        for body in [copy.deepcopy(b) for b in self.workloads.values()]:
            if condition(body, "Requeued").get("status") == "False":
                self._set(body, Requeued=("True", "BackoffFinished"))
                self._keep(body)


class KueueOperator(Operator):
    """An operator that follows Kueue, perhaps a little late."""

    def __init__(self, cluster: Cluster, small_kueue: SmallKueue) -> None:
        self.small_kueue = small_kueue
        self.known: tuple[Workload, ...] = ()
        self.trouble = ""
        super().__init__(cluster)

    def sync(self) -> None:
        super().sync()
        self.known = tuple(read_workload(copy.deepcopy(body)) for body in self.small_kueue.workloads.values())

    def admission(self) -> Admission:
        otherwise = QueueAdmission() if self.cluster.job["spec"].get("queue") else AT_ONCE
        named = self.cluster.job["metadata"].get("labels", {}).get(LABEL_KUEUE_QUEUE)
        if not named and not self.known:
            return otherwise
        return KueueAdmission(Kueue(self.known, {"gpus": FLAVOR}, trouble=self.trouble), SETTINGS, otherwise)

    def carry_out(self, action: Action, fresh: bool) -> None:
        match action:
            case CreateWorkload(manifest):
                self.small_kueue.create(manifest)
            case PatchWorkload():
                self.small_kueue.patch(action)
            case DeleteWorkload():
                self.small_kueue.delete(action)
            case _:
                super().carry_out(action, fresh)


def small_job(cluster: Cluster, *, queue: str | None = "team", elastic: bool = False, **spec: Any) -> None:
    """Let the cluster's job name a queue, or none, and be elastic or not."""
    job = copy.deepcopy(cluster.job)
    job["metadata"]["labels"] = {LABEL_KUEUE_QUEUE: queue} if queue else {}
    job["metadata"]["annotations"] = {ANNOTATION_KUEUE_ELASTIC: "true"} if elastic else {}
    if spec:
        job["spec"] |= spec
        job["metadata"]["generation"] += 1
    cluster.job = job
