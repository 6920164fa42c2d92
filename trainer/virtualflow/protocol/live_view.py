"""What the live page of a job shows, the token that opens it, and its address.

The page is the coordinator's, at :data:`PAGE_PATH`, and knows nothing of the job. What it shows comes from
:data:`VIEW_PATH`, to whoever bears the view token (or the job's own): in parts, each sent only where it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from html import escape
from urllib.parse import urlencode

import msgspec

from virtualflow.protocol.job_record import Break
from virtualflow.protocol.messages import Base, Count, NonFinite

PAGE_PATH = "/ui"
"""The page: one for all jobs, without a token."""
VIEW_PATH = "/v1/view"
LOG_PATH = "/v1/log"
"""The end of a worker's log, as text: ``?worker=NAME``."""


def view_token(token: str) -> str:
    """The token that opens the view of a job, and nothing else of it.

    Args:
        token: of the job; nobody can tell it from what this returns.
    """
    return hmac.new(token.encode(), b"virtualflow view", hashlib.sha256).hexdigest()


def page_address(coordinator: str, token: str, job: str) -> str:
    """The address of a job's live page, with all that it needs.

    The token stands behind a ``#``: browsers keep that to themselves, so that it is in no request and no log.

    Args:
        coordinator: ``http://host:port``, or ``https://host:port`` of one with an identity: it shows its page without
            TLS as well, to browsers of its machine, which have no certificate and would warn of its own.
    """
    plain = coordinator.replace("https://", "http://", 1)
    return f"{plain}{PAGE_PATH}#{urlencode({'token': view_token(token), 'job': job})}"


@dataclass(frozen=True)
class PageFrame:
    """A job's live page as a notebook shows it: the value of a cell becomes the page.

    Args:
        address: of the page, with its token.
        height: in pixels, of the frame that it is in.
    """

    address: str
    height: int

    def _repr_html_(self) -> str:
        source = escape(self.address)
        style = f"width:100%;height:{self.height}px;border:1px solid #8886"
        return f'<iframe src="{source}" title="The live page of a job" style="{style}"></iframe>'


class ViewSeries(Base, frozen=True, tag=False):
    """Figures over the steps, each a column as long as ``steps``; ``None``: none was told there."""

    steps: tuple[Count, ...]
    speed: tuple[float | None, ...]
    """Steps a second."""
    workers: tuple[float | None, ...]
    """Members of the generation at that step."""
    metrics: dict[str, tuple[float | None, ...]]
    times: tuple[float | None, ...] = ()
    """Unix time at which each step was told."""
    breaks: tuple[Break, ...] = ()
    began: float | None = None
    """Unix time of the first figures."""
    width: Count = 0
    """Steps that share a point; 0: an earlier version does not say."""
    non_finite: NonFinite | None = None
    """The first metric that was not finite."""


_SAME = msgspec.Raw()


class View(Base, frozen=True, tag=False, omit_defaults=True):
    """The answer: where the training is, and the parts that whoever asks has not got.

    Parts travel as they were encoded, once for all who look.
    """

    have: str
    """What to ask with, the next time: ``?have=…``."""
    now: msgspec.Raw
    """A ``job_view.ViewNow``."""
    job: msgspec.Raw = _SAME
    """A ``job_view.ViewJob``; left out: it is as it was."""
    log: msgspec.Raw = _SAME
    """A ``job_view.ViewLog``."""
    series: msgspec.Raw = _SAME
    """A :class:`ViewSeries`."""
