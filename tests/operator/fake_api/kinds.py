"""The kinds of objects that the fake API server keeps, and what it checks and fills in for each."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema

from fake_api.status import Object

_LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of object in one version."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    status: bool = False
    """Has a status subresource, which alone changes the status."""
    scale: Object | None = None
    """specReplicasPath, statusReplicasPath, labelSelectorPath."""
    schema: Object | None = None
    """openAPIV3Schema of a custom resource."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """The plural with its group, as error messages say it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified(self) -> str:
        """The kind with its group, as refusals of its content say it."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    @property
    def custom(self) -> bool:
        return self.schema is not None

    @property
    def generation(self) -> bool:
        """Whether a change of what is wanted raises metadata.generation."""
        return self.custom or self.group in {"policy", "networking.k8s.io"}

    @classmethod
    def of_definition(cls, definition: Object) -> Kind:
        """Return the kind of the served version of a CustomResourceDefinition."""
        spec = definition["spec"]
        names = spec["names"]
        version = next(version for version in spec["versions"] if version["served"])
        subresources = version.get("subresources") or {}
        return cls(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            spec["scope"] == "Namespaced",
            tuple(names.get("shortNames") or ()),
            tuple(names.get("categories") or ()),
            "status" in subresources,
            subresources.get("scale"),
            version["schema"]["openAPIV3Schema"],
        )

    def prepare(self, body: Object) -> None:
        """Prune what the kind does not know and fill in defaults, in place."""
        if self.schema is not None:
            whole: Object = {key: body.pop(key) for key in ("apiVersion", "kind", "metadata") if key in body}
            _prune(body, self.schema)
            body.update(whole)
            _fill(body, self.schema)
        elif self.plural in _PREPARE:
            _PREPARE[self.plural](body)

    def unknown(self, body: Object) -> list[str]:
        """Return the fields that a pod has not, as far as they are asked for: at its top, of its specification and of
        containers, and in its metadata.
        """
        if self.plural != "pods":
            return []
        spec = body.get("spec") or {}
        parts = [
            ("", body, _OF_A_BODY),
            ("metadata.", body.get("metadata") or {}, _OF_METADATA),
            ("spec.", spec, _OF_A_POD),
        ]
        parts += [
            (f"spec.containers[{index}].", container, _OF_A_CONTAINER)
            for index, container in enumerate(spec.get("containers") or ())
        ]
        return sorted(place + key for place, part, known in parts for key in part if key not in known)

    def faults(self, body: Object) -> list[str]:
        """Return what is wrong with an object, in the API server's words: path, kind of fault, what would be right."""
        metadata = body["metadata"]
        found = list(_metadata_faults(metadata, self.plural))
        if self.schema is not None:
            found += [_fault(error) for error in jsonschema.Draft202012Validator(self.schema).iter_errors(body)]
            found += _duplicates(body, self.schema, "")
        elif self.plural == "pods":
            found += _pod_faults(body.get("spec") or {})
        return found


def _fault(error: jsonschema.ValidationError) -> str:
    path = ""
    for part in error.absolute_path:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    if error.validator == "required":
        missing = re.findall("'(.*)' is a required property", error.message)
        return f"{path}.{missing[0]}: Required value".lstrip(".")
    word = {"enum": "Unsupported value"}.get(str(error.validator), "Invalid value")
    return f"{path}: {word}: {error.message}".lstrip(".")


def _prune(value: Any, schema: Object) -> None:
    """Drop fields that the schema does not name."""
    if isinstance(value, list):
        for item in value:
            _prune(item, schema.get("items") or {})
    elif isinstance(value, dict):
        known = schema.get("properties") or {}
        others = schema.get("additionalProperties")
        for key in list(value):
            if key in known:
                _prune(value[key], known[key])
            elif isinstance(others, dict):
                _prune(value[key], others)
            elif not (schema.get("x-kubernetes-preserve-unknown-fields") or others):
                del value[key]


def _fill(value: Any, schema: Object) -> None:
    """Put defaults where nothing is."""
    if isinstance(value, list):
        for item in value:
            _fill(item, schema.get("items") or {})
    elif isinstance(value, dict):
        for key, part in (schema.get("properties") or {}).items():
            if key not in value and "default" in part:
                default = part["default"]
                value[key] = dict(default) if isinstance(default, dict) else default
            if key in value:
                _fill(value[key], part)


def _duplicates(value: Any, schema: Object, path: str) -> list[str]:
    """Return the items of map-like lists that bear a key for the second time."""
    found: list[str] = []
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys") if schema.get("x-kubernetes-list-type") == "map" else None
        seen: set[tuple[object, ...]] = set()
        for index, item in enumerate(value):
            found += _duplicates(item, schema.get("items") or {}, f"{path}[{index}]")
            if keys and isinstance(item, dict):
                mark = tuple(str(item.get(key)) for key in keys)
                if mark in seen:
                    found.append(f"{path}[{index}]: Duplicate value: {dict(zip(keys, mark, strict=True))}".lstrip("."))
                seen.add(mark)
    elif isinstance(value, dict):
        for key, part in (schema.get("properties") or {}).items():
            if key in value:
                found += _duplicates(value[key], part, f"{path}.{key}")
    return found


