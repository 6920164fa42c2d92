"""What the fake API server says of itself: groups, versions, resources."""

from __future__ import annotations

from fake_api.kinds import Kind
from fake_api.status import Object, Refusal
from fake_api.store import Store

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def discover(store: Store, path: str) -> Object:
    """Return the answer of a path that names no object."""
    parts = path.strip("/").split("/")
    served = {(kind.group, kind.version) for kind in store.kinds.values()}
    match parts:
        case ["version"]:
            return {"major": "1", "minor": "20", "gitVersion": "v1.20.0-fake"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            groups = [_group(group, version) for group, version in sorted(served) if group]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["api", version] if ("", version) in served:
            return _resources(store, "", version)
        case ["apis", group, version] if group and (group, version) in served:
            return _resources(store, group, version)
    raise Refusal(404, "NotFound", "the server could not find the requested resource")


def _group(group: str, version: str) -> Object:
    entry = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [entry], "preferredVersion": entry}


def _resources(store: Store, group: str, version: str) -> Object:
    own = [kind for kind in store.kinds.values() if (kind.group, kind.version) == (group, version)]
    resources = [entry for kind in own for entry in _entries(kind)]
    name = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}


def _entries(kind: Kind) -> list[Object]:
    common = {"singularName": kind.kind.lower() if kind.custom else "", "namespaced": kind.namespaced}
    main: Object = common | {"name": kind.plural, "kind": kind.kind, "verbs": _VERBS}
    if kind.short_names:
        main["shortNames"] = list(kind.short_names)
    if kind.categories:
        main["categories"] = list(kind.categories)
    entries = [main]
    common |= {"singularName": "", "verbs": ["get", "patch", "update"]}
    if kind.status:
        entries.append(common | {"name": f"{kind.plural}/status", "kind": kind.kind})
    if kind.scale is not None:
        entries.append(
            common | {"name": f"{kind.plural}/scale", "kind": "Scale", "group": "autoscaling", "version": "v1"}
        )
    return entries
