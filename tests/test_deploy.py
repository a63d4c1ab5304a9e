"""What operators copy from deploy/: manifests, alerts, the dashboard, nginx, compose."""

import json
import math
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml
from artifacts import write_artifact
from manifests import Object, build, check, containers, load, pods
from served import Running, eventually, request_of, running

from laconic import __version__
from serve.asgi.listener import bind
from serve.settings.server_settings import Settings

HOME = Path(__file__).parents[1]
DEPLOY = HOME / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
BUILT = ("overlays/cpu", "overlays/keda", "overlays/gpu", "jobs", "kserve", "kuberay")


def deployment(objects: list[Object]) -> Object:
    (found,) = [each for each in objects if each["kind"] == "Deployment"]
    return found


@pytest.mark.parametrize("name", BUILT)
def test_the_manifests_have_no_finding(name: str) -> None:
    objects = build(KUBERNETES / name)
    assert check(objects) == []
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)
    images = {container["image"] for each in objects for container in containers(each)}
    assert {image.rpartition(":")[2] for image in images} == {__version__}


def plant(change: Callable[[Object], None]) -> list[str]:
    objects = deepcopy(build(KUBERNETES / "overlays/cpu"))
    change(deployment(objects))
    return check(objects)


def container_of(subject: Object) -> Any:
    return next(containers(subject))


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda each: each["spec"].update(minReadySeconds="5"), "'5' is not of type 'integer'"),
        (lambda each: container_of(each).update(readynessProbe={}), "'readynessProbe' was unexpected"),
        (lambda each: each["spec"]["selector"]["matchLabels"].update(app="x"), "does not match the labels"),
        (lambda each: container_of(each)["securityContext"].update(capabilities={"add": ["ALL"]}), "has capabilities"),
        (lambda each: next(pods(each))["securityContext"].pop("runAsNonRoot"), "may run as root"),
        (lambda each: next(pods(each)).update(terminationGracePeriodSeconds=20), "killed 20 s after SIGTERM"),
        (lambda each: container_of(each)["livenessProbe"]["httpGet"].update(port="metrics"), "asks port 'metrics'"),
        (lambda each: container_of(each)["ports"].pop(), "port 'admin' is none of"),
        (lambda each: container_of(each)["volumeMounts"][0].update(name="x"), "mounts 'x', which is no volume"),
        (lambda each: each["spec"].update(replicas=2), "would reset the autoscaler's"),
        (lambda each: next(pods(each))["volumes"].append({"name": "h", "hostPath": {"path": "/"}}), "restricts"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(change: Callable[[Object], None], finding: str) -> None:
    assert finding in " ".join(plant(change))


def test_the_drain_of_the_servers_fits_the_grace_period_of_their_pods() -> None:
    settings = Settings.model_validate(yaml.safe_load((KUBERNETES / "base/serve.yaml").read_text()))
    pod = next(pods(deployment(build(KUBERNETES / "base"))))
    probe = container_of(pod)["readinessProbe"]
    assert settings.drain > 2 * probe["periodSeconds"] * probe["failureThreshold"]
    assert pod["terminationGracePeriodSeconds"] >= settings.grace + 5
    ports = {port["name"]: port["containerPort"] for port in container_of(pod)["ports"]}
    assert ports == {"http": 8000, "grpc": settings.grpc_port, "admin": int((settings.admin or "").rpartition(":")[2])}


def need(program: str, package: str) -> None:
    """Skip the test where a program is not installed; with CI set, where all of them are to be, it fails."""
    if shutil.which(program) is None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"{program} is not installed: apt-get install {package}")


def test_kubectl_builds_the_same_objects() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    for name in BUILT:
        done = subprocess.run(
            ["kubectl", "kustomize", str(KUBERNETES / name)], capture_output=True, text=True, check=True
        )
        theirs = {f"{each['kind']} {each['metadata']['name']}": each for each in yaml.safe_load_all(done.stdout)}
        ours = {f"{each['kind']} {each['metadata']['name']}": each for each in build(KUBERNETES / name)}
        for key, each in ours.items():
            if each["kind"] not in (
                "ConfigMap",
                "Deployment",
            ):  # a ConfigMap has a hash in its name, and where it is named
                assert theirs[key] == each


