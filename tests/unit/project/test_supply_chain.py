"""What is installed and handed out is known by name, version, hash and licence."""

from __future__ import annotations

import csv
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.licenses import canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "images"
LOCKS = ("build", "operator", "trainer-cpu", "trainer-cuda")


@cache
def locked(name: str) -> dict[str, tuple[Version, frozenset[str]]]:
    """Return what a lock has: each package's version and the hashes of its files."""
    found = {}
    for line in (IMAGES / f"{name}.txt").read_text().replace("\\\n", "").splitlines():
        words = line.split()
        requirement = Requirement(words[0])
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        found[canonicalize_name(requirement.name)] = (Version(pin.version), frozenset(words[1:]))
    return found


@cache
def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]): Version(line.split("==")[1]) for line in lines}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_hashes(lock: str) -> None:
    for name, (_, hashes) in locked(lock).items():
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in hashes), name


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_the_versions_of_the_constraints_so_run_make_lock_after_a_change(lock: str) -> None:
    versions = {name: version for name, (version, _) in locked(lock).items() if name in pins()}
    # Two builds of one version: torch 2.13.0+cpu is 2.13.0.
    assert {name: Version(version.public) for name, version in versions.items()} == {
        name: pins()[name] for name in versions
    }
    unpinned = set(locked(lock)) - set(versions)
    assert all(re.match(r"cuda-|nvidia-|triton$", name) for name in unpinned), unpinned


@pytest.mark.parametrize(
    ("lock", "extra", "more"),
    [
        ("operator", "operator", set()),
        ("trainer-cpu", "trainer", {"scikit-learn"}),
        ("trainer-cuda", "trainer", {"scikit-learn"}),
    ],
)
def test_a_lock_has_all_that_the_project_asks_for_so_run_make_lock_after_a_change(
    lock: str, extra: str, more: set[str]
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"][extra]]
    for requirement in wanted:
        version, _ = locked(lock)[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement
    assert more <= set(locked(lock))


def test_the_locks_of_the_trainer_differ_in_torch_and_what_cuda_brings() -> None:
    cpu, cuda = ({name: version for name, (version, _) in locked(f"trainer-{t}").items()} for t in ("cpu", "cuda"))
    assert (cpu["torch"].local, cuda["torch"].local) == ("cpu", None)
    assert {name: version for name, version in cuda.items() if name in cpu} | {"torch": cpu["torch"]} == cpu
    assert "nvidia-cublas" in cuda


def test_no_lock_names_an_index_or_a_place() -> None:
    for lock in LOCKS:
        assert not re.search(r"://|--(index|extra|find|trusted)|@ ", (IMAGES / f"{lock}.txt").read_text()), lock


def test_the_licence_of_all_that_is_locked_is_known() -> None:
    with (IMAGES / "licenses.csv").open() as file:
        licenses = {row["package"]: row["license"] for row in csv.DictReader(file)}
    assert set(licenses) == {name for lock in LOCKS for name in locked(lock)}
    for name, expression in licenses.items():
        assert canonicalize_license_expression(expression) == expression, name
