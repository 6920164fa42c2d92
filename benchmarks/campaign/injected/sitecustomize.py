"""In each process of a campaign: a wall clock that can jump, and storage that can stall and fail.

Eight bytes of the file ``CAMPAIGN_CLOCK`` are the seconds by which ``time.time`` is ahead. The file
``CAMPAIGN_STORAGE`` says what ``os.fsync`` does: nothing else stands between a checkpoint and its volume everywhere.
"""

import mmap
import os
import struct
import time

if "CAMPAIGN_CLOCK" in os.environ:
    with open(os.environ["CAMPAIGN_CLOCK"], "r+b") as _file:
        _ahead = mmap.mmap(_file.fileno(), 8)
    _time, _time_ns, _fsync = time.time, time.time_ns, os.fsync

    def _jumping() -> float:
        return _time() + struct.unpack("d", _ahead[:8])[0]

    def _jumping_ns() -> int:
        return _time_ns() + int(struct.unpack("d", _ahead[:8])[0] * 1e9)

    def _failing(descriptor: int) -> None:
        with open(os.environ["CAMPAIGN_STORAGE"]) as file:
            word = file.read()
        while word == "stall":
            time.sleep(0.1)
            with open(os.environ["CAMPAIGN_STORAGE"]) as file:
                word = file.read()
        if word.isdigit():
            raise OSError(int(word), os.strerror(int(word)))
        _fsync(descriptor)

    time.time, time.time_ns, os.fsync = _jumping, _jumping_ns, _failing
