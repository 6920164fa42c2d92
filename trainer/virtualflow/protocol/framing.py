"""Messages between workers and the coordinator as they travel: JSON, deflated where it is long, decoded strictly."""

from __future__ import annotations

import zlib

import msgspec

from virtualflow.protocol.messages import FromWorker, ToWorker, encode
from virtualflow.protocol.settings import DEFLATED, MAX_UNPACKED, MAX_VALUES


def pack(message: msgspec.Struct) -> bytes:
    """A message between worker and coordinator as it travels: JSON, deflated if it is long."""
    data = encode(message)
    return zlib.compress(data, 1) if len(data) > DEFLATED else data


def unpack_from_worker(data: bytes | str) -> FromWorker:
    """What a worker has packed.

    Raises:
        MsgspecError, UnicodeDecodeError, RecursionError: it is no such message, or too long.
    """
    return from_worker.decode(countable(inflated(data)))


def unpack_to_worker(data: bytes | str) -> ToWorker:
    return to_worker.decode(countable(inflated(data)))


def inflated(data: bytes | str) -> bytes | str:
    """JSON, which begins with a brace, as it is; else what was deflated, as far as it is not too long."""
    if isinstance(data, str) or data[:1] == b"{":
        return data
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(data, MAX_UNPACKED)
    except zlib.error as error:
        raise msgspec.DecodeError(f"neither JSON nor deflated: {error}") from error
    if not inflate.eof or inflate.unused_data:
        raise msgspec.DecodeError("it was cut off, is too long, or something follows it")
    return plain


def countable(data: bytes | str) -> bytes | str:
    """JSON with no more values than a message may have. msgspec counts a list only once it has decoded all of it.

    Every value but the first of a list or an object stands behind a comma, so commas, those in texts included, bound
    how many there are.
    """
    values = data.count(",") if isinstance(data, str) else data.count(b",")
    if values > MAX_VALUES:
        raise msgspec.DecodeError(f"it has {values} values, and no message has more than {MAX_VALUES}")
    return data


from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
to_worker: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker)
