"""The cache: an older version never wins, what is deleted stays deleted, and a list heals what was missed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow_operator.constants import LABEL_JOB, LABEL_ROLE, WORKER
from virtualflow_operator.k8s.cache import ObjectCache, Store, key_of

KEY = ("ml", "digits")


def thing(version: int, uid: str = "u1", name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "ml", "name": name, "uid": uid, "resourceVersion": str(version)}, **fields}


def pod(
    version: int = 1, name: str = "digits-workers-0", uid: str = "u1", job: str | None = "digits"
) -> dict[str, Any]:
    body = thing(version, uid, name, spec={"nodeName": "n"}, status={"phase": "Running"})
    body["metadata"]["labels"] = {LABEL_JOB: job} if job else {}
    return body


def shelf() -> ObjectCache[int]:
    return ObjectCache(lambda body: int(body["metadata"]["resourceVersion"]))


def value(kept: ObjectCache[int], name: str = "a") -> int | None:
    entry = kept.entries.get(("ml", name))
    return entry.value if entry is not None else None


@given(st.lists(st.integers(1, 50), min_size=1))
def test_the_newest_version_wins_in_whatever_order_they_come(versions: list[int]) -> None:
    kept = shelf()
    for version in versions:
        kept.put(thing(version))
    assert value(kept) == max(versions)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(1, 3), st.integers(1, 9)),
            st.tuples(st.just("remove"), st.integers(1, 3), st.just(0)),
        ),
        max_size=20,
    )
)
def test_what_was_deleted_never_comes_back(events: list[tuple[str, int, int]]) -> None:
    kept, dead = shelf(), set()
    for kind, life, version in events:
        uid = f"u{life}"
        if kind == "put":
            kept.put(thing(10 * life + version, uid))
        else:
            kept.remove("ml", "a", uid)
            dead.add(uid)
        entry = kept.entries.get(("ml", "a"))
        assert entry is None or entry.uid not in dead


@given(st.permutations([(1, 11), (1, 15), (2, 21), (2, 24), (3, 31)]))
def test_of_successive_objects_of_one_name_the_last_one_stays(order: list[tuple[int, int]]) -> None:
    kept = shelf()
    for life, version in order:
        kept.put(thing(version, f"u{life}"))
    assert value(kept) == 31


def test_what_is_put_says_what_was_known_and_what_is() -> None:
    kept = shelf()
    assert kept.put(thing(5)) == (None, 5)
    assert kept.put(thing(7)) == (5, 7)
    assert kept.put(thing(6)) == (7, 7)
    assert kept.put(thing(9, "u2")) == (None, 9), "another object of that name was not known before"
    assert kept.remove("ml", "a", "u1") is False
    assert kept.remove("ml", "a", "u2") is True
    assert kept.put(thing(10, "u2")) == (None, None)


def test_a_list_adds_what_was_missed_and_removes_what_is_gone() -> None:
    kept = shelf()
    for name in "abc":
        kept.put(thing(1, name, name))
    bodies = [thing(1, "a", "a"), thing(2, "b", "b"), thing(3, "d", "d")]
    changed = kept.replace(map(kept.listed, bodies), time.monotonic(), lambda _: True)
    assert changed == {("ml", "b"), ("ml", "c"), ("ml", "d")}
    assert sorted(kept.entries) == [("ml", "a"), ("ml", "b"), ("ml", "d")]
    kept.put(thing(9, "c", "c"))
    assert value(kept, "c") is None, "an event that comes late does not bring it back"


def test_of_a_list_only_what_is_wanted_is_kept_and_what_is_known_is_not_read_again() -> None:
    """Ten thousand pods as they are listed take 200 MiB."""
    read: list[str] = []
    kept = ObjectCache[str](lambda body: read.append(body["metadata"]["name"]) or "read")  # type: ignore[func-returns-value]
    bodies = [thing(1, "a", "a"), thing(2, "b", "b")]
    for body in bodies:
        kept.put(body)
    listed = [*map(kept.listed, [*bodies, thing(3, "b", "b"), thing(1, "other", "a")])]
    assert not any(body in one for one in listed if one is not None for body in bodies)
    assert read == ["a", "b", "b", "a"], "a newer version, and another object of that name"
    kept.put({"metadata": {"name": "c", "uid": "c"}})
    kept.listed({"metadata": {"name": "c", "uid": "c"}})
    assert read[4:] == ["c", "c"], "without a version, nothing says that it is the same"


def test_a_list_says_nothing_of_what_is_newer_than_it_or_elsewhere() -> None:
    kept, begun = shelf(), time.monotonic() - 1
    kept.put(thing(1))
    assert kept.replace([], begun, lambda _: True) == set()
    assert kept.replace([], time.monotonic(), lambda key: key[0] == "other") == set()
    assert value(kept) == 1
    assert kept.replace([], time.monotonic(), lambda _: True) == {("ml", "a")}


def test_a_list_that_began_before_a_deletion_does_not_undo_it() -> None:
    kept = shelf()
    kept.put(thing(1))
    kept.remove("ml", "a", "u1")
    assert kept.replace([kept.listed(thing(1))], time.monotonic() - 1, lambda _: True) == set()
    assert value(kept) is None


@given(st.data())
def test_after_a_list_the_shelf_is_the_list(data: st.DataObject) -> None:
    kept = shelf()
    names = st.sampled_from("abcde")
    for name in data.draw(st.lists(names)):
        kept.put(thing(data.draw(st.integers(1, 9)), f"old-{name}", name))
    truth = {name: thing(data.draw(st.integers(10, 19)), f"u-{name}", name) for name in data.draw(st.sets(names))}
    kept.replace([*map(kept.listed, truth.values())], time.monotonic() + 1, lambda _: True)
    assert {name for _, name in kept.entries} == set(truth)
    assert all(value(kept, name) == int(b["metadata"]["resourceVersion"]) for name, b in truth.items())


# --- jobs and their pods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{}, {"metadata": {}}, {"metadata": {"labels": {"app": "x"}}}], ids=str)
def test_what_bears_no_label_of_ours_belongs_to_no_job(body: dict[str, Any]) -> None:
    assert key_of(body) is None


def test_pods_are_found_by_their_job() -> None:
    store = Store()
    assert store.put_pod(pod()) == KEY
    assert store.put_pod(pod()) is None, "nothing new"
    assert store.put_pod(pod(name="other-0", uid="u2", job="other")) == ("ml", "other")
    assert store.put_pod(pod(name="x", uid="u3", job=None)) is None
    assert [p.name for p in store.pods_of(KEY)] == ["digits-workers-0"]
    assert store.remove_pod("ml", "digits-workers-0", "another-uid") is None
    assert store.remove_pod("ml", "digits-workers-0", "u1") == KEY
    assert store.pods_of(KEY) == ()
    assert store.put_pod(pod(version=2)) is None, "it is deleted"


def test_a_pod_that_changes_its_job_leaves_the_former_one() -> None:
    store = Store()
    store.put_pod(pod())
    assert store.put_pod(pod(version=2, job="other")) == ("ml", "other")
    assert store.pods_of(KEY) == ()
    assert len(store.pods_of(("ml", "other"))) == 1


def test_how_a_pod_had_ended_is_remembered_of_one_that_is_deleted() -> None:
    store = Store()
    over = {"status": {"phase": "Succeeded"}}
    for number in range(3):
        store.put_pod(pod(name=f"digits-workers-{number}", uid=f"u{number}") | (over if number else {}))
    assert store.former_of(KEY) == ()
    store.remove_pod("ml", "digits-workers-0", "u0")
    assert store.former_of(KEY) == (), "it did not end by itself"
    store.remove_pod("ml", "digits-workers-1", "u1")
    store.replace_pods([], time.monotonic(), lambda _: True)
    assert [(p.name, p.phase) for p in store.former_of(KEY)] == [
        ("digits-workers-1", "Succeeded"),
        ("digits-workers-2", "Succeeded"),
    ]
    store.put_pod(pod(version=9, name="digits-workers-1", uid="u9"))
    store.remove_pod("ml", "digits-workers-1", "u9")
    assert [p.name for p in store.former_of(KEY)] == ["digits-workers-2"], "its namesake's end is not its own"
    store.forget_job(KEY)
    assert store.former_of(KEY) == ()


def test_a_job_loses_something_while_it_goes_and_when_it_is_gone() -> None:
    def service(uid: str) -> dict[str, Any]:
        body = thing(1, uid, "digits-coordinator", spec={"clusterIP": "10.0.0.1"})
        body["metadata"]["labels"] = {LABEL_JOB: "digits"}
        return body

    def leaving(store: Store) -> None:
        body = pod(version=2)
        body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        store.put_pod(body)

    losses: list[Callable[[Store], object]] = [
        leaving,
        lambda store: store.remove_pod("ml", "digits-workers-0", "u1"),
        lambda store: store.replace_pods([], time.monotonic(), lambda _: True),
        lambda store: store.remove_service("ml", "digits-coordinator", "u2"),
        lambda store: store.replace_services([], time.monotonic(), lambda _: True),
    ]
    for lose in losses:
        store = Store()
        assert not store.loses(KEY)
        store.put_pod(pod())
        store.services.put(service("u2"))
        assert store.remove_pod("ml", "digits-workers-0", "u9") is None
        assert store.remove_service("ml", "digits-coordinator", "u9") is None
        assert not store.loses(KEY), "what was deleted is another one's"
        lose(store)
        assert store.loses(KEY)
        assert not store.loses(("ml", "other"))
    store.forget_job(KEY)
    assert not store.loses(KEY)


def test_a_deletion_that_comes_before_the_creation_counts() -> None:
    store = Store()
    assert store.remove_pod("ml", "digits-workers-0", "u1") is None
    assert store.put_pod(pod()) is None
    assert store.pods_of(KEY) == ()


def test_a_list_of_pods_heals_and_names_the_jobs_that_are_concerned() -> None:
    store = Store()
    store.put_pod(pod())
    store.put_pod(pod(name="digits-workers-1", uid="u2"))
    bodies = [
        pod(name="digits-workers-1", uid="u2"),
        pod(name="other-0", uid="u3", job="other"),
        pod(job=None, name="x"),
    ]
    assert store.replace_pods(map(store.pods.listed, bodies), time.monotonic(), lambda _: True) == {
        KEY,
        ("ml", "other"),
    }
    assert [p.name for p in store.pods_of(KEY)] == ["digits-workers-1"]
    assert store.replace_pods(map(store.pods.listed, bodies), time.monotonic(), lambda _: True) == set()


def test_of_a_jobs_nodes_it_is_known_how_many_workers_of_all_jobs_are_there() -> None:
    store = Store()

    def put(name: str, job: str, node: str, role: str = WORKER, phase: str = "Running") -> None:
        body = pod(name=name, uid=name, job=job) | {"spec": {"nodeName": node}, "status": {"phase": phase}}
        body["metadata"]["labels"][LABEL_ROLE] = role
        store.put_pod(body)

    put("digits-0", "digits", "n")
    put("digits-1", "digits", "m")
    put("digits-2", "digits", "")
    put("digits-c", "digits", "k", "coordinator")
    put("other-0", "other", "n")
    put("other-1", "other", "n", phase="Succeeded")
    put("other-2", "other", "l")
    assert store.crowds_of(KEY) == {"n": 2, "m": 1, "k": 0}


def test_a_node_concerns_the_jobs_that_have_pods_on_it() -> None:
    store = Store()
    store.put_pod(pod())
    node = {"metadata": {"name": "n", "uid": "n1", "resourceVersion": "1"}, "spec": {}}
    assert store.put_node(node) == {KEY}
    assert store.put_node(node | {"status": {"images": ["news"]}}) == set(), "nothing that matters has changed"
    cordoned = {"metadata": node["metadata"] | {"resourceVersion": "2"}, "spec": {"unschedulable": True}}
    assert store.put_node(cordoned) == {KEY}
    assert store.put_node(node) == set(), "an older version"
    nodes = store.node_map()
    assert nodes is not None
    assert nodes["n"].cordoned
    assert store.remove_node("n", "n1") == {KEY}
    store.nodes_known = False
    assert store.node_map() is None
