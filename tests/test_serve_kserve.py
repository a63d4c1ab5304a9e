"""The V2 protocol: what tritonclient gets, and what a malformed request gets."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
from artifacts import X, Y, write_artifact
from hypothesis import given
from hypothesis import strategies as st
from served import Running, change_artifact, request_of, running
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from laconic.errors import InputError
from laconic.tensor import check_inputs
from serve.http import kserve
from serve.protocol.infer_request import DTYPES
from serve.settings.server_settings import Settings

INFER = "/v2/models/twice/infer"
ROWS = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
DOUBLES = {
    "BOOL": "bool",
    "INT8": "int8",
    "INT64": "int64",
    "UINT8": "uint8",
    "FP16": "float16",
    "FP64": "float64",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = [write_artifact(folder / "twice.laconic")]
    for datatype, dtype in DOUBLES.items():
        x = np.ones((2, 3), dtype)
        specs = [spec.model_copy(update={"dtype": dtype}).model_dump(mode="json") for spec in (X, Y)]
        path = write_artifact(folder / f"{datatype}.laconic", factor=1)
        golden = {"0.input.x": x, "0.output.y": x}
        paths.append(change_artifact(path, inputs=specs[:1], outputs=specs[1:], golden=golden))
    with running(*paths, max_body=1 << 20) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def tensor(rows: Any = ROWS, *, binary: bool = True, datatype: str = "FP32") -> triton.InferInput:
    given = triton.InferInput("x", list(rows.shape), datatype)
    given.set_data_from_numpy(rows, binary_data=binary)
    return given


def test_tritonclient_reads_health_metadata_configuration_and_statistics(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("twice")
    assert client.is_model_ready("twice", "1")
    assert not client.is_model_ready("thrice")
    assert client.get_server_metadata()["name"] == "laconic"
    metadata = client.get_model_metadata("twice", "1")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    configuration = client.get_model_config("twice")
    assert configuration["max_batch_size"] == 4
    assert configuration["parameters"]["knee"] == {"string_value": "4"}
    assert configuration["instance_group"][0]["count"] >= 1
    assert configuration["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}]
    assert {model["name"] for model in client.get_model_repository_index()} == {"twice", *DOUBLES}
    assert len(client.get_inference_statistics()["model_stats"]) == 1 + len(DOUBLES)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritonclient_infers_in_binary_and_json(
    client: triton.InferenceServerClient, binary_in: bool, binary_out: bool
) -> None:
    outputs = [triton.InferRequestedOutput("y", binary_data=binary_out)]
    answer = client.infer("twice", [tensor(binary=binary_in)], outputs=outputs, request_id="7")
    np.testing.assert_array_equal(answer.as_numpy("y"), 2 * ROWS)
    assert answer.get_response()["id"] == "7"
    assert answer.get_response()["model_version"] == "1"


def test_tritonclient_gets_all_outputs_in_binary_by_default(client: triton.InferenceServerClient) -> None:
    answer = client.infer("twice", [tensor()], model_version="1", parameters={"anything": "goes"}, priority=1)
    assert answer.get_output("y")["parameters"]["binary_data_size"] == ROWS.nbytes
    np.testing.assert_array_equal(answer.as_numpy("y"), 2 * ROWS)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_tritonclient_compresses_both_ways(client: triton.InferenceServerClient, coding: str) -> None:
    rows = np.ones((200, 3), np.float32)
    answer = client.infer(
        "twice", [tensor(rows)], request_compression_algorithm=coding, response_compression_algorithm=coding
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), 2 * rows)


@pytest.mark.parametrize("datatype", DOUBLES)
@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype_survives_the_way_there_and_back(
    client: triton.InferenceServerClient, datatype: str, binary: bool
) -> None:
    rows = np.array([[0, 1, 1], [1, 0, 1]], DOUBLES[datatype])
    if datatype == "FP16" and not binary:
        pytest.skip("tritonclient sends FP16 in binary only")
    given = tensor(rows, binary=binary, datatype=datatype)
    answer = client.infer(datatype, [given], outputs=[triton.InferRequestedOutput("y", binary_data=True)])
    assert answer.as_numpy("y").dtype == rows.dtype
    np.testing.assert_array_equal(answer.as_numpy("y"), rows)


def test_nan_and_infinity_go_through_binary_bit_by_bit(client: triton.InferenceServerClient) -> None:
    rows = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    np.testing.assert_array_equal(client.infer("twice", [tensor(rows)]).as_numpy("y"), rows)
    with pytest.raises(InferenceServerException, match="Ask for it in binary"):
        client.infer("twice", [tensor(rows)], outputs=[triton.InferRequestedOutput("y", binary_data=False)])


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("twice", tensor(np.ones((1, 4), np.float32)), r"shape \[1, 4\], expected \[batch, 3\]"),
        ("twice", tensor(np.ones((1, 3), np.float64), datatype="FP64"), "float64, expected float32"),
        ("thrice", tensor(), "no model 'thrice' is served"),
    ],
)
def test_tritonclient_is_told_what_does_not_fit(
    client: triton.InferenceServerClient, model: str, given: triton.InferInput, message: str
) -> None:
    for _ in range(2):
        with pytest.raises(InferenceServerException, match=message):
            client.infer(model, [given])
    np.testing.assert_array_equal(client.infer("twice", [tensor()]).as_numpy("y"), 2 * ROWS)


GOOD = request_of(ROWS.tolist())


def changed(**changes: Any) -> bytes:
    """A request in JSON whose input differs from a good one."""
    return json.dumps({"inputs": [GOOD["inputs"][0] | changes]}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{{{",
        b'"text"',
        b"\xff\xfe{}",
        b"{}",
        b'{"inputs": {}}',
        b'{"inputs": []}',
        b'{"inputs": [1]}',
        b'{"inputs": [{"name": 1}]}',
        b'{"id": 1, "inputs": []}',
        b'{"parameters": 3, "inputs": []}',
        json.dumps({"inputs": GOOD["inputs"] * 2}).encode(),
        json.dumps(GOOD | {"outputs": [{"name": "z"}]}).encode(),
        json.dumps(GOOD | {"outputs": [{"name": "y"}] * 2}).encode(),
        json.dumps(GOOD | {"outputs": [{"name": "y", "parameters": {"classification": 3}}]}).encode(),
        json.dumps(GOOD | {"parameters": {"timeout": -1}}).encode(),
        json.dumps(GOOD | {"parameters": {"timeout": "soon"}}).encode(),
        changed(name="z"),
        changed(datatype="BYTES"),
        changed(datatype="FP8"),
        changed(datatype=None),
        changed(datatype=["FP32"]),
        changed(shape=[2, -3]),
        changed(shape=[2, True]),
        changed(shape=[0, 3], data=[]),
        changed(shape=[2**62, 2**62]),
        changed(shape="[2, 3]"),
        changed(shape=[2, 3.0]),
        changed(shape=[1] * 100, data=[1]),
        changed(data=[1, 2, 3]),
        changed(data=[[1, 2], [3]]),
        changed(data=["1", "2", "3", "4", "5", "6"]),
        changed(data=[None] * 6),
        changed(data=[{}] * 6),
        changed(data=[1e39] * 6),
        changed(data=[True] * 6),
        changed(data=6),
        changed(parameters={"shared_memory_region": "r"}),
        changed(parameters={"binary_data_size": 24}),
        json.dumps(GOOD).replace("1.0", "NaN", 1).encode(),
        json.dumps(GOOD).replace("1.0", "Infinity", 1).encode(),
        json.dumps(GOOD).replace("1.0", "1e999", 1).encode(),
        b'{"inputs": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    ],
)
def test_a_malformed_request_gets_400_and_the_connection_stays_usable(http: httpx.Client, body: bytes) -> None:
    answer = http.post(INFER, content=body)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    assert "connection" not in answer.headers
    assert http.post(INFER, json=GOOD).status_code == 200


@pytest.mark.parametrize("parameters", [{"sequence_id": 7, "sequence_start": True}, {"sequence_id": "call"}])
def test_a_request_of_a_sequence_is_refused_since_its_state_is_not_kept(http: httpx.Client, parameters: Any) -> None:
    answer = http.post(INFER, json=GOOD | {"parameters": parameters})
    assert answer.status_code == 400
    assert "keeps no state" in answer.json()["error"]
    assert http.post(INFER, json=GOOD | {"parameters": {"sequence_id": 0}}).status_code == 200


@pytest.mark.parametrize(("datatype", "number"), [("UINT8", 300), ("INT8", -129), ("INT64", 1.5), ("INT64", 2**64)])
def test_a_number_that_the_datatype_does_not_hold_gets_400(http: httpx.Client, datatype: str, number: float) -> None:
    body = {"inputs": [{"name": "x", "datatype": datatype, "shape": [1, 3], "data": [number, 1, 1]}]}
    answer = http.post(f"/v2/models/{datatype}/infer", json=body)
    assert answer.status_code == 400, answer.text
    assert datatype in answer.json()["error"]


def binary_request(size: Any = 24, extra: bytes = b"", **changes: Any) -> tuple[bytes, int]:
    described = {"name": "x", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": size}} | changes
    header = json.dumps({"inputs": [described]}).encode()
    return header + ROWS.tobytes() + extra, len(header)


@pytest.mark.parametrize("size", [0, 23, 25, -24, 2**63, "24", None, 24.0, True])
def test_a_binary_size_that_lies_gets_400(http: httpx.Client, size: Any) -> None:
    body, length = binary_request(size)
    answer = http.post(INFER, content=body, headers={"Inference-Header-Content-Length": str(length)})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("length", ["0", "-1", "9999", "x", "", "1e2", "9" * 400, "+5", "\xb2"])
def test_a_header_length_that_lies_gets_400(http: httpx.Client, length: str) -> None:
    body, _ = binary_request()
    answer = http.post(INFER, content=body, headers={"Inference-Header-Content-Length": length.encode("latin-1")})
    assert answer.status_code == 400, answer.text


def test_bytes_too_many_or_too_few_and_a_bool_that_is_neither_0_nor_1_get_400(http: httpx.Client) -> None:
    body, length = binary_request(extra=b"more")
    headers = {"Inference-Header-Content-Length": str(length)}
    assert "28 bytes follow" in http.post(INFER, content=body, headers=headers).json()["error"]
    assert "takes 24" in http.post(INFER, content=body[:-5], headers=headers).json()["error"]
    header = json.dumps(
        {"inputs": [{"name": "x", "datatype": "BOOL", "shape": [1, 3], "parameters": {"binary_data_size": 3}}]}
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    assert http.post("/v2/models/BOOL/infer", content=header + b"\0\1\1", headers=headers).status_code == 200
    assert http.post("/v2/models/BOOL/infer", content=header + b"\0\1\2", headers=headers).status_code == 400


def test_a_body_over_the_limit_gets_413_announced_or_not_and_an_unknown_coding_415(http: httpx.Client) -> None:
    large = b"[" + b"1," * (1 << 20) + b"1]"
    for content in (large, iter([large[: 1 << 19]] * 4)):
        answer = http.post(INFER, content=content)
        assert answer.status_code == 413
        assert "1048576" in answer.json()["error"]
    assert http.post(INFER, json=GOOD).status_code == 200
    assert http.post(INFER, content=b"{}", headers={"Content-Encoding": "br"}).status_code == 415


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_packed_bomb_gets_413_and_rubbish_gets_400(http: httpx.Client, coding: str, pack: Any) -> None:
    headers = {"Content-Encoding": coding}
    assert http.post(INFER, content=pack(b" " * (1 << 24)), headers=headers).status_code == 413
    assert http.post(INFER, content=b"not packed", headers=headers).status_code == 400
    assert http.post(INFER, content=pack(json.dumps(GOOD).encode())[:-9], headers=headers).status_code == 400
    assert http.post(INFER, content=pack(json.dumps(GOOD).encode()), headers=headers).status_code == 200


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("x") | JSONS,
        "datatype": st.sampled_from(sorted(DTYPES)) | JSONS,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSONS,
        "data": st.lists(st.integers() | st.floats(allow_nan=False), max_size=6) | JSONS,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 30) | JSONS}) | JSONS,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, max_size=2) | JSONS},
    optional={"id": JSONS, "parameters": JSONS, "outputs": st.lists(st.fixed_dictionaries({"name": JSONS})) | JSONS},
)


def read(body: bytes, length: bytes | None) -> None:
    """Read and check as the server does."""
    split = len(body) if length is None else kserve.read_length(length, len(body))
    check_inputs((X,), kserve.read_request(body, split, (Y,), Settings()).inputs)


@given(REQUESTS, st.binary(max_size=40), st.booleans())
def test_whatever_json_comes_it_is_read_or_refused_as_the_clients_fault(
    request: Any, tail: bytes, announced: bool
) -> None:
    header = json.dumps(request).encode()
    with suppress(InputError):
        read(header + tail, b"%d" % len(header) if announced else None)


@given(st.binary(max_size=200), st.none() | st.binary(max_size=20))
def test_whatever_bytes_come_they_are_read_or_refused_as_the_clients_fault(body: bytes, length: bytes | None) -> None:
    with pytest.raises(InputError):
        read(body, length)
