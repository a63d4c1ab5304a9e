"""When the server says that it is ready: with a model, and with every model that it is told to require."""

from pathlib import Path
from typing import NamedTuple

import grpc
import httpx
import pytest
from artifacts import write_artifact
from served import Running, eventually, running
from test_serve_models import publish

from laconic.errors import UsageError
from serve.grpc import inference_pb2 as pb
from serve.settings.settings_file import load_settings


class Answers(NamedTuple):
    """What the server says of itself: over HTTP with the reason, and over gRPC by both protocols."""

    live: int
    ready: int
    reason: str
    server_ready: bool
    health: int


def ask(server: Running) -> Answers:
    with server.client() as http, grpc.insecure_channel(server.grpc_address) as channel:
        answer = http.get("/v2/health/ready")
        server_ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"")
        health = channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        return Answers(
            live=http.get("/v2/health/live").status_code,
            ready=answer.status_code,
            reason=answer.json()["error"] if answer.content else "",
            server_ready=pb.ServerReadyResponse.FromString(server_ready).ready,
            health=pb.HealthCheckResponse.FromString(health).status,
        )


READY = Answers(200, 200, "", True, pb.HealthCheckResponse.SERVING)


def not_ready(reason: str) -> Answers:
    return Answers(200, 503, reason, False, pb.HealthCheckResponse.NOT_SERVING)


def test_a_server_without_a_model_is_not_ready(tmp_path: Path) -> None:
    with running(models=tmp_path, poll=0.05, grpc_port=0) as server:
        assert ask(server) == not_ready("no model is served: the folder of models holds none")
        publish(tmp_path / "twice.laconic", 2)
        assert eventually(lambda: ask(server) == READY)


def test_a_server_whose_only_model_is_unavailable_is_not_ready_and_says_why(tmp_path: Path) -> None:
    with running(models=tmp_path, poll=0.05, grpc_port=0) as server:
        publish(tmp_path / "bad.laconic", 2, nonsense=1)
        assert eventually(lambda: "not a model of the fake engine" in ask(server).reason)
        answers = ask(server)
        assert answers == not_ready(answers.reason)
        assert answers.reason.startswith("model 'bad' is not ready: ")
        publish(tmp_path / "bad.laconic", 2)
        assert eventually(lambda: ask(server) == READY)
        httpx.post(f"{server.url}/v2/repository/models/bad/unload").raise_for_status()
        assert ask(server) == not_ready("model 'bad' is not ready: unloaded")


def test_a_server_is_not_ready_until_every_required_model_is(tmp_path: Path) -> None:
    given = write_artifact(tmp_path / "given" / "one.laconic")
    folder = tmp_path / "models"
    folder.mkdir()
    with running(given, models=folder, poll=0.05, grpc_port=0, require=("one", "two", "three")) as server:
        missing = "model {!r} is not ready: the folder of models does not hold it"
        assert ask(server) == not_ready(f"{missing.format('two')}; {missing.format('three')}")
        publish(folder / "three" / "4", 2)
        assert eventually(lambda: ask(server) == not_ready(missing.format("two")))
        publish(folder / "two.laconic", 2)
        assert eventually(lambda: ask(server) == READY)


def test_a_required_model_that_could_never_come_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "minilm.laconic")
    message = r"--require names 'minilm\.laconic', .* Did you mean 'minilm'\?"
    with pytest.raises(UsageError, match=message), running(path, require=("minilm.laconic",)):
        pass


def test_required_models_are_named_by_options_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("require: [one, two]")
    assert load_settings({}, {}, file).require == ("one", "two")
    assert load_settings({}, {"LACONIC_SERVE_REQUIRE": "one,two"}).require == ("one", "two")
    assert load_settings({"require": ["two"]}, {}, file).require == ("two",)
