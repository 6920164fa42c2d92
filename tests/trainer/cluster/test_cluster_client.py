"""Jobs of a real API server, by program and by ``kubectl vf``; without nodes, so the test writes their statuses."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import psutil
import pytest
import yaml

import kube_apiserver

pytest.importorskip("kubernetes", reason="needs kubernetes: install the extra cluster")
from kubernetes import client as kubernetes
from kubernetes import config as kubeconfigs

from virtualflow.cluster import AsyncClient, Client
from virtualflow.cluster.api import COORDINATOR, GROUP, LABEL_JOB, LABEL_ROLE, PLURAL, VERSION, WORKER
from virtualflow.cluster.checks import check
from virtualflow.cluster.jobs_page import JobsSeen
from virtualflow.cluster.plugin import main
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.identity import PAGE_TOKEN
from virtualflow.protocol.live_view import view_token
from virtualflow.protocol.settings import ENV_TOKEN

pytestmark = pytest.mark.skipif(not kube_apiserver.at_hand(), reason=kube_apiserver.HOW)

CRDS = Path(__file__).parents[3] / "crds"
CONTAINER = {"name": "worker", "image": "trainer:test"}


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    group = {"name": "w", "template": {"spec": {"containers": [CONTAINER]}}}
    usual = {"workerGroups": [group], "virtualNodes": 8, "replicas": 2}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "VirtualFlowJob",
        "metadata": {"name": name},
        "spec": usual | spec,
    }


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with kube_apiserver.api_server(tmp_path_factory.mktemp("api")) as path:
        api = kubeconfigs.new_client_from_config(str(path))
        definitions = kubernetes.ApiextensionsV1Api(api)
        definition = yaml.safe_load((CRDS / "virtualflowjobs.yaml").read_text())
        definitions.create_custom_resource_definition(definition)
        deadline = time.monotonic() + 60
        while True:
            found = definitions.read_custom_resource_definition(definition["metadata"]["name"])
            said = {c.type: c.status for c in (found.status.conditions if found.status else None) or ()}
            if said.get("Established") == "True":
                break
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        yield path
        api.close()


@pytest.fixture
def client(kubeconfig: Path) -> Iterator[Client]:
    with Client(kubeconfig=kubeconfig) as made:
        yield made
        for job in made.jobs():
            job.delete()
        for pod in made.core.list_namespaced_pod(made.namespace).items:
            made.core.delete_namespaced_pod(pod.metadata.name, made.namespace, grace_period_seconds=0)


def write_status(client: Client, name: str, **status: Any) -> None:
    """As the operator does."""
    client._jobs.patch_namespaced_custom_object_status(
        GROUP, VERSION, client.namespace, PLURAL, name, {"status": status}
    )


def add_worker(client: Client, job: str, name: str) -> None:
    metadata = {"name": name, "labels": {LABEL_JOB: job, LABEL_ROLE: WORKER}}
    body = {"metadata": metadata, "spec": {"containers": [CONTAINER]}}
    client.core.create_namespaced_pod(client.namespace, body)


def test_a_job_is_created_scaled_suspended_and_resumed(client: Client, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest("digits")))
    job = client.submit(tmp_path / "job.yaml")
    assert (job.name, job.namespace, job.phase, job.finished) == ("digits", "default", "Pending", False)
    job.scale(5)
    assert job.refresh().body["spec"]["replicas"] == 5
    job.suspend()
    assert job.refresh().body["spec"]["suspend"] is True
    job.resume()
    assert job.refresh().body["spec"]["suspend"] is False
    assert [each.name for each in client.jobs(everywhere=True)] == ["digits"]


def test_who_waits_hears_of_the_end_and_of_why(client: Client) -> None:
    job = client.submit(manifest("digits"))
    with pytest.raises(TimeoutError, match="digits is Pending, and the time"):
        job.wait(0.2)
    ends = threading.Timer(0.3, write_status, (client, "digits"), {"phase": "Complete", "step": 9, "digest": "abc"})
    ends.start()
    assert job.wait(30).status["digest"] == "abc"
    ends.join()
    client.submit(manifest("broken"))
    message = "Too many crashes: ValueError: no"
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": message}
    write_status(client, "broken", phase="Failed", conditions=[failed | {"lastTransitionTime": "2026-11-24T11:00:00Z"}])
    with pytest.raises(VirtualFlowError, match=f"broken has failed: {message}"):
        client.job("broken").wait(30)
    gone = client.submit(manifest("gone"))
    deletion = threading.Timer(0.3, client.job("gone").delete)
    deletion.start()
    with pytest.raises(VirtualFlowError, match="gone is not there any more: it was deleted"):
        gone.wait(30)
    deletion.join()


def test_a_worker_is_drained_by_an_eviction(client: Client) -> None:
    job = client.submit(manifest("digits"))
    add_worker(client, "digits", "digits-w-0")
    assert job.workers() == ["digits-w-0"]
    with pytest.raises(ConfigurationError, match="digits-w-7 is no worker of digits; it has digits-w-0"):
        job.drain("digits-w-7")
    job.drain("digits-w-0")
    assert job.workers() == [], "a pod without a node goes at once"


def test_what_the_api_server_refuses_is_one_sentence(client: Client, kubeconfig: Path) -> None:
    client.submit(manifest("digits"))
    with pytest.raises(ConfigurationError, match=r'cannot create the job digits: .*"digits" already exists'):
        client.submit(manifest("digits"))
    with pytest.raises(ConfigurationError, match="replicas must be at most virtualNodes"):
        client.submit(manifest("other", replicas=9))
    with pytest.raises(
        ConfigurationError, match=r'cannot read the job gone in the namespace default: .*"gone" not found'
    ):
        client.job("gone")
    with pytest.raises(ConfigurationError, match=r"that is no VirtualFlowJob"):
        client.submit({"kind": "Job"})
    with pytest.raises(ConfigurationError, match="no cluster"):
        Client(kubeconfig=kubeconfig, context="other")


def test_the_plugin_shows_and_changes_jobs(
    client: Client, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(*arguments: str) -> tuple[int, str, str]:
        code = main([arguments[0], "--kubeconfig", str(kubeconfig), *arguments[1:]])
        said = capsys.readouterr()
        return code, said.out, said.err

    assert say("top") == (0, "", "There are no jobs in the namespace default.\n")
    client.submit(manifest("digits"))
    assert "digits   Pending" in say("top")[1]
    assert "no operator has seen it yet" in say("why", "digits")[1]
    assert say("scale", "digits", "3") == (0, "digits: 3 workers wanted\n", "")
    assert client.job("digits").body["spec"]["replicas"] == 3
    assert say("scale", "digits", "9")[0] == 2
    assert say("suspend", "digits")[0] == say("resume", "digits")[0] == 0
    write_status(client, "digits", phase="Running", step=1_020, earlierSteps=1)
    code, _, said = say("suspend", "digits")
    lost = "digits has no spec.checkpoint: a suspension loses 1021 steps of training"
    assert (code, said) == (2, f"virtualflow: {lost}; give it a checkpoint, or say --force\n")
    assert not client.job("digits").body["spec"].get("suspend")
    assert say("suspend", "digits", "--force") == (0, "digits: to be suspended\n", "")
    assert say("resume", "digits")[0] == 0
    assert say("logs", "digits") == (0, "", "")
    write_status(client, "digits", phase="Complete", step=7, digest="abc")
    assert say("wait", "digits") == (0, "digits: Complete, step 7, digest abc\n", "")
    code, _, said = say("why", "nobody")
    assert (code, said.count("\n")) == (2, 1)


FORWARDS = """\
#!{python}
# As kubectl port-forward looks from outside, of a pod in which a coordinator listens: it is one itself.
import pathlib, sys, threading, time
print(*sys.argv[1:], file=open({calls!r}, "a"), flush=True)
port = sys.argv[-1].partition(":")[0] or "0"
ready = pathlib.Path({ready!r})
ready.unlink(missing_ok=True)
def tell():
    while not ready.exists():
        time.sleep(0.01)
    print("Forwarding from 127.0.0.1:" + ready.read_text().strip().rpartition(":")[2] + " -> 7700", flush=True)
