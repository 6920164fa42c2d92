"""Scripts and functions as jobs: what is shipped, and what cannot be."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from virtualflow.cluster.scripts import Submission, source_of, submission
from virtualflow.errors import ConfigurationError

GREETING = "hello"


def made(train: Callable[[], object] | str | Path, **options: Any) -> Submission:
    usual: dict[str, Any] = {"image": "i", "replicas": 2, "name": "greet", "files": (), "args": (), "resources": {}}
    return submission(train, **(usual | {"spec": {}} | options))


def greet(times: int = 2) -> None:
    import json
    from pathlib import Path as Where

    def line(number: int) -> str:
        return json.dumps({"hello": number, "times": times, "here": Where().is_absolute()})

    print("\n".join(line(number) for number in range(times)))


def uses_what_is_outside() -> None:
    print(GREETING, [Path(name) for name in ("a",)])


def needs(steps: int) -> None:
    print(steps)


def annotated(path: Path | None = None) -> None:
    print(path)


def counts(number: int = 3) -> int:
    return number if number == 0 else counts(number - 1)


@pytest.mark.parametrize("function", [greet, counts])
def test_a_function_runs_as_a_script_of_its_own(function: Callable[[], object], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source_of(function))
    ran = subprocess.run(
        [sys.executable, "train.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    expected = ['{"hello": 0, "times": 2, "here": false}', '{"hello": 1, "times": 2, "here": false}']
    assert ran.stdout.splitlines() == (expected if function is greet else [])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (uses_what_is_outside, "uses GREETING, Path, defined outside it"),
        (annotated, "uses Path, defined outside it"),
        (needs, r"needs\(\) is called without arguments: missing a required argument: 'steps'"),
        (lambda: None, "a function that was made by def"),
        (print, "a function that was made by def"),
    ],
)
def test_what_cannot_run_elsewhere_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        source_of(function)


def test_a_function_without_a_source_is_refused() -> None:
    space: dict[str, Any] = {}
    exec("def typed(): pass", space)
    with pytest.raises(ConfigurationError, match="the source of typed is nowhere to be read"):
        source_of(space["typed"])


def test_a_script_and_its_files_lie_in_one_folder(tmp_path: Path) -> None:
    for name, content in {"train.py": b"import helper", "helper.py": b"", "table.bin": b"\xff\x00"}.items():
        (tmp_path / name).write_bytes(content)
    files = [tmp_path / "helper.py", tmp_path / "table.bin"]
    job, shipped = made(tmp_path / "train.py", files=files, args=["--steps", "3"], name=None)
    name = job["metadata"]["name"]
    assert name.startswith("train-")
    (container,) = job["spec"]["workerGroups"][0]["template"]["spec"]["containers"]
    assert (container["command"], container["args"]) == (["python", "/job/train.py"], ["--steps", "3"])
    assert shipped["metadata"]["name"] == f"{name}-files"
    assert shipped["data"] == {"train.py": "import helper", "helper.py": ""}
    assert base64.b64decode(shipped["binaryData"]["table.bin"]) == b"\xff\x00"


def test_what_a_worker_requests_limits_all_but_its_processor() -> None:
    job, _ = made(greet, resources={"cpu": 2, "memory": "4Gi", "nvidia.com/gpu": 1}, spec={"maxReplicas": 8})
    (container,) = job["spec"]["workerGroups"][0]["template"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": 2, "memory": "4Gi", "nvidia.com/gpu": 1},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": 1},
    }
    assert (job["spec"]["replicas"], job["spec"]["maxReplicas"]) == (2, 8)


def test_files_that_cannot_be_shipped_are_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "inner" / "train.py").write_text("")
    (tmp_path / "a b.py").write_text("")
    (tmp_path / "large.bin").write_bytes(bytes((1 << 20) + 1))
    for file, said in (
        ("inner/train.py", r"two files are called train\.py"),
        ("inner", "cannot be shipped: Is a directory; put folders into the image"),
        ("absent.py", "cannot be shipped: No such file"),
        ("a b.py", "is no name for a shipped file"),
        ("large.bin", "it is larger than 1,048,576 bytes; put folders into the image"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            made(tmp_path / "train.py", files=[tmp_path / file])


@pytest.mark.parametrize(
    ("file", "begin"), [("Fine_tune-2.py", "fine-tune-2-"), (f"{'x' * 50}.py", f"{'x' * 40}-"), ("_.py", "job-")]
)
def test_a_job_is_named_after_its_script(file: str, begin: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("")
    name = made(tmp_path / file, name=None).job["metadata"]["name"]
    assert name.startswith(begin)
    assert len(name) == len(begin) + 6
