"""The V2 protocol over gRPC: what tritonclient gets, and what malformed, late and abandoned calls get."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from artifacts import write_artifact
from hypothesis import given
from hypothesis import strategies as st
from served import Running, change_artifact, eventually, running
from tritonclient import grpc as triton
from tritonclient.grpc import service_pb2

from laconic.errors import InputError, UsageError
from serve.grpc import inference_pb2 as pb
from serve.grpc.grpc_messages import MAX_FIELDS, MAX_PARSED, parse_request, read_inputs
from serve.grpc.grpc_responses import write_final, write_response, write_streamed
from serve.protocol.infer_request import InferRequest
from serve.server import serve

SERVICE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"
ROWS = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
CONTENTS = {
    "BOOL": ("bool", "bool_contents"),
    "INT8": ("int8", "int_contents"),
    "INT64": ("int64", "int64_contents"),
    "UINT16": ("uint16", "uint_contents"),
    "UINT64": ("uint64", "uint64_contents"),
    "FP32": ("float32", "fp32_contents"),
    "FP64": ("float64", "fp64_contents"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = [write_artifact(folder / "twice.laconic", poison=666.0)]
    for datatype in ("INT8", "FP16"):
        dtype = {"INT8": "int8", "FP16": "float16"}[datatype]
        x = np.ones((2, 3), dtype)
        specs = [{"name": name, "dtype": dtype, "shape": ["batch", 3], "bounds": {}} for name in "xy"]
        path = write_artifact(folder / f"{datatype}.laconic", factor=1)
        golden = {"0.input.x": x, "0.output.y": x}
        paths.append(change_artifact(path, inputs=specs[:1], outputs=specs[1:], golden=golden))
    with running(*paths, grpc_port=0, max_body=1 << 20, body_timeout=0.5) as server:
        yield server


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model of 0.3 s per batch of up to 8 rows, one batch at a time, and a queue of 0.5 s."""
    path = write_artifact(tmp_path_factory.mktemp("artifacts") / "slow.laconic", seconds=0.3)
    with running(change_artifact(path, knee=8), grpc_port=0, threads=1, queue_seconds=0.5) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc_address) as client:
        yield client


@pytest.fixture
def channel(server: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield channel


def tensor(rows: Any = ROWS, datatype: str = "FP32") -> triton.InferInput:
    given = triton.InferInput("x", list(rows.shape), datatype)
    given.set_data_from_numpy(rows)
    return given


def message(name: str = "twice", rows: np.ndarray = ROWS, **changes: Any) -> bytes:
    """A request with raw contents, serialized."""
    given = {"name": "x", "datatype": "FP32", "shape": rows.shape} | changes
    return pb.ModelInferRequest(
        model_name=name, inputs=[given], raw_input_contents=[rows.tobytes()]
    ).SerializeToString()


def infer(channel: grpc.Channel, body: bytes, **options: Any) -> pb.ModelInferResponse:
    call = channel.unary_unary(f"{SERVICE}ModelInfer")
    return pb.ModelInferResponse.FromString(call(body, **{"timeout": 10} | options))


def status_of(channel: grpc.Channel, body: bytes, **options: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as failed:
        infer(channel, body, **options)
    return failed.value.code()


def test_every_message_fits_the_one_that_tritons_clients_send_and_read() -> None:
    theirs = service_pb2.DESCRIPTOR.message_types_by_name
    both = [name for name in pb.DESCRIPTOR.message_types_by_name if name in theirs]
    assert len(both) > 40
    for name in both:
        check_fields(pb.DESCRIPTOR.message_types_by_name[name], theirs[name])
    types = service_pb2.ModelConfigResponse().config.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
    assert dict(pb.DataType.items()).items() <= {(name, each.number) for name, each in types.items()}


def check_fields(own: Any, theirs: Any) -> None:
    """Each field of ours is one of theirs, and so are those of the messages in it."""
    for field in own.fields:
        their = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (their.number, their.type, their.is_repeated)
        if field.message_type is not None:
            check_fields(field.message_type, their.message_type)


def test_tritonclient_reads_health_metadata_configuration_and_statistics(
    server: Running, client: triton.InferenceServerClient
) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("twice")
    assert client.is_model_ready("twice", "1")
    assert not client.is_model_ready("thrice")
    assert not client.is_model_ready("twice", "9")
    assert client.get_server_metadata().name == "laconic"
    metadata = client.get_model_metadata("twice", "1", as_json=True)
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "3"]}]
    configuration = client.get_model_config("twice").config
    assert configuration.max_batch_size == 4
    assert [(each.name, each.data_type, list(each.dims)) for each in configuration.input] == [("x", 11, [3])]
    assert {model.name for model in client.get_model_repository_index().models} == {"twice", "INT8", "FP16"}
    client.infer("twice", [tensor()])
    (statistics,) = client.get_inference_statistics("twice").model_stats
    assert statistics.inference_stats.success.count >= 1
    by_size = {each.batch_size: each.compute_infer.count for each in statistics.batch_stats}
    assert sum(by_size.values()) == statistics.execution_count
    assert sum(size * count for size, count in by_size.items()) == statistics.inference_count
    assert len(client.get_inference_statistics().model_stats) == 3