threading.Thread(target=tell, daemon=True).start()
from virtualflow.launcher.cli import main
sys.exit(main(["coordinator", "--host", "127.0.0.1", "--port", port, "--ready-file", str(ready)]))
"""
TOKEN = "the token of digits"


def add_coordinator(client: Client, job: str, name: str, *, plaintext: bool = False) -> None:
    """As the operator and the kubelet do: a pod that runs, whose token is in a Secret."""
    core, secret = client.core, f"{job}-token"
    if secret not in [each.metadata.name for each in core.list_namespaced_secret(client.namespace).items]:
        core.create_namespaced_secret(client.namespace, {"metadata": {"name": secret}, "stringData": {"token": TOKEN}})
    reference = {"secretKeyRef": {"name": secret, "key": "token"}}
    container = {
        "name": COORDINATOR,
        "image": "operator:test",
        "env": [{"name": ENV_TOKEN, "valueFrom": reference}] if plaintext else [],
        "ports": [{"containerPort": 7700}],
    }
    page = {"name": secret, "items": [{"key": "token", "path": PAGE_TOKEN}]}
    sources = [{"secret": {"name": "its-identity"}}, {"secret": page}]
    spec = {"containers": [container]}
    if not plaintext:
        spec["volumes"] = [{"name": "virtualflow-identity", "projected": {"sources": sources}}]
    metadata = {"name": name, "labels": {LABEL_JOB: job, LABEL_ROLE: COORDINATOR}}
    core.create_namespaced_pod(client.namespace, {"metadata": metadata, "spec": spec})
    core.patch_namespaced_pod_status(name, client.namespace, {"status": {"phase": "Running"}})


def looks(address: str) -> str:
    """The phase that the page at that address would show."""
    page, _, fragment = address.partition("#")
    token = dict(urllib.parse.parse_qsl(fragment))["token"]
    view = urllib.request.Request(page.replace("/ui", "/v1/view"), headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(view, timeout=30) as answer:
        return str(json.load(answer)["now"]["phase"])


def forwarding(folder: Path) -> None:
    """Put a kubectl there that forwards to coordinators of its own."""
    kubectl = folder / "kubectl"
    calls, ready = str(folder / "calls"), str(folder / "ready")
    kubectl.write_text(FORWARDS.format(python=sys.executable, calls=calls, ready=ready))
    kubectl.chmod(0o755)


@contextlib.contextmanager
def showing(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``kubectl vf ui`` with a kubectl whose coordinators run in ``folder``: its process and the address it prints."""
    forwarding(folder)
    trainer = str(Path(__file__).parents[3] / "trainer")
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": trainer, ENV_TOKEN: TOKEN}
    # Where this test runs in the background of a shell, SIGINT is ignored, and processes inherit that.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from virtualflow.cluster.plugin import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "ui", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as plugin:
        try:
            assert plugin.stdout is not None
            yield plugin, plugin.stdout.readline().strip()
        finally:
            plugin.kill()


