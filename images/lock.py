"""Write the locks beside this file, from which the Dockerfile installs, and the licences of what they lock.

``make lock`` runs it, after a change of ``pyproject.toml`` or ``constraints.txt``. uv resolves ``pyproject.toml`` under
``constraints.txt`` and writes every package with the hashes of all its files; versions that a lock has and that still
fit stay. The CPU build of torch is in an index of its own: name that in ``PIP_EXTRA_INDEX_URL`` (or a folder with its
wheel in ``PIP_FIND_LINKS``), as for ``pip``. The locks name no index.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name

IMAGES = Path(__file__).parent
ROOT = IMAGES.parent
PYTHON_VERSION = "3.11"  # of the images
# Locks hold for aarch64 too: the packages are the same there, and the hashes are those of all files of a version.
PLATFORM = "x86_64-manylinux_2_28"

# What metadata say in words, as SPDX says it.
SPDX = {
    "Apache 2.0": "Apache-2.0",
    "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
# Whose metadata do not say which licence it is; read in the packages.
READ = {
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
    "jinja2": "BSD-3-Clause",
    "mpmath": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
}


def licence(metadata: Mapping[str, Any]) -> str:
    """Return the SPDX expression of a package by its metadata, as ``pip install --report`` gives them."""
    name = canonicalize_name(metadata["name"])
    words = [metadata.get("license_expression"), READ.get(name), metadata.get("license")]
    for told in filter(None, [*words, *metadata.get("classifier", [])]):
        try:
            return canonicalize_license_expression(SPDX.get(told, told))
        except InvalidLicenseExpression:
            continue
    raise SystemExit(f"{name}: its metadata name no licence that SPDX knows: read it, and enter it in images/lock.py")


def pinned(name: str) -> str:
    """Return the version of a package in ``constraints.txt``."""
    (version,) = re.findall(rf"^{name}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return version


def lock(name: str, requirements: list[str], extra: str | None = None, more_indexes: bool = False) -> None:
    """Write one lock: the project's dependencies with those of an extra, if one is named, and further requirements."""
    project = ["pyproject.toml", "--extra", extra] if extra else []
    command = [
        *(Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", *project, "-"),
        *("--constraints", "constraints.txt", "--output-file", f"images/{name}.txt"),
        *("--python-version", PYTHON_VERSION, "--python-platform", PLATFORM, "--generate-hashes"),
        *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
        *("--index-strategy", "unsafe-best-match"),  # pip's: the best version of all indexes
    ]
    # What pip's settings say, in uv's names.
    settings = {"UV_DEFAULT_INDEX": "PIP_INDEX_URL", "SSL_CERT_FILE": "PIP_CERT"}
    if more_indexes:
        settings |= {"UV_INDEX": "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS": "PIP_FIND_LINKS"}
    environment = os.environ | {ours: os.environ[pips] for ours, pips in settings.items() if pips in os.environ}
    subprocess.run(command, cwd=ROOT, env=environment, input="\n".join(requirements), text=True, check=True)


def licences(name: str) -> dict[str, str]:
    """Return what a lock installs: each name and its licence. pip reads metadata, and downloads little else."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"),
            *("--only-binary", ":all:", "--require-hashes", "--report", report.name, "-r", f"images/{name}.txt"),
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        installed = json.load(report)["install"]
    return {canonicalize_name(package["metadata"]["name"]): licence(package["metadata"]) for package in installed}


def main() -> None:
    """Write all locks, then the licences of all that they name."""
    lock("build", ["hatchling"])
    lock("operator", [], extra="operator")
    # scikit-learn brings the data of the examples.
    lock("trainer-cuda", ["scikit-learn"], extra="trainer")
    lock("trainer-cpu", ["scikit-learn", f"torch=={pinned('torch')}+cpu"], extra="trainer", more_indexes=True)
    found: dict[str, str] = {}
    for name in ("build", "operator", "trainer-cpu", "trainer-cuda"):
        found |= licences(name)
    with (IMAGES / "licenses.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("package", "license"), *sorted(found.items())])


if __name__ == "__main__":
    main()