def test_http_and_grpc_describe_a_model_alike(server: Running, client: triton.InferenceServerClient) -> None:
    def numbers_as_text(value: Any) -> Any:  # as JSON of protobuf has 64-bit integers
        if isinstance(value, dict):
            return {key: numbers_as_text(each) for key, each in value.items() if each not in ("", [], 0)}
        if isinstance(value, list):
            return [numbers_as_text(each) for each in value]
        return str(value)

    with server.client() as http:
        for path, own in (
            ("", client.get_model_metadata("twice", as_json=True)),
            ("/config", client.get_model_config("twice", as_json=True)["config"]),
        ):
            assert numbers_as_text(own) == numbers_as_text(http.get(f"/v2/models/twice{path}").json()) | (
                {"dynamic_batching": {}} if path else {}
            )


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_tritonclient_infers(client: triton.InferenceServerClient, compression: str | None) -> None:
    outputs = [triton.InferRequestedOutput("y")]
    answer = client.infer(
        "twice",
        [tensor()],
        model_version="1",
        outputs=outputs,
        request_id="7",
        priority=1,
        parameters={"anything": "goes"},
        compression_algorithm=compression,
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), 2 * ROWS)
    assert answer.get_response().id == "7"
    assert answer.get_response().model_version == "1"


def test_a_stream_answers_in_order_and_goes_on_after_an_error(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(100):
        rows = np.full((1, 4 if number == 50 else 3), number, np.float32)
        client.async_stream_infer("twice", [tensor(rows)], request_id=str(number), enable_empty_final_response=True)
    for number in range(100):
        result, error = answers.get(timeout=10)
        if number == 50:
            assert "shape [1, 4], expected [batch, 3]" in str(error)
            continue
        assert result.get_response().id == str(number)
        assert result.get_response().parameters["triton_final_response"].bool_param
        assert result.as_numpy("y")[0, 0] == 2 * number
    client.stop_stream()


@pytest.mark.parametrize("datatype", CONTENTS)
def test_typed_contents_become_an_array_of_their_type(datatype: str) -> None:
    dtype, field = CONTENTS[datatype]
    rows = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    if datatype == "UINT64":
        rows[0, 1] = 2**64 - 1
    contents = {field: rows.ravel().tolist()}
    request = pb.ModelInferRequest(inputs=[{"name": "x", "datatype": datatype, "shape": [2, 3], "contents": contents}])
    array = read_inputs(*parse_request(request.SerializeToString()))["x"]
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, rows)


def test_raw_tensors_are_views_of_the_message() -> None:
    body = message()
    array = read_inputs(*parse_request(body))["x"]
    np.testing.assert_array_equal(array, ROWS)
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))