def leaves_nothing(plugin: subprocess.Popen[str]) -> None:
    """Interrupt it, as Ctrl-C does."""
    children = psutil.Process(plugin.pid).children(recursive=True)
    plugin.send_signal(signal.SIGINT)
    assert plugin.wait(30) == 130
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


@pytest.mark.slow
def test_the_way_to_the_page_is_kept_open_and_leaves_nothing(client: Client, kubeconfig: Path, tmp_path: Path) -> None:
    client.submit(manifest("digits"))
    write_status(client, "digits", phase="Running", coordinator="digits-coordinator-0")
    add_coordinator(client, "digits", "digits-coordinator-0")
    found = client.job("digits").coordinator()
    assert found is not None
    assert (found.pod, found.port, found.token) == ("digits-coordinator-0", 7700, TOKEN)
    assert TOKEN not in repr(found)
    calls = tmp_path / "calls"
    with showing(tmp_path, "--kubeconfig", str(kubeconfig), "digits") as (plugin, address):
        assert address.endswith(f"/ui#token={view_token(TOKEN)}&job=default%2Fdigits")
        port = address.split("/ui")[0].rpartition(":")[2]
        assert looks(address) == "waiting"
        # The coordinator is lost, and another one takes its place: the address stays.
        client.core.delete_namespaced_pod("digits-coordinator-0", client.namespace, grace_period_seconds=0)
        add_coordinator(client, "digits", "digits-coordinator-1", plaintext=True)
        (child,) = psutil.Process(plugin.pid).children()
        child.kill()
        deadline = time.monotonic() + 60
        while "digits-coordinator-1" not in calls.read_text() or not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert looks(address) == "waiting"
        assert calls.read_text().splitlines() == [
            f"--kubeconfig={kubeconfig} --namespace=default port-forward --address=127.0.0.1 {rest}"
            for rest in ("pod/digits-coordinator-0 :7700", f"pod/digits-coordinator-1 {port}:7700")
        ]
        leaves_nothing(plugin)


