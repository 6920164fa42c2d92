"""Templates against the Pod Security Standards, control by control."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from resource_rules import ROOT

from virtualflow_operator.pod_security import CAPABILITIES, SYSCTLS, VOLUMES, Level, violations

Template = dict[str, Any]
BASELINE = "(Pod Security Standard baseline)."
RESTRICTED = "(Pod Security Standard restricted)."
KINDS = ("containers", "initContainers", "ephemeralContainers")

STRICT: Template = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""A container's security context that restricted accepts."""


def in_container(context: Template | None = None, kind: str = "containers", **fields: Any) -> Template:
    """A template whose container of that kind has the context on top of a strict one."""
    container = {"name": "trainer", "image": "a", "securityContext": STRICT | (context or {})} | fields
    spec: Template = {"containers": [{"name": "first", "image": "a", "securityContext": STRICT}]}
    spec[kind] = [*spec.get(kind, []), container]
    return {"spec": spec}


def in_pod(context: Template | None = None, **fields: Any) -> Template:
    """A template whose pod has the context and fields, and whose container is strict."""
    container = {"name": "trainer", "image": "a", "securityContext": STRICT}
    return {"spec": {"containers": [container], "securityContext": context or {}} | fields}


def annotated(key: str, value: Any) -> Template:
    return in_pod() | {"metadata": {"annotations": {key: value}}}


def volume(**source: Any) -> Template:
    return in_pod(volumes=[{"name": "data", **source}])


APPARMOR = "container.apparmor.security.beta.kubernetes.io/trainer"
SECCOMP = "seccomp.security.alpha.kubernetes.io/pod"

