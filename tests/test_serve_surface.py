"""The whole surface of tritonclient, over HTTP and gRPC: every method of its clients is called."""

import inspect
import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from artifacts import write_artifact
from served import Running, running
from tritonclient import grpc, http
from tritonclient.utils import InferenceServerException

from serve.protocol.extensions import LOG_SETTINGS, TRACE_SETTINGS

ROWS = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
REFUSED = "refused"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    write_artifact(folder / "models" / "other.laconic")
    with running(write_artifact(folder / "twice.laconic"), models=folder / "models", grpc_port=0) as server:
        yield server


@pytest.fixture(params=[http, grpc], ids=["http", "grpc"])
def client(server: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    address = server.address if request.param is http else server.grpc_address
    with request.param.InferenceServerClient(address) as client:
        yield client


def tensor(client: Any) -> list[Any]:
    given = module_of(client).InferInput("x", [2, 3], "FP32")
    given.set_data_from_numpy(ROWS)
    return [given]


def module_of(client: Any) -> Any:
    return http if isinstance(client, http.InferenceServerClient) else grpc


def infer_later(client: Any) -> Any:
    if isinstance(client, http.InferenceServerClient):
        return client.async_infer("twice", tensor(client)).get_result().as_numpy("y")
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer("twice", tensor(client), lambda result, error: answers.put(result or error))
    return answers.get(timeout=10).as_numpy("y")


def stream(client: Any) -> Any:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(result or error))
    client.async_stream_infer("twice", tensor(client))
    result = answers.get(timeout=10).as_numpy("y")
    client.stop_stream()
    return result


REGION = "system_shared_memory"
CUDA = "cuda_shared_memory"
CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "is_server_live": (lambda client: client.is_server_live(), True),
    "is_server_ready": (lambda client: client.is_server_ready(), True),
    "is_model_ready": (lambda client: client.is_model_ready("twice", "1"), True),
    "get_server_metadata": (lambda client: client.get_server_metadata(), None),
    "get_model_metadata": (lambda client: client.get_model_metadata("twice"), None),
    "get_model_config": (lambda client: client.get_model_config("twice", "1"), None),
    "get_model_repository_index": (lambda client: client.get_model_repository_index(), None),
    "get_inference_statistics": (lambda client: client.get_inference_statistics("twice", "1"), None),
    "get_trace_settings": (lambda client: client.get_trace_settings(), None),
    "update_trace_settings": (lambda client: client.update_trace_settings(settings={"trace_rate": "5"}), REFUSED),
    "get_log_settings": (lambda client: client.get_log_settings(), None),
    "update_log_settings": (lambda client: client.update_log_settings({"log_verbose_level": 2}), REFUSED),
    f"get_{REGION}_status": (lambda client: client.get_system_shared_memory_status(), None),
    f"register_{REGION}": (lambda client: client.register_system_shared_memory("r", "/r", 64), REFUSED),
    f"unregister_{REGION}": (lambda client: client.unregister_system_shared_memory(), None),
    f"get_{CUDA}_status": (lambda client: client.get_cuda_shared_memory_status(), None),
    f"register_{CUDA}": (lambda client: client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64), REFUSED),
    f"unregister_{CUDA}": (lambda client: client.unregister_cuda_shared_memory("r"), None),
    "infer": (lambda client: client.infer("twice", tensor(client)).as_numpy("y"), 2 * ROWS),
    "async_infer": (infer_later, 2 * ROWS),
    "start_stream": (stream, 2 * ROWS),
    "async_stream_infer": (stream, 2 * ROWS),
    "stop_stream": (stream, 2 * ROWS),
    "load_model": (lambda client: client.load_model("other"), None),
    "unload_model": (lambda client: client.unload_model("other"), None),
}
OWN = {"close", "register_plugin", "unregister_plugin", "plugin", "generate_request_body", "parse_response_body"}
"""Methods that send nothing."""


def methods(client: Any) -> list[str]:
    public = {name for name, _ in inspect.getmembers(client, callable) if not name.startswith("_")}
    return sorted(public - OWN)


def test_each_method_of_the_client_is_answered(client: Any) -> None:
    for name in methods(client):
        ask, expected = CALLS[name]
        if isinstance(expected, str):
            with pytest.raises(InferenceServerException):
                ask(client)
        elif expected is None:
            ask(client)
        else:
            np.testing.assert_array_equal(ask(client), expected)
    assert client.is_server_live()


def test_models_of_the_folder_alone_are_loaded_and_unloaded(client: Any) -> None:
    for name in ("twice", "thrice"):
        with pytest.raises(InferenceServerException, match=f"holds no '{name}'"):
            client.load_model(name)
    client.unload_model("other")
    assert not client.is_model_ready("other")
    client.load_model("other")
    assert client.is_model_ready("other")
    with pytest.raises(InferenceServerException, match="'parameters' are not supported"):
        client.load_model("other", config='{"max_batch_size": 1}')


def test_settings_that_stay_as_they_are_are_accepted(client: Any) -> None:
    assert as_dict(client.update_trace_settings("twice", {"trace_level": None, "trace_rate": "1000"})) == TRACE_SETTINGS
    assert as_dict(client.update_trace_settings(settings={"trace_level": ["OFF"]})) == TRACE_SETTINGS
    assert as_dict(client.get_trace_settings("twice")) == TRACE_SETTINGS
    assert as_dict(client.update_log_settings({"log_info": True, "log_verbose_level": 0})) == LOG_SETTINGS
    for change in ({"log_info": False}, {"log_colour": True}):
        with pytest.raises(InferenceServerException):
            client.update_log_settings(change)
    with pytest.raises(InferenceServerException, match="no model 'thrice'"):
        client.get_trace_settings("thrice")


def as_dict(settings: Any) -> dict[str, Any]:
    """Settings as HTTP has them."""
    if isinstance(settings, dict):
        return settings
    values: dict[str, Any] = {}
    for name, each in settings.settings.items():
        if hasattr(each, "value"):
            values[name] = list(each.value) if isinstance(TRACE_SETTINGS[name], list) else each.value[0]
        else:
            values[name] = getattr(each, each.WhichOneof("parameter_choice"))
    return values


@pytest.mark.parametrize("path", ["/v2/logging", "/v2/trace/setting", "/v2/models/twice/trace/setting"])
def test_settings_over_http_have_bounds_and_refuse_what_is_no_object(server: Running, path: str) -> None:
    with server.client() as client:
        assert client.post(path).status_code == 200
        for body, status in ((b"[]", 400), (b"{", 400), (b'{"x": 1}', 400), (b" " * (1 << 17), 413)):
            answer = client.post(path, content=body)
            assert (answer.status_code, set(answer.json())) == (status, {"error"})


def test_every_route_answers_head_like_get_and_names_its_methods_in_a_405(server: Running) -> None:
    with server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert len(paths) > 25
        for path, operations in paths.items():
            address = path.replace("{name}", "twice").replace("{version}", "1").replace("{region}", "r")
            if "get" in operations:
                got, head = client.get(address), client.head(address)
                assert head.status_code == got.status_code
                assert head.content == b""
            answer = client.delete(address)
            assert answer.status_code == 405, (path, answer.text)
            allowed = {name.strip().lower() for name in answer.headers["allow"].split(",")} - {"head"}
            assert allowed == set(operations), path