EVIL = "<img src=x onerror=\"document.title='taken'\">"


@pytest.mark.skipif(chromium.PROGRAM is None, reason=chromium.HOW)
@pytest.mark.skipif(not chromium.CHECKER, reason=chromium.HOW_CHECKER)
def test_all_jobs_are_on_one_page_each_a_link_to_its_own(client: Client, kubeconfig: Path, tmp_path: Path) -> None:
    """What it shows is what the API server says, as soon as it says it; nobody's words are more than text."""
    for name in ("broken", "digits", "waits"):
        client.submit(manifest(name, **({"queue": "shared"} if name == "waits" else {})))
    running = {"phase": "Running", "workers": "2/3", "step": 40, "totalSteps": 100, "stepsPerSecond": "0.5"}
    lost = {"from": 3, "to": 2, "cause": "lost", "step": 30, "reason": "w-2 is lost", "pauseMilliseconds": 41}
    write_status(
        client,
        "digits",
        **running,
        goodput="0.964",
        coordinator="digits-coordinator-0",
        lastChange=lost | {"repeatedSteps": 1},
    )
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": f"crashed\n{EVIL}"}
    write_status(client, "broken", phase="Failed", conditions=[failed | {"lastTransitionTime": "2026-11-24T11:00:00Z"}])
    add_coordinator(client, "digits", "digits-coordinator-0")

    def row(job: str) -> str:
        found = f"[...document.querySelectorAll('#jobs tr')].find(e => e.querySelector('a').textContent === '{job}')"
        return f"[...{found}.children].map(e => [...e.children].map(x => x.textContent).filter(Boolean).join(' | '))"

    async def look(address: str) -> None:
        async with asyncio.timeout(120), chromium.browser() as tab:
            await tab.look(1_280)
            await tab.open(address)
            await tab.until("document.querySelectorAll('#jobs tr').length === 3")
            counted = "3 jobs of the namespace default: 1 Failed, 1 Pending, 1 Running"
            assert await tab.value("document.getElementById('counted').textContent") == counted
            assert await tab.value(row("digits")) == [
                "digits",
                "Running",
                "step 40 of 100, about 2 min left",
                "96.4 %",
                "2 of 3 wanted",
                "",
                "",
                "3 workers → 2 workers at step 30 (w-2 is lost): pause 41 ms, 1 step repeated",
            ]
            assert (await tab.value(row("waits")))[4:7] == [
                "0 of 2 wanted",
                "shared",
                "no operator has seen it yet",
            ]
            assert (await tab.value(row("broken")))[6] == (
                f"crashed … {EVIL} | To do: correct the script; make a new job"
            )
            assert await tab.value("[...document.querySelectorAll('#jobs a')].map(e => e.hasAttribute('href'))") == [
                True,
                False,
                False,
            ]
            assert await tab.value("[location.hash, document.querySelectorAll('img').length]") == ["", 0]
            write_status(client, "digits", step=60)
            await tab.until(f"{row('digits')}[2].startsWith('step 60 of 100')")
            client.job("waits").delete()
            await tab.until("document.querySelectorAll('#jobs tr').length === 2")
            await tab.value("find('words').value = 'fail'; find('words').dispatchEvent(new Event('input'))")
            assert await tab.value("[...document.querySelectorAll('#jobs a')].map(e => e.textContent)") == ["broken"]
            await tab.value("find('words').value = ''; list()")
            for width, dark in ((1_280, False), (1_280, True), (390, False)):
                assert await tab.violations(width, dark=dark) == []
            await tab.look(1_280)
            assert await tab.walk() == ["Skip to the jobs", "Show only", "goodput", "digits"]
            if pictures := os.environ.get("VIRTUALFLOW_TEST_PICTURES"):
                for kind, width, dark in (("wide", 1_280, False), ("phone", 390, False), ("dark", 1_280, True)):
                    await tab.look(width, dark=dark)
                    await tab.picture(Path(pictures) / f"jobs-{kind}.png")
            assert tab.complaints == []
            await tab.value("document.querySelector('#jobs a[href]').focus()")
            await tab.press("Enter", 13, "\r")
            await tab.until("location.pathname === '/ui' && find('phase').textContent === 'waiting'")
            assert await tab.value("document.getElementById('name').textContent") == "default/digits"

    with showing(tmp_path, "--kubeconfig", str(kubeconfig)) as (plugin, address):
        for wrong in ("", "Bearer nobody", "Bearer nöbödy"):
            asked = urllib.request.Request(address.partition("#")[0] + "v1/jobs", headers={"Authorization": wrong})
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(asked, timeout=30)
        asyncio.run(look(address))
        leaves_nothing(plugin)


