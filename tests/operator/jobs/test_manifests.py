"""Manifests: the user's template goes through untouched, and what is ours is always right."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pod_standard import beyond_restricted
from scenes import SETTINGS, body, container, group

from tiers import examples
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import (
    ENV_ACTIVATIONS,
    ENV_ADDRESS,
    ENV_BACKWARD,
    ENV_DEVICE_MEMORY,
    ENV_HASH_SEED,
    ENV_HOST_MEMORY,
    ENV_OPTIMIZER_PLACEMENT,
    ENV_PROFILE,
    ENV_TOKEN,
    ENV_WORKER,
    HASH_SEED,
    BackwardSpec,
)
from virtualflow_operator.api.objects import Job, read_job, read_pod, read_service
from virtualflow_operator.constants import CHECKPOINT_VOLUME, COORDINATOR_PORT, LABEL_JOB
from virtualflow_operator.controllers.issuer import derive_token
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.manifests import coordinator_hash, hash_templates, template_hash
from virtualflow_operator.settings import LeaseSettings, OperatorSettings

Spec = dict[str, Any]
LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
DNS = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
LONGEST_NAME = 40
"""Characters that the schema allows a job's name."""
CLAIM = {"persistentVolumeClaim": {"claimName": "kept"}}


def job_of(**spec: Any) -> Job:
    return read_job(body(**spec))


def worker_of(job: Job, ordinal: int = 0, address: str = "10.0.0.1") -> Spec:
    return manifests.worker_pod(job, job.spec.worker_groups[0], ordinal, address, SETTINGS)


def environment(pod: Spec) -> dict[str, Spec]:
    return {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}


# --- the user's template ----------------------------------------------------------------------------------------------

SCALARS = st.one_of(st.booleans(), st.integers(0, 9), st.text("abc", min_size=1, max_size=4))
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text("xyz", min_size=1), inner, max_size=2)
    ),
    max_leaves=6,
)
NAMES = st.text("abcdefgh", min_size=3, max_size=6)
CONTAINERS = st.fixed_dictionaries(
    {"name": NAMES, "image": NAMES},
    optional={
        "command": st.lists(NAMES, max_size=2),
        "env": st.lists(st.fixed_dictionaries({"name": NAMES, "value": NAMES}), max_size=2),
        "volumeMounts": st.lists(st.fixed_dictionaries({"name": NAMES, "mountPath": NAMES}), max_size=2),
        "terminationMessagePath": st.just("/tmp/log"),
        "terminationMessagePolicy": st.just("File"),
        "resources": st.just({"limits": {"nvidia.com/gpu": 1}}),
        "aFieldOfTheFuture": ANYTHING,
    },
)
TEMPLATES = st.fixed_dictionaries(
    {
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(CONTAINERS, min_size=1, max_size=2)},
            optional={
                "volumes": st.lists(st.fixed_dictionaries({"name": NAMES, "emptyDir": st.just({})}), max_size=2),
                "affinity": st.just({"nodeAffinity": {}}),
                "terminationGracePeriodSeconds": st.integers(0, 99),
                "automountServiceAccountToken": st.booleans(),
                "nodeSelector": st.dictionaries(NAMES, NAMES, max_size=2),
                "aFieldOfTheFuture": ANYTHING,
            },
        )
    },
    optional={
        "metadata": st.fixed_dictionaries(
            {},
            optional={
                "labels": st.dictionaries(NAMES, NAMES, max_size=2),
                "annotations": st.dictionaries(NAMES, NAMES, max_size=2),
            },
        )
    },
)


