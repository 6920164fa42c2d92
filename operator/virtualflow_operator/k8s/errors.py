"""What the API server says when it refuses a request, or why it did not answer: an exception each, with its code."""

from __future__ import annotations

import json

_MESSAGE_LIMIT = 2000
"""Characters kept of an answer that is no Status object (a proxy's error page)."""


class ApiError(Exception):
    """The API server refused a request, or did not answer it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message or reason or f"HTTP {code}")
        self.code = code
        """The HTTP status, or 0 when there was no answer."""
        self.reason = reason
        """The Status object's reason in CamelCase (``AlreadyExists``), or the name of a connection's error."""
        self.message = message or reason or f"HTTP {code}"


class NotFound(ApiError):
    """404: there is no such object, or no such resource."""


class AlreadyExists(ApiError):
    """409: an object of this name is there."""


class Conflict(ApiError):
    """409: somebody else changed the object meanwhile, or a precondition does not hold."""


class Gone(ApiError):
    """410: a resourceVersion or a ``continue`` token is too old."""


class Invalid(ApiError):
    """400, 413, 422: the object will never be accepted as it is."""


class Forbidden(ApiError):
    """401, 403: the operator's account may not do this, or an admission rule forbids it."""


class TooManyRequests(ApiError):
    """429: the API server is overloaded, or a disruption budget forbids an eviction."""

    def __init__(self, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(code, reason, message)
        self.retry_after = retry_after
        """Seconds to wait as the API server wishes; None when it does not say."""


class Unavailable(ApiError):
    """5xx, a time-out, or no connection: the request may or may not have been carried out."""


_ERRORS: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: Invalid,
    422: Invalid,
}


def unanswered(error: Exception, seconds: float | None) -> Unavailable:
    """Return what a failed connection means."""
    if isinstance(error, TimeoutError):
        return Unavailable(0, "Timeout", f"The API server did not answer within {seconds:g} s.")
    return Unavailable(0, type(error).__name__, f"The API server cannot be reached: {error}")


def refusal(code: int, data: bytes, retry_after: str | None) -> ApiError:
    """Return what an answer that is no success means; its body is a Status object, or a proxy's text."""
    text = data.decode(errors="replace").strip()
    try:
        status = json.loads(text)
    except ValueError:
        status = None
    if not (isinstance(status, dict) and status.get("kind") == "Status"):
        status = {"message": text[:_MESSAGE_LIMIT]}
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or "")
    if code == 429:
        return TooManyRequests(code, reason, message, _seconds(retry_after, status.get("details")))
    if code >= 500 or code < 400:
        return Unavailable(code, reason, message)
    if code == 409 and reason == "AlreadyExists":
        return AlreadyExists(code, reason, message)
    return _ERRORS.get(code, ApiError)(code, reason, message)


def _seconds(header: str | None, details: object) -> float | None:
    """Return the seconds to wait by the header, else by the Status object's details."""
    if header is not None and header.isascii() and header.isdigit():
        return float(header)
    hint = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    return float(hint) if isinstance(hint, int) and hint > 0 else None
