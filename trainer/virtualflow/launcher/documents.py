"""Reads YAML so that whatever is wrong with it is an error of YAML.

PyYAML makes values of scalars by ``int``, ``datetime`` and the like, and lets their errors through: a date of month 13,
``!!bool maybe``, a number of 5,000 digits.
"""

from __future__ import annotations

from typing import Any

import yaml

from virtualflow.protocol.wording import printable

_SHOWN = 40
"""Characters of a scalar in a complaint."""


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a scalar of which no value can be made."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, OverflowError):
            text = repr(str(node.value)[:_SHOWN])
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            problem = f"no value of type {kind} can be made of {text}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def parse_yaml(text: str | bytes) -> list[Any]:
    """Return the documents of a text; empty ones are left out.

    Raises:
        YAMLError, UnicodeDecodeError, RecursionError: it is no YAML.
    """
    return [document for document in yaml.load_all(text, _Loader) if document is not None]


def describe_fault(error: Exception) -> str:
    """Say in one line what :func:`parse_yaml` has raised."""
    return printable(" ".join(str(error).split()))
