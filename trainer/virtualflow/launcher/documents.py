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
_MOST_LEVELS = 100
"""Of brackets. PyYAML's time grows with the square of their depth: 1,500 take seconds."""


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a scalar of which no value can be made, and brackets that nobody writes so deep."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 - PyYAML's name
        if self.flow_level >= _MOST_LEVELS:
            problem = f"brackets are nested more than {_MOST_LEVELS} deep"
            raise yaml.scanner.ScannerError(None, None, problem, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

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
