"""Refusals in the API server's words: every error is a Status object."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


class Refusal(Exception):
    """A request that the API server does not carry out."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}

    @property
    def status(self) -> Object:
        """The Status object that answers the request."""
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        if self.details:
            status["details"] = self.details
        return status | {"message": self.message, "reason": self.reason, "code": self.code}


def not_found(resource: str, name: str) -> Refusal:
    """``resource`` is the plural with its group: virtualflowjobs.virtualflow.dev."""
    return Refusal(404, "NotFound", f'{resource} "{name}" not found', _which(resource, name))


def already_exists(resource: str, name: str) -> Refusal:
    return Refusal(409, "AlreadyExists", f'{resource} "{name}" already exists', _which(resource, name))


def conflict(resource: str, name: str, why: str) -> Refusal:
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return Refusal(409, "Conflict", message, _which(resource, name))


def unmet(kind: str, name: str, what: str, wanted: str, own: str) -> Refusal:
    """A precondition that does not hold."""
    why = f"the {what} in the precondition ({wanted}) does not match the {what} in record ({own}). "
    return conflict(kind, name, why + "The object might have been deleted and then recreated")


def invalid(kind: str, name: str, causes: list[str]) -> Refusal:
    text = causes[0] if len(causes) == 1 else "[" + ", ".join(causes) + "]"
    return Refusal(422, "Invalid", f'{kind} "{name}" is invalid: {text}', _which(kind, name))


def bad_request(message: str) -> Refusal:
    return Refusal(400, "BadRequest", message)


def expired(message: str) -> Refusal:
    return Refusal(410, "Expired", message)


def _which(resource: str, name: str) -> Object:
    plain, _, group = resource.partition(".")
    return {"name": name, "kind": plain} | ({"group": group} if group else {})
