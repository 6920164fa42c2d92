"""Random streams as a function of where one is in the training, never of which process is there.

A process's global generators (torch, numpy, random) are seeded anew for each virtual node of a step, before its
samples are loaded and before it is computed, so augmentation and dropout draw the same numbers wherever they run and
however often they are repeated. Generators that a user's object holds for itself (``numpy.random.default_rng()`` kept
in a dataset) are out of reach; ``worker.contents`` finds them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

_LIMIT = 1 << 63
_WORD = 0xFFFF_FFFF


def derive_seed(*path: int | str) -> int:
    """Derive a seed in ``[0, 2**63)`` from a path such as ``("samples", seed, epoch, step, virtual_node)``.

    The same path gives the same seed on every machine and Python version; different paths give unrelated
    seeds. The path is encoded without ambiguity (kind, value and, for text, length of every part) and hashed
    with BLAKE2b.

    Raises:
        TypeError: a part is neither ``int`` nor ``str``: its text might not be the same everywhere.
    """
    encoded = []
    for part in path:
        if part.__class__ is int:
            encoded.append(f"i{part};")
        elif isinstance(part, str):
            encoded.append(f"s{len(part)}:{part};")
        else:
            raise TypeError(f"a seed is derived from int and str, not from {part!r}")
    return _hash("".join(encoded).encode())


def seed_process(value: int) -> None:
    """Seed this process's global generators: torch's (CPU, and CUDA where in use), ``random``'s and numpy's.

    ``torch.manual_seed`` looks for every kind of accelerator and takes a hundred times as long, so the
    generators are seeded directly. numpy takes 32 bits of ``value`` (64 would cost five times as much); it is
    left alone when nobody has imported it.
    """
    value %= _LIMIT
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & _WORD)


def read_generators() -> tuple[object, ...]:
    """Where this process's global generators are: equal as long as nobody draws from them."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    ours = random.getstate(), *(state.numpy().tobytes() for state in (torch.get_rng_state(), *devices))
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ours
    _, keys, place, *_ = numpy.random.get_state()
    return *ours, keys.tobytes(), place


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Let this process's global generators begin at ``value`` for a while, and go on as before afterwards."""
    numpy = sys.modules.get("numpy")
    ours, theirs = torch.get_rng_state(), random.getstate()
    others = None if numpy is None else numpy.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    seed_process(value)
    try:
        yield
    finally:
        torch.set_rng_state(ours)
        random.setstate(theirs)
        if numpy is not None:
            numpy.random.set_state(others)
        if devices:
            torch.cuda.set_rng_state_all(devices)


def seed_virtual_node(seed: int, step: int, virtual_node: int) -> None:
    """Seed this process for the computation of ``virtual_node`` in ``step`` (counted from 1) of a job."""
    # The encoding of derive_seed("virtual-node", seed, step, virtual_node), spelt out: it is called all the time.
    path = b"s12:virtual-node;i%d;i%d;i%d;" % (seed, step, virtual_node)
    seed_process(int.from_bytes(blake2b(path, digest_size=8).digest(), "big"))


def seed_samples(seed: int, epoch: int, epoch_step: int, virtual_node: int) -> None:
    seed_process(_hash(b"s7:samples;i%d;i%d;i%d;i%d;" % (seed, epoch, epoch_step, virtual_node)))


def seed_stream_sample(seed: int, epoch: int, virtual_node: int, ordinal: int) -> None:
    seed_process(_hash(b"s6:stream;i%d;i%d;i%d;i%d;" % (seed, epoch, virtual_node, ordinal)))


def _hash(encoded: bytes) -> int:
    return int.from_bytes(blake2b(encoded, digest_size=8).digest(), "big") % _LIMIT
