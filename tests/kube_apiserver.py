"""A kube-apiserver and etcd of the tests' own, where both are on PATH: a real API without nodes.

It is there in two or three seconds, without a cluster, and takes more pods than a machine could run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ports import free_port
from virtualflow.launcher.supervisor import die_with

READY_SECONDS = 90.0
STOP_SECONDS = 10.0
HOW = "needs kube-apiserver and etcd: put both on PATH"


COLLECTING = [
    "--controllers=garbage-collector-controller,namespace-controller",
    "--leader-elect=false",
    "--secure-port=0",
]
"""Who removes the children of what was deleted, and what is in a namespace, where that program is at hand, too."""


def at_hand() -> bool:
    """Whether there are programs to start."""
    return bool(shutil.which("etcd") and shutil.which("kube-apiserver"))


@contextlib.contextmanager
def running(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the end of the block; its output goes to ``log``."""
    with (
        log.open("wb") as output,
        # It goes with this process, however that ends.
        subprocess.Popen(arguments, stdout=output, stderr=output, preexec_fn=die_with(os.getpid())) as process,  # noqa: PLW1509
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[Path]:
    """Start both, with their files in ``folder``; the path of a kubeconfig with all rights."""
    etcd, program = shutil.which("etcd"), shutil.which("kube-apiserver")
    assert etcd is not None, HOW
    assert program is not None, HOW
    token, keys = secrets.token_hex(16), folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", keys, "2048"], check=True, capture_output=True, timeout=60)
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    client, peer, port = free_port(), free_port(), free_port()
    etcd_arguments = [
        etcd,
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls=http://127.0.0.1:{client}",
        f"--advertise-client-urls=http://127.0.0.1:{client}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        "--unsafe-no-fsync",
    ]
    arguments = [
        program,
        f"--etcd-servers=http://127.0.0.1:{client}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={folder}/certificates",
        f"--token-auth-file={folder}/tokens.csv",
        f"--service-account-key-file={keys}",
        f"--service-account-signing-key-file={keys}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-cluster-ip-range=10.97.0.0/16",
        "--authorization-mode=RBAC",
        "--disable-admission-plugins=ServiceAccount",
        "--allow-privileged=true",  # as clusters have it: what forbids it is admission
    ]
    kubeconfig = folder / "kubeconfig"
    cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": "test", "user": {"token": token}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            }
        )
    )
    with running(etcd_arguments, folder / "etcd.log"), running(arguments, folder / "kube-apiserver.log") as server:

        def ready() -> bool:
            assert server.poll() is None, (folder / "kube-apiserver.log").read_text()[-2_000:]
            asked = ["curl", "-fsSk", "-m", "2", "-H", f"Authorization: Bearer {token}"]
            url = f"https://127.0.0.1:{port}/readyz"
            return subprocess.run([*asked, url], check=False, capture_output=True, timeout=10).returncode == 0

        deadline = time.monotonic() + READY_SECONDS
        while not ready():
            assert time.monotonic() < deadline, "the API server does not become ready"
            time.sleep(0.05)
        controllers = shutil.which("kube-controller-manager")
        if controllers is None:
            yield kubeconfig
            return
        with running([controllers, f"--kubeconfig={kubeconfig}", *COLLECTING], folder / "controllers.log"):
            yield kubeconfig