def test_custom_resources_fit_their_definitions() -> None:
    """With LACONIC_CRDS, the folder of the CustomResourceDefinitions of KServe, KEDA and KubeRay."""
    folder = os.environ.get("LACONIC_CRDS")
    if folder is None:
        pytest.skip("LACONIC_CRDS does not name a folder of CustomResourceDefinitions")
    kinds = {}
    for definition in (each for path in sorted(Path(folder).glob("*.yaml")) for each in load(path)):
        for version in definition["spec"]["versions"]:
            kind = f"{definition['spec']['group']}/{version['name']} {definition['spec']['names']['kind']}"
            kinds[kind] = close(version["schema"]["openAPIV3Schema"])
    tried = set()
    for each in (each for name in BUILT for each in build(KUBERNETES / name)):
        schema = kinds.get(kind := f"{each['apiVersion']} {each['kind']}")
        if schema is not None:
            tried.add(each["kind"])
            jsonschema.validate(each | {"metadata": {}}, schema)
            misspelt = json.loads(json.dumps(each).replace('"spec": {', '"spec": {"storageUrl": "x", ', 1))
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(misspelt | {"metadata": {}}, schema)
        else:
            assert "." not in each["apiVersion"].partition("/")[0] or kind.startswith(
                ("networking.k8s.io", "monitoring.coreos.com")
            ), kind
    assert tried == {"ScaledObject", "ClusterServingRuntime", "InferenceService", "RayCluster", "RayService"}


