"""Identities of the parties of a job, for tests: their authority, and folders as a process is given them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from virtualflow.protocol.certificates import Authority, Party, Role, make_key
from virtualflow.protocol.identity import Identity, write_identity

JOB = "job-a"
HOUR = 3_600.0


@dataclass
class Identities:
    """Of one job, below ``folder``."""

    folder: Path
    authority: Authority
    job: str = JOB

    def issue(
        self,
        role: Role,
        name: str,
        uid: str = "",
        *,
        now: float | None = None,
        lifetime: float = HOUR,
        believed: Sequence[Authority] | None = None,
    ) -> Path:
        """Write an identity; its folder.

        Args:
            now: of the authority's clock; ``None``: the right time.
            believed: the authorities that its holder believes; ``None``: this one.
        """
        key, party = make_key(), Party(self.job, role, name, uid)
        now = time.time() if now is None else now
        certificate = self.authority.issue(key.public_key(), party, now, lifetime)
        bundle = [each.certificate for each in believed or [self.authority]]
        write_identity(self.folder / name, key, certificate, bundle)
        return self.folder / name

    def hold(self, role: Role, name: str) -> Identity:
        return Identity(self.issue(role, name))


def identities(folder: Path, job: str = JOB) -> Identities:
    """Of a job with an authority of its own."""
    return Identities(folder / job, Authority.make(job, time.time()), job)