FORBIDDEN_BY_BASELINE: dict[str, tuple[Template, str]] = {
    "host network": (in_pod(hostNetwork=True), "Remove hostNetwork from the pod"),
    "host processes": (in_pod(hostPID=True), "Remove hostPID from the pod"),
    "host IPC": (in_pod(hostIPC=True), "Remove hostIPC from the pod"),
    "host network in words": (in_pod(hostNetwork="true"), "Remove hostNetwork from the pod"),
    "Windows host process of the pod": (
        in_pod({"windowsOptions": {"hostProcess": True}}),
        "Remove securityContext.windowsOptions.hostProcess from the pod",
    ),
    "Windows host process of a container": (
        in_container({"windowsOptions": {"hostProcess": True}}),
        "Remove securityContext.windowsOptions.hostProcess from container trainer",
    ),
    "privileged": (
        in_container({"privileged": True}),
        "Remove securityContext.privileged from container trainer",
    ),
    "hostPath": (volume(hostPath={"path": "/"}), "Replace the hostPath of volume data"),
    "an empty hostPath": (volume(hostPath={}), "Replace the hostPath of volume data"),
    "host port": (
        in_container(ports=[{"containerPort": 80}, {"containerPort": 80, "hostPort": 80}]),
        "Remove hostPort from the ports of container trainer",
    ),
    "a probe of another host": (
        in_container(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
        "Remove host from livenessProbe of container trainer",
    ),
    "a startup probe by TCP": (
        in_container(startupProbe={"tcpSocket": {"host": "10.0.0.1", "port": 80}}),
        "Remove host from startupProbe of container trainer",
    ),
    "a hook to another host": (
        in_container(lifecycle={"preStop": {"httpGet": {"host": "localhost"}}}),
        "Remove host from lifecycle.preStop of container trainer",
    ),
    "AppArmor off in the pod": (
        in_pod({"appArmorProfile": {"type": "Unconfined"}}),
        "Set securityContext.appArmorProfile.type of the pod",
    ),
    "AppArmor off in a container": (
        in_container({"appArmorProfile": {"type": "Unconfined"}}),
        "Set securityContext.appArmorProfile.type of container trainer",
    ),
    "AppArmor off by annotation": (annotated(APPARMOR, "unconfined"), f"Set the annotation {APPARMOR}"),
    "an SELinux type of the host": (
        in_pod({"seLinuxOptions": {"type": "spc_t"}}),
        "Set securityContext.seLinuxOptions.type of the pod",
    ),
    "an SELinux user": (
        in_container({"seLinuxOptions": {"user": "system_u"}}),
        "Remove securityContext.seLinuxOptions.user from container trainer",
    ),
    "an SELinux role": (
        in_container({"seLinuxOptions": {"role": "sysadm_r"}}),
        "Remove securityContext.seLinuxOptions.role from container trainer",
    ),
    "an unmasked /proc": (
        in_container({"procMount": "Unmasked"}),
        "Remove securityContext.procMount from container trainer",
    ),
    "seccomp off in the pod": (
        in_pod({"seccompProfile": {"type": "Unconfined"}}),
        "Set securityContext.seccompProfile.type of the pod to",
    ),
    "seccomp off in a container": (
        in_container({"seccompProfile": {"type": "Unconfined"}}),
        "Set securityContext.seccompProfile.type of container trainer to",
    ),
    "seccomp off by annotation": (annotated(SECCOMP, "unconfined"), f"Set the annotation {SECCOMP}"),
    "a sysctl of the host": (
        in_pod({"sysctls": [{"name": "net.ipv4.tcp_syncookies"}, {"name": "kernel.msgmax", "value": "1"}]}),
        "Remove kernel.msgmax from securityContext.sysctls of the pod",
    ),
}

FORBIDDEN_BY_RESTRICTED: dict[str, tuple[Template, str]] = {
    "a network volume": (volume(nfs={"server": "a", "path": "/"}), "Make volume data a persistentVolumeClaim"),
    "an image volume": (volume(image={"reference": "a"}), "Make volume data a persistentVolumeClaim"),
    "privilege escalation": (
        in_container({"allowPrivilegeEscalation": True}),
        "Set securityContext.allowPrivilegeEscalation of container trainer to false",
    ),
    "privilege escalation not denied": (
        in_container({"allowPrivilegeEscalation": None}),
        "Set securityContext.allowPrivilegeEscalation of container trainer to false",
    ),
    "root not denied": (
        in_container({"runAsNonRoot": None}),
        "Set securityContext.runAsNonRoot of the pod or of container trainer to true",
    ),
    "root allowed": (
        in_container({"runAsNonRoot": False}),
        "Set securityContext.runAsNonRoot of the pod or of container trainer to true",
    ),
    "root allowed in a container of a pod that denies it": (
        {"spec": in_container({"runAsNonRoot": False})["spec"] | {"securityContext": {"runAsNonRoot": True}}},
        "Set securityContext.runAsNonRoot of the pod or of container trainer to true",
    ),
    "root in a container": (in_container({"runAsUser": 0}), "Set securityContext.runAsUser of container trainer to"),
    "root in the pod": (in_pod({"runAsUser": 0}), "Set securityContext.runAsUser of the pod to"),
    "no seccomp profile": (
        in_container({"seccompProfile": None}),
        "Set securityContext.seccompProfile.type of the pod or of container trainer to",
    ),
    "capabilities not dropped": (
        in_container({"capabilities": {"drop": ["KILL"]}}),
        "Add ALL to securityContext.capabilities.drop of container trainer",
    ),
    "no capabilities named": (
        in_container({"capabilities": None}),
        "Add ALL to securityContext.capabilities.drop of container trainer",
    ),
    "a capability that baseline allows": (
        in_container({"capabilities": {"drop": ["ALL"], "add": ["CHOWN", "NET_BIND_SERVICE"]}}),
        "Remove CHOWN from securityContext.capabilities.add of container trainer",
    ),
}

ALLOWED: dict[str, Template] = {
    "a strict container": in_container(),
    "all that is false, empty or default": in_pod(
        {"windowsOptions": {"hostProcess": False}, "seLinuxOptions": {"type": "", "user": "", "role": ""}},
        hostNetwork=False,
        hostPID=None,
        hostIPC=False,
    ),
    "a container that says no": in_container({"privileged": False, "procMount": "Default"}),
    "a port of the pod only": in_container(ports=[{"containerPort": 80}]),
    "a container port": in_container(ports=[{"containerPort": 80, "hostPort": 0}]),
    "a probe of itself": in_container(readinessProbe={"httpGet": {"port": 80, "host": ""}}),
    "every harmless sysctl": in_pod({"sysctls": [{"name": name, "value": "1"} for name in sorted(SYSCTLS)]}),
    "AppArmor by default": in_pod({"appArmorProfile": {"type": "RuntimeDefault"}}),
    "AppArmor by annotation": annotated(APPARMOR, "localhost/mine"),
    "seccomp by annotation": annotated(SECCOMP, "runtime/default"),
    "a seccomp profile of the node": in_container({"seccompProfile": {"type": "Localhost", "localhostProfile": "a"}}),
    "an SELinux type of containers": in_pod({"seLinuxOptions": {"type": "container_t", "level": "s0:c1,c2"}}),
    "the capability to bind ports": in_container({"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}),
    "a volume of nothing": volume(),
    "some user": in_container({"runAsUser": 1000}),
    "the pod speaks for its containers": {
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "a",
                    "securityContext": {key: STRICT[key] for key in ("allowPrivilegeEscalation", "capabilities")},
                }
            ],
        }
    },
    **{f"a volume of kind {kind}": volume(**{kind: {}}) for kind in sorted(VOLUMES)},
}