def close(schema: Any) -> Any:
    """A schema of a definition that refuses unknown fields, as the API server drops or refuses them."""
    if isinstance(schema, list):
        return [close(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: close(value) for key, value in schema.items() if key not in ("description", "format")}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed["properties"] = {key: close(value) for key, value in schema["properties"].items()}
        closed.setdefault("additionalProperties", False)
    return closed


EXPRESSIONS = {
    **{
        f"{panel['title']}, {target['refId']}": target["expr"]
        for panel in json.loads((DEPLOY / "grafana/dashboards/laconic.json").read_text(encoding="utf-8"))["panels"]
        for target in panel["targets"]
    },
    **{
        rule["alert"]: re.split(r" [<>=]+ ", rule["expr"])[0]
        for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    },
    **{
        f"trigger {number}": trigger["metadata"]["query"].replace('{namespace="laconic"}', "")
        for number, trigger in enumerate(load(KUBERNETES / "components/keda/scaledobject.yaml")[0]["spec"]["triggers"])
    },
}
"""What the dashboard, the alerts and the autoscaler ask Prometheus for, less the thresholds of alerts."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(write_artifact(tmp_path_factory.mktemp("models") / "twice.laconic")) as server:
        yield server


def put_load(server: Running, stopped: threading.Event) -> None:
    """Ask until the event is set; one request of eight is wrong."""
    with server.client() as http:
        for number in count():
            if stopped.wait(0.05):
                break
            http.post("/v2/models/twice/infer", json=request_of([[1, 2, 3]] if number % 8 else [[1]]))


def test_every_metric_that_is_asked_for_is_one_of_the_servers(server: Running) -> None:
    with server.client() as http:
        names = set(re.findall(r"^(\w+)", http.get("/metrics").text, re.MULTILINE))
    for title, expression in EXPRESSIONS.items():
        asked = set(re.findall(r"\b(?:nv|laconic|process)_\w+", re.sub(r'"[^"]*"', "", expression)))
        assert asked <= names, title


def test_every_query_of_the_dashboard_and_the_alerts_is_answered_by_a_real_scrape(
    server: Running, tmp_path: Path
) -> None:
    need("prometheus", "prometheus")
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    scrape = {"job_name": "laconic", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
    interval = {"scrape_interval": "500ms", "scrape_timeout": "400ms"}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"global": interval, "scrape_configs": [scrape]}))
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
    stopped = threading.Event()
    load_thread = threading.Thread(target=put_load, args=(server, stopped))
    load_thread.start()
    process = subprocess.Popen(["prometheus", *options], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as http:
            missing = dict(EXPRESSIONS)

            def ask() -> bool:
                for title, expression in list(missing.items()):
                    query = re.sub(r"\[[^]]*\]", "[3s]", expression).replace('=~"$model"', '=~".*"')
                    answer = http.get("/api/v1/query", params={"query": query}).json()
                    assert answer["status"] == "success", (title, answer)
                    if any(math.isfinite(float(each["value"][1])) for each in answer["data"]["result"]):
                        del missing[title]
                return not missing

            def is_up() -> bool:
                with suppress(httpx.TransportError):
                    return http.get("/-/ready").status_code == 200
                return False

            assert eventually(is_up, 20)
            eventually(ask, 15)
            assert missing == {}
    finally:
        process.kill()
        process.wait()
        stopped.set()
        load_thread.join()


def test_each_alert_fires_in_one_case_and_not_in_the_other() -> None:
    cases = yaml.safe_load((DEPLOY / "prometheus/alerts.test.yml").read_text(encoding="utf-8"))["tests"]
    tried = [(test["alertname"], bool(test["exp_alerts"])) for case in cases for test in case["alert_rule_test"]]
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    assert sorted(tried) == sorted((rule["alert"], fires) for rule in rules for fires in (False, True))
    need("promtool", "prometheus")
    command = ["promtool", "test", "rules", "alerts.test.yml"]
    done = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_names_only_files_that_are_there_or_made_by_the_script_and_publishes_one_port(tmp_path: Path) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    shutil.copy(DEPLOY / "prepare.sh", tmp_path)
    subprocess.run(["sh", "prepare.sh", "models.example.com"], cwd=tmp_path, check=True, capture_output=True)
    assert all((tmp_path / secret["file"]).is_file() for secret in compose["secrets"].values())
    keys = (tmp_path / "secrets/keys").read_text()
    assert f"prometheus={(tmp_path / 'secrets/metrics.key').read_text()}\n" in keys
    services = compose["services"]
    assert [name for name, each in services.items() for port in each.get("ports", ()) if "127.0.0.1" not in port] == [
        "nginx"
    ]
    for name, service in services.items():
        sources = [volume.partition(":")[0] for volume in service.get("volumes", ())]
        assert all(
            (DEPLOY / source).exists() or source == "./models" for source in sources if source.startswith(".")
        ), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        assert service["cap_drop"] == ["ALL"]
    settings = Settings.model_validate(yaml.safe_load((DEPLOY / "compose/serve.yaml").read_text()))
    assert int(services["laconic-1"]["stop_grace_period"].removesuffix("s")) >= settings.grace + 5
    assert {host for each in services for host in [each] if host.startswith("laconic-")} == set(
        re.findall(r"server (laconic-\d)", (DEPLOY / "nginx/laconic.conf").read_text())
    )


@pytest.mark.sweep("frozen")
@pytest.mark.parametrize("fault", ["frozen", "restarted"])
def test_behind_nginx_no_request_fails_while_a_server_freezes_or_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, import_benchmark: Callable[[str], Any], fault: str
) -> None:
    """The other faults, with figures: benchmarks/failover.py."""
    need("nginx", "nginx-light")
    failover = import_benchmark("failover")
    for name, value in {"CLIENTS": 4, "SERVERS": 2, "PAUSE": 0.05}.items():
        monkeypatch.setattr(failover, name, value)
    artifact = write_artifact(tmp_path / "twice.laconic")
    before, after = failover.measure(fault, str(artifact), {"inputs": {"x": [1, 2, 3]}}, (0.5, 4.0))
    assert len(before) > 4
    assert {each.status for each in (*before, *after)} == {200}
    assert max(each.seconds for each in after) < 3 + 2.5
