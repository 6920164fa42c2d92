"""What a run on this machine takes from a VirtualFlowJob manifest, and what it says about the rest."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from signing import write_key

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import cli
from virtualflow.launcher.manifest import JobManifest, expand, load_manifest, local_command, read_manifest
from virtualflow.launcher.options import RunOptions, resolve
from virtualflow.protocol.settings import (
    ENV_ACTIVATIONS,
    ENV_BACKWARD,
    ENV_CHECKPOINT_KEEP,
    ENV_CHECKPOINT_MEMORY,
    ENV_CHECKPOINT_SECONDS,
    ENV_CHECKPOINT_STEPS,
    ENV_DEVICE_MEMORY,
    ENV_HOST_MEMORY,
    ENV_ON_NON_FINITE,
    ENV_OPTIMIZER_PLACEMENT,
    ENV_PROFILE,
    ENV_REDUNDANCY,
    ENV_REPRODUCIBILITY,
    ENV_SHARD,
    ENV_SIGN,
    ENV_TRUST,
    ENV_VERIFY,
)

MANIFEST = """\
apiVersion: virtualflow.dev/v1alpha1
kind: VirtualFlowJob
metadata:
  name: digits
spec:
  virtualNodes: 8
  replicas: 3
  workerGroups:
    - name: workers
      template:
        spec:
          containers:
            - name: trainer
              image: virtualflow:dev
              command: [python]
              args: [examples/digits.py, --steps, $(STEPS)]
              env:
                - name: STEPS
                  value: "120"
              resources:
                limits: {cpu: "1"}
