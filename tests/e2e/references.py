"""Digests of undisturbed runs, which those on the cluster must equal."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from cluster import ROOT, Cluster, Object, command, until
from cluster_jobs import TRAINER_IMAGE, Job
from installation import temporary_namespace

FINGERPRINT = """
import sys, torch
processor = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), "")
version = torch.__version__.split("+")[0]
open(sys.argv[1], "w").write("|".join([version, torch.backends.cpu.get_cpu_capability(), processor]))
"""
"""Writes what decides about bits into the file that it is given."""


def same_machine(cluster: Cluster) -> bool:
    """Say whether equal bits may be expected here and in a pod: the same torch on the same kind of processor."""
    here = command(sys.executable, "-c", FINGERPRINT, "/dev/stdout").strip()
    words = ["python", "-c", FINGERPRINT, "/dev/termination-log"]
    spec = {"restartPolicy": "Never", "containers": [{"name": "look", "image": TRAINER_IMAGE, "command": words}]}
    with temporary_namespace(cluster, "look") as namespace:
        cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "look"}, "spec": spec}, namespace)

        def looked() -> str | None:
            pod = cluster.get("pods", namespace, "look") or {}
            states = pod.get("status", {}).get("containerStatuses") or [{}]
            return states[0].get("state", {}).get("terminated", {}).get("message")

        there = until("a pod has said what it runs on", looked, 120).strip()
    if here != there:
        print(f"\nthe references run in the cluster: here is {here}, there {there}")
    return here == there


def run_here(manifest: Object) -> str:
    """Return the digest of ``virtualflow run -f``."""
    with tempfile.TemporaryDirectory() as directory:
        path, report = Path(directory, "job.yaml"), Path(directory, "report.json")
        path.write_text(yaml.safe_dump(manifest))
        words = [sys.executable, "-m", "virtualflow", "run", "--plain", "--report", str(report), "-f", str(path)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(report.read_text())["digest"])


def run_there(cluster: Cluster, manifest: Object) -> str:
    """Return the digest of an undisturbed job with one worker."""
    alone = json.loads(json.dumps(manifest))
    alone["spec"] |= {"replicas": 1, "minReplicas": 1}
    alone["spec"].pop("checkpoint", None)
    with temporary_namespace(cluster, "reference") as namespace:
        job = Job(cluster, namespace, alone["metadata"]["name"]).create(alone)
        return str(job.wait_phase("Complete", 900)["digest"])
