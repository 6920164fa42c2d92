"""Jobs of a cluster, for programs and people beside it: a client of the API server, and ``kubectl vf``.

It sees what ``kubectl`` sees, and needs the extra ``cluster``; the rest of the library knows nothing of Kubernetes, and
nothing may import this package. What it shows is the job's own status: nothing is decided here.
"""

from typing import TYPE_CHECKING, Any

from virtualflow._imports import load

if TYPE_CHECKING:
    from virtualflow.cluster.client import AsyncClient, AsyncJob, Client
    from virtualflow.cluster.job import Job

__all__ = ["AsyncClient", "AsyncJob", "Client", "Job"]

_LAZY = {"AsyncClient": "client", "AsyncJob": "client", "Client": "client", "Job": "job"}
NEEDS = "kubernetes is not installed: pip install 'virtualflow[cluster]'"


def __getattr__(name: str) -> Any:
    """What ``__all__`` says, once it is asked for: the plugin says in a sentence what is missing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'virtualflow.cluster' has no attribute {name!r}")
    try:
        return load(f"virtualflow.cluster.{_LAZY[name]}", name)
    except ModuleNotFoundError as error:
        if error.name not in ("kubernetes", "urllib3"):  # which kubernetes brings
            raise
        raise ImportError(NEEDS) from None
