"""A client of the coordinator's HTTP API for those who signal and watch a job: the command line, the local
runner and the operator. Requests and answers are those of ``http_api``.

A coordinator may be restarting at any moment, so requests are repeated with back-off for a while and the
watch stream reconnects for ever. Every call may safely be repeated.

Who answers is not trusted, since a coordinator's pod is within its user's reach: no redirect is followed, an answer is
read in pieces up to a limit, and a stream no faster than its reader allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
import msgspec

from virtualflow.errors import VirtualFlowError
from virtualflow.protocol.framing import countable
from virtualflow.protocol.http_api import PATHS, Answer, Call, Status
from virtualflow.protocol.identity import TLS_ONLY, Credential, context_of, explain_refusal, headers_of
from virtualflow.protocol.messages import encode
from virtualflow.protocol.settings import SignalSettings
from virtualflow.protocol.versions import StatusHeader, explain_mismatch, read_status_header, speaker, this_speaker

_status = msgspec.json.Decoder(Status)
_answer = msgspec.json.Decoder(Answer)

_PIECE = 65_536
"""Bytes of an answer that are read at once."""
_CONNECTIONS = 4
"""Of one client: a stream or two, and calls."""
_RECEIVED = 32 << 10
"""Bytes of a stream that the kernel keeps (it doubles them), and that come in at once, however fast they are sent."""
_CAUGHT_UP = 8
"""Messages of a stream that are passed over at once because a newer one is there already."""
_DATA = (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY)
Admit = Callable[[int], Awaitable[None]]
"""Called with the size of a status that has come, before it is read; returns when it may be."""


class CoordinatorUnreachable(VirtualFlowError):
    """No coordinator answered within the patience of the caller."""


class CallRefused(VirtualFlowError):
    """The coordinator understood who asked or what was asked, and said no; the message is its sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        """The HTTP status."""


class ProtocolMismatch(CallRefused):
    """The coordinator is of a version that this one has no protocol in common with."""


class CoordinatorMisbehaves(CallRefused):
    """What answers does what no coordinator does: it sends elsewhere, too much, or what cannot be read."""


class StatusTooLarge(CoordinatorMisbehaves):
    """A status is larger than what its reader takes."""


class _Stream(aiohttp.ClientWebSocketResponse):
    """A stream whose reader may want nothing for a while: aiohttp by itself would read half a megabyte ahead."""

    def keep_little(self) -> None:
        self.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED)

    def pause(self) -> None:
        if self._conn is not None and self._conn.transport is not None:
            self._conn.transport.pause_reading()

    def resume(self) -> None:
        if self._conn is not None and self._conn.transport is not None:
            self._conn.transport.resume_reading()


