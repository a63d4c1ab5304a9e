"""Builds the folders of deploy/kubernetes/ as kustomize does, and checks what comes of them.

`kubernetes_schemas.json` holds Kubernetes 1.35's own schemas of the kinds that are used, from kubernetes-validate, with
the descriptions left out. What schemas cannot see is checked here: selectors, ports, probes, grace periods, pod
security.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text(encoding="utf-8"))
VOLUMES = {"name", "configMap", "persistentVolumeClaim", "emptyDir"}
"""Kinds of volumes that are used, of those that pod security `restricted` allows."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Object = dict[str, Any]


def load(path: Path) -> list[Object]:
    return [each for each in yaml.load_all(path.read_text(encoding="utf-8"), LOADER) if each]


def build(folder: Path) -> list[Object]:
    """The objects of a kustomization. Of kustomize, what these files use: resources, components, patches of JSON 6902,
    images, a namespace, and ConfigMaps of files, without the hash in their names."""
    return apply(folder, [])


def apply(folder: Path, objects: list[Object]) -> list[Object]:
    (content,) = load(folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator", "images", "patches"}
    assert set(content) <= known, folder
    for name in content.get("resources", ()):
        objects += build(folder / name) if (folder / name).is_dir() else load(folder / name)
    for generator in content.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}
        metadata = {"name": generator["name"], "namespace": content.get("namespace")}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for name in content.get("components", ()):
        apply(folder / name, objects)
    for each in content.get("patches", ()):
        target = each["target"]
        (subject,) = [
            found
            for found in objects
            if found["kind"] == target["kind"] and found["metadata"]["name"] == target["name"]
        ]
        for operation in yaml.safe_load((folder / each["path"]).read_text(encoding="utf-8")):
            patch(subject, operation)
    for image in content.get("images", ()):
        for container in (each for found in objects for each in containers(found)):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    return objects


def patch(subject: Any, operation: Object) -> None:
    """Apply an operation of JSON 6902 in place."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in parents:
        subject = subject[int(part) if isinstance(subject, list) else part]
    if operation["op"] != "add":
        assert last in subject, operation
    if operation["op"] == "remove":
        del subject[last]
    else:
        subject[last] = deepcopy(operation["value"])


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in an object with its path."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from walk(inner, f"{path}.{key}")


def pods(subject: Object) -> Iterator[Object]:
    """The specifications of pods in an object: wherever there are containers."""
    yield from (value for _, value in walk(subject) if isinstance(value, dict) and "containers" in value)


def containers(subject: Object) -> Iterator[Object]:
    for pod in pods(subject):
        yield from (*pod.get("initContainers", ()), *pod["containers"])


@cache
def validator(kind: str) -> Any:
    schema = {"$defs": SCHEMAS["$defs"], "$ref": f"#/$defs/{SCHEMAS['kinds'][kind]}"}
    return jsonschema.Draft202012Validator(schema)


def check(objects: list[Object]) -> list[str]:
    """All findings; those of schemas only for the kinds of Kubernetes itself."""
    findings = []
    for subject in objects:
        kind, name = f"{subject['apiVersion']} {subject['kind']}", f"{subject['kind']} {subject['metadata']['name']}"
        if kind in SCHEMAS["kinds"]:
            errors = validator(kind).iter_errors(subject)
            findings += [f"{name}: {'.'.join(map(str, error.path))}: {error.message[:200]}" for error in errors]
        findings += [f"{name}: {text}" for text in (*check_pods(subject), *check_selectors(subject, objects))]
    return findings


def check_pods(subject: Object) -> Iterator[str]:
    """Pod security `restricted`, probes and mounts."""
    for pod in pods(subject):
        shared = pod.get("securityContext", {})
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            security = shared | container.get("securityContext", {})
            if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
                yield f"{container['name']} may run as root"
            if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
                yield f"{container['name']} may gain privileges"
            if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
                yield f"{container['name']} has no seccomp profile"
            capabilities = security.get("capabilities", {})
            if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
                yield f"{container['name']} has capabilities: {capabilities}"
            limits = container.get("resources", {})
            if limits.get("limits", {}).get("memory") != limits.get("requests", {}).get("memory") or not limits:
                yield f"{container['name']} can be evicted: its memory request is not its limit"
            ports = {port.get("name"): port["containerPort"] for port in container.get("ports", ())}
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                port = container.get(name, {}).get("httpGet", {}).get("port")
                if port is not None and port not in (*ports, *ports.values()):
                    yield f"the {name} asks port {port!r}, which is none of {ports}"
            volumes = {volume["name"] for volume in pod.get("volumes", ())}
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in volumes:
                    yield f"{container['name']} mounts {mount['name']!r}, which is no volume"
        if any(
            set(volume) - {"name", "configMap", "persistentVolumeClaim", "emptyDir"}
            for volume in pod.get("volumes", ())
        ):
            yield "a volume is of a kind that pod security restricts, or that is not known here"
        yield from check_grace(subject, pod)


def check_grace(subject: Object, pod: Object) -> Iterator[str]:
    """A pod is killed at the end of its grace period, which must be later than the server's own (5 s to spare)."""
    options = [arg for container in pod["containers"] for arg in container.get("args", ())]
    settings = {arg[2:].partition("=")[0]: arg.partition("=")[2] for arg in options if arg.startswith("--")}
    period, grace = pod.get("terminationGracePeriodSeconds", 30), float(settings.get("grace") or 25)
    if subject["kind"] != "Job" and period < grace + 5:
        yield f"killed {period} s after SIGTERM, before the {grace:g} s of grace are over"


