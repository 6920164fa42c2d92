"""The log's two formats, and the job on every line."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from virtualflow_operator.observability import logs
from virtualflow_operator.settings import LogFormat

logger = logging.getLogger("virtualflow_operator.test")


@pytest.fixture(autouse=True)
def former_logging() -> Iterator[None]:
    """Put back what other tests' logging is."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in logs.TAMED}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, former in levels.items():
        logging.getLogger(name).setLevel(former)


def written(log_format: LogFormat = "text", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(log_format, level, stream)  # type: ignore[arg-type]
    return stream


def test_text_lines_are_time_level_logger_message_and_fields() -> None:
    stream = written()
    with logs.job_context("team", "digits"):
        logger.info("made %d workers", 3, extra={"cause": "scaled up", "empty": ""})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO virtualflow_operator.test made 3 workers "
        r'cause="scaled up" empty="" job_namespace=team job_name=digits\n',
        stream.getvalue(),
    )


def test_json_lines_are_objects() -> None:
    stream = written("json")
    with logs.job_context("team", "digits"):
        logger.warning("two\nlines", extra={"step": 7, "path": io})
    entry = json.loads(stream.getvalue())
    assert entry.pop("time").endswith("Z")
    assert entry.pop("path").startswith("<module 'io'")
    assert entry == {
        "level": "warning",
        "logger": "virtualflow_operator.test",
        "message": "two\nlines",
        "step": 7,
        "job_namespace": "team",
        "job_name": "digits",
    }
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_tracebacks_are_kept(log_format: LogFormat) -> None:
    stream = written(log_format)
    try:
        raise ZeroDivisionError("a defect")
    except ZeroDivisionError:
        logger.exception("failed", stack_info=True)
    text = stream.getvalue()
    if log_format == "json":
        entry = json.loads(text)
        assert "Stack (most recent call last)" in entry["stack"]
        text = entry["exception"]
    assert "Traceback (most recent call last)" in text
    assert "ZeroDivisionError: a defect" in text


def test_users_words_cannot_forge_a_line() -> None:
    stream = written()
    logger.info("the script said %s", "x\n2026-01-01T00:00:00.000Z CRITICAL root forged", extra={"word": "a\r\nb"})
    assert stream.getvalue().count("\n") == 1


def test_jobs_that_are_taken_care_of_at_once_keep_their_own_names() -> None:
    stream = written("json")

    async def care(name: str, mine: asyncio.Event, other: asyncio.Event) -> None:
        with logs.job_context("team", name):
            mine.set()
            await other.wait()
            logging.getLogger("some.library").warning("below %s", name)
        logger.info("outside")

    async def both() -> None:
        one, two = asyncio.Event(), asyncio.Event()
        await asyncio.gather(care("one", one, two), care("two", two, one))

    asyncio.run(both())
    for line in stream.getvalue().splitlines():
        entry = json.loads(line)
        name = entry["message"].removeprefix("below ") if entry["message"] != "outside" else None
        assert entry.get("job_name") == name


def test_the_level_counts_and_libraries_are_tamed() -> None:
    stream = written(level="debug")
    logger.debug("ours")
    for name in ("kopf.objects", "kubernetes.aio.client.rest", "aiohttp.access", "asyncio"):
        logging.getLogger(name).info("chatter of %s", name)
        logging.getLogger(name).warning("trouble of %s", name)
    text = stream.getvalue()
    assert "ours" in text
    assert "chatter" not in text
    assert text.count("trouble") == 4
    stream = written(level="error")
    logging.getLogger("kopf.objects").warning("trouble")
    logger.warning("trouble")
    assert stream.getvalue() == ""


def test_configuring_again_replaces_the_handler() -> None:
    first, second = written(), written()
    logger.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_what_kopf_puts_on_its_records_stays_off_the_log() -> None:
    stream = written("json")
    logger.warning("about an object", extra={"k8s_ref": {"uid": "u"}, "settings": object()})
    assert set(json.loads(stream.getvalue())) == {"time", "level", "logger", "message"}