@given(
    st.text(max_size=200), st.lists(st.integers(1, 40), max_size=3), st.booleans(), st.sampled_from(["FP32", "INT8"])
)
def test_an_answer_has_the_bytes_that_protobuf_writes(
    given_id: str, shape: list[int], final: bool, datatype: str
) -> None:
    array = np.ones(shape, CONTENTS[datatype][0])
    request = InferRequest(id=given_id, inputs={}, outputs={"y": False, "z": True}, timeout=None)
    expected = pb.ModelInferResponse(model_name="twice", model_version="1", id=given_id)
    for name in request.outputs:
        expected.outputs.add(name=name, datatype=datatype, shape=array.shape)
        expected.raw_output_contents.append(array.tobytes())
    outputs = dict.fromkeys(request.outputs, array)
    assert write_response(request, outputs, model="twice", version="1") == expected.SerializeToString()
    if final:
        expected.parameters["triton_final_response"].bool_param = True
    streamed = (write_final if final else write_streamed)(request, outputs, model="twice", version="1")
    assert streamed == pb.ModelStreamInferResponse(infer_response=expected).SerializeToString()


def test_a_message_that_repeats_but_for_its_tensors_is_read_anew(channel: grpc.Channel) -> None:
    for rows in (ROWS, ROWS + 1, ROWS[:1]):
        assert infer(channel, message(rows=rows)).raw_output_contents == [(2 * rows).tobytes()]
    (known, _), (again, _) = parse_request(message()), parse_request(message(rows=ROWS + 1))
    assert known is again


GOOD = {"name": "x", "datatype": "FP32", "shape": [1, 3]}
RAW = [ROWS[:1].tobytes()]


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"inputs": [GOOD]},
        {"inputs": [GOOD | {"name": "z"}], "raw_input_contents": RAW},
        {"inputs": [GOOD, GOOD], "raw_input_contents": RAW * 2},
        {"inputs": [GOOD], "raw_input_contents": RAW * 2},
        {"inputs": [GOOD], "raw_input_contents": [RAW[0][:-1]]},
        {"inputs": [GOOD | {"contents": {"fp32_contents": [1, 2, 3]}}], "raw_input_contents": RAW},
        {"inputs": [GOOD | {"contents": {"fp32_contents": [1, 2]}}]},
        {"inputs": [GOOD | {"contents": {"fp64_contents": [1, 2, 3]}}]},
        {"inputs": [GOOD | {"datatype": "BYTES"}], "raw_input_contents": RAW},
        {"inputs": [GOOD | {"datatype": "FP64"}], "raw_input_contents": [RAW[0] * 2]},
        {"inputs": [GOOD | {"shape": [-1, 3]}], "raw_input_contents": RAW},
        {"inputs": [GOOD | {"shape": [2**62, 2**62]}], "raw_input_contents": RAW},
        {"inputs": [GOOD | {"shape": [1] * 70}], "raw_input_contents": RAW},
        {
            "inputs": [GOOD | {"parameters": {"shared_memory_region": {"string_param": "r"}}}],
            "raw_input_contents": RAW,
        },
        {"inputs": [GOOD], "raw_input_contents": RAW, "outputs": [{"name": "z"}]},
        {"inputs": [GOOD], "raw_input_contents": RAW, "outputs": [{"name": "y"}] * 2},
        {
            "inputs": [GOOD],
            "raw_input_contents": RAW,
            "outputs": [{"name": "y", "parameters": {"classification": {"int64_param": 1}}}],
        },
        {"inputs": [GOOD], "raw_input_contents": RAW, "parameters": {"timeout": {"int64_param": -1}}},
        {"inputs": [GOOD], "raw_input_contents": RAW, "parameters": {"timeout": {"string_param": "soon"}}},
        {"inputs": [GOOD], "raw_input_contents": RAW, "parameters": {"timeout": {}}},
        {"inputs": [GOOD], "raw_input_contents": RAW, "parameters": {"sequence_id": {"int64_param": 7}}},
    ],
)
def test_a_request_that_does_not_fit_is_an_invalid_argument(channel: grpc.Channel, request_: dict[str, Any]) -> None:
    body = pb.ModelInferRequest(model_name="twice", **request_).SerializeToString()
    assert status_of(channel, body) is grpc.StatusCode.INVALID_ARGUMENT
    assert infer(channel, message()).raw_output_contents == [(2 * ROWS).tobytes()]