def check_selectors(subject: Object, objects: list[Object]) -> Iterator[str]:
    """Selectors against labels, ports and names against what they name, disruption budgets against replicas."""
    spec, kind = subject.get("spec", {}), subject["kind"]
    templates = [each["spec"]["template"] for each in objects if each["kind"] in ("Deployment", "Job")]
    if kind == "Deployment" and not matches(spec["selector"]["matchLabels"], spec["template"]):
        yield "the selector does not match the labels of the template"
    selector = {
        "Service": spec.get("selector"),
        "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels"),
        "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
    }.get(kind)
    if selector is not None:
        selected = [template for template in templates if matches(selector, template)]
        if not selected:
            yield f"the selector {selector} matches no pod"
        names = {port.get("name") for each in selected for inner in containers(each) for port in inner.get("ports", ())}
        rules = [port for rule in spec.get("ingress", ()) for port in rule.get("ports", ())]
        for port in (*(each["targetPort"] for each in spec.get("ports", ())), *(each["port"] for each in rules)):
            if port not in names:
                yield f"port {port!r} is none of {sorted(map(str, names))}"
    if kind == "PodDisruptionBudget":
        replicas = [each["spec"].get("replicas", 2) for each in objects if each["kind"] == "Deployment"]
        if spec.get("minAvailable", 0) >= min(replicas) or spec.get("maxUnavailable", 1) == 0:
            yield "no pod may ever be evicted"
    if kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        target = spec["scaleTargetRef"]
        subjects = [
            each for each in objects if each["kind"] == target["kind"] and each["metadata"]["name"] == target["name"]
        ]
        if not subjects:
            yield f"there is no {target['kind']} {target['name']}"
        if any("replicas" in each["spec"] for each in subjects):
            yield "replicas of the Deployment would reset the autoscaler's"
    if kind == "ServiceMonitor":
        services = [each for each in objects if each["kind"] == "Service"]
        fits = [
            each for each in services if spec["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
        ]
        ports = {port["name"] for each in fits for port in each["spec"]["ports"]}
        if {each["port"] for each in spec["endpoints"]} - ports:
            yield f"its endpoints are none of the ports {sorted(ports)}"


def matches(selector: dict[str, str], template: Object) -> bool:
    return selector.items() <= template.get("metadata", {}).get("labels", {}).items()
