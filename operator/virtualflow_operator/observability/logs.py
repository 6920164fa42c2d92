"""The operator's log: one line a record, for people or for machines, with the job that it is about.

The job is a context variable: whoever takes care of a job enters :func:`job_context`, and every line from below bears
it, those of libraries too. ``extra=`` of a logging call becomes ``key=value``, or a field.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from json import dumps
from typing import Any, TextIO

from pythonjsonlogger import json
from pythonjsonlogger.core import RESERVED_ATTRS

from virtualflow.protocol.wording import printable
from virtualflow_operator.settings import LogFormat, LogLevel

_job: ContextVar[tuple[str, str] | None] = ContextVar("job", default=None)

_FOREIGN_ATTRIBUTES = frozenset({"k8s_ref", "k8s_skip", "settings", "color_message", "websocket"})
"""What libraries put on records for handlers of their own (kopf: whole objects)."""

TAMED = {
    "aiohttp.access": logging.WARNING,
    "asyncio": logging.WARNING,
    "kopf": logging.WARNING,
    "kubernetes": logging.WARNING,
    "urllib3": logging.WARNING,
}
"""Libraries that tell more than a log should hold, and the least that is taken from each."""


@contextmanager
def job_context(namespace: str, name: str) -> Iterator[None]:
    """Have all records of this task, while the context lasts, bear the job's namespace and name."""
    token = _job.set((namespace, name))
    try:
        yield
    finally:
        _job.reset(token)


def configure(log_format: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Send the records of this process to ``stream`` (standard error), in place of all former handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(_attach_job)
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name, least in TAMED.items():
        logging.getLogger(name).setLevel(max(least, root.level))


class TextFormatter(logging.Formatter):
    """``2026-11-21T01:02:03.123Z INFO virtualflow_operator.queue message key=value``; a traceback follows."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record; line breaks in the message are escaped, because users' words may be in it."""
        fields = "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        message = _one_line(record.getMessage())
        lines = [f"{_time(record)} {record.levelname} {record.name} {message}{fields}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        if record.stack_info:
            lines.append(self.formatStack(record.stack_info))
        return printable("\n".join(lines))


class JsonFormatter(json.JsonFormatter):
    """One JSON object a line: time, level, logger, message, the fields, and the exception's traceback."""

    def __init__(self) -> None:
        super().__init__(
            ["name", "message"],
            rename_fields={"name": "logger", "exc_info": "exception", "stack_info": "stack"},
            reserved_attrs=[*RESERVED_ATTRS, *_FOREIGN_ATTRIBUTES],
            json_default=str,
        )

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Put what a record holds into what will be written."""
        super().add_fields(log_data, record, message_dict)
        log_data |= {"time": _time(record), "level": record.levelname.lower()}


def _attach_job(record: logging.LogRecord) -> bool:
    """Put the job on a record before it may leave this task's context."""
    job = _job.get()
    if job is not None:
        record.job_namespace, record.job_name = job
    return True


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {
        key: value
        for key, value in record.__dict__.items()
        if key not in RESERVED_ATTRS and key not in _FOREIGN_ATTRIBUTES
    }


def _plain(value: object) -> str:
    text = _one_line(str(value))
    return dumps(text) if not text or any(character in text for character in ' ="') else text


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
