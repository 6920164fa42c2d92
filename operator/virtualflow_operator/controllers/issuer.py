"""Issues the identities of all parties of all jobs, and their tokens; nothing is kept of any job.

The authority of a job is derived from the operator's key and the job's uid. So each replica computes the same one, also
after a restart, and whoever has neither the key nor that job's pods can issue nothing for it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence

from virtualflow.protocol.certificates import Authority, Party, derive_key, make_key
from virtualflow.protocol.identity import IssuedIdentity, identity_files
from virtualflow_operator.settings import CertificateSettings


def fingerprint(key: bytes) -> str:
    """Which key it is, for names: nothing can be told from it about the key."""
    return hashlib.sha256(b"virtualflow key " + key).hexdigest()[:8]


def derive_token(key: bytes, uid: str) -> str:
    """The token of the job with that uid: whoever has the operator's key can tell it, and nobody else."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest()


class Issuer:
    """Vouches for the parties of all jobs.

    Args:
        keys: the operator's; the first one's authorities issue, those of all are believed.
    """

    def __init__(self, keys: Sequence[bytes], settings: CertificateSettings) -> None:
        self._keys, self._settings = keys, settings

    def token(self, job: str) -> str:
        """The token of the job with that uid: it opens the live page, or all of a job in plaintext."""
        return derive_token(self._keys[0], job)

    def files_of(self, party: Party, now: float) -> dict[str, bytes]:
        """The files of the identity of a party of a job, issued now (Unix seconds); each time with another key."""
        authorities = [
            Authority.make(f"{party.job} {fingerprint(key)}", now, derive_key(key, party.job)) for key in self._keys
        ]
        key = make_key()
        certificate = authorities[0].issue(key.public_key(), party, now, self._settings.lifetime)
        return identity_files(key, certificate, [authority.certificate for authority in authorities])

    def control(self, job: str, clock: Callable[[], float] = time.time) -> IssuedIdentity:
        """This operator's own identity in the job with that uid."""
        party = Party(job, "control", "operator")
        return IssuedIdentity(lambda now: self.files_of(party, now), self._settings.renew_after, clock)