def test_who_may_not_list_jobs_is_told_so_and_what_else_to_try(
    client: Client, kubeconfig: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_in(client, kubeconfig, tmp_path, "stranger")

    def say(*arguments: str) -> tuple[int, str, int]:
        code = main(["ui", "--kubeconfig", str(path), *arguments])
        said = capsys.readouterr()
        return code, said.err, (said.out + said.err).count("\n")

    code, said, lines = say()
    assert (code, lines) == (2, 1)
    assert said.startswith("virtualflow: cannot list the jobs of the namespace default: virtualflowjobs")
    code, said, lines = say("-A")
    assert (code, lines) == (2, 1)
    assert said.startswith("virtualflow: cannot list the jobs of all namespaces: virtualflowjobs")
    assert said.endswith("; -n NAMESPACE shows those of one\n")
    assert say("-A", "digits")[0] == 2
    let(client, "stranger", "list")
    with Client(kubeconfig=path) as stranger:
        client.submit(manifest("digits"))
        jobs = JobsSeen(stranger, everywhere=False)
        version = jobs.look()
        with pytest.raises(ConfigurationError, match=r"cannot watch jobs: .* cannot watch resource"):
            jobs._watch(version)


def test_jobs_beyond_the_bound_are_counted_out_and_lists_come_in_parts(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        client.submit(manifest(f"job-{number}"))
    monkeypatch.setattr("virtualflow.cluster.jobs_page.CHUNK", 2)
    jobs = JobsSeen(client, everywhere=True)
    jobs.look()
    assert [line.name for line in jobs.view("").jobs] == [f"job-{number}" for number in range(5)]
    monkeypatch.setattr("virtualflow.cluster.jobs_page.MOST", 3)
    jobs.look()
    view = jobs.view("")
    assert (len(view.jobs), view.counted) == (3, "the first 3 jobs of all namespaces: 3 Pending")


def test_the_cell_of_the_example_notebook_shows_a_job_of_a_cluster(
    client: Client, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(manifest("digits"))
    write_status(client, "digits", phase="Running", coordinator="digits-coordinator-0")
    add_coordinator(client, "digits", "digits-coordinator-0")
    forwarding(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv(ENV_TOKEN, TOKEN)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    cells = json.loads((Path(__file__).parents[3] / "examples/notebook.ipynb").read_text())["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if "cluster" in cell["metadata"].get("tags", ())]
    before, _, last = source.rpartition("\n")
    names: dict[str, Any] = {}
    exec(f"{before}\npage = {last}", names)
    page = names["page"]
    assert looks(page.address) == "waiting"
    assert f'<iframe src="{html.escape(page.address)}"' in page._repr_html_()
    client.job("digits").delete()  # with which the way ends
    names["client"].close()


def test_where_there_is_no_page_one_sentence_says_why(
    client: Client,
    kubeconfig: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def say() -> tuple[int, str, str]:
        code = main(["ui", "--kubeconfig", str(kubeconfig), "digits"])
        said = capsys.readouterr()
        return code, said.out, said.err

    client.submit(manifest("digits"))
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'error: pods/portforward is forbidden' >&2\nexit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    why = "virtualflow: no coordinator of digits runs: the job is Pending; kubectl vf why digits says why\n"
    assert say() == (2, "", why)
    add_coordinator(client, "digits", "digits-coordinator-2")
    assert say()[0] == 1
    assert say()[2] == "virtualflow: digits-coordinator-2 cannot be reached: error: pods/portforward is forbidden\n"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    code, _, said = say()
    assert (code, "there is no kubectl on the PATH" in said) == (2, True)


def train() -> None:
    print("here")


def config_maps(client: Client) -> dict[str, Any]:
    found = client.core.list_namespaced_config_map(client.namespace).items
    return {each.metadata.name: each for each in found if each.metadata.name != "kube-root-ca.crt"}


def test_a_function_is_submitted_with_its_source_as_a_file_of_the_job(client: Client) -> None:
    job = client.submit(train, image="trainer:test", replicas=4, name="fun", spec={"virtualNodes": 8})
    assert (job.name, job.body["spec"]["replicas"], job.body["spec"]["virtualNodes"]) == ("fun", 4, 8)
    (name, shipped), *others = config_maps(client).items()
    assert (name, others) == ("fun-files", [])
    assert shipped.data["train.py"].startswith("def train() -> None:")
    (owner,) = shipped.metadata.owner_references
    assert (owner.kind, owner.name, owner.uid) == ("VirtualFlowJob", "fun", job.body["metadata"]["uid"])
    client.core.delete_namespaced_config_map(name, client.namespace)  # no controller collects it here


def test_a_submission_that_is_refused_leaves_nothing(client: Client) -> None:
    with pytest.raises(ConfigurationError, match="needs an image"):
        client.submit(train)
    with pytest.raises(ConfigurationError, match="a manifest says all by itself"):
        client.submit(manifest("digits"), image="trainer:test")
    with pytest.raises(ConfigurationError, match=r"cannot create the job fun: .*replicas"):
        client.submit(train, image="trainer:test", name="fun", replicas=-1)
    body = {"metadata": {"name": "fun-files"}}
    client.core.create_namespaced_config_map(client.namespace, body)  # somebody's, in the way
    with pytest.raises(ConfigurationError, match=r"cannot create the job fun: .*already exists"):
        client.submit(train, image="trainer:test", name="fun", spec={"virtualNodes": 8})
    assert client.jobs() == []
    client.core.delete_namespaced_config_map("fun-files", client.namespace)


def test_the_same_without_blocking_an_event_loop(client: Client, kubeconfig: Path) -> None:
    async def use() -> list[str]:
        async with AsyncClient(kubeconfig=kubeconfig) as jobs:
            job = await jobs.submit(manifest("digits"))
            with pytest.raises(TimeoutError):
                await job.wait(0.2)
            waiting = asyncio.create_task(job.wait(60))
            await job.scale(3)
            add_worker(client, "digits", "digits-w-0")
            assert await job.workers() == ["digits-w-0"]
            await job.suspend()
            await job.resume()
            write_status(client, "digits", phase="Complete")
            assert (await waiting).seen.finished
            assert [one.seen.name for one in await jobs.jobs()] == ["digits"]
            assert (await (await jobs.job("digits")).refresh()).seen.body["spec"]["replicas"] == 3
            return [line.text async for line in job.logs()]

    assert asyncio.run(use()) == []


def test_who_stops_waiting_is_not_kept(client: Client, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("virtualflow.cluster.job.REQUEST_SECONDS", 1.0)

    async def use() -> None:
        async with AsyncClient(kubeconfig=kubeconfig) as jobs:
            waiting = asyncio.create_task((await jobs.submit(manifest("digits"))).wait())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(use())  # joins the threads


def log_in(client: Client, kubeconfig: Path, folder: Path, name: str) -> Path:
    """The kubeconfig of a user without any rights."""
    client.core.create_namespaced_service_account("default", {"metadata": {"name": name}})
    token = client.core.create_namespaced_service_account_token(name, "default", {"spec": {"audiences": []}})
    known = yaml.safe_load(kubeconfig.read_text())
    known["users"] = [{"name": known["users"][0]["name"], "user": {"token": token.status.token}}]
    (folder / name).write_text(yaml.safe_dump(known))
    return folder / name


def let(client: Client, name: str, *verbs: str) -> None:
    """Let that user do this with jobs of the namespace."""
    roles = kubernetes.RbacAuthorizationV1Api(client.api)
    rules = [{"apiGroups": [GROUP], "resources": [PLURAL], "verbs": verbs}]
    roles.create_namespaced_role("default", {"metadata": {"name": name}, "rules": rules})
    bound = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}],
    }
    roles.create_namespaced_role_binding("default", bound)


def add_node(client: Client, name: str, labels: dict[str, str], **allocatable: str) -> None:
    client.core.create_node({"metadata": {"name": name, "labels": labels}})
    amounts = {resource.replace("_", "/"): amount for resource, amount in allocatable.items()}
    client.core.patch_node_status(name, {"status": {"allocatable": amounts, "capacity": amounts}})


def add_operator(client: Client, image: str) -> kubernetes.AppsV1Api:
    labels = {"app.kubernetes.io/part-of": "virtualflow", "app.kubernetes.io/component": "operator"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "operator", "image": image}]}}
    spec = {"selector": {"matchLabels": labels}, "template": pod}
    apps = kubernetes.AppsV1Api(client.api)
    apps.create_namespaced_deployment("default", {"metadata": {"name": "vf-operator", "labels": labels}, "spec": spec})
    return apps


def test_a_cluster_is_checked_before_a_job_is_there(client: Client) -> None:
    wanted = {"nvidia.com/gpu": 2, "cpu": "500m", "memory": "2Gi"}
    body = manifest("digits")
    pod = body["spec"]["workerGroups"][0]["template"]["spec"]
    pod["containers"] = [CONTAINER | {"resources": {"limits": wanted}}]

    def found(changed: dict[str, Any] | None = None) -> dict[str, str]:
        return {each.sentence: each.verdict for each in check(client, changed or body)}

    assert found() == {
        "the cluster has virtualflowjobs.virtualflow.dev/v1alpha1": "ok",
        "no operator runs; install the chart": "no",
        "in default you may do all that kubectl vf does": "ok",
        "digits would be accepted": "ok",
        "there is no node": "no",
    }
    apps = add_operator(client, "operator:1")
    assert found()["the operator is not ready: kubectl -n default describe deploy vf-operator"] == "no"
    status = {"status": {"replicas": 1, "readyReplicas": 1}}
    apps.patch_namespaced_deployment_status("vf-operator", "default", status)
    assert found()["the operator runs: default/vf-operator, operator:1"] == "ok"
    add_node(client, "small", {"kind": "t4"}, cpu="8", memory="16Gi")
    assert found()["w: a worker requests 2 nvidia.com/gpu, and no node has more than 0"] == "no"
    add_node(client, "large", {"kind": "v100"}, cpu="8", memory="16Gi", **{"nvidia.com/gpu": "4"})
    assert found()["w: a worker fits on 1 of 2 nodes when they are empty"] == "ok"
    pod["nodeSelector"] = {"kind": "t4"}
    assert found()["w: a worker requests 2 nvidia.com/gpu, and no node of those with kind=t4 has more than 0"] == "no"
    pod["nodeSelector"] = {"kind": "a100"}
    assert found()["w: no node has the labels kind=a100"] == "no"
    refused = next(
        said for said in found(manifest("digits", replicas=-1)) if said.startswith("digits would be refused")
    )
    assert "replicas" in refused
    wrong = manifest("digits", coordinator={"template": {"metadata": {"lables": {"a": "b"}}}})
    (said,) = [said for said in found(wrong) if said.startswith("digits would be refused")]
    assert said.startswith("digits would be refused: coordinator: Pod in version")
    assert 'unknown field "metadata.lables"' in said
    client.submit(manifest("digits"))
    pod["nodeSelector"], pod["nodeSelectr"] = {}, {"kind": "t4"}
    (said,) = [said for said in found() if said.startswith("digits would be refused")]
    assert 'worker group w: Pod in version "v1" cannot' in said
    assert 'unknown field "spec.nodeSelectr"' in said
    del pod["nodeSelectr"]
    assert found()["digits is there already"] == "ok"
    misspelt = manifest("digits", minReplica=2)
    assert any('unknown field "spec.minReplica"' in said for said in found(misspelt))
    apps.delete_namespaced_deployment("vf-operator", "default")
    for node in ("small", "large"):
        client.core.delete_node(node)


def test_the_plugin_tells_whether_all_is_ready(
    client: Client, kubeconfig: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest("digits")))
    assert main(["check", "--kubeconfig", str(kubeconfig), str(tmp_path / "job.yaml")]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "ok      the cluster has virtualflowjobs.virtualflow.dev/v1alpha1"
    assert second == "no      no operator runs; install the chart"
    add_operator(client, "operator:1").patch_namespaced_deployment_status(
        "vf-operator", "default", {"status": {"replicas": 1, "readyReplicas": 1}}
    )
    assert main(["check", "--kubeconfig", str(kubeconfig)]) == 0
    assert main(["check", "--kubeconfig", str(kubeconfig), str(tmp_path / "none.yaml")]) == 2
    kubernetes.AppsV1Api(client.api).delete_namespaced_deployment("vf-operator", "default")


def test_who_may_not_look_is_told_so_and_what_to_ask_for(client: Client, kubeconfig: Path, tmp_path: Path) -> None:
    with Client(kubeconfig=log_in(client, kubeconfig, tmp_path, "guest")) as guest:
        found = [(each.verdict, each.sentence) for each in check(guest, manifest("digits"))]
    verdicts, sentences = zip(*found, strict=True)
    assert verdicts == ("ok", "unknown", "no", "no", "unknown")
    assert "cannot be seen: deployments.apps is forbidden" in sentences[1]
    assert sentences[2] == (
        "in default you may not create jobs, suspend and resume jobs, scale jobs, read logs, drain workers; ask for "
        "the role edit in that namespace"
    )
    assert "would be refused" in sentences[3]
    client.core.delete_namespaced_service_account("guest", "default")


def test_who_may_not_list_events_reads_the_conditions_all_the_same(
    client: Client, kubeconfig: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = client.submit(manifest("digits"))
    message = "digits-w-0 cannot start: FailedMount: no such volume"
    told = {"type": "Degraded", "status": "True", "reason": "CannotStart", "message": message}
    write_status(client, "digits", phase="Pending", conditions=[told | {"lastTransitionTime": "2026-11-24T11:00:00Z"}])
    viewer = log_in(client, kubeconfig, tmp_path, "viewer")
    let(client, "viewer", "get", "list", "watch")
    assert main(["why", "--kubeconfig", str(viewer), job.name]) == 0
    said = capsys.readouterr().out
    assert f"Degraded True, CannotStart: {message}" in said
    assert "events are not shown: cannot list events of digits" in said
