"""Test what computes on other versions than the pinned ones: ``python tests/versions.py oldest newest@3.13``.

``make test-versions`` calls it. Each word is a version of torch (``oldest`` and ``newest`` of what ``pyproject.toml``
promises, or one like ``2.6.0``), with ``@3.13`` on another Python than this one; or ``integrations``: the newest
transformers, accelerate, peft, lightning and so on, beside the pinned torch. Each gets an environment of its own, which
is removed behind it, from pip as it is set up here. At the end there is a line for each, with pytest's closing line.

The exit code is 1 if a test failed, else 3 if a version could not be had, else 0. It needs no package but pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILED, NOT_RUN = 1, 3
OWN = ("trainer", "bench", "test")
"""The extras that the library and its tests need anyway."""
COMPUTES = [
    *(f"tests/trainer/{suite}" for suite in ("step", "reduction", "state", "memory", "jobs")),
    "tests/unit/memory",
]
CLOSING = re.compile(r"=+ (.* in [0-9.]+s.*) =+")
VERSIONS = """
import importlib.metadata as m, platform, sys
print(", ".join(f"{name} {m.version(name)}" for name in sys.argv[1:]) + f", Python {platform.python_version()}")
"""


@dataclass(frozen=True)
class Leg:
    """What is tested in one environment."""

    word: str
    """As it was asked for."""
    python: str
    """The version of another Python; empty: the one that runs this."""
    extras: tuple[str, ...]
    """Of the project."""
    wanted: tuple[str, ...]
    """What pip installs beside them."""
    shown: tuple[str, ...]
    """The packages whose versions are told."""
    tests: tuple[str, ...]
    """What pytest runs."""


class NotRun(Exception):
    """Why there is no environment, in one line."""


# --- what is asked for ------------------------------------------------------------------------------------------------


def name_of(requirement: str) -> str:
    """Return the package of a requirement as indexes spell it."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def leg(word: str, extras: dict[str, list[str]]) -> Leg:
    """Read a word; ``extras`` are the project's optional dependencies."""
    version, _, python = word.partition("@")
    if version == "integrations":
        (named,) = extras["integrations"]
        shown = named.partition("[")[2].rstrip("]").split(",")
        shown = [name_of(each) for extra in shown for each in extras[extra] if not each.startswith("virtualflow")]
        tests = ("tests/trainer/integrations", "--nightly")
        return Leg(word, python, (*OWN, "integrations"), (), ("torch", *dict.fromkeys(shown)), tests)
    (promised,) = (each for each in extras["trainer"] if name_of(each) == "torch")
    if version == "oldest":
        bound = re.search(r">=([\d.]+)", promised)
        assert bound is not None, promised
        version = bound[1]
    torch = promised if version == "newest" else f"torch=={version}"
    return Leg(word, python, OWN, (torch,), ("torch",), ("--slow", *COMPUTES))


def constraints(leg: Leg, project: dict[str, list[str]], base: Iterable[str], pins: Iterable[str]) -> list[str]:
    """Choose the pins that hold: those of the library and of the tests themselves.

    What is tried brings along what it needs, and those versions are the index's choice.
    """
    mine = {name_of(each) for each in [*base, *(each for extra in OWN for each in project[extra])]}
    mine -= {name_of(each) for each in leg.wanted}
    return [pin for pin in pins if "==" in pin and name_of(pin) in mine]


# --- an environment ---------------------------------------------------------------------------------------------------


def interpreter(version: str) -> str:
    """Find the Python of a version: this one, one of the PATH, or one of pyenv's."""
    if not version:
        return sys.executable
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    for path in filter(None, [shutil.which(f"python{version}"), *map(str, kept)]):
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
        if done.stdout.startswith(f"Python {version}."):  # a shim of pyenv may be there and start nothing
            return path
    raise NotRun(f"there is no Python {version} here: put python{version} on the PATH")


def install(leg: Leg, folder: Path, minutes: float) -> str:
    """Make the environment, and return its Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    held = constraints(leg, project["optional-dependencies"], project["dependencies"], pins)
    (folder / "constraints.txt").write_text("\n".join([*held, ""]))
    python = str(folder / "bin" / "python")
    what = [*leg.wanted, "-e", f"{ROOT}[{','.join(leg.extras)}]"]
    pip = [python, "-m", "pip", "install", "-q", "--no-input", "--disable-pip-version-check", *what]
    try:
        subprocess.run([interpreter(leg.python), "-m", "venv", folder], check=True, timeout=60 * minutes)
        done = subprocess.run(
            [*pip, "-c", str(folder / "constraints.txt")],
            env={**os.environ, "TMPDIR": str(folder)},  # gigabytes pass through it
            capture_output=True,
            text=True,
            check=False,
            timeout=60 * minutes,
        )
    except subprocess.CalledProcessError as error:
        raise NotRun(f"{error.cmd[0]} cannot make virtual environments: install its venv module") from None
    except subprocess.TimeoutExpired:
        raise NotRun(f"pip has not installed it within {minutes:g} minutes") from None
    if done.returncode:
        said = re.findall(r"^ERROR: (?!ResolutionImpossible)(.*)", done.stderr, re.MULTILINE)
        raise NotRun(f"pip cannot install it: {said[-1] if said else f'exit code {done.returncode}'}")
    return python


def run(leg: Leg, python: str, tests: list[str]) -> tuple[bool, str]:
    """Run the tests; whether they passed, and a line that says so."""
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=900", *(tests or leg.tests)]
    command += [] if any(each.startswith("-n") for each in tests) else ["-n", "2", "--dist", "worksteal"]
    named = subprocess.run([python, "-c", VERSIONS, *leg.shown], capture_output=True, text=True, check=True, timeout=60)
    closing = "pytest ended without a closing line"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            found = CLOSING.fullmatch(line.strip())
            closing = found[1] if found else closing
    return process.returncode == 0, f"{named.stdout.strip()}: {closing}"


def main() -> int:
    """Take the words of the command line one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="VERSION", help="oldest, newest, 2.6.0, newest@3.13, integrations")
    parser.add_argument("--minutes", type=float, default=30, help="of pip, at most (%(default)g)")
    parser.add_argument("--tests", default="", help="arguments of pytest in place of the suites")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an environment goes with this process
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    place = ROOT / "build"
    place.mkdir(exist_ok=True)
    lines, codes = [], set()
    for asked in [leg(word, extras) for word in options.words]:
        with tempfile.TemporaryDirectory(prefix="versions-", dir=place, ignore_cleanup_errors=True) as folder:
            try:
                print(f"setting up {asked.word}", flush=True)
                passed, line = run(asked, install(asked, Path(folder), options.minutes), options.tests.split())
                codes.add(0 if passed else FAILED)
            except NotRun as why:
                line = f"not run: {why}"
                codes.add(NOT_RUN)
        lines.append(f"{asked.word}: {line}")
    print("\n" + "\n".join(lines))
    return FAILED if FAILED in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
