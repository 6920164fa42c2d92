"""What is known of the jobs' Workloads: whose they are, who is woken, and why nothing is known."""

from __future__ import annotations

from typing import Any, cast

from virtualflow_operator.constants import LABEL_JOB
from virtualflow_operator.k8s.client import Forbidden, KubeApi, NotFound, Object
from virtualflow_operator.k8s.following import WorkloadWatch
from virtualflow_operator.settings import OperatorSettings

DIGITS, OTHER = ("ml", "digits"), ("ml", "other")


def workload(name: str, version: int = 1, *, job: str = "digits", queue: str = "team") -> Object:
    metadata = {"namespace": "ml", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata | {"labels": {LABEL_JOB: job}}, "spec": {"queueName": queue}}


class Watch(WorkloadWatch):
    """One without an API server, and whom it has woken."""

    def __init__(self) -> None:
        self.woken: list[Any] = []
        super().__init__(cast(KubeApi, None), self.woken.append, OperatorSettings(image="operator:test"))

    def names(self, key: tuple[str, str]) -> list[str]:
        return [known.name for known in self.of(key)]


def test_each_job_is_woken_for_its_own_workloads_and_not_for_what_changes_nothing() -> None:
    watch = Watch()
    watch.take(workload("b"))
    watch.take(workload("a"))
    watch.take(workload("c", job="other"))
    assert (watch.names(DIGITS), watch.names(OTHER)) == (["a", "b"], ["c"])
    assert watch.woken == [DIGITS, DIGITS, OTHER]
    watch.take(workload("a", 2))
    watch.take(workload("a", 3, queue="another"))
    watch.take(workload("a", 2))  # late
    assert watch.woken[3:] == [DIGITS]
    assert watch.of(DIGITS)[0].queue == "another"
    watch.lose("ml", "a", "uid-a")
    watch.take(workload("a", 3, queue="another"))  # late
    assert (watch.names(DIGITS), watch.woken[4:]) == (["b"], [DIGITS])


def test_a_list_says_what_is_gone() -> None:
    watch = Watch()
    watch.take(workload("a"))
    watch.take(workload("c", job="other"))
    watch.woken.clear()
    watch.replace([watch._cache.listed(workload("b"))], 1e12, lambda _: True)
    assert (watch.names(DIGITS), watch.names(OTHER)) == (["b"], [])
    assert sorted(watch.woken) == [DIGITS, DIGITS, OTHER]


def test_all_that_name_a_queue_are_woken_when_it_is_known_or_not_known_any_more() -> None:
    watch = Watch()
    assert "not been listed yet" in watch.trouble
    watch.note_barred(NotFound(404, "NotFound", "the server could not find the requested resource"))
    watch.note_known()
    assert "no Workloads of Kueue" in watch.trouble
    watch.note_known()
    assert watch.woken == [None], "once"
    watch.replace([], 1e12, lambda _: True)
    watch.note_known()
    assert (watch.trouble, watch.woken) == ("", [None, None])
    watch.note_barred(Forbidden(403, "Forbidden", "workloads is forbidden"))
    watch.note_known()
    assert "workloads is forbidden" in watch.trouble
    watch.take(workload("a"))
    watch.forget()
    assert (watch.names(DIGITS), "not been listed yet" in watch.trouble) == ([], True)