class CoordinatorClient:
    """Talks to the coordinator at ``url``; an asynchronous context manager.

    Raises:
        CallRefused: from every method, when the coordinator says no (a wrong token or role, an unknown worker, …).
        CoordinatorMisbehaves: from every method; it is a ``CallRefused``.
        CoordinatorUnreachable: from every method but ``watch``, after ``patience`` seconds.
    """

    def __init__(self, url: str, credential: Credential, settings: SignalSettings) -> None:
        self._url = url.rstrip("/")
        self._credential = credential
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(self._refuse_redirect)  # also of a stream, which has no option for it
        self._session = aiohttp.ClientSession(
            headers=headers_of(self._credential),
            timeout=aiohttp.ClientTimeout(total=self._settings.request_timeout),
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS, force_close=True, ssl=context_of(self._credential)),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # no coordinator compresses, and little may become very much
            trace_configs=[tracing],
            ws_response_class=_Stream,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def status(self, patience: float | None = None, *, brief: bool = False) -> Status:
        """What the job is doing now.

        Args:
            patience: seconds to go on trying while none answers; ``None``: that of the settings.
            brief: with the latest few membership changes and events only.
        """
        return self._decode(await self._request("GET", "/v1/status?brief=1" if brief else "/v1/status", None, patience))

    async def send(self, call: Call, patience: float | None = None) -> str:
        """Make a call; the coordinator's one-sentence answer.

        Args:
            patience: seconds to go on trying while none answers; ``None``: that of the settings.
        """
        body = await self._request("POST", PATHS[type(call)], encode(call), patience)
        return _sentence(body)

    async def watch(
        self,
        progress: float | None = None,
        *,
        brief: bool = False,
        on_link: Callable[[bool], None] | None = None,
        most: int | None = None,
        admit: Admit | None = None,
        keep: Callable[[Status], Status] | None = None,
    ) -> AsyncIterator[Status]:
        """The status, now and after each change, for ever: a stream that breaks is opened again.

        Args:
            progress: seconds in which at most one message comes that only reports progress; ``None``: each one comes.
            brief: with the latest few membership changes and events only.
            on_link: called with ``True`` when a stream is open, and with ``False`` when it broke or when none could be
                opened; not again while that stays as it is.
            most: bytes of the largest status that is taken (``StatusTooLarge`` is raised for a larger one); ``None``:
                ``max_answer`` of the settings.
            admit: awaited before a status is read. Of what comes meanwhile only the newest is.
            keep: makes what the caller gets of a status, of which nothing else stays in memory.
        """
        assert self._session is not None, "use the client as an asynchronous context manager"
        query = {"brief": "1"} if brief else {}
        if progress is not None:
            query["progress"] = f"{progress:.10g}"
        delay = self._settings.retry_first
        linked: bool | None = None

        def tell(now: bool) -> None:
            nonlocal linked
            if now is not linked and on_link is not None:
                on_link(now)
            linked = now

        while True:
            opened = time.monotonic()
            try:
                async with self._session.ws_connect(
                    self._url + "/v1/watch",
                    params=query,
                    max_msg_size=self._settings.max_answer if most is None else most,
                    # It says that it closes, and leaves: whoever waits for the answer would read a flood meanwhile.
                    timeout=aiohttp.ClientWSTimeout(ws_close=0.0),
                    heartbeat=self._settings.request_timeout,
                ) as stream:
                    assert isinstance(stream, _Stream)
                    tell(True)
                    async with contextlib.aclosing(self._read(stream, admit, keep)) as statuses:
                        async for status in statuses:
                            yield status
            except aiohttp.WSServerHandshakeError as error:
                if 400 <= error.status < 500:
                    tell(False)
                    raise CallRefused(error.status, _refusal(error.status)) from error
            except CallRefused:
                tell(False)
                raise
            except aiohttp.ClientConnectorCertificateError as error:
                tell(False)
                raise CallRefused(403, explain_refusal(self._url, error)) from error
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass  # It is restarting, or gone for good: whoever started it knows, and stops watching.
            tell(False)
            if time.monotonic() - opened > self._settings.retry_most:
                delay = self._settings.retry_first
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._settings.retry_most)

    async def _read(
        self, stream: _Stream, admit: Admit | None, keep: Callable[[Status], Status] | None
    ) -> AsyncGenerator[Status]:
        if admit is not None:
            stream.keep_little()
        coming = asyncio.ensure_future(stream.receive())
        try:
            while True:
                await asyncio.sleep(0)
                if not coming.done():
                    stream.resume()  # all that had come is read
                message = await coming
                if message.type is aiohttp.WSMsgType.ERROR and isinstance(message.data, aiohttp.WebSocketError):
                    too_large = message.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
                    kind = StatusTooLarge if too_large else CoordinatorMisbehaves
                    raise kind(200, self._misbehavior(str(message.data))) from message.data
                if message.type not in _DATA:
                    return  # the connection broke, or was closed
                coming = asyncio.ensure_future(stream.receive())
                if admit is not None:
                    stream.pause()
                    await admit(len(message.data))
                    for _ in range(_CAUGHT_UP):
                        await asyncio.sleep(0)
                        if not coming.done() or coming.exception() is not None or coming.result().type not in _DATA:
                            break
                        message, coming = coming.result(), asyncio.ensure_future(stream.receive())
                status = self._decode(message.data)
                del message
                yield status if keep is None else (status := keep(status))
        finally:
            coming.cancel()

    def _decode(self, content: bytes | str) -> Status:
        """The status, of whatever version that this one has a protocol in common with."""
        try:
            status, error = _status.decode(countable(content)), None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
            status, error = None, fault
        mismatch = self._mismatch(read_status_header(content) if status is None else status)
        if mismatch is not None:
            raise ProtocolMismatch(200, mismatch) from error
        if status is None:
            raise self._misbehaves(200, f"what it sends is no status: {error}") from error
        return status

    def _mismatch(self, status: Status | StatusHeader | None) -> str | None:
        if status is None or status.protocol is None:
            return None
        name = f"the coordinator at {self._url}"
        coordinator = speaker(name, status.protocol, status.oldest_protocol, status.version)
        return explain_mismatch(coordinator, this_speaker("this client"))

    def _misbehaves(self, code: int, what: str) -> CoordinatorMisbehaves:
        return CoordinatorMisbehaves(code, self._misbehavior(what))

    def _misbehavior(self, what: str) -> str:
        return f"what answers at {self._url} does not behave like a coordinator: {what}"

    async def _refuse_redirect(
        self, _: aiohttp.ClientSession, __: SimpleNamespace, redirect: aiohttp.TraceRequestRedirectParams
    ) -> None:
        redirect.response.close()
        raise self._misbehaves(redirect.response.status, "it sends its callers elsewhere")

    async def _content(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for piece in response.content.iter_chunked(_PIECE):
            content += piece
            if len(content) > self._settings.max_answer:
                response.close()
                raise self._misbehaves(response.status, f"its answer exceeds {self._settings.max_answer} bytes")
        return bytes(content)

    async def _request(self, method: str, path: str, body: bytes | None, patience: float | None) -> bytes:
        assert self._session is not None, "use the client as an asynchronous context manager"
        deadline = time.monotonic() + (self._settings.patience if patience is None else patience)
        delay = self._settings.retry_first
        headers = {"Content-Type": "application/json"} if body is not None else None
        while True:
            trouble = ""
            try:
                async with self._session.request(method, self._url + path, data=body, headers=headers) as response:
                    content = await self._content(response)
                    if response.status < 400:
                        return content
                    if response.status < 500:
                        raise CallRefused(response.status, _sentence(content) or _refusal(response.status))
                    trouble = _sentence(content) or f"it answers {response.status}"
            except aiohttp.InvalidURL as error:
                raise CallRefused(400, f"{self._url} is no address of a coordinator; write http://host:port") from error
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
                if isinstance(error, aiohttp.ClientSSLError):
                    trouble = explain_refusal(self._url, error)
            if time.monotonic() + delay >= deadline:
                raise CoordinatorUnreachable(f"the coordinator at {self._url} does not answer ({trouble})")
            await asyncio.sleep(delay)
            delay = min(2 * delay, self._settings.retry_most)


def _sentence(content: bytes) -> str:
    try:
        return _answer.decode(content).message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _refusal(code: int) -> str:
    if code in (401, 403):
        return "the coordinator refuses the token; it must be the one that the job was started with"
    return f"the coordinator {TLS_ONLY}" if code == 426 else f"the coordinator refuses the request ({code})"
