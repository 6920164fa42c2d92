"""A script, or a function, as a job: the manifest, and the ``ConfigMap`` with the files that its workers get.

A function travels as its source, not as an object: workers run it as a script of its own, so it imports what it needs.
"""

from __future__ import annotations

import base64
import builtins
import inspect
import re
import secrets
import symtable
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from virtualflow.atomic_file import read_regular
from virtualflow.cluster.api import GROUP, KIND, VERSION, Object
from virtualflow.errors import ConfigurationError

FOLDER = "/job"
"""Where the files are in a worker's container; the script runs in the image's own directory."""
_MOST_BYTES = 1 << 20
"""A ``ConfigMap`` takes so many."""
_NAME_LENGTH = 40
"""Of a job's name, before what makes it unique: its pods' names are longer, and may have 63 characters."""


class Submission(NamedTuple):
    """What is created for a script."""

    job: Object
    """A ``VirtualFlowJob``."""
    files: Object
    """A ``ConfigMap``, which is to belong to the job."""


def submission(
    train: Callable[[], object] | str | Path,
    *,
    image: str,
    replicas: int,
    name: str | None,
    files: Sequence[str | Path],
    args: Sequence[str],
    resources: Mapping[str, str | int],
    spec: Mapping[str, Any],
) -> Submission:
    """The objects of a job that runs ``train``; see :meth:`virtualflow.cluster.Client.submit`.

    Raises:
        ConfigurationError: it cannot be shipped; the sentence says what to do.
    """
    if callable(train):
        title, sources = str(train.__name__), {"train.py": source_of(train).encode()}
        main = "train.py"
    else:
        title, main = Path(train).stem, Path(train).name
        sources = {main: _read(Path(train))}
    for each in map(Path, files):
        if each.name in sources:
            raise ConfigurationError(f"two files are called {each.name}, and all lie in one folder; rename one of them")
        sources[each.name] = _read(each)
    name = name or _unique(title)
    entry: Object = {
        "name": "trainer",
        "image": image,
        "command": ["python", f"{FOLDER}/{main}"],
        "args": list(args),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "files", "mountPath": FOLDER, "readOnly": True}],
    }
    if resources:
        limits = {resource: amount for resource, amount in resources.items() if resource != "cpu"}
        entry["resources"] = {"requests": dict(resources), "limits": limits}
    pod = {
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [entry],
        "volumes": [{"name": "files", "configMap": {"name": f"{name}-files"}}],
    }
    workers = {"replicas": replicas, "workerGroups": [{"name": "workers", "template": {"spec": pod}}]}
    job = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {**workers, **spec},
    }
    return Submission(job, _config_map(f"{name}-files", sources))


def source_of(function: Callable[[], object]) -> str:
    """A script that defines that function and calls it.

    Raises:
        ConfigurationError: it is no function of its own, needs arguments, or uses what is defined outside it.
    """
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        raise ConfigurationError("submit takes a function that was made by def, the path of a script, or a manifest")
    called = function.__name__
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigurationError(f"{called}() is called without arguments: {error}; give each a default") from None
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError:
        raise ConfigurationError(
            f"the source of {called} is nowhere to be read; define it in a file or a notebook, or give a script's path"
        ) from None
    outside = sorted(set(_unknown(symtable.symtable(source, called, "exec"))) - {called, *vars(builtins)})
    if outside:
        raise ConfigurationError(
            f"{called} uses {', '.join(outside)}, defined outside it, and only its own source goes to the workers; "
            "import or define that inside it, or give a script's path"
        )
    return f'{source}\n\nif __name__ == "__main__":\n    {called}()\n'


def _unknown(table: symtable.SymbolTable) -> Iterator[str]:
    """Names that a piece of source takes from the module around it."""
    for symbol in table.get_symbols():
        at_top = table.get_type() == "module" and not symbol.is_assigned() and not symbol.is_namespace()
        if symbol.is_referenced() and (at_top or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _unknown(child)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be shipped: {error.strerror}; put folders into the image") from None


def _unique(title: str) -> str:
    """A name for a job, made from that of its script."""
    plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:_NAME_LENGTH].strip("-")
    return f"{plain or 'job'}-{secrets.token_hex(3)}"


def _config_map(name: str, sources: Mapping[str, bytes]) -> Object:
    size = sum(map(len, sources.values()))
    if size > _MOST_BYTES:
        raise ConfigurationError(
            f"the files have {size:,} bytes, and {_MOST_BYTES:,} is the most that goes with a job; put them into the "
            "image or on a volume"
        )
    text: dict[str, str] = {}
    other: dict[str, str] = {}
    for key, content in sources.items():
        if not re.fullmatch(r"[-._a-zA-Z0-9]+", key):
            raise ConfigurationError(f"{key!r} is no name for a shipped file: use letters, digits, '-', '_' and '.'")
        try:
            text[key] = content.decode()
        except UnicodeDecodeError:
            other[key] = base64.b64encode(content).decode()
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": text, "binaryData": other}
