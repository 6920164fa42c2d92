"""What is installed and handed out is known by name, version, hash and licence."""

from __future__ import annotations

import csv
import datetime as dt
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

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


DIGEST = f"sha256:{'0' * 64}"


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """The files of a release, as far as the bill looks into them."""
    for name in ("virtualflow-0.1.0-py3-none-any.whl", "virtualflow-0.1.0.tar.gz", "virtualflow-0.1.0.tgz"):
        (tmp_path / name).write_text(name)
    return tmp_path


def load_sbom() -> ModuleType:
    found = importlib.util.spec_from_file_location("sbom", IMAGES / "sbom.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def bill(folder: Path, **digests: str) -> dict[str, Any]:
    document: dict[str, Any] = load_sbom().bill(folder, digests, dt.datetime(2026, 1, 2, tzinfo=dt.UTC))
    return document


def test_the_bill_has_what_is_released_and_all_that_the_images_install(release: Path) -> None:
    document = bill(release)
    packages = {entry["SPDXID"]: entry for entry in document["packages"]}
    assert len(packages) == len(document["packages"])
    described = [
        packages[each["relatedSpdxElement"]]["name"]
        for each in document["relationships"]
        if (each["spdxElementId"], each["relationshipType"]) == (document["SPDXID"], "DESCRIBES")
    ]
    images = [f"virtualflow-{image} (image)" for image in ("operator", "trainer-cpu", "trainer-cuda")]
    assert described == [*sorted(file.name for file in release.iterdir()), *images]
    for lock in ("operator", "trainer-cpu", "trainer-cuda"):
        (image,) = (name for name, entry in packages.items() if entry["name"] == f"virtualflow-{lock} (image)")
        inside = {
            (packages[each["relatedSpdxElement"]]["name"], packages[each["relatedSpdxElement"]]["versionInfo"])
            for each in document["relationships"]
            if (each["spdxElementId"], each["relationshipType"]) == (image, "CONTAINS")
        }
        assert inside == {(name, str(version)) for name, (version, _) in locked(lock).items()}


def test_each_entry_of_the_bill_is_what_spdx_asks_for(release: Path) -> None:
    document = bill(release)
    names = {entry["SPDXID"] for entry in document["packages"]} | {document["SPDXID"]}
    assert (document["spdxVersion"], document["dataLicense"]) == ("SPDX-2.3", "CC0-1.0")
    assert document["creationInfo"]["created"] == "2026-01-02T00:00:00Z"
    for each in document["relationships"]:
        assert {each["spdxElementId"], each["relatedSpdxElement"]} <= names
    told = {each["licenseId"] for each in document["hasExtractedLicensingInfos"]}
    for entry in document["packages"]:
        assert re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", entry["SPDXID"])
        assert set(re.findall(r"LicenseRef-[\w.-]+", entry["licenseDeclared"])) <= told, entry["name"]
    assert "pkg:pypi/torch@2.13.0%2Bcpu" in json.dumps(document)


def test_an_image_has_its_digest_where_that_is_known(release: Path) -> None:
    found = {entry["name"]: entry.get("checksums") for entry in bill(release, OPERATOR_DIGEST=DIGEST)["packages"]}
    assert found["virtualflow-operator (image)"] == [{"algorithm": "SHA256", "checksumValue": "0" * 64}]
    assert found["virtualflow-trainer-cpu (image)"] is None
    with pytest.raises(SystemExit, match="latest is no digest of an image"):
        bill(release, OPERATOR_DIGEST="latest")


def test_the_hashes_are_those_of_all_files(release: Path) -> None:
    for _ in range(2):  # a second run leaves the first one's out
        subprocess.run([sys.executable, str(IMAGES / "sbom.py"), str(release)], check=True, timeout=60)
    listed = (release / "SHA256SUMS").read_text().split()[1::2]
    assert sorted([*listed, "SHA256SUMS"]) == sorted(file.name for file in release.iterdir())
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=release, check=True, timeout=60)


@pytest.mark.parametrize("digest", ["", DIGEST])
def test_the_packaged_chart_names_the_operators_image_by_its_digest(tmp_path: Path, digest: str) -> None:
    chart = tmp_path / "virtualflow"
    subprocess.run(
        ["make", str(chart), f"CHART={chart}", f"OPERATOR_DIGEST={digest}"], cwd=ROOT, check=True, timeout=60
    )
    ours, packaged = ((folder / "values.yaml").read_text() for folder in (ROOT / "charts" / "virtualflow", chart))
    assert packaged == ours.replace('digest: ""', f'digest: "{digest}"')
    assert {path.relative_to(chart) for path in chart.rglob("*")} == {
        path.relative_to(ROOT / "charts" / "virtualflow") for path in (ROOT / "charts" / "virtualflow").rglob("*")
    }
