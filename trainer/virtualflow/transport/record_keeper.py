"""The record of the job, kept by a few workers for the coordinator that takes the present one's place.

The bytes are a coordinator's own; nobody looks into them here. One that knows no records answers 404, and a record that
does not arrive is no loss for the training: so whatever goes wrong is logged, and tried again with the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from virtualflow.protocol.job_record import AGE, PATH
from virtualflow.protocol.settings import MAX_MESSAGE

logger = logging.getLogger("virtualflow.worker")


class RecordKeeper:
    """Keeps the newest record that it could fetch from the coordinators at ``url`` (link's thread).

    Args:
        url: ``http://host:port``.
        timeout: seconds that one request may take.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.fetches = False
        """Whether this worker is one of those that keep it; set by the training thread."""
        self._url = f"{url}{PATH}"
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._record: bytes | None = None
        self._fetched_at = 0.0

    async def keep(self, session: aiohttp.ClientSession, interval: float) -> None:
        """Hand over what is kept, then fetch anew every ``interval`` seconds, until the connection ends."""
        await self._hand_over(session)
        while True:
            await asyncio.sleep(interval)
            if self.fetches:
                await self._fetch(session)

    async def _hand_over(self, session: aiohttp.ClientSession) -> None:
        if self._record is None:
            return
        age = {AGE: f"{time.monotonic() - self._fetched_at:.3f}"}
        try:
            async with session.put(self._url, data=self._record, params=age, timeout=self._timeout) as answer:
                if answer.status != 200:
                    logger.debug("the record of the job is not taken: %s", await answer.text())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("the record of the job was not handed over: %s", error)

    async def _fetch(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get(self._url, timeout=self._timeout) as answer:
                if answer.status == 200 and (answer.content_length or 0) <= MAX_MESSAGE:  # more would not be taken
                    self._record, self._fetched_at = await answer.read(), time.monotonic()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("the record of the job was not fetched: %s", error)
