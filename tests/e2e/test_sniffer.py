"""Somebody who hears every packet between the pods of a job, on every node: nothing of it can be read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
from cluster import Object, until
from cluster_jobs import Job, script, spread
from installation import Installed
from sniffing import Sniffer, key_patterns, known_patterns, training

from virtualflow.protocol.identity import OWN
from virtualflow.protocol.live_view import view_token

STARTS = 240.0
CANARY = b"what goes between two pods in plaintext"
SING = f"""
import os, socket, urllib.parse
address = urllib.parse.urlsplit(os.environ["VIRTUALFLOW_COORDINATOR"])
with socket.create_connection((address.hostname, address.port), 30) as connection:
    connection.sendall({CANARY!r})
"""
"""What each worker says first, in plaintext, to the port of its coordinator: it shows that the ears would hear."""


def test_who_hears_every_packet_between_nodes_learns_nothing(
    installed: Installed, start: Callable[[Object], Job]
) -> None:
    if os.geteuid() != 0 or not any(name.startswith("veth") for _, name in socket.if_nameindex()):
        pytest.skip("it needs root on the machine of the nodes, with the pods' interfaces")
    secrets: dict[str, bytes] = {}
    sniffer = Sniffer(interface="veth*")
    try:
        job = start(spread(script("heard", training(1_500, 0.05, SING), replicas=2)))
        job.wait_training(2, STARTS)
        nodes = {pod["spec"]["nodeName"] for pod in job.workers()}
        assert len(nodes) == 2, nodes
        _note(job, secrets)
        job.kubectl("scale", "vfj", "heard", "--replicas=3")  # the third one gets the state
        job.wait_training(3, STARTS)
        _note(job, secrets)
        job.kubectl("delete", "pod", job.workers()[0]["metadata"]["name"], "--force", "--grace-period=0")
        until("its place is taken", lambda: job.status().get("changes", 0) >= 3, STARTS)
        job.wait_training(3, STARTS)
        _note(job, secrets)
        assert job.coordinator_status()["phase"] in ("training", "evaluating")
        job.patch({"suspend": True})
        job.wait_phase("Suspended", STARTS)
    finally:
        sniffer.close()
    assert sniffer.dropped == 0
    assert sniffer.hears(CANARY)
    assert sniffer.total > 5_000_000, "gradients of hundreds of steps, and the state twice"
    heard = [what for what, forms in known_patterns().items() if any(map(sniffer.hears, forms))]
    heard += [what for what, secret in secrets.items() if sniffer.hears(secret)]
    assert heard == []
    assert len([what for what in secrets if what.startswith("key")]) >= 5, "a coordinator and four workers"


def _note(job: Job, secrets: dict[str, bytes]) -> None:
    """Keep what is secret of the pods that there are now."""
    token = job.token().encode()
    secrets |= {"token": token, "view token": view_token(token.decode()).encode()}
    for pod in job.pods():
        identity = job.identity_of(pod)
        who = f"{pod['metadata']['name']} {pod['metadata']['uid']}"  # its successor has the same name
        secrets |= {f"{what} of {who}": secret for what, secret in key_patterns(identity[OWN]).items()}
