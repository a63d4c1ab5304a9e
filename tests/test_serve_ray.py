"""Replicas on a Ray cluster: what is refused before one is started, and one with everything that it promises."""

import asyncio
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from artifacts import write_artifact
from served import eventually, request_of, running

from laconic.errors import UsageError
from laconic.registry import import_address
from serve.replicas.ray_applications import find_reason
from serve.replicas.ray_server import ReplicaArguments, build, check_settings, make_routes
from serve.replicas.replica_metrics import merge_metrics
from serve.server import serve
from serve.settings.server_settings import Settings

HOME = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"replicas": 3, "max_replicas": 2}, "at most 2 replicas are fewer than at least 3"),
        ({"fronts": 2}, "fronts does not go with Ray"),
        ({"admin": "9000"}, "admin does not go with Ray"),
        ({"models": "models"}, "models does not go with Ray"),
    ],
)
def test_settings_that_replicas_cannot_follow_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_settings(Settings.model_validate(settings))


def test_settings_of_replicas_are_refused_without_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="replicas is for replicas on a Ray cluster"):
        serve([tmp_path], replicas=2)


def test_of_a_failure_in_a_replica_the_reason_is_said() -> None:
    assert find_reason("Failed.\nTraceback:\n  File\nlaconic.errors.UnprovenArtifact: a: no verdict") == "a: no verdict"


def test_several_models_have_paths_of_their_own() -> None:
    assert make_routes({"a": ""}) == {"a": "/"}
    assert make_routes({"a": "", "b.c": ""}) == {"a": "/a", "b.c": "/b.c"}
    with pytest.raises(UsageError, match="cannot be the name of a model"):
        make_routes({"a": "", "b c": ""})


def test_metrics_of_replicas_are_merged_under_one_head() -> None:
    text = '# HELP a A\n# TYPE a counter\na{{model="m"}} {}\n# HELP b B\n# TYPE b gauge\nb 1\n'
    assert merge_metrics({"two": text.format(2), "one": text.format(1)}) == (
        '# HELP a A\n# TYPE a counter\na{replica="one",model="m"} 1\na{replica="two",model="m"} 2\n'
        '# HELP b B\n# TYPE b gauge\nb{replica="one"} 1\nb{replica="two"} 1\n'
    )


def test_the_manifest_of_a_ray_service_names_our_builder_and_our_settings() -> None:
    manifest = yaml.safe_load((HOME / "deploy/kubernetes/kuberay/rayservice.yaml").read_text())
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    assert import_address(application["import_path"]) is build
    arguments = ReplicaArguments.model_validate(application["args"])
    check_settings(arguments)
    assert arguments.artifact == "minilm=/models/minilm.laconic"


@pytest.mark.skipif(find_spec("grpc_reflection") is None, reason="ray[serve] is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own classes
def test_the_configuration_of_ray_serve_llm_is_one_that_ray_and_vllm_read() -> None:
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig  # the public name needs vLLM
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load((HOME / "deploy/ray/llm.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(content).applications
    assert application.import_path == "ray.serve.llm:build_openai_app"
    (model,) = application.args["llm_configs"]
    config = LLMConfig.model_validate(model)
    assert config.model_id == "chat"
    known = json.loads((HOME / "tests/vllm_flags.json").read_text())
    names = {name.replace("-", "_") for name in (*known["values"], *known["switches"])}
    assert set(config.engine_kwargs) <= names
    with pytest.raises(ValueError, match="accelerator_typ"):
        LLMConfig.model_validate(model | {"accelerator_typ": "L4"})


@pytest.fixture
def tools(import_benchmark: Callable[[str], Any]) -> Any:
    return import_benchmark("ray_replicas")


@pytest.mark.skipif(find_spec("grpc_reflection") is None, reason="ray[serve] is not installed")
def test_a_cluster_gives_the_same_bytes_survives_a_kill_names_its_replicas_and_ends_with_0(
    tmp_path: Path, tools: Any
) -> None:
    artifact = write_artifact(tmp_path / "twice.laconic")
    options = ("--on", "ray", "--replicas", "2", "--drain", "0", "--max-rows", "4")
    with (
        tools.serving(str(artifact), *options) as served,
        running(f"model={artifact}") as bare,
        httpx.Client(base_url=served.url) as client,
    ):
        assert client.get("/v2/health/ready").status_code == 200
        assert client.post("/v2/models/model/infer", json=request_of([[1, 2, 3]] * 5)).status_code == 400
        bodies = asyncio.run(tools.ask(served, 1, 0.5)).bodies
        served_bare = tools.Served(served.process, bare.url, served.requests)
        assert bodies == asyncio.run(tools.ask(served_bare, 1, 0.2)).bodies
        killed = tools.measure_kill(served, 2.5)
        assert set(killed.final) == {"200"}, killed
        samples = '\nnv_inference_count{replica="'
        assert eventually(lambda: client.get("/metrics").text.count(samples) == 2, 60)


@pytest.mark.sweep
@pytest.mark.skipif(find_spec("grpc_reflection") is None, reason="ray[serve] is not installed")
def test_replicas_follow_the_load_and_no_request_fails(tmp_path: Path, tools: Any) -> None:
    with tools.serving(str(write_artifact(tmp_path / "twice.laconic")), "--on", "ray", *tools.SCALING) as served:
        tally, most, last = tools.measure_scaling(served)
    assert set(tally.final) == {"200"}, tally
    assert (most, last) == (3, 1)