def _metadata_faults(metadata: Object, plural: str) -> Iterator[str]:
    name = metadata.get("name") or ""
    valid = _SERVICE_NAME if plural == "services" else _SUBDOMAIN
    longest = 63 if plural in {"services", "namespaces"} else 253
    if not name:
        yield "metadata.name: Required value: name or generateName is required"
    elif not valid.fullmatch(name) or len(name) > longest:
        yield f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 subdomain is required'
    for key, value in (metadata.get("labels") or {}).items():
        if not isinstance(value, str) or len(value) > 63 or not _LABEL.fullmatch(value):
            yield f'metadata.labels: Invalid value: "{value}": {key} must be a valid label of at most 63 characters'
    for index, owner in enumerate(metadata.get("ownerReferences") or ()):
        for key in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(key):
                yield f'metadata.ownerReferences[{index}].{key}: Invalid value: "": must not be empty'


def _pod_faults(spec: Object) -> Iterator[str]:
    containers = spec.get("containers")
    if not containers:
        yield "spec.containers: Required value"
    names: set[str] = set()
    for index, container in enumerate(containers or ()):
        for key in ("name", "image"):
            if not container.get(key):
                yield f"spec.containers[{index}].{key}: Required value"
        if container.get("name") in names:
            yield f'spec.containers[{index}].name: Duplicate value: "{container["name"]}"'
        names.add(container.get("name"))
    if spec.get("restartPolicy") not in {"Always", "OnFailure", "Never"}:
        yield f'spec.restartPolicy: Unsupported value: "{spec.get("restartPolicy")}"'


def _prepare_pod(body: Object) -> None:
    spec = body.setdefault("spec", {})
    defaults = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst"}
    defaults |= {"securityContext": {}, "schedulerName": "default-scheduler", "enableServiceLinks": True}
    for key, value in defaults.items():
        spec.setdefault(key, value)
    for container in spec.get("containers") or ():
        resources = container.get("resources") or {}
        if resources.get("limits"):
            resources["requests"] = dict(resources["limits"]) | (resources.get("requests") or {})


def _prepare_service(body: Object) -> None:
    spec = body.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    for port in spec.get("ports") or ():
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port"))


def _prepare_secret(body: Object) -> None:
    body.setdefault("type", "Opaque")
    data = body.setdefault("data", {})
    for key, value in (body.pop("stringData", None) or {}).items():
        data[key] = base64.b64encode(value.encode()).decode()


_OF_A_BODY = frozenset(("apiVersion", "kind", "metadata", "spec", "status"))
_OF_METADATA = frozenset(
    (
        *("annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"),
        *("generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences"),
        *("resourceVersion", "selfLink", "uid"),
    )
)
_OF_A_POD = frozenset(
    (
        *("activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig", "dnsPolicy"),
        *("enableServiceLinks", "ephemeralContainers", "hostAliases", "hostIPC", "hostNetwork", "hostPID", "hostUsers"),
        *("hostname", "hostnameOverride", "imagePullSecrets", "initContainers", "nodeName", "nodeSelector", "os"),
        *("overhead", "preemptionPolicy", "priority", "priorityClassName", "readinessGates", "resourceClaims"),
        *("resources", "restartPolicy", "runtimeClassName", "schedulerName", "schedulingGates", "schedulingGroup"),
        *("securityContext", "serviceAccount", "serviceAccountName", "setHostnameAsFQDN", "shareProcessNamespace"),
        *("subdomain", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints", "volumes"),
    )
)
_OF_A_CONTAINER = frozenset(
    (
        *("args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name"),
        *("ports", "readinessProbe", "resizePolicy", "resources", "restartPolicy", "restartPolicyRules"),
        *("securityContext", "startupProbe", "stdin", "stdinOnce", "terminationMessagePath"),
        *("terminationMessagePolicy", "tty", "volumeDevices", "volumeMounts", "workingDir"),
    )
)

_PREPARE = {"pods": _prepare_pod, "services": _prepare_service, "secrets": _prepare_secret}

DEFINITIONS = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
    short_names=("crd", "crds"),
    status=True,
)
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False, short_names=("ns",), status=True)
PODS = Kind("", "v1", "pods", "Pod", short_names=("po",), categories=("all",), status=True)
NODES = Kind("", "v1", "nodes", "Node", namespaced=False, short_names=("no",), status=True)
BUILT_IN = (
    DEFINITIONS,
    NAMESPACES,
    PODS,
    NODES,
    Kind("", "v1", "services", "Service", short_names=("svc",), categories=("all",), status=True),
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "configmaps", "ConfigMap", short_names=("cm",)),
    Kind("", "v1", "events", "Event", short_names=("ev",)),
    Kind("coordination.k8s.io", "v1", "leases", "Lease"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", short_names=("pdb",), status=True),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", short_names=("netpol",)),
)
