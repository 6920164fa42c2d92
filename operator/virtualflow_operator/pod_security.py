"""The Pod Security Standards of Kubernetes: the operator makes pods in the name of those who may make jobs.

Where Pod Security admission is missing, nobody else would keep a user who may create a ``VirtualFlowJob``, but no
pods, from reaching the nodes. The controls are those of the standards of Kubernetes 1.34 for Linux; where versions
differ, the stricter one counts. What is not of the right type is left to the API server, which refuses the pod, unless
it looks like something forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Level = Literal["privileged", "baseline", "restricted"]

CAPABILITIES: Final = frozenset(
    {
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    }
)
"""Capabilities that a container may add under baseline."""

SYSCTLS: Final = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
"""Kernel parameters that concern nobody but the pod."""

SELINUX_TYPES: Final = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})

VOLUMES: Final = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
"""Kinds of volumes that a pod may have under restricted."""

_APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"
_SECCOMP_ANNOTATIONS = ("seccomp.security.alpha.kubernetes.io/pod", "container.seccomp.security.alpha.kubernetes.io/")
_PROFILES = (None, "RuntimeDefault", "Localhost")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HOOKS = ("postStart", "preStop")


@dataclass(frozen=True)
class _Place:
    """Something with a security context: the pod or one of its containers."""

    text: str
    fields: Mapping[str, Any]

    @property
    def context(self) -> Mapping[str, Any]:
        return _mapping(self.fields.get("securityContext"))


@dataclass(frozen=True)
class _Pod:
    """A template taken apart."""

    annotations: Mapping[str, Any]
    pod: _Place
    containers: tuple[_Place, ...]
    """Of all kinds."""

    @property
    def places(self) -> tuple[_Place, ...]:
        return (self.pod, *self.containers)

    @property
    def volumes(self) -> list[Mapping[str, Any]]:
        return _mappings(self.pod.fields.get("volumes"))


def violations(pod_template_spec: Mapping[str, Any], level: Level) -> list[str]:
    """What a pod template asks for beyond ``level``, a sentence each that says what to do; empty when it may be used.

    Args:
        pod_template_spec: ``metadata`` and ``spec``, as in a Deployment's template or in a pod.
        level: the Pod Security Standard to hold it against.
    """
    if level == "privileged":
        return []
    pod = _take_apart(pod_template_spec)
    found = [f"{sentence} (Pod Security Standard baseline)" for control in _BASELINE for sentence in control(pod)]
    if level == "restricted":
        found += [
            f"{sentence} (Pod Security Standard restricted)" for control in _RESTRICTED for sentence in control(pod)
        ]
    return [f"{sentence}." for sentence in dict.fromkeys(found)]


def _take_apart(template: object) -> _Pod:
    spec = _mapping(_mapping(template).get("spec"))
    containers: list[_Place] = []
    for key in ("initContainers", "containers", "ephemeralContainers"):
        for index, fields in enumerate(_mappings(spec.get(key))):
            name = fields.get("name")
            known = isinstance(name, str) and 0 < len(name) <= 63
            containers.append(_Place(f"container {name}" if known else f"{key}[{index}]", fields))
    annotations = _mapping(_mapping(_mapping(template).get("metadata")).get("annotations"))
    return _Pod(annotations, _Place("the pod", spec), tuple(containers))


# --- baseline ---------------------------------------------------------------------------------------------------------


def _host_namespaces(pod: _Pod) -> Iterator[str]:
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.pod.fields.get(key) not in (None, False):
            yield f"Remove {key} from the pod: it must not share the node's namespaces"


def _windows_host_process(pod: _Pod) -> Iterator[str]:
    for place in pod.places:
        if _mapping(place.context.get("windowsOptions")).get("hostProcess") not in (None, False):
            yield f"Remove securityContext.windowsOptions.hostProcess from {place.text}: it gives access to the node"


def _privileged(pod: _Pod) -> Iterator[str]:
    for place in pod.containers:
        if place.context.get("privileged") not in (None, False):
            yield f"Remove securityContext.privileged from {place.text}: it gives access to the node"


def _capabilities(pod: _Pod) -> Iterator[str]:
    for place in pod.containers:
        forbidden = _forbidden(_mapping(place.context.get("capabilities")).get("add"), CAPABILITIES)
        if forbidden:
            yield f"Remove {forbidden} from securityContext.capabilities.add of {place.text}"


def _host_path(pod: _Pod) -> Iterator[str]:
    for volume in pod.volumes:
        if volume.get("hostPath") is not None:
            yield f"Replace the hostPath of volume {_quote(volume.get('name'))}: the node's files are out of bounds"


def _host_ports(pod: _Pod) -> Iterator[str]:
    for place in pod.containers:
        if any(port.get("hostPort") not in (None, 0) for port in _mappings(place.fields.get("ports"))):
            yield f"Remove hostPort from the ports of {place.text}: the node's ports are out of bounds"


def _host_probes(pod: _Pod) -> Iterator[str]:
    for place in pod.containers:
        lifecycle = _mapping(place.fields.get("lifecycle"))
        checks = [(key, place.fields.get(key)) for key in _PROBES]
        checks += [(f"lifecycle.{key}", lifecycle.get(key)) for key in _HOOKS]
        for key, check in checks:
            if any(
                _mapping(_mapping(check).get(way)).get("host") not in (None, "") for way in ("httpGet", "tcpSocket")
            ):
                yield f"Remove host from {key} of {place.text}: the kubelet would call it from the node"


def _apparmor(pod: _Pod) -> Iterator[str]:
    for place in pod.places:
        profile = place.context.get("appArmorProfile")
        if profile is not None and _mapping(profile).get("type") not in _PROFILES:
            yield f"Set securityContext.appArmorProfile.type of {place.text} to RuntimeDefault or Localhost"
    for key, value in pod.annotations.items():
        if str(key).startswith(_APPARMOR_ANNOTATION) and not _annotated(value, ("", "runtime/default")):
            yield f"Set the annotation {_quote(key)} to runtime/default, or remove it"


def _selinux(pod: _Pod) -> Iterator[str]:
    for place in pod.places:
        options = _mapping(place.context.get("seLinuxOptions"))
        kind = options.get("type")
        if kind is not None and not (isinstance(kind, str) and kind in SELINUX_TYPES):
            yield f"Set securityContext.seLinuxOptions.type of {place.text} to container_t, or remove it"
        for key in ("user", "role"):
            if options.get(key) not in (None, ""):
                yield f"Remove securityContext.seLinuxOptions.{key} from {place.text}"


def _proc_mount(pod: _Pod) -> Iterator[str]:
    for place in pod.containers:
        if place.context.get("procMount") not in (None, "", "Default"):
            yield f"Remove securityContext.procMount from {place.text}: all of /proc would be seen"


def _seccomp(pod: _Pod) -> Iterator[str]:
    for place in pod.places:
        if _mapping(place.context.get("seccompProfile")).get("type") not in _PROFILES:
            yield f"Set securityContext.seccompProfile.type of {place.text} to RuntimeDefault or Localhost"
    for key, value in pod.annotations.items():
        if str(key).startswith(_SECCOMP_ANNOTATIONS) and not _annotated(value, ("runtime/default", "docker/default")):
            yield f"Set the annotation {_quote(key)} to runtime/default, or remove it"


def _sysctls(pod: _Pod) -> Iterator[str]:
    names = [entry.get("name") for entry in _mappings(pod.pod.context.get("sysctls"))]
    forbidden = _forbidden(names, SYSCTLS)
    if forbidden:
        yield f"Remove {forbidden} from securityContext.sysctls of the pod"


# --- restricted -------------------------------------------------------------------------------------------------------


def _volume_types(pod: _Pod) -> Iterator[str]:
    for volume in pod.volumes:
        kinds = [key for key, value in volume.items() if key != "name" and value is not None]
        if any(kind not in VOLUMES for kind in kinds):
            yield f"Make volume {_quote(volume.get('name'))} a persistentVolumeClaim, emptyDir, configMap or secret"


def _privilege_escalation(pod: _Pod) -> Iterator[str]:
    for place in pod.containers:
        if place.context.get("allowPrivilegeEscalation") is not False:
            yield f"Set securityContext.allowPrivilegeEscalation of {place.text} to false"


def _non_root(pod: _Pod) -> Iterator[str]:
    by_pod = pod.pod.context.get("runAsNonRoot")
    for place in pod.containers:
        own = place.context.get("runAsNonRoot")
        if (by_pod if own is None else own) is not True:
            yield f"Set securityContext.runAsNonRoot of the pod or of {place.text} to true"


def _user(pod: _Pod) -> Iterator[str]:
    for place in pod.places:
        user = place.context.get("runAsUser")
        if user is not None and (not isinstance(user, int) or user == 0):
            yield f"Set securityContext.runAsUser of {place.text} to a user other than 0"


def _seccomp_given(pod: _Pod) -> Iterator[str]:
    by_pod = _mapping(pod.pod.context.get("seccompProfile")).get("type")
    for place in pod.containers:
        own = _mapping(place.context.get("seccompProfile")).get("type")
        if own is None and by_pod is None:
            yield f"Set securityContext.seccompProfile.type of the pod or of {place.text} to RuntimeDefault"


def _capabilities_dropped(pod: _Pod) -> Iterator[str]:
    for place in pod.containers:
        capabilities = _mapping(place.context.get("capabilities"))
        dropped = capabilities.get("drop")
        if not isinstance(dropped, list) or "ALL" not in dropped:
            yield f"Add ALL to securityContext.capabilities.drop of {place.text}"
        forbidden = _forbidden(capabilities.get("add"), frozenset({"NET_BIND_SERVICE"}))
        if forbidden:
            yield f"Remove {forbidden} from securityContext.capabilities.add of {place.text}"


_Control = Callable[[_Pod], Iterator[str]]
_BASELINE: tuple[_Control, ...] = (
    _windows_host_process,
    _host_namespaces,
    _privileged,
    _capabilities,
    _host_path,
    _host_ports,
    _host_probes,
    _apparmor,
    _selinux,
    _proc_mount,
    _seccomp,
    _sysctls,
)
_RESTRICTED: tuple[_Control, ...] = (
    _volume_types,
    _privilege_escalation,
    _non_root,
    _user,
    _seccomp_given,
    _capabilities_dropped,
)


# --- reading what may be anything -------------------------------------------------------------------------------------


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _forbidden(names: object, allowed: frozenset[str]) -> str:
    """The names that are not allowed, as a part of a sentence; empty when there are none."""
    listed = names if isinstance(names, list) else []
    return ", ".join(_quote(name) for name in listed if not (isinstance(name, str) and name in allowed))


def _annotated(value: object, allowed: tuple[str, ...]) -> bool:
    return isinstance(value, str) and (value in allowed or value.startswith("localhost/"))


def _quote(value: object) -> str:
    """Something that a user wrote, fit for a sentence."""
    text = value if isinstance(value, str) and value.isprintable() else "?"
    return text if len(text) <= 100 else f"{text[:97]}..."