@pytest.mark.parametrize(("template", "beginning"), FORBIDDEN_BY_BASELINE.values(), ids=FORBIDDEN_BY_BASELINE.keys())
def test_baseline_and_restricted_forbid(template: Template, beginning: str) -> None:
    (sentence,) = violations(template, "baseline")
    assert sentence.startswith(beginning), sentence
    assert sentence.endswith(BASELINE)
    assert sentence in violations(template, "restricted")
    assert violations(template, "privileged") == []


@pytest.mark.parametrize(
    ("template", "beginning"), FORBIDDEN_BY_RESTRICTED.values(), ids=FORBIDDEN_BY_RESTRICTED.keys()
)
def test_only_restricted_forbids(template: Template, beginning: str) -> None:
    (sentence,) = violations(template, "restricted")
    assert sentence.startswith(beginning), sentence
    assert sentence.endswith(RESTRICTED)
    assert violations(template, "baseline") == []


@pytest.mark.parametrize("template", ALLOWED.values(), ids=ALLOWED.keys())
def test_restricted_allows(template: Template) -> None:
    assert violations(template, "restricted") == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "context",
    [
        {"privileged": True},
        {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
        {"procMount": "Unmasked"},
        {"appArmorProfile": {"type": "Unconfined"}},
        {"seccompProfile": {"type": "Unconfined"}},
        {"seLinuxOptions": {"type": "spc_t"}},
    ],
    ids=lambda context: next(iter(context)),
)
def test_no_kind_of_container_is_overlooked_by_baseline(kind: str, context: Template) -> None:
    (sentence,) = violations(in_container(context, kind), "baseline")
    assert "container trainer" in sentence


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", STRICT)
def test_no_kind_of_container_is_overlooked_by_restricted(kind: str, missing: str) -> None:
    (sentence,) = violations(in_container({missing: None}, kind), "restricted")
    assert "container trainer" in sentence


@pytest.mark.parametrize("capability", ["SYS_ADMIN", "NET_RAW", "NET_ADMIN", "ALL", "chown", "CAP_CHOWN"])
def test_baseline_refuses_other_capabilities(capability: str) -> None:
    template = in_container({"capabilities": {"drop": ["ALL"], "add": [capability]}})
    (sentence,) = violations(template, "baseline")
    assert sentence.startswith(f"Remove {capability} from securityContext.capabilities.add of container trainer")


def test_baseline_allows_the_capabilities_that_containers_have_anyway() -> None:
    assert violations(in_container({"capabilities": {"add": sorted(CAPABILITIES)}}), "baseline") == []


def test_a_container_without_a_name_is_still_found() -> None:
    template = {"spec": {"containers": [{}, {"securityContext": {"privileged": True}}]}}
    (sentence,) = violations(template, "baseline")
    assert "from containers[1]:" in sentence


def test_what_a_user_wrote_stays_short_and_printable_in_a_sentence() -> None:
    template = in_pod({"sysctls": [{"name": "x" * 10_000}, {"name": "a\nb"}, {"name": 10**5_000}]})
    (sentence,) = violations(template, "baseline")
    assert len(sentence) < 300
    assert sentence.isprintable()


def test_the_example_is_allowed_by_baseline() -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "digits.yaml").read_text(encoding="utf-8"))
    for group in manifest["spec"]["workerGroups"]:
        assert violations(group["template"], "baseline") == []


KEYS = [
    *("metadata", "annotations", "spec", "securityContext", "volumes", "name", "ports", "hostPort", "hostPath", "add"),
    *(*KINDS, "capabilities", "drop", "seccompProfile", "type", "sysctls", "seLinuxOptions", "lifecycle", "preStop"),
    *("httpGet", "host", "windowsOptions", "appArmorProfile", "runAsUser", APPARMOR, SECCOMP),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)


def placed(path: tuple[str, ...], value: Any) -> Any:
    """``value`` at a path of keys; the containers are lists."""
    for key in reversed(path):
        value = {key: [value] if key in KINDS else value}
    return value


PATHS = st.sampled_from(
    [
        (),
        ("spec",),
        ("metadata", "annotations"),
        ("spec", "securityContext"),
        ("spec", "containers"),
        ("spec", "initContainers", "securityContext"),
        ("spec", "containers", "securityContext", "capabilities"),
    ]
)


@given(path=PATHS, value=JSON, level=st.sampled_from(get_args(Level)))
@settings(max_examples=300, deadline=None)
def test_no_template_makes_it_raise(path: tuple[str, ...], value: Any, level: Level) -> None:
    for sentence in violations(placed(path, value), level):
        assert sentence.endswith((BASELINE, RESTRICTED))