"""


def test_a_manifest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    assert load_manifest(path) == JobManifest(
        name="digits",
        virtual_nodes=8,
        replicas=3,
        command=("python", "examples/digits.py", "--steps", "120"),
        environment={"STEPS": "120"},
        groups=("workers",),
        backoff_limit=3,
    )


def test_what_a_cluster_is_told_about_bits_groups_and_checkpoints_is_read() -> None:
    document = _document()
    document["spec"].update(reproducibility="Statistical", checkpoint={"everySteps": 5, "everySeconds": 30, "keep": 2})
    document["spec"]["workerGroups"].extend([{"name": "spot"}, {}])
    manifest = read_manifest(document)
    assert manifest.groups == ("workers", "spot", "2")
    assert manifest.command[0] == "python"
    assert manifest.reproducibility == "Statistical"
    assert (manifest.every_steps, manifest.every_seconds, manifest.keep) == (5, 30, 2)


def _resolve(path: Path, *options: str) -> RunOptions:
    return resolve(cli.parser().parse_args(["run", *options, "-f", str(path)]))


def _manifest(directory: Path, **spec: Any) -> Path:
    import yaml

    document = _document()
    _container(document).update(command=[sys.executable], args=["-c", "pass"])
    document["spec"].update(spec)
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("spec", "limit"), [({}, 3), ({"backoffLimit": 0}, 0), ({"backoffLimit": 9}, 9)], ids=["as a cluster", "0", "9"]
)
def test_a_run_of_a_manifest_bears_as_many_crashes_as_a_cluster_would(
    tmp_path: Path, spec: dict[str, int], limit: int
) -> None:
    assert _resolve(_manifest(tmp_path, **spec)).backoff_limit == limit


CHECKPOINT = {"everySteps": 5, "everySeconds": 30, "keep": 2}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param([], (None, None, None), id="not without a directory"),
        pytest.param(["--checkpoint-dir", "."], ("5", "30", "2"), id="with a directory"),
        pytest.param(
            ["--checkpoint-dir", ".", "--checkpoint-steps", "7", "--checkpoint-keep", "9"],
            ("7", "30", "9"),
            id="options go before",
        ),
    ],
)
def test_checkpoints_are_written_as_the_manifest_says(
    options: list[str], expected: tuple[str | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = _resolve(_manifest(tmp_path, checkpoint=CHECKPOINT), *options).environment
    names = (ENV_CHECKPOINT_STEPS, ENV_CHECKPOINT_SECONDS, ENV_CHECKPOINT_KEEP)
    assert tuple(environment.get(name) for name in names) == expected


@pytest.mark.parametrize(
    ("spec", "options", "value"),
    [
        pytest.param({}, [], None, id="nobody says"),
        pytest.param({"checkpoint": {**CHECKPOINT, "memory": True}}, [], "1", id="the manifest, without a directory"),
        pytest.param({"checkpoint": {**CHECKPOINT, "memory": False}}, [], None, id="the manifest does not want it"),
        pytest.param({}, ["--checkpoint-memory"], "1", id="the option"),
    ],
)
def test_workers_are_told_to_keep_a_copy_in_memory(
    spec: dict[str, object], options: list[str], value: str | None, tmp_path: Path
) -> None:
    environment = _resolve(_manifest(tmp_path, **spec), *options).environment
    assert environment.get(ENV_CHECKPOINT_MEMORY) == value


def test_workers_are_told_where_the_keys_are_and_never_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    private, public = write_key(tmp_path, "mine")
    environment = _resolve(_manifest(tmp_path), "--sign", private.name, "--trust", public.name).environment
    assert (environment[ENV_SIGN], environment[ENV_TRUST]) == (str(private), str(public))
    assert not {ENV_SIGN, ENV_TRUST} & _resolve(_manifest(tmp_path)).environment.keys()


@pytest.mark.parametrize("option", ["--sign", "--trust"])
def test_a_file_without_a_key_is_refused_before_anything_is_started(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"job\.yaml (is no private key|does not hold public keys)"):
        _resolve(_manifest(tmp_path), option, str(tmp_path / "job.yaml"))


def test_a_manifest_says_how_many_processes_a_worker_has_unless_the_command_line_does(tmp_path: Path) -> None:
    groups = _document()["spec"]["workerGroups"]
    groups[0]["memory"] = {"device": "8Gi", "host": "9Gi"}
    manifest = _manifest(tmp_path, processesPerWorker=2, workerGroups=groups)
    chosen, other = _resolve(manifest), _resolve(manifest, "--processes-per-worker", "1")
    assert (chosen.processes_per_worker, other.processes_per_worker) == (2, 1)
    told = [(one.environment[ENV_DEVICE_MEMORY], one.environment[ENV_HOST_MEMORY]) for one in (chosen, other)]
    assert told == [(str(8 << 30), str(9 << 29)), (str(8 << 30), str(9 << 30))]


def test_memory_that_is_no_flag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.checkpoint\.memory must be true or false, not 'yes'"):
        _resolve(_manifest(tmp_path, checkpoint={**CHECKPOINT, "memory": "yes"}))


@pytest.mark.parametrize("word", [None, "Bitwise", "Statistical"])
def test_workers_are_told_how_equal_the_bits_must_be(word: str | None, tmp_path: Path) -> None:
    spec = {} if word is None else {"reproducibility": word}
    assert _resolve(_manifest(tmp_path, **spec)).environment.get(ENV_REPRODUCIBILITY) == word


@pytest.mark.parametrize(
    ("spec", "options", "word"),
    [
        pytest.param({}, [], None, id="nobody says"),
        pytest.param({"onNonFinite": "Stop"}, [], "Stop", id="the manifest"),
        pytest.param({"onNonFinite": "Stop"}, ["--on-non-finite", "Continue"], "Continue", id="the option goes before"),
    ],
)
def test_workers_are_told_what_to_do_about_a_loss_of_nan(
    spec: dict[str, str], options: list[str], word: str | None, tmp_path: Path
) -> None:
    assert _resolve(_manifest(tmp_path, **spec), *options).environment.get(ENV_ON_NON_FINITE) == word


@pytest.mark.parametrize(
    ("spec", "options", "seconds"),
    [
        pytest.param({}, [], None, id="nobody says"),
        pytest.param({"elasticity": {"hangSeconds": 90}}, [], 90, id="the manifest"),
        pytest.param({"elasticity": {"hangSeconds": 90}}, ["--hang-seconds", "2.5"], 2.5, id="the option goes before"),
    ],
)
def test_the_coordinator_is_told_how_long_a_training_thread_may_stand_still(
    spec: dict[str, object], options: list[str], seconds: float | None, tmp_path: Path
) -> None:
    assert _resolve(_manifest(tmp_path, **spec), *options).hang_seconds == seconds


@pytest.mark.parametrize(
    ("spec", "options", "share"),
    [
        pytest.param({}, [], None, id="nobody says"),
        pytest.param({"verify": {"sample": 0.01}}, [], "0.01", id="the manifest"),
        pytest.param({"verify": {"sample": 1}}, [], "1.0", id="all of it"),
        pytest.param({"verify": {"sample": 0.01}}, ["--verify", "0.5"], "0.5", id="the option goes before"),
    ],
)
def test_workers_are_told_how_much_to_verify(
    spec: dict[str, object], options: list[str], share: str | None, tmp_path: Path
) -> None:
    assert _resolve(_manifest(tmp_path, **spec), *options).environment.get(ENV_VERIFY) == share


@pytest.mark.parametrize("share", [-1, 1.5, True, "0.1"])
def test_another_share_to_verify_is_refused(share: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.verify\.sample must be a number from 0 to 1"):
        _resolve(_manifest(tmp_path, verify={"sample": share}))


def test_another_word_for_what_to_do_about_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.onNonFinite must be Continue or Stop, not 'stop'"):
        _resolve(_manifest(tmp_path, onNonFinite="stop"))


def _with_memory(tmp_path: Path, memory: object, **spec: object) -> Path:
    document = _document()
    _container(document).update(command=[sys.executable], args=["-c", "pass"])
    groups = document["spec"]["workerGroups"]
    return _manifest(tmp_path, workerGroups=[groups[0] | {"memory": memory}], **spec)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "options", "told"),
    [
        pytest.param(None, [], (None, None, None), id="nobody says"),
        pytest.param({"device": "24Gi"}, [], (24 * GIB, None, None), id="the device"),
        pytest.param({"device": "24G", "host": "96Gi"}, [], (24 * 10**9, 96 * GIB, None), id="the host, too"),
        pytest.param({"device": "1Gi", "activations": "Swap"}, [], (GIB, None, "Swap"), id="activations"),
        pytest.param(
            {"device": "24Gi", "host": "96Gi"}, ["--device-memory", "2GiB"], (2 * GIB, 96 * GIB, None), id="an option"
        ),
        pytest.param({"device": "24Gi"}, ["--host-memory", "2GiB"], (24 * GIB, 2 * GIB, None), id="one beside it"),
    ],
)
def test_workers_are_told_how_much_memory_their_group_may_use(
    memory: object, options: list[str], told: tuple[object, ...], tmp_path: Path
) -> None:
    environment = _resolve(_with_memory(tmp_path, memory), *options).environment
    found = tuple(environment.get(name) for name in (ENV_DEVICE_MEMORY, ENV_HOST_MEMORY, ENV_ACTIVATIONS))
    assert found == tuple(None if word is None else str(word) for word in told)


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        pytest.param("24Gi", "memory must be a mapping", id="a size alone"),
        pytest.param({"host": "96Gi"}, "memory.device is missing", id="the host alone"),
        pytest.param({"device": 24}, "memory.device must be a size like 24Gi, not 24", id="a number"),
        pytest.param({"device": "much"}, "'much' is no size of memory", id="no size"),
        pytest.param({"device": "1Gi", "activations": "swap"}, "Auto or Keep or Recompute or Swap", id="another word"),
    ],
)
def test_memory_that_makes_no_sense_is_refused(memory: object, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        _resolve(_with_memory(tmp_path, memory))


@pytest.mark.parametrize("place", [None, "Device", "Host"])
def test_workers_are_told_where_the_optimizer_steps(place: str | None, tmp_path: Path) -> None:
    environment = _resolve(_manifest(tmp_path, optimizerPlacement=place)).environment
    assert environment.get(ENV_OPTIMIZER_PLACEMENT) == place


def test_workers_are_told_how_far_backward_passes_go(tmp_path: Path) -> None:
    said = {"fractions": [1, 0.5], "fullEvery": 4}
    environment = _resolve(_manifest(tmp_path, backward=said)).environment
    assert json.loads(environment[ENV_BACKWARD]) == said
    assert ENV_BACKWARD not in _resolve(_manifest(tmp_path)).environment
    with pytest.raises(ConfigurationError, match=r"spec.backward cannot be read: .*fractions"):
        _resolve(_manifest(tmp_path, backward={"fractions": [0]}))


@pytest.mark.parametrize(
    ("sharding", "options", "told"),
    [
        pytest.param(None, [], (None, None), id="as the script says"),
        pytest.param({"what": "Parameters"}, [], ("Parameters", None), id="the parameters"),
        pytest.param({"what": "Optimizer", "redundancy": "None"}, [], ("Optimizer", "None"), id="with nobody else"),
        pytest.param(None, ["--shard", "parameters", "--redundancy", "none"], ("Parameters", "None"), id="by options"),
        pytest.param(
            {"what": "Parameters", "redundancy": "None"}, ["--shard", "none"], ("None", "None"), id="options over it"
        ),
        pytest.param(None, ["--redundancy", "checkpoint"], (None, "Checkpoint"), id="the redundancy alone"),
    ],
)
def test_workers_are_told_what_is_divided(
    sharding: object, options: list[str], told: tuple[str | None, ...], tmp_path: Path
) -> None:
    environment = _resolve(_manifest(tmp_path, sharding=sharding), *options).environment
    assert (environment.get(ENV_SHARD), environment.get(ENV_REDUNDANCY)) == told


@pytest.mark.parametrize(
    ("sharding", "sentence"),
    [
        pytest.param("Parameters", "spec.sharding must be a mapping", id="a word alone"),
        pytest.param({}, "spec.sharding.what is missing", id="nothing"),
        pytest.param({"what": "parameters"}, "what must be Parameters or Hybrid or Optimizer", id="another word"),
        pytest.param(
            {"what": "Parameters", "redundancy": "Checkpoint"},
            "spec.sharding.redundancy is Checkpoint, and spec.checkpoint is missing; add one",
            id="a checkpoint that nobody writes",
        ),
    ],
)
def test_a_division_that_makes_no_sense_is_refused(sharding: object, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        _resolve(_manifest(tmp_path, sharding=sharding))


def test_a_profile_is_looked_for_beside_the_manifest(tmp_path: Path) -> None:
    groups = _document()["spec"]["workerGroups"]
    _container({"spec": {"workerGroups": groups}}).update(command=[sys.executable], args=["-c", "pass"])
    path = _manifest(tmp_path, workerGroups=[groups[0] | {"profile": "profiles/cpu.json"}])
    assert _resolve(path).environment[ENV_PROFILE] == str(tmp_path / "profiles" / "cpu.json")
    path = _manifest(tmp_path, workerGroups=[groups[0] | {"profile": "/profiles/a100.json"}])
    assert _resolve(path).environment[ENV_PROFILE] == "/profiles/a100.json"
    assert ENV_PROFILE not in _resolve(_manifest(tmp_path)).environment


def test_a_profile_that_is_named_on_the_command_line_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        _resolve(_manifest(tmp_path), "--profile", str(tmp_path / "none.json"))


def test_of_several_groups_the_first_runs_and_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _manifest(tmp_path)
    _resolve(path)
    assert capsys.readouterr().err == ""
    groups = [*_document()["spec"]["workerGroups"], {"name": "spot"}]
    _container({"spec": {"workerGroups": groups}}).update(command=[sys.executable], args=["-c", "pass"])
    _resolve(_manifest(tmp_path, workerGroups=groups))
    said = "virtualflow: of the manifest's 2 worker groups only the first, workers, runs on this machine\n"
    assert capsys.readouterr().err == said


def _document() -> dict[str, Any]:
    import yaml

    document: dict[str, Any] = yaml.safe_load(MANIFEST)
    return copy.deepcopy(document)


def _container(document: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = document["spec"]["workerGroups"][0]["template"]["spec"]["containers"][0]
    return container


def test_numbers_that_are_not_given_are_left_to_the_defaults() -> None:
    document = _document()
    del document["spec"]["virtualNodes"], document["spec"]["replicas"], document["metadata"]
    manifest = read_manifest(document)
    assert (manifest.name, manifest.virtual_nodes, manifest.replicas) == (None, None, None)


def _without(key: str) -> Any:
    return lambda document: document.pop(key)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda d: d.update(kind="Deployment"), "VirtualFlowJob", id="another kind"),
        pytest.param(lambda d: d.update(apiVersion="v1"), "virtualflow.dev", id="another group"),
        pytest.param(_without("spec"), "spec is missing", id="no spec"),
        pytest.param(lambda d: d["spec"].update(virtualNodes=0), "at least 1", id="no virtual nodes"),
        pytest.param(lambda d: d["spec"].update(backoffLimit=-1), "at least 0", id="fewer crashes than none"),
        pytest.param(lambda d: d["spec"].update(replicas="3"), "whole number", id="replicas are a string"),
        pytest.param(lambda d: d["spec"].update(replicas=True), "whole number", id="replicas are a truth value"),
        pytest.param(lambda d: d["spec"].update(workerGroups=[]), "workerGroups is empty", id="no group"),
        pytest.param(lambda d: d["spec"]["workerGroups"].append(3), r"workerGroups\[1\] must be", id="a strange group"),
        pytest.param(lambda d: d["spec"]["workerGroups"][0].update(profile=3), "name of a file", id="a profile"),
        pytest.param(lambda d: d["spec"].update(reproducibility="Exact"), "Bitwise or Statistical", id="how exact"),
        pytest.param(lambda d: d["spec"].update(reproducibility=[]), "Bitwise or Statistical", id="a list of it"),
        pytest.param(lambda d: d["spec"].update(checkpoint=3), "spec.checkpoint must be a mapping", id="a checkpoint"),
        pytest.param(
            lambda d: d["spec"].update(checkpoint={"everySteps": 0}),
            r"spec\.checkpoint\.everySteps",
            id="every 0 steps",
        ),
        pytest.param(lambda d: d["spec"].update(workerGroups=[3]), "must be a mapping", id="a group is a number"),
        pytest.param(lambda d: _container(d).pop("command"), "command is missing", id="no command"),
        pytest.param(lambda d: _container(d).update(args="a b"), "list of strings", id="args are a string"),
        pytest.param(lambda d: _container(d).update(args=["--steps", 5]), "in quotes", id="an argument is a number"),
        pytest.param(lambda d: _container(d).update(envFrom=[{}]), "envFrom needs a cluster", id="envFrom"),
        pytest.param(
            lambda d: _container(d).update(env=[{"name": "A", "valueFrom": {}}]),
            "takes A from the cluster",
            id="valueFrom",
        ),
        pytest.param(
            lambda d: _container(d).update(env=[{"name": "A", "value": 5}]), "in quotes", id="a value is a number"
        ),
        pytest.param(lambda d: _container(d).update(env={"A": "5"}), "must be a list", id="env is a mapping"),
    ],
)
def test_what_cannot_be_run_is_named_in_one_sentence(spoil: Any, said: str) -> None:
    document = _document()
    spoil(document)
    with pytest.raises(ConfigurationError, match=said) as caught:
        read_manifest(document)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(None, "No such file", id="no file"),
        pytest.param("a: [", "not YAML", id="not YAML"),
        pytest.param("a: 2026-13-45", "no value of type timestamp can be made of '2026-13-45'", id="no such month"),
        pytest.param("a: !!bool maybe", "no value of type bool can be made of 'maybe'", id="no such word"),
        pytest.param("a: !!int ''", "no value of type int can be made of ''", id="no digits"),
        pytest.param("a: !!timestamp b", "no value of type timestamp can be made of 'b'", id="no date"),
        pytest.param(f"a: {'9' * 5_000}", "no value of type int can be made of '9{40}'", id="too many digits"),
        pytest.param("a: " + "[{b: " * 1_500, "brackets are nested more than 100 deep", id="brackets in brackets"),
        pytest.param("", "exactly one document", id="empty"),
        pytest.param(MANIFEST + "---\n" + MANIFEST, "exactly one document", id="two documents"),
        pytest.param("- 1\n", "must be a mapping", id="a list"),
    ],
)
def test_a_file_that_is_no_manifest_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_manifest(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "expanded"),
    [("$(A)", "1"), ("x$(A)y$(B)", "x1y$(B)"), ("$$(A)", "$(A)"), ("$A", "$A"), ("$()", "$()")],
)
def test_variables_are_expanded_as_in_kubernetes(word: str, expanded: str) -> None:
    assert expand(word, {"A": "1"}) == expanded


@pytest.mark.parametrize(
    ("command", "local"),
    [
        (("python", "a.py"), (sys.executable, "a.py")),
        (("python3", "a.py"), (sys.executable, "a.py")),
        (("/usr/bin/python3.12", "a.py"), (sys.executable, "a.py")),
        (("pythonic",), ("pythonic",)),
        (("sh", "-c", "python a.py"), ("sh", "-c", "python a.py")),
    ],
)
def test_python_is_this_interpreter(command: tuple[str, ...], local: tuple[str, ...]) -> None:
    assert local_command(command) == local
