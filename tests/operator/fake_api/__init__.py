"""An API server for tests: what the operator sees of a real one, in this process, with faults at will.

``test_api_contract_*.py`` hold it equal to a real kube-apiserver. What it leaves out: admission plug-ins, RBAC,
strategic merge patches, server-side apply, OpenAPI, several versions of one kind, schedulers, kubelets and controllers
other than the garbage collector. Pods move only when the test moves them.
"""

from __future__ import annotations

from fake_api.faults import Fault
from fake_api.frontend import Request
from fake_api.kinds import Kind
from fake_api.server import FakeApi
from fake_api.status import Refusal
from fake_api.store import Store

__all__ = ["FakeApi", "Fault", "Kind", "Refusal", "Request", "Store"]
