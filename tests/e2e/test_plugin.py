"""``kubectl vf`` and the client for programs, with a job of real pods."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable

from cluster import ROOT, Cluster, Object, until
from cluster_jobs import TRAINER_IMAGE, Job, container, digits
from installation import Installed

from virtualflow.cluster import Client
from virtualflow.cluster.plugin import main

Start = Callable[[Object], Job]


def nodes_share_files(cluster: Cluster) -> bool:
    """Whether the nodes are one machine, and so have one folder for the logs of pods."""
    machines = cluster.kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.machineID}").split()
    return len(machines) > 1 and len(set(machines)) == 1


def test_a_job_is_followed_drained_and_explained(
    installed: Installed, start: Start, reference: Callable[[Object], str]
) -> None:
    manifest = digits("digits", steps=600, pause=0.05)
    command = container(manifest)["command"]
    command[-1] = f"print('it begins', flush=True)\n{command[-1]}"
    made = start(manifest)
    made.wait_training(2, 240)
    with Client(kubeconfig=installed.cluster.kubeconfig, namespace=made.namespace) as client:
        job = client.job("digits")
        lines: list[str] = []

        def begun() -> set[str]:
            return {line.worker for line in job.logs() if line.text == "it begins"}

        readable = begun()

        def follow() -> None:
            lines.extend(f"{line.worker}: {line.text}" for line in job.logs(follow=True))

        reader = threading.Thread(target=follow, daemon=True)
        reader.start()
        first, second = job.workers()
        job.drain(second)
        made.wait_training(2, 240)
        until("the drained worker is gone", lambda: second not in client.job("digits").workers(), 60)
        readable |= begun()
        made.go_fast()
        status = client.job("digits").wait(240).status
        assert (status["digest"], status["repeatedSteps"]) == (reference(digits("digits")), 0)
        assert status["changes"] >= 1
        reader.join(60)
        assert not reader.is_alive(), "it ends with the job"
        (third,) = set(job.workers()) - {first}
        told = [line.removesuffix(": it begins") for line in lines if line.endswith(": it begins")]
        everybody = {first, second, third}
        if nodes_share_files(installed.cluster):
            # Their kubelets remove the logs of each other's pods: of some there may be nothing to follow.
            everybody = readable | (everybody & set(told))
        assert sorted(told) == sorted(everybody), "of everybody, and once"
        where = ["--kubeconfig", installed.cluster.kubeconfig, "-n", made.namespace]
        assert main(["why", *where, "digits"]) == 0
        assert main(["check", *where, str(ROOT / "examples/digits.yaml")]) == 0


def train() -> None:
    import torch
    import torch.nn.functional as F

    import virtualflow as vf

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1_000, 1)
    with vf.elastic(model, optimizer, torch.utils.data.TensorDataset(x, 2 * x), batch_size=80, epochs=3) as run:
        for step in run:
            for features, wanted in step:
                F.mse_loss(model(features), wanted).backward()
    print(f"the weight is {model.weight.item():.3f}")


def test_a_function_is_shipped_and_trained_and_leaves_nothing(installed: Installed, namespace: str) -> None:
    with Client(kubeconfig=installed.cluster.kubeconfig, namespace=namespace) as client:
        job = client.submit(train, replicas=2, image=TRAINER_IMAGE, resources={"cpu": "100m", "memory": "512Mi"})
        status = job.wait(240).status
        assert (status["step"], status["repeatedSteps"]) == (39, 0)
        said = {line.text for line in job.logs()}
        removed = {text for text in said if text.endswith("no such file or directory")}
        if not (nodes_share_files(installed.cluster) and said == removed != set()):  # by each other's kubelets
            assert any(text.startswith("the weight is ") for text in said), said
        job.delete()

        def files() -> list[str]:
            found = client.core.list_namespaced_config_map(namespace).items
            return [each.metadata.name for each in found if each.metadata.name.endswith("-files")]

        until("its files are gone", lambda: files() == [], 60)


def test_the_live_page_of_a_job_is_reached_from_outside(installed: Installed, start: Start) -> None:
    made = start(digits("digits", steps=600, pause=0.05))
    made.wait_training(2, 240)
    program = "import sys; from virtualflow.cluster.plugin import main; sys.exit(main())"
    where = ["--kubeconfig", installed.cluster.kubeconfig, "-n", made.namespace]
    command = [sys.executable, "-c", program, "ui", *where, "digits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as plugin:
        try:
            assert plugin.stdout is not None
            page, _, fragment = plugin.stdout.readline().strip().partition("#")
            said = dict(urllib.parse.parse_qsl(fragment))
            assert said["job"] == f"{made.namespace}/digits"
            with urllib.request.urlopen(page, timeout=30) as answer:
                assert "text/html" in answer.headers["Content-Type"]
            looks = {"Authorization": f"Bearer {said['token']}"}
            view = urllib.request.Request(page.replace("/ui", "/v1/view"), headers=looks)
            with urllib.request.urlopen(view, timeout=30) as answer:
                shown = json.load(answer)
            assert shown["now"]["phase"] == "training"
            assert len(shown["job"]["workers"]) == 2
            made.go_fast()
            made.wait_phase("Complete", 240)
            ended, _ = plugin.communicate(timeout=60)
            assert (plugin.returncode, ended.splitlines()[-1]) == (0, "digits is Complete.")
        finally:
            plugin.kill()
