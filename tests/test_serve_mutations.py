"""Good requests, damaged at random: each is answered, none with a 5xx, and the server serves on."""

import base64
import io
import json
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from artifacts import write_artifact
from PIL import Image
from served import Running, running, write_image_model
from test_serve_openai import write_model

pytestmark = [pytest.mark.usefixtures("own_tasks"), pytest.mark.filterwarnings("ignore:overflow")]

ROW = np.array([[1, 2, 3]], np.float32)
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 3]}
PIECES = [
    b'"',
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b"-",
    b"1e999",
    b"null",
    b"NaN",
    b"true",
    b"\\u0000",
    b"\xff",
    b"9" * 30,
]
"""What is put into a body."""


@pytest.fixture(scope="module")
def server(own_tasks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = [
        write_artifact(folder / "twice.laconic"),
        write_model(folder / "text.laconic"),
        write_image_model(folder / "pixels.laconic"),
    ]
    with running(*paths) as server:
        yield server


def good_requests() -> list[tuple[str, bytes, dict[str, str]]]:
    """Path, body and headers of requests that are answered with 200."""
    binary = json.dumps({"inputs": [TENSOR | {"parameters": {"binary_data_size": ROW.nbytes}}]}).encode()
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (255, 0, 0)).save(file, "PNG")
    image = file.getvalue()
    as_json = [
        ("/v2/models/twice/infer", {"id": "1", "inputs": [TENSOR | {"data": [1, 2, 3]}], "outputs": [{"name": "y"}]}),
        ("/v1/models/twice/predict", {"inputs": [{"x": [1, 2, 3]}, {"x": [4, 5, 6.5]}]}),
        ("/v1/models/text/predict", {"text": ["the cat", ["sat on", "a mat"]]}),
        ("/v1/models/pixels/predict", {"image": base64.b64encode(image).decode()}),
        ("/v1/embeddings", {"model": "text", "input": [[2, 3], [4]], "encoding_format": "base64"}),
        ("/v2/logging", {"log_info": True}),
    ]
    form = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + image + b"\r\n--b--\r\n"
    return [
        *((path, json.dumps(body).encode(), {}) for path, body in as_json),
        ("/v2/models/twice/infer", binary + ROW.tobytes(), {"inference-header-content-length": str(len(binary))}),
        ("/v1/models/pixels/predict", image, {"content-type": "image/png"}),
        ("/v1/models/pixels/predict", form, {"content-type": "multipart/form-data; boundary=b"}),
    ]


def damage(body: bytes, rng: random.Random) -> bytes:
    """The body with up to four random changes."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        place, length = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 8, 64])
        match rng.randrange(5):
            case 0:
                data[place : place + length] = rng.randbytes(length)
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = rng.choice(PIECES)
            case 3:
                data[place:place] = data[place : place + length] * rng.choice([1, 2, 50])
            case _:
                data = data[:place]
    return bytes(data)


def try_damaged(client: httpx.Client, count: int, seed: int) -> Counter[int]:
    """Send so many damaged requests. Returns how many were answered with each status."""
    rng = random.Random(seed)
    requests = good_requests()
    statuses: Counter[int] = Counter()
    for _ in range(count):
        path, body, headers = rng.choice(requests)
        damaged = damage(body, rng)
        if rng.random() < 0.1:
            headers = headers | {"request-timeout": rng.choice(["60", "0", "-1", "x", "1e3", "9" * 12])}
        if rng.random() < 0.1 and headers.get("inference-header-content-length"):
            headers = headers | {"inference-header-content-length": str(rng.randrange(-5, 500))}
        answer = client.post(path, content=damaged, headers=headers)
        assert answer.status_code < 500, (path, headers, damaged, answer.text)
        if answer.status_code != 200:
            assert "error" in answer.json()
        statuses[answer.status_code] += 1
    return statuses


def test_damaged_requests_get_no_5xx_and_leave_the_server_as_it_was(server: Running) -> None:
    with server.client() as client:
        statuses = try_damaged(client, 300, seed=0)
        assert set(statuses) <= {200, 400, 404, 413, 415}
        assert statuses[400] > 100
        for path, body, headers in good_requests():
            assert client.post(path, content=body, headers=headers).status_code == 200, path
    assert not server.app.budget.used
