"""Writes resource.md from the CustomResourceDefinitions, so that what a user reads is what the API server enforces.

python docs/generate_resource.py > docs/reference/resource.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CRD = Path(__file__).parents[1] / "crds" / "virtualflowjobs.yaml"
QUEUE_CRD = CRD.with_name("virtualflowqueues.yaml")
LARGEST_NUMBER = 2**53 - 1
"""The bound of counters: as large as JSON holds without rounding, so not worth a user's attention."""

Schema = Mapping[str, Any]
RowWriter = Callable[[str, Schema, bool], str]

INTRODUCTION = """\
# Custom resources

<!-- Made from crds/virtualflowjobs.yaml by docs/generate_resource.py. Do not edit it here. -->

{description}

- API version `{group}/{version}`, kind `{kind}`, short name `{short}`; `kubectl get {category}` lists jobs too.
- `kubectl explain {short}.spec` shows these fields in a terminal.
- [examples/digits.yaml](../../examples/digits.yaml) is an example to begin with.
- [Queues](#the-queue) are on this page, too.
- `metadata.name`: {name} It must match `{pattern}`.

Fields in **bold** are required. `[]` stands for the entries of a list. A *label selector* has `matchLabels` and
`matchExpressions` as in Kubernetes, at most 32 entries each.
"""

RULES = """\
## Rules

The API server checks these when a job is created or changed. The operator checks them again, and says what is wrong in
the job's conditions, with the reason `InvalidSpec`.
"""

SCALE = """\
## Scaling

`kubectl scale {short}/NAME --replicas=4` and a HorizontalPodAutoscaler set `{wanted}`. They read `{have}`, and find the
workers' pods by `{selector}`.
"""

COLUMNS = """\
## Columns of kubectl get

| column | shows | when |
|---|---|---|
"""

FIRST = ("workerGroups", "virtualNodes", "replicas", "minReplicas", "checkpoint")
"""Fields of a job that most have; the others are folded."""
FIRST_OF_STATUS = ("phase", "conditions", "workers", "step", "digest")

TABLE = "| field | type | meaning |\n|---|---|---|\n"


def generate(crd: Mapping[str, Any]) -> str:
    """The page that describes the resource of ``crd``, as Markdown."""
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    name = schema["properties"]["metadata"]["properties"]["name"]
    scale = version["subresources"]["scale"]
    parts = [
        INTRODUCTION.format(
            description=schema["description"],
            group=crd["spec"]["group"],
            version=version["name"],
            kind=names["kind"],
            short=names["shortNames"][0],
            category=names["categories"][0],
            name=name["description"],
            pattern=name["pattern"],
        ),
        f"## spec\n\n{spec['description']}\n\n" + "".join(_tables(spec, _spec_row, first=FIRST)),
        RULES + "\n" + "".join(f"- {rule}\n" for rule in _rules(spec, "")),
        SCALE.format(
            short=names["shortNames"][0],
            wanted=scale["specReplicasPath"].lstrip("."),
            have=scale["statusReplicasPath"].lstrip("."),
            selector=scale["labelSelectorPath"].lstrip("."),
        ),
        f"## status\n\n{status['description']}\n\n" + "".join(_tables(status, _status_row, first=FIRST_OF_STATUS)),
        _conditions(status["properties"]["conditions"]),
        COLUMNS + "".join(_columns(version["additionalPrinterColumns"])),
    ]
    return "\n".join(parts)


QUEUE = """\

## The queue

<!-- Made from crds/virtualflowqueues.yaml. -->

{description}

- API version `{group}/{version}`, kind `{kind}`, short name `{short}`; it has no namespace.
- [Share a cluster with queues](../how-to/queues.md) says how to use it.
- [examples/queue.yaml](../../examples/queue.yaml) is one.
"""


def generate_queue(crd: Mapping[str, Any]) -> str:
    """What the page says of the queues' ``crd``, as Markdown."""
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    spec, status = schema["properties"]["spec"], schema["properties"]["status"]
    parts = [
        QUEUE.format(
            description=schema["description"],
            group=crd["spec"]["group"],
            version=version["name"],
            kind=names["kind"],
            short=names["shortNames"][0],
        ),
        f"### spec of a queue\n\n{spec['description']}\n\n" + "".join(_tables(spec, _spec_row, "####")),
        "### Rules of a queue\n\n" + "".join(f"- {rule}\n" for rule in _rules(spec, "")),
        f"### status of a queue\n\n{status['description']} Its condition `Ready` has the reasons of\n"
        "[the list](reasons.md#of-a-queue).\n\n" + "".join(_tables(status, _status_row, "####")),
    ]
    return "\n".join(parts)


def _tables(schema: Schema, row: RowWriter, level: str = "###", *, first: Sequence[str] = ()) -> Iterator[str]:
    """A table of the fields of ``schema`` itself, then one for each of them that has fields, under a heading.

    Of the fields themselves all but the ``first`` are folded, if some are named.
    """
    required = schema.get("required", [])
    rows = {key: row(key, field, key in required) for key, field in schema["properties"].items()}
    yield TABLE
    yield from (rows.pop(key) for key in first)
    if first:
        yield f'\n<details markdown="1">\n<summary>{len(rows)} more fields</summary>\n\n{TABLE}'
    yield from rows.values()
    if first:
        yield "\n</details>\n"
    for key, field in schema["properties"].items():
        if key == "conditions":
            continue  # they have a section of their own
        inner = field.get("items", field)
        if inner.get("properties") and not _selects(inner):
            yield f"\n{level} {key}{'[]' if 'items' in field else ''}\n\n{TABLE}"
            yield from (row(*below) for below in _fields(inner, ""))


