"""Label and field selectors, as the API server reads them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from fake_api.status import bad_request

Matcher = Callable[[dict[str, Any]], bool]

_KEY = r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?"
_VALUE = r"[A-Za-z0-9._-]*"
_SET = re.compile(rf"^(?P<key>{_KEY})\s+(?P<operator>in|notin)\s+\((?P<values>[^()]*)\)$")
_EQUAL = re.compile(rf"^(?P<key>{_KEY})\s*(?P<operator>==|=|!=)\s*(?P<value>{_VALUE})$")
_EXISTS = re.compile(rf"^(?P<absent>!?)\s*(?P<key>{_KEY})$")
_COMMA = re.compile(r",(?![^(]*\))")


@functools.lru_cache
def labels(selector: str) -> Matcher:
    """Return whether an object's labels satisfy every requirement of the selector."""
    requirements = [_requirement(part.strip()) for part in _COMMA.split(selector)] if selector.strip() else []

    def matches(item: dict[str, Any]) -> bool:
        own = item["metadata"].get("labels") or {}
        return all(requirement(own) for requirement in requirements)

    return matches


def _requirement(text: str) -> Matcher:
    if found := _SET.match(text):
        key, values = found["key"], {value.strip() for value in found["values"].split(",")}
        wanted = found["operator"] == "in"
        return lambda own: (own.get(key) in values) == wanted
    if found := _EQUAL.match(text):
        key, value, equal = found["key"], found["value"], found["operator"] != "!="
        return lambda own: (own.get(key) == value) == equal
    if found := _EXISTS.match(text):
        key, present = found["key"], not found["absent"]
        return lambda own: (key in own) == present
    raise bad_request(f"unable to parse requirement: {text!r}")


@functools.lru_cache
def fields(selector: str) -> Matcher:
    """Return whether an object's fields are as the selector says; only paths to scalars."""
    requirements: list[tuple[list[str], str, bool]] = []
    for part in selector.split(",") if selector.strip() else []:
        found = re.match(r"^([A-Za-z.]+)(==|=|!=)(.*)$", part.strip())
        if found is None:
            raise bad_request(f"invalid selector: {part!r}; can't understand it")
        requirements.append((found[1].split("."), found[3], found[2] != "!="))

    def matches(item: dict[str, Any]) -> bool:
        return all((_scalar(item, path) == value) == equal for path, value, equal in requirements)

    return matches


def _scalar(item: dict[str, Any], path: list[str]) -> str:
    value: Any = item
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