def test_fp16_is_sent_raw_and_a_number_that_the_datatype_does_not_hold_is_refused(channel: grpc.Channel) -> None:
    rows = ROWS.astype(np.float16)
    assert infer(channel, message("FP16", rows, datatype="FP16")).raw_output_contents == [rows.tobytes()]
    given = GOOD | {"datatype": "FP16", "contents": {"fp32_contents": [1, 2, 3]}}
    body = pb.ModelInferRequest(model_name="FP16", inputs=[given]).SerializeToString()
    assert status_of(channel, body) is grpc.StatusCode.INVALID_ARGUMENT
    given = GOOD | {"datatype": "INT8", "contents": {"int_contents": [300, 1, 1]}}
    body = pb.ModelInferRequest(model_name="INT8", inputs=[given]).SerializeToString()
    assert status_of(channel, body) is grpc.StatusCode.INVALID_ARGUMENT


def test_errors_have_the_statuses_of_grpc(channel: grpc.Channel) -> None:
    assert status_of(channel, message("thrice")) is grpc.StatusCode.NOT_FOUND
    assert status_of(channel, message(rows=np.full((1, 3), 666, np.float32))) is grpc.StatusCode.INTERNAL
    assert status_of(channel, b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(channel, b"") is grpc.StatusCode.NOT_FOUND  # a message may be empty: it names no model
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(f"{SERVICE}ModelGuess")(b"")
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_over_the_limit_exhausts_a_resource_also_when_packed(channel: grpc.Channel) -> None:
    large = np.zeros((100_000, 3), np.float32)
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        assert status_of(channel, message(rows=large), compression=compression) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert infer(channel, message()).model_name == "twice"


@pytest.mark.parametrize("tag", [b"\x2a", b"\x32", b"\x3a"], ids=["inputs", "outputs", "raw"])
def test_a_message_of_very_many_fields_is_refused_before_it_is_parsed(tag: bytes) -> None:
    with pytest.raises(InputError, match="fields"):
        parse_request((tag + b"\0") * (MAX_FIELDS + 1))


def test_a_message_of_large_typed_contents_is_told_to_send_them_raw() -> None:
    given = GOOD | {"contents": {"fp32_contents": np.zeros(MAX_PARSED // 4, np.float32)}}
    with pytest.raises(InputError, match="raw_input_contents"):
        parse_request(pb.ModelInferRequest(inputs=[given]).SerializeToString())


@given(st.binary(max_size=60), st.integers(0, 60), st.binary(max_size=10))
def test_whatever_bytes_come_they_are_read_or_refused_as_the_clients_fault(
    noise: bytes, place: int, cut: bytes
) -> None:
    good = message()
    for body in (noise, good[:place] + noise + good[place:], good[:place] + cut + good[place + len(cut) :]):
        try:
            request, raw = parse_request(body)
            read_inputs(request, raw)
        except InputError:
            continue
        expected = pb.ModelInferRequest.FromString(body)
        assert [bytes(each) for each in raw] == list(expected.raw_input_contents)


def test_a_call_whose_deadline_passes_in_the_queue_is_never_run(slow: Running) -> None:
    with grpc.insecure_channel(slow.grpc_address) as channel, grpc.insecure_channel(slow.grpc_address) as other:
        first = threading.Thread(target=infer, args=(channel, message("slow")))
        first.start()
        time.sleep(0.05)
        before = len(slow.batches("slow"))
        assert status_of(other, message("slow"), timeout=0.1) is grpc.StatusCode.DEADLINE_EXCEEDED
        first.join()
        assert eventually(lambda: not slow.app.repository.get("slow").batcher.pending)
        time.sleep(0.4)
        assert len(slow.batches("slow")) - before <= 1


def test_a_cancelled_call_is_dropped_from_the_queue(slow: Running) -> None:
    batcher = slow.app.repository.get("slow").batcher
    with grpc.insecure_channel(slow.grpc_address) as channel:
        call = channel.unary_unary(f"{SERVICE}ModelInfer")
        calls = [call.future(message("slow")) for _ in range(3)]
        assert eventually(lambda: batcher.pending > 0 or any(each.done() for each in calls))
        for each in calls:
            each.cancel()
        assert eventually(lambda: not batcher.pending)
    assert eventually(lambda: not slow.app.budget.used)


def test_an_overloaded_server_says_when_to_come_back(slow: Running) -> None:
    with grpc.insecure_channel(slow.grpc_address) as channel:
        call = channel.unary_unary(f"{SERVICE}ModelInfer")
        infer(channel, message("slow", np.ones((8, 3), np.float32)))  # from which the rate is known
        calls = [call.future(message("slow", np.ones((8, 3), np.float32))) for _ in range(12)]
        statuses = [each.exception() for each in calls]
        refused = [each for each in statuses if each is not None]
        assert refused
        for each in refused:
            assert each.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(each.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1000
        assert None in statuses


def test_a_call_whose_message_never_comes_is_ended(channel: grpc.Channel) -> None:
    silent = threading.Event()

    def nothing() -> Iterator[bytes]:
        silent.wait(10)
        yield b""

    with pytest.raises(grpc.RpcError, match=r"did not arrive within 0\.5 s") as failed:
        channel.stream_unary(f"{SERVICE}ModelInfer")(nothing(), timeout=8)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    silent.set()


def test_health_is_told_as_grpc_defines_it(channel: grpc.Channel) -> None:
    check = channel.unary_unary(f"{HEALTH}Check")
    for service in ("", "inference.GRPCInferenceService"):
        body = pb.HealthCheckRequest(service=service).SerializeToString()
        assert pb.HealthCheckResponse.FromString(check(body)).status == pb.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as failed:
        check(pb.HealthCheckRequest(service="else").SerializeToString())
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_stopping_server_says_so_ends_streams_and_answers_what_is_under_way(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "slow.laconic", seconds=0.5)
    answers: queue.Queue[Any] = queue.Queue()
    with running(path, grpc_port=0) as server:
        channel = grpc.insecure_channel(server.grpc_address)
        watch = channel.unary_stream(f"{HEALTH}Watch")(b"", timeout=10)
        assert pb.HealthCheckResponse.FromString(next(watch)).status == pb.HealthCheckResponse.SERVING
        client = triton.InferenceServerClient(server.grpc_address)
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("slow", [tensor()])
        under_way = channel.unary_unary(f"{SERVICE}ModelInfer").future(message("slow"), timeout=10)
        assert eventually(lambda: len(server.batches("slow")) > 0 or server.app.repository.get("slow").batcher.pending)
        time.sleep(0.1)
    assert [pb.HealthCheckResponse.FromString(each).status for each in watch] == [pb.HealthCheckResponse.NOT_SERVING]
    assert pb.ModelInferResponse.FromString(under_way.result()).model_name == "slow"
    result, error = answers.get(timeout=5)
    assert error is None
    np.testing.assert_array_equal(result.as_numpy("y"), 2 * ROWS)
    client.close()
    channel.close()


def test_calls_that_outlast_the_grace_are_told_that_the_server_stops(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "slow.laconic", seconds=1.5)
    with running(path, grpc_port=0, grace=0.2) as server:
        channel = grpc.insecure_channel(server.grpc_address)
        call = channel.unary_unary(f"{SERVICE}ModelInfer").future(message("slow"), timeout=10)
        time.sleep(0.3)
    assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
    channel.close()


def test_a_port_in_use_is_reported_before_models_are_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="--grpc-port"):
        serve([tmp_path / "missing.laconic"], port=0, grpc_port=taken.getsockname()[1])