def _spec_row(path: str, field: Schema, required: bool) -> str:
    shown = f"**`{path}`**" if required else f"`{path}`"
    default = f"default `{_written(field['default'])}`" if field.get("default", {}) not in ({}, "") else ""
    return _row(shown, ", ".join(filter(None, (_type(field), _bounds(field), default))), _prose(field))


def _status_row(path: str, field: Schema, required: bool) -> str:
    del required  # the operator writes them, so nobody needs to know
    return _row(f"`{path}`", _type(field), _prose(field))


def _conditions(conditions: Schema) -> str:
    fields = conditions["items"]["properties"]
    types = [line.split(": ", 1) for line in fields["type"]["description"].splitlines()]
    first = fields["reason"]["description"].splitlines()[0]
    lines = [
        f"## Conditions\n\n{conditions['description']}\n\n| type | True when |\n|---|---|\n",
        *(_row(f"`{kind}`", meaning) for kind, meaning in types),
        "\n| field | type | meaning |\n|---|---|---|\n",
        *(
            _row(f"`{key}`", _type(field), first if key == "reason" else _prose(field))
            for key, field in fields.items()
            if key != "type"
        ),
        "\n[Reasons and events](reasons.md#of-a-job) explains each reason.\n",
    ]
    return "".join(lines)


def _columns(columns: list[Mapping[str, Any]]) -> Iterator[str]:
    for column in columns:
        when = "with `-o wide`" if column.get("priority") else "always"
        yield _row(column["name"].upper(), f"`{column['jsonPath'].lstrip('.')}`", when)


def _selects(schema: Schema) -> bool:
    """Whether ``schema`` is a label selector, which readers know from Kubernetes."""
    return set(schema.get("properties", ())) == {"matchLabels", "matchExpressions"}


def _refuses(schema: Schema) -> bool:
    """Whether ``schema`` is only there to refuse a field by its name."""
    return any(rule["rule"] == "false" for rule in schema.get("x-kubernetes-validations", ()))


def _fields(schema: Schema, prefix: str) -> Iterator[tuple[str, Schema, bool]]:
    """Each field below ``schema`` with its path and whether it is required, parents before children."""
    required = schema.get("required", [])
    for key, field in schema.get("properties", {}).items():
        path = f"{prefix}{key}"
        if _refuses(field):
            continue  # the description of what is above it says so
        yield path, field, key in required
        if _selects(field):
            continue
        yield from _fields(field, f"{path}.")
        if "items" in field:
            yield from _fields(field["items"], f"{path}[].")


def _rules(schema: Schema, path: str) -> Iterator[str]:
    """The sentence of each rule at or below ``schema``."""
    for rule in [] if _refuses(schema) else schema.get("x-kubernetes-validations", []):
        yield f"`{path}`: {rule['message']}" if "[]" in path else str(rule["message"])
    for key, field in schema.get("properties", {}).items():
        yield from _rules(field, f"{path}.{key}".lstrip("."))
    if "items" in schema:
        yield from _rules(schema["items"], f"{path}[]")


def _type(field: Schema) -> str:
    if _selects(field):
        return "label selector"
    if field["type"] == "array":
        return f"list of {_plural(field['items']['type'])}"
    if "additionalProperties" in field:
        return f"map of {_plural(field['additionalProperties']['type'])}"
    if field.get("format") == "date-time":
        return "time"
    if field.get("x-kubernetes-preserve-unknown-fields"):
        return "object, any fields"
    return str(field["type"])


def _plural(kind: str) -> str:
    return f"{kind}s"


def _bounds(field: Schema) -> str:
    """What the API server accepts, in words."""
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    bounds = [
        _range(field, "minimum", "maximum", ""),
        _range(field, "minItems", "maxItems", " entries"),
        _range(field, "minProperties", "maxProperties", " entries"),
        _range(field, "minLength", "maxLength", " characters"),
        f"`{field['pattern']}`" if "pattern" in field else "",
    ]
    return ", ".join(bound for bound in bounds if bound)


def _range(field: Schema, lowest: str, highest: str, unit: str) -> str:
    low, high = field.get(lowest), field.get(highest)
    if high is None:
        return ""
    if low == high:
        return f"exactly {low}" + (unit if low != 1 else unit.replace("entries", "entry"))
    if high == LARGEST_NUMBER:
        return f"at least {low}"
    return f"at most {high}{unit}" if low is None else f"{low} to {high}{unit}"


def _prose(field: Schema) -> str:
    return " ".join(field["description"].split())


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    sys.stdout.write(generate(yaml.safe_load(CRD.read_text(encoding="utf-8"))))
    sys.stdout.write(generate_queue(yaml.safe_load(QUEUE_CRD.read_text(encoding="utf-8"))))
