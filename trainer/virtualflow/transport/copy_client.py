"""A worker's way to the copy of the state in the coordinator's memory: plain blocking HTTP.

A gigabyte is sent and read in few large pieces. Meanwhile the thread leaves the interpreter to the training.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.parse
from collections.abc import Iterator, Sequence

import msgspec

from virtualflow.errors import VirtualFlowError
from virtualflow.protocol.http_api import COPY_HEADER, COPY_PATH, Answer, CopyHeader
from virtualflow.protocol.identity import Credential, headers_of
from virtualflow.transport.settings import CopySettings

_ANSWER = 65_536
"""Bytes of an answer that is no copy, at most."""


class CopyRefused(VirtualFlowError):
    """The coordinator does not take a copy, in its words."""


class CopyClient:
    """Sends copies to the coordinator at ``url``, and fetches the newest.

    Every method raises OSError when the coordinator cannot be reached, nothing moves for ``settings.idle`` seconds,
    what answers is no coordinator, or :meth:`close` is called meanwhile.
    """

    def __init__(self, url: str, credential: Credential, settings: CopySettings) -> None:
        self._url = urllib.parse.urlsplit(url)
        self._credential = credential
        self._settings = settings
        self._lock = threading.Lock()
        self._open: http.client.HTTPConnection | None = None
        self._closed = False

    def put(self, header: CopyHeader, parts: Sequence[memoryview]) -> None:
        """Send a copy that consists of these bytes, one after the other."""
        size = sum(part.nbytes for part in parts)
        headers = {COPY_HEADER: msgspec.json.encode(header).decode(), "Content-Length": str(size)}
        with self._request("PUT", headers) as connection:
            for part in parts:
                for start in range(0, part.nbytes, self._settings.piece):
                    connection.sock.sendall(part[start : start + self._settings.piece])
            response = connection.getresponse()
            if response.status != 200:
                raise CopyRefused(_sentence(response))

    def head(self) -> CopyHeader | None:
        with self._request("HEAD", {}) as connection:
            return _read_header(connection.getresponse())

    def get(self) -> tuple[CopyHeader, bytearray] | None:
        with self._request("GET", {}) as connection:
            response = connection.getresponse()
            header = _read_header(response)
            if header is None:
                return None
            body = bytearray(response.length or 0)
            whole, end = memoryview(body), 0
            while end < len(body):
                count = response.readinto(whole[end : end + self._settings.piece])
                if not count:
                    raise ConnectionError(f"the copy ended after {end} of {len(body)} bytes")
                end += count
            return header, body

    def close(self) -> None:
        """End the request that another thread is in, and refuse all to come."""
        with self._lock:
            self._closed = True
            if self._open is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    self._open.sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _request(self, method: str, headers: dict[str, str]) -> Iterator[http.client.HTTPConnection]:
        host, port, timeout = self._url.hostname or "", self._url.port, self._settings.connect_timeout
        connection = (
            http.client.HTTPConnection(host, port, timeout=timeout)
            if isinstance(self._credential, str)
            else http.client.HTTPSConnection(host, port, timeout=timeout, context=self._credential.client_context())
        )
        try:
            connection.connect()
            connection.sock.settimeout(self._settings.idle)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("this worker ends")
                self._open = connection
            connection.putrequest(method, self._url.path + COPY_PATH)
            for name, value in {**headers_of(self._credential), **headers}.items():
                connection.putheader(name, value)
            connection.endheaders()
            yield connection
        except http.client.HTTPException as error:
            raise ConnectionError(f"what answers is no coordinator: {error!r}") from error
        finally:
            with self._lock:
                self._open = None
                connection.close()


def _read_header(response: http.client.HTTPResponse) -> CopyHeader | None:
    if response.status == 404:  # also of a coordinator that knows no copies
        return None
    if response.status != 200:
        raise ConnectionError(_sentence(response))
    try:
        return msgspec.json.decode(response.headers.get(COPY_HEADER, ""), type=CopyHeader)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"what answers is no coordinator: {error}") from error


def _sentence(response: http.client.HTTPResponse) -> str:
    try:
        return msgspec.json.decode(response.read(_ANSWER), type=Answer).message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"HTTP {response.status}"
