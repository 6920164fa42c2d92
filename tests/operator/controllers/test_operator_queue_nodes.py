"""The operator process in a fake cluster with queues: which nodes the workers of a queue run on."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubelet import NODES as NODE_NAMES
from queue_stage import QUICK_POLICY, add_queue, given, queue, queued, shares
from stage import NAMESPACE, Stage, play

from virtualflow_operator.constants import WORKER
from virtualflow_operator.k8s.client import NODES, PODS, Object


@pytest.mark.slow
def test_the_minimum_is_made_for_on_demand_nodes_and_the_rest_for_spot_ones(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for node in NODE_NAMES:
            stage.server.modify(NODES, None, node, {"metadata": {"labels": {"pool": "ml"}}})
        stage.server.modify(NODES, None, "node-c", {"metadata": {"labels": {"capacity": "spot"}}})
        add_queue(
            stage,
            nodeSelector={"matchLabels": {"pool": "ml"}},
            spotSelector={"matchLabels": {"capacity": "spot"}},
        )
        stage.start(scheduling=QUICK_POLICY)
        stage.server.add(queued("digits", minReplicas=2, elasticity={"minReplicasOn": "OnDemand"}))
        await stage.until(lambda: stage.trains("digits", 6))
        assert queue(stage)["status"]["capacity"]["spot"] == "2"
        grounds = [pod["metadata"]["labels"]["virtualflow.dev/capacity"] for pod in stage.pods("digits", WORKER)]
        assert sorted(grounds) == ["on-demand"] * 2 + ["spot"] * 4
        for pod in stage.pods("digits", WORKER):
            affinity = pod["spec"]["affinity"]["nodeAffinity"]
            (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
            demands = {(d["key"], d["operator"]) for d in term["matchExpressions"]}
            on_demand = pod["metadata"]["labels"]["virtualflow.dev/capacity"] == "on-demand"
            assert demands == {("pool", "In")} | ({("capacity", "NotIn")} if on_demand else set())
            assert ("preferredDuringSchedulingIgnoredDuringExecution" in affinity) is not on_demand
        # Fewer are wanted: those on spot nodes go first.
        stage.change("digits", maxReplicas=3)
        await stage.until(lambda: stage.trains("digits", 3))
        left = [pod["metadata"]["labels"]["virtualflow.dev/capacity"] for pod in stage.pods("digits", WORKER)]
        assert sorted(left) == ["on-demand", "on-demand", "spot"]

    play(tmp_path, story)


@pytest.mark.slow
def test_workers_that_find_no_node_are_withdrawn_and_others_get_their_share(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        add_queue(stage)
        pods = stage.server.all

        def large(pod: Object) -> bool:
            """Of the job ``large`` only one worker finds a node with enough of everything."""
            own = pods(PODS, NAMESPACE, "virtualflow.dev/job=large,virtualflow.dev/role=worker")
            name = pod["metadata"]["name"]
            return name.startswith("large-w") and any(p["spec"].get("nodeName") for p in own)

        stage.kubelet.unschedulable = large
        stage.start("--unschedulable-seconds=1", scheduling=QUICK_POLICY)
        stage.server.add(queued("large"))
        stage.server.add(queued("small"))
        await stage.until(lambda: given(stage, "large") == 3 and len(stage.workers("large")) == 3)
        await stage.until(lambda: stage.status("large").get("readyReplicas") == 1)
        for pod in stage.pods("large", WORKER):
            if not pod["spec"].get("nodeName"):
                stage.server.set_pod(
                    NAMESPACE,
                    pod["metadata"]["name"],
                    conditions=[
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "Unschedulable",
                            "message": "too small",
                            "lastTransitionTime": stage.server.store.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
                        }
                    ],
                )
        await stage.until(lambda: given(stage, "large") == 1 and stage.trains("small", 5))
        assert shares(stage, "large", "small") == [1, 5]
        stage.kubelet.unschedulable = lambda _: False
        stage.server.set_node("node-a", taints=[{"key": "new", "effect": "NoSchedule"}])
        stage.server.set_node("node-a", taints=[])
        await stage.until(lambda: stage.trains("large", 3) and stage.trains("small", 3))

    play(tmp_path, story)