def assert_kept(given: Any, made: Any, path: str = "") -> None:
    """All that was given is there; lists may only have grown, in front or behind."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            assert key in made, f"{path}.{key} is missing"
            assert_kept(value, made[key], f"{path}.{key}")
    elif isinstance(given, list) and path.endswith((".env", ".volumeMounts", ".volumes")):
        ours = [entry for entry in made if entry not in given]
        assert [entry for entry in made if entry not in ours] == given, f"{path} has changed"
    elif isinstance(given, list):
        assert len(made) == len(given)
        for index, (one, other) in enumerate(zip(given, made, strict=True)):
            assert_kept(one, other, f"{path}[{index}]")
    else:
        assert made == given, f"{path} has changed"


@settings(max_examples=examples(60), deadline=None)
@given(TEMPLATES, st.sampled_from([None, {"volume": CLAIM}]))
def test_every_field_that_the_user_gave_is_in_the_pod(template: Spec, checkpoint: Spec | None) -> None:
    extra: Spec = {"checkpoint": checkpoint} if checkpoint else {}
    raw = body(workerGroups=[{"name": "workers", "template": template}], **extra)
    before = copy.deepcopy(raw)
    job = read_job(raw)
    pod = worker_of(job, 3)
    assert raw == before, "the template itself is not touched"
    assert pod == worker_of(job, 3), "the same job gives the same pod"
    assert_kept(template, pod)
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["metadata"]["name"] == "digits-workers-3"
    read = read_pod(pod | {"metadata": pod["metadata"] | {"uid": "u"}})
    assert (read.owner, read.group, read.ordinal, read.role) == ("uid-1", "workers", 3, "worker")
    assert read.template == template_hash(job, job.spec.worker_groups[0])


def test_what_is_not_given_has_careful_defaults() -> None:
    spec = worker_of(job_of(elasticity={"drainGraceSeconds": 45}))["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] == 45
    assert spec["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert "podAntiAffinity" in spec["affinity"]


def test_labels_of_ours_win_over_those_of_the_template() -> None:
    template = group()["template"] | {"metadata": {"labels": {LABEL_JOB: "other", "team": "a"}}}
    labels = worker_of(job_of(workerGroups=[{"name": "workers", "template": template}]))["metadata"]["labels"]
    assert (labels[LABEL_JOB], labels["team"]) == ("digits", "a")


def test_a_coordinator_is_told_nothing_that_an_image_of_an_older_operator_refuses() -> None:
    (container,) = manifests.coordinator_pod(job_of(), 0, SETTINGS)["spec"]["containers"]
    assert container["command"] == ["python", "-I", "-u", "-m", "virtualflow", "coordinator"]
    assert set(container["args"][::2]) <= {
        "--host", "--port", "--wanted", "--minimum", "--startup-grace", "--heartbeat-limit"
    }  # fmt: skip


# --- names ------------------------------------------------------------------------------------------------------------


@given(
    st.from_regex(r"\A[a-z][a-z0-9]*(-+[a-z0-9]+)*\Z").filter(lambda name: len(name) <= LONGEST_NAME),
    st.from_regex(r"\A[a-z0-9]+(-+[a-z0-9]+)*\Z").filter(lambda name: len(name) <= 20 and name != "coordinator"),
    st.sampled_from([0, 7, 4_095]),
)
def test_names_and_labels_are_valid_for_every_valid_job(name: str, group_name: str, ordinal: int) -> None:
    raw = body(name=name, workerGroups=[group(group_name)])
    job = read_job(raw)
    made = [worker_of(job, ordinal), manifests.coordinator_pod(job, ordinal, SETTINGS), manifests.service(job, ordinal)]
    made += [
        manifests.secret(job, "t", SETTINGS),
        manifests.disruption_budget(job),
        manifests.network_policy(job, SETTINGS),
    ]
    for manifest in made:
        metadata = manifest["metadata"]
        longest = 63 if manifest["kind"] in ("Pod", "Service") else 253
        assert DNS.fullmatch(metadata["name"]), f"{metadata['name']} is no name"
        assert len(metadata["name"]) <= longest, f"{metadata['name']} has more than {longest} characters"
        assert all(LABEL.fullmatch(value) for value in metadata["labels"].values()), metadata["labels"]
        assert metadata["ownerReferences"][0]["uid"] == "uid-1"
        assert metadata["ownerReferences"][0]["controller"] is True


def test_the_longest_name_and_its_dry_run_are_still_valid() -> None:
    job = read_job(body(name="j" * LONGEST_NAME, workerGroups=[group("g" * 20)]))
    assert len(worker_of(job, 0)["metadata"]["name"] + "-check") <= 253
    assert LABEL.fullmatch(job.name)


# --- what a worker is told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({}, (8, None, None, None, None, "bitwise"), id="no checkpoint"),
        pytest.param(
            {"virtualNodes": 16, "reproducibility": "Statistical"},
            (16, None, None, None, None, "statistical"),
            id="statistical",
        ),
        pytest.param(
            {"checkpoint": {"volume": CLAIM}},
            (8, "/virtualflow/checkpoints/uid-1", None, 60.0, 3, "bitwise"),
            id="a checkpoint in a directory of the job's own",
        ),
        pytest.param(
            {"checkpoint": {"volume": CLAIM, "directory": "a/b", "everySteps": 10, "everySeconds": 5, "keep": 1}},
            (8, "/virtualflow/checkpoints/a/b", 10, 5.0, 1, "bitwise"),
            id="a checkpoint in all detail",
        ),
    ],
)
@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
def test_a_worker_reads_what_the_operator_writes(
    spec: Spec, expected: tuple[object, ...], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = environment(worker_of(job_of(**spec), address=address))
    assert told[ENV_TOKEN]["valueFrom"]["secretKeyRef"] == {
        "name": "digits-virtualflow-token-uid-1-0123abcd",
        "key": "token",
    }
    assert told[ENV_WORKER]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert told[ENV_ADDRESS]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert told[ENV_HASH_SEED]["value"] == str(HASH_SEED)
    for name in [name for name in os.environ if name.startswith("VIRTUALFLOW_")]:
        monkeypatch.delenv(name)
    for name, entry in told.items():
        monkeypatch.setenv(name, entry.get("value", f"from-the-cluster-{name}"))
    read = WorkerEnvironment.read()
    host = f"[{address}]" if ":" in address else address
    assert read.coordinator == f"http://{host}:{COORDINATOR_PORT}"
    assert (read.token, read.worker) == (f"from-the-cluster-{ENV_TOKEN}", f"from-the-cluster-{ENV_WORKER}")
    directory = None if read.checkpoint_dir is None else str(read.checkpoint_dir)
    found = (read.virtual_nodes, directory, read.checkpoint_steps, read.checkpoint_seconds, read.checkpoint_keep)
    assert (*found, read.reproducibility) == expected


def test_what_a_job_began_with_counts_whatever_its_specification_says_now() -> None:
    raw = body({"virtualNodes": 8, "reproducibility": "Bitwise"}, virtualNodes=16, reproducibility="Statistical")
    told = environment(worker_of(read_job(raw)))
    assert told["VIRTUALFLOW_VIRTUAL_NODES"]["value"] == "8"
    assert told["VIRTUALFLOW_REPRODUCIBILITY"]["value"] == "Bitwise"


def test_a_job_that_is_to_stop_at_nan_says_so_to_its_workers_old_and_new() -> None:
    goes_on, stops = job_of(), job_of(onNonFinite="Stop")
    found = [environment(worker_of(job))["VIRTUALFLOW_ON_NON_FINITE"]["value"] for job in (goes_on, stops)]
    assert found == ["Continue", "Stop"]
    assert hash_templates(goes_on).all == hash_templates(job_of(onNonFinite="Continue")).all
    assert hash_templates(goes_on).all != hash_templates(stops).all, "workers are replaced one by one"


def test_workers_are_told_how_often_they_check_one_another() -> None:
    assert "VIRTUALFLOW_VERIFY" not in environment(worker_of(job_of()))
    assert environment(worker_of(job_of(verify={"sample": 0.01})))["VIRTUALFLOW_VERIFY"]["value"] == "0.01"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        pytest.param({}, {}, id="nobody says"),
        pytest.param({"device": "24Gi"}, {ENV_DEVICE_MEMORY: str(24 * GIB)}, id="the device"),
        pytest.param(
            {"device": "1.5G", "host": "96Gi", "activations": "Recompute"},
            {ENV_DEVICE_MEMORY: "1500000000", ENV_HOST_MEMORY: str(96 * GIB), ENV_ACTIVATIONS: "Recompute"},
            id="all of it",
        ),
    ],
)
def test_workers_are_told_how_much_memory_their_group_may_use(memory: Spec, told: dict[str, str]) -> None:
    groups = [group(**({"memory": memory} if memory else {})), group("others")]
    job = job_of(workerGroups=groups)
    names = {ENV_DEVICE_MEMORY, ENV_HOST_MEMORY, ENV_ACTIVATIONS}
    found = [
        {name: entry["value"] for name, entry in environment(pod).items() if name in names}
        for pod in (manifests.worker_pod(job, of, 0, "10.0.0.1", SETTINGS) for of in job.spec.worker_groups)
    ]
    assert found == [told, {}]


@pytest.mark.parametrize(
    ("command", "python"),
    [
        pytest.param(["python", "-u", "train.py"], "python", id="python"),
        pytest.param(["/opt/venv/bin/python3.12", "train.py"], "/opt/venv/bin/python3.12", id="a python of its own"),
        pytest.param(["accelerate", "launch", "train.py"], "python", id="another program"),
    ],
)
def test_a_worker_of_several_processes_runs_its_command_as_each_of_them(command: list[str], python: str) -> None:
    pods = [container(command=command, args=["--lr", "$(RATE)"])]
    memory = {"device": "24Gi", "host": "96Gi"}
    one, two = (
        worker_of(job_of(processesPerWorker=count, workerGroups=[group(pod={"containers": pods}, memory=memory)]))
        for count in (1, 2)
    )
    first, second = one["spec"]["containers"][0], two["spec"]["containers"][0]
    assert first["command"] == command
    assert second["command"] == [python, "-P", "-m", "virtualflow", "processes", "2", "--", *command]
    assert second["args"] == first["args"] == ["--lr", "$(RATE)"]
    told = [{name: entry.get("value") for name, entry in environment(pod).items()} for pod in (one, two)]
    assert {name for name in told[0] if told[0][name] != told[1][name]} == {ENV_HOST_MEMORY}
    assert told[1][ENV_HOST_MEMORY] == str(48 << 30)
    assert told[1][ENV_DEVICE_MEMORY] == str(24 << 30)


def test_a_job_has_no_more_workers_than_virtual_nodes_for_their_processes() -> None:
    spec = job_of(replicas=6, minReplicas=5, processesPerWorker=3).spec
    assert (spec.most, spec.desired, spec.least) == (2, 2, 2)


def test_a_worker_reads_the_memory_and_the_place_of_the_optimizer_that_the_operator_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = {"device": "24Gi", "host": "96Gi", "activations": "Swap"}
    job = job_of(workerGroups=[group(memory=memory)], optimizerPlacement="Host")
    for name, entry in environment(worker_of(job)).items():
        monkeypatch.setenv(name, entry.get("value", "x"))
    read = WorkerEnvironment.read()
    found = (read.device_memory, read.host_memory, read.activations, read.optimizer)
    assert found == (24 * GIB, 96 * GIB, "swap", "host")


def test_a_worker_reads_how_far_backward_passes_go_as_the_operator_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENV_BACKWARD not in environment(worker_of(job_of()))
    said = {"fractions": [1, 0.5], "rotate": False, "scale": "Sum", "fullEvery": 4}
    monkeypatch.setenv(ENV_BACKWARD, environment(worker_of(job_of(backward=said)))[ENV_BACKWARD]["value"])
    assert WorkerEnvironment.read().backward == BackwardSpec((1.0, 0.5), rotate=False, scale="Sum", full_every=4)


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (None, (None, None)),
        ({"what": "Parameters"}, ("parameters", None)),
        ({"what": "Optimizer", "redundancy": "None"}, ("optimizer", "none")),
        ({"what": "None"}, ("none", None)),
    ],
)
def test_a_worker_reads_what_is_divided_as_the_operator_writes_it(
    said: dict[str, str] | None, read: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, entry in environment(worker_of(job_of(sharding=said))).items():
        monkeypatch.setenv(name, entry.get("value", "x"))
    found = WorkerEnvironment.read()
    assert (found.shard, found.redundancy) == read


@pytest.mark.parametrize("place", ["Device", "Host"])
def test_workers_are_told_where_the_optimizer_steps(place: str) -> None:
    assert ENV_OPTIMIZER_PLACEMENT not in environment(worker_of(job_of()))
    told = environment(worker_of(job_of(optimizerPlacement=place)))
    assert told[ENV_OPTIMIZER_PLACEMENT]["value"] == place


def test_a_limit_of_hangs_is_told_to_the_coordinator_old_and_new_in_its_environment() -> None:
    """An image of an older version refuses a flag that it does not know."""
    without, limited = job_of(), job_of(elasticity={"hangSeconds": 90})
    plain, told = (manifests.coordinator_pod(job, 0, SETTINGS)["spec"]["containers"][0] for job in (without, limited))
    assert told["args"] == plain["args"]
    assert {"name": "VIRTUALFLOW_HANG_SECONDS", "value": "90"} in told["env"]
    assert "VIRTUALFLOW_HANG_SECONDS" not in [variable["name"] for variable in plain["env"]]
    assert coordinator_hash(without) != coordinator_hash(limited)


def test_the_users_own_variables_come_after_ours() -> None:
    pod = {"containers": [container(env=[{"name": "MINE", "value": "$(VIRTUALFLOW_WORKER)"}])]}
    names = [
        entry["name"] for entry in worker_of(job_of(workerGroups=[group(pod=pod)]))["spec"]["containers"][0]["env"]
    ]
    assert names[-1] == "MINE"
    assert names.count(ENV_WORKER) == 1


def test_a_checkpoint_brings_its_volume() -> None:
    spec = worker_of(job_of(checkpoint={"volume": CLAIM}))["spec"]
    assert spec["volumes"] == [{"name": CHECKPOINT_VOLUME, **CLAIM}]
    (mount,) = spec["containers"][0]["volumeMounts"]
    assert mount["name"] == CHECKPOINT_VOLUME
    assert environment({"spec": spec})["VIRTUALFLOW_CHECKPOINT_DIR"]["value"].startswith(mount["mountPath"] + "/")


def test_a_copy_in_memory_is_for_workers_old_and_new_of_jobs_that_want_one() -> None:
    without, off, on = (
        job_of(checkpoint={"volume": CLAIM, **more}) for more in ({}, {"memory": False}, {"memory": True})
    )
    assert "VIRTUALFLOW_CHECKPOINT_MEMORY" not in environment(worker_of(off))
    assert environment(worker_of(on))["VIRTUALFLOW_CHECKPOINT_MEMORY"]["value"] == "1"
    assert hash_templates(without).all == hash_templates(off).all, "a newer schema gives it to every job"
    assert hash_templates(on).all != hash_templates(off).all, "workers are replaced one by one"


def test_workers_of_a_group_with_a_profile_are_told_of_it() -> None:
    plain, profiled = (
        job_of(workerGroups=[group()]),
        job_of(workerGroups=[group(profile="/profiles/a100.json")]),
    )
    assert ENV_PROFILE not in environment(worker_of(plain))
    assert environment(worker_of(profiled))[ENV_PROFILE]["value"] == "/profiles/a100.json"
    # It is but a first guess: those that run are not replaced for its sake.
    hashes = {template_hash(job, job.spec.worker_groups[0]) for job in (plain, profiled)}
    assert len(hashes) == 1


def test_a_terminal_message_goes_where_the_template_wants_it() -> None:
    pod = {"containers": [container(terminationMessagePath="/tmp/log")]}
    told = environment(worker_of(job_of(workerGroups=[group(pod=pod)])))
    assert told["VIRTUALFLOW_TERMINATION_LOG"]["value"] == "/tmp/log"


# --- the coordinator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secrets", [(), ("pull",)], ids=["no pull secret", "a pull secret"])
def test_a_coordinators_pod_keeps_to_the_restricted_standard(secrets: tuple[str, ...]) -> None:
    pod = manifests.coordinator_pod(job_of(), 0, OperatorSettings(image="o:1", image_pull_secrets=secrets))
    assert beyond_restricted(pod["spec"]) == []
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert [entry["name"] for entry in pod["spec"].get("imagePullSecrets", [])] == list(secrets)


def test_what_the_user_wants_different_is_laid_over_the_coordinators_pod() -> None:
    over = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "priorityClassName": "high",
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"resources": {"limits": {"memory": "2Gi"}}}],
        },
    }
    job = job_of(coordinator={"template": over})
    pod = manifests.coordinator_pod(job, 2, SETTINGS)
    (first,) = pod["spec"]["containers"]
    assert (first["name"], first["image"]) == ("coordinator", SETTINGS.image)
    assert first["resources"] == {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}
    assert first["command"] == ["python", "-I", "-u", "-m", "virtualflow", "coordinator"]
    assert (pod["spec"]["priorityClassName"], pod["metadata"]["labels"]["team"]) == ("high", "a")
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert job.spec.coordinator.template == over, "the user's template is not touched"
    assert coordinator_hash(job) != coordinator_hash(job_of())


def test_what_runs_in_a_coordinators_pod_is_not_the_users_to_choose() -> None:
    mine = {
        "image": "evil:1",
        "env": [{"name": "PYTHONWARNINGS", "value": "all:0:antigravity.x:0:0"}],
        "volumeMounts": [{"name": "evil", "mountPath": "/usr/lib/python3"}],
        "ofANewerKubernetes": ["sh"],
    }
    helper = {"name": "evil", "image": "evil:1"}
    template = {"spec": {"containers": [mine, helper], "initContainers": [helper], "hostNetwork": True}}
    spec = manifests.coordinator_pod(job_of(coordinator={"template": template}), 0, SETTINGS)["spec"]
    assert spec == manifests.coordinator_pod(job_of(), 0, SETTINGS)["spec"]


def test_the_service_leads_to_one_coordinator() -> None:
    job = job_of()
    service, pod = manifests.service(job, 4), manifests.coordinator_pod(job, 4, SETTINGS)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (
        not service["spec"]["selector"].items()
        <= manifests.coordinator_pod(job, 5, SETTINGS)["metadata"]["labels"].items()
    )
    assert not service["spec"]["selector"].items() <= worker_of(job, 4)["metadata"]["labels"].items()
    assert read_service(service).ordinal == 4


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_a_token_belongs_to_one_job_and_one_operator() -> None:
    assert derive_token(b"k", "u") == derive_token(b"k", "u")
    tokens = {derive_token(key, uid) for key in (b"k", b"l") for uid in ("u", "v")}
    assert len(tokens) == 4
    assert all(re.fullmatch(r"[0-9a-f]{64}", token) for token in tokens)


def test_the_selector_of_the_scale_subresource_finds_the_workers_only() -> None:
    job = job_of()
    wanted = dict(part.split("=") for part in manifests.selector(job).split(","))
    assert wanted.items() <= worker_of(job)["metadata"]["labels"].items()
    assert not wanted.items() <= manifests.coordinator_pod(job, 0, SETTINGS)["metadata"]["labels"].items()
    assert manifests.disruption_budget(job)["spec"] == {"minAvailable": 1, "selector": {"matchLabels": wanted}}


def test_a_network_policy_lets_in_the_job_itself_and_the_operator_to_one_port() -> None:
    told = OperatorSettings(image="o:1", operator_labels={"app": "op"}, lease=LeaseSettings(namespace="system"))
    policy = manifests.network_policy(job_of(), told)
    inside, operator = policy["spec"]["ingress"]
    assert policy["spec"]["podSelector"] == {"matchLabels": {LABEL_JOB: "digits"}}
    assert inside == {"from": [{"podSelector": {"matchLabels": {LABEL_JOB: "digits"}}}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": COORDINATOR_PORT}]
    assert operator["from"][0]["podSelector"]["matchLabels"] == {"app": "op"}
    assert "system" in str(operator["from"][0]["namespaceSelector"])


def test_directories_stay_inside_the_volume() -> None:
    job = job_of(checkpoint={"volume": CLAIM, "directory": "/a/"})
    value = environment(worker_of(job))["VIRTUALFLOW_CHECKPOINT_DIR"]["value"]
    assert Path(value).is_relative_to("/virtualflow/checkpoints")
