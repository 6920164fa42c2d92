"""An upgrade of the operator by Helm under running jobs, from an older version, and the way back."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import RELEASE, ROOT, SYSTEM, Object, command, until
from cluster_jobs import OPERATOR_IMAGE, TRAINER_IMAGE, Job, container, digits
from installation import Installed
from slots import add_queue, set_slots, take_slot

from kstatus import kstatus

OLD = os.environ.get("VIRTUALFLOW_E2E_OLD", "")
"""The older version: a commit, whose images have the tag ``old``."""
QUEUE = "e2e-upgrade"
STEPS = 800
"""At half a second each far more than two changes of version take, and few enough for a slow machine at the end."""

pytestmark = pytest.mark.skipif(
    not OLD,
    reason="needs an older version: make image-old OLD=<commit>, give both images to the nodes, and set "
    "VIRTUALFLOW_E2E_OLD=<commit>",
)


class Release:
    """The release on the cluster, in one version or the other."""

    def __init__(self, installed: Installed, old: Path) -> None:
        self._cluster = installed.cluster
        self._versions = {
            "old": (old / "charts" / "virtualflow", "old"),
            "new": (ROOT / "charts" / "virtualflow", OPERATOR_IMAGE.rpartition(":")[2]),
        }

    def become(self, version: str) -> None:
        """Upgrade it to that version, and wait until an operator of it leads."""
        chart, tag = self._versions[version]
        begun = time.monotonic()
        words = ("--reset-then-reuse-values", "--set", f"image.tag={tag}", "--wait", "--timeout=150s")
        self._cluster.helm("upgrade", RELEASE, str(chart), "-n", SYSTEM, *words, timeout=180)
        waited = time.monotonic() - begun

        def leads() -> bool:
            return str(self._cluster.leader()["spec"]["containers"][0]["image"]).endswith(f":{tag}")

        until(f"an operator of the {version} version leads", leads, 60, every=0.1)
        print(f"to the {version} version: helm --wait {waited:.1f} s, it leads after {time.monotonic() - begun:.1f} s")


@pytest.fixture
def release(installed: Installed, tmp_path: Path) -> Iterator[Release]:
    """The release in the older version, with a queue; in the end it is of this version again."""
    archive = command("git", "-C", ROOT, "archive", "--format=tar", "-o", tmp_path / "old.tar", OLD, "charts", "crds")
    assert archive == ""
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "old.tar").read_bytes())) as files:
        files.extractall(tmp_path / "old", filter="data")
    for node in installed.cluster.nodes():
        set_slots(installed.cluster, node)
    found = Release(installed, tmp_path / "old")
    try:
        found.become("old")
        add_queue(installed.cluster, QUEUE)
        yield found
    finally:
        installed.cluster.kubectl("delete", "vfq", QUEUE, check=False)
        found.become("new")


def older(job: Object) -> Object:
    """Let a job's workers be of the older version."""
    container(job)["image"] = f"{TRAINER_IMAGE.rpartition(':')[0]}:old"
    return job


def pods(job: Job) -> dict[str, int]:
    """The job's pods, and how often a container of each was started again."""
    found = [(pod["metadata"]["uid"], pod["status"].get("containerStatuses") or []) for pod in job.pods()]
    return {uid: sum(status["restartCount"] for status in statuses) for uid, statuses in found}


def test_jobs_train_on_through_an_upgrade_and_the_way_back(
    installed: Installed, namespace: str, release: Release, reference: Callable[[Object], str]
) -> None:
    plain = older(digits("plain", steps=STEPS, pause=0.5))
    queued = take_slot(older(digits("queued", steps=STEPS, pause=0.5, queue=QUEUE, maxReplicas=2)))
    jobs = [
        Job(installed.cluster, namespace, manifest["metadata"]["name"]).create(manifest) for manifest in (plain, queued)
    ]
    for job in jobs:
        job.wait_training(2, 240)
    before = [pods(job) for job in jobs]
    steps = [job.status()["step"] for job in jobs]

    def train_on(version: str) -> None:
        """All are as before, but for the steps that they have made since."""
        release.become(version)
        for number, job in enumerate(jobs):
            status = job.wait_step(steps[number] + 10, 120)
            print(f"{job.name}: from step {steps[number]} to {status['step']}")
            steps[number] = status["step"]
            assert (status["phase"], status["readyReplicas"], status.get("repeatedSteps", 0)) == ("Running", 2, 0)
            assert pods(job) == before[number]

    train_on("new")
    assert kstatus(installed.cluster.get("vfj", namespace, "plain") or {}) == "Current"
    jobs[0].patch({"elasticity": {"startupDeadlineSeconds": 3600}})  # the older definition has no such field
    until("that is seen", lambda: jobs[0].status()["observedGeneration"] == 2, 30)
    train_on("old")
    jobs[0].kubectl("scale", "vfj", "plain", "--replicas=3")
    jobs[0].wait_training(3, 240)
    for job in jobs:
        job.go_fast()
    for job in jobs:
        status = job.wait_phase("Complete", 300)
        assert (status["digest"], status.get("repeatedSteps", 0)) == (reference(digits("digits", steps=STEPS)), 0)
    release.become("new")
    for job in jobs:
        until(
            "a job that has ended meanwhile is current",
            lambda job=job: kstatus(installed.cluster.get("vfj", namespace, job.name) or {}) == "Current",
            60,
        )
