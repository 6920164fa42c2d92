"""Write what a release consists of beside its files: a bill of materials (SPDX 2.3, JSON) and their hashes.

``make dist`` runs it when the wheel, the sdist and the chart are in ``dist/``. The bill has those files, the images and
all that their locks install, what builds them, and each one's licence. An image's digest is there if it is given
(``OPERATOR_DIGEST``, ``TRAINER_CPU_DIGEST``, ``TRAINER_CUDA_DIGEST``): it is known only when the image is built.
"""

from __future__ import annotations

import csv
import datetime as dt
import hashlib
import json
import os
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

IMAGES = Path(__file__).parent
ROOT = IMAGES.parent
LOCKED = ("operator", "trainer-cpu", "trainer-cuda")
SUMS = "SHA256SUMS"
UPLOT = ROOT / "trainer" / "virtualflow" / "coordinator" / "page" / "uplot"
"""What the live page draws with: the one part of the wheel that others have written."""

Entry = dict[str, Any]


def locked(name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the version of each package of a lock."""
    for line in (IMAGES / f"{name}.txt").read_text().splitlines():
        if found := re.match(r"([\w.-]+)==([^\s;]+)", line):
            yield found[1], found[2]


def licenses() -> dict[str, str]:
    """Return the SPDX expression of each package that a lock has."""
    with (IMAGES / "licenses.csv").open() as file:
        return {row["package"]: row["license"] for row in csv.DictReader(file)}


def package(name: str, version: str, license_declared: str, purl: str = "", sha256: str = "") -> Entry:
    """Return a package of the bill.

    Args:
        license_declared: an SPDX expression.
        purl: where it is published, as a package URL; empty: nowhere yet.
        sha256: of the file, in hexadecimal digits; empty: any of several files.
    """
    entry = {
        "SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-{version}"),
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": license_declared,
        "copyrightText": "NOASSERTION",
    }
    if purl:
        reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
        entry["externalRefs"] = [reference]
    if sha256:
        entry["checksums"] = [{"algorithm": "SHA256", "checksumValue": sha256}]
    return entry


def bill(folder: Path, environment: Mapping[str, str], now: dt.datetime) -> Entry:
    """Return the SPDX document.

    Args:
        folder: of the release's files.
        environment: with the digests of the images, as far as they are known.
        now: when it is written.

    Raises:
        SystemExit: a digest is none.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version, own, known = project["version"], project["license"], licenses()
    packages: dict[str, Entry] = {}
    relations: list[tuple[str, str, str]] = []

    def add(entry: Entry, relation: str, other: str, *, inwards: bool = False) -> str:
        name = entry["SPDXID"]
        packages[name] = entry
        relations.append((name, relation, other) if inwards else (other, relation, name))
        return str(name)

    def from_lock(name: str, of: str) -> Entry:
        return package(name, of, known[name], f"pkg:pypi/{name}@{quote(of, safe='')}")

    document = "SPDXRef-DOCUMENT"
    (drawn_by,) = re.findall(r"uPlot \(v([\d.]+)\)", (UPLOT / "uPlot.iife.min.js").read_text())
    for file in sorted(folder.iterdir()):
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        name = add(package(file.name, version, own, sha256=sha256), "DESCRIBES", document)
        if file.name.endswith((".whl", ".tar.gz")):  # the chart is neither built nor has it a page
            add(package("uplot", drawn_by, "MIT", f"pkg:npm/uplot@{drawn_by}"), "CONTAINS", name)
            for tool in locked("build"):
                add(from_lock(*tool), "BUILD_TOOL_OF", name, inwards=True)
    for image in LOCKED:
        digest = environment.get(f"{image.upper().replace('-', '_')}_DIGEST", "")
        if digest and not re.fullmatch("sha256:[0-9a-f]{64}", digest):
            raise SystemExit(f"{digest} is no digest of an image: it must be sha256: and 64 hexadecimal digits")
        named = package(f"virtualflow-{image} (image)", version, own, sha256=digest.removeprefix("sha256:"))
        holder = add(named, "DESCRIBES", document)
        for installed in locked(image):
            add(from_lock(*installed), "CONTAINS", holder)
    declared = " ".join(entry["licenseDeclared"] for entry in packages.values())
    content = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": document,
        "name": f"virtualflow-{version}",
        "creationInfo": {"created": f"{now:%Y-%m-%dT%H:%M:%SZ}", "creators": ["Tool: virtualflow-images-sbom"]},
        "packages": list(packages.values()),
        "relationships": [
            {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}
            for one, kind, other in dict.fromkeys(relations)
        ],
        "hasExtractedLicensingInfos": [
            {"licenseId": ref, "extractedText": f"{ref}: the text is in the package."}
            for ref in sorted(set(re.findall(r"LicenseRef-[\w.-]+", declared)))
        ],
    }
    # The same content has the same name.
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return content | {"documentNamespace": uuid.uuid5(uuid.NAMESPACE_OID, digest).urn}


def write_sums(folder: Path) -> None:
    """Write ``SHA256SUMS``, which ``sha256sum --check`` reads."""
    files = [file for file in sorted(folder.iterdir()) if file.name != SUMS]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / SUMS).write_text("".join(lines))


def main(folder: Path) -> None:
    """Write both beside the files of a release."""
    stamp = os.environ.get("SOURCE_DATE_EPOCH")
    now = dt.datetime.fromtimestamp(int(stamp), dt.UTC) if stamp else dt.datetime.now(dt.UTC)
    document = bill(folder, os.environ, now)
    (folder / f"{document['name']}.spdx.json").write_text(json.dumps(document, indent=2) + "\n")
    write_sums(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
