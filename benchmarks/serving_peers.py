"""Other servers that echo a list of numbers, as their documentation shows how."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BARE = "bare uvicorn"

UVICORN = """
import sys, uvicorn

async def app(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    length = b"%d" % len(body)
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})

uvicorn.run(app, port=int(sys.argv[1]), access_log=False, log_level="warning", lifespan="off")
"""
FASTAPI = """
import sys, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class Numbers(BaseModel):
    numbers: list[float]

app = FastAPI()

@app.post("/echo")
async def echo(request: Numbers) -> Numbers:
    return request

uvicorn.run(app, port=int(sys.argv[1]), access_log=False, log_level="warning")
"""
LITSERVE = """
import sys
import litserve

class Echo(litserve.LitAPI):
    def setup(self, device): pass
    def decode_request(self, request): return request["numbers"]
    def predict(self, numbers): return numbers
    def encode_response(self, numbers): return {"numbers": numbers}

if __name__ == "__main__":
    server = litserve.LitServer(Echo(), accelerator="cpu")
    server.run(port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
"""
BENTOML = """
import bentoml

@bentoml.service(metrics={"enabled": False}, logging={"access": {"enabled": False}})
class Echo:
    @bentoml.api
    def echo(self, numbers: list[float]) -> list[float]:
        return numbers
"""
MLSERVER = """
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

class Echo(MLModel):
    async def load(self) -> bool: return True
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = payload.inputs[0]
        output = ResponseOutput(name="y", shape=given.shape, datatype=given.datatype, data=given.data)
        return InferenceResponse(model_name=self.name, outputs=[output])
"""
START_MLSERVER = """
import os, sys
os.chdir(sys.argv[1])
sys.path.insert(0, ".")
sys.argv = ["mlserver", "start", "."]
from mlserver.cli import main
main()
"""
RAY = """
import sys
from ray import serve
from starlette.requests import Request

@serve.deployment(max_ongoing_requests=100)
class Echo:
    async def __call__(self, request: Request) -> dict:
        return {"numbers": (await request.json())["numbers"]}

serve.start(http_options={"port": int(sys.argv[1])})
serve.run(Echo.bind(), route_prefix="/echo", blocking=True)
"""
TRITON = """
import sys
import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

@batch
def echo(x):
    return {"y": x}

tensor = {"dtype": np.float32, "shape": (-1,)}
with Triton(config=TritonConfig(http_port=int(sys.argv[1]), allow_grpc=False, allow_metrics=False)) as triton:
    triton.bind(
        model_name="echo",
        infer_func=echo,
        inputs=[Tensor(name="x", **tensor)],
        outputs=[Tensor(name="y", **tensor)],
        config=ModelConfig(max_batch_size=64),
    )
    triton.serve()
"""


@dataclass(frozen=True)
class Peer:
    """A server. command: after the interpreter. body: from the numbers to the JSON of a request; None for raw bytes.
    binary: whether it takes a V2 request with binary tensors instead."""

    name: str
    module: str
    program: str
    port: int
    path: str
    body: Callable[[list[float]], Any] | None = lambda numbers: {"numbers": numbers}
    command: tuple[str, ...] = ("{path}", "{port}")
    files: dict[str, str] = field(default_factory=dict)
    binary: bool = False


def make_v2_request(numbers: list[float]) -> dict[str, Any]:
    """Make a V2 request in JSON: MLServer has no binary extension."""
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, len(numbers)], "data": numbers}]}


V2 = "/v2/models/echo/infer"
PEERS = {
    BARE: Peer(BARE, "bare", UVICORN, 8851, "/", None),
    "FastAPI": Peer("FastAPI with pydantic, JSON", "naive", FASTAPI, 8852, "/echo"),
    "litserve": Peer("LitServe, JSON", "lit", LITSERVE, 8853, "/predict"),
    "bentoml": Peer(
        "BentoML, JSON",
        "bento",
        BENTOML,
        8854,
        "/echo",
        command=("-m", "bentoml", "serve", "bento:Echo", "--port", "{port}", "--working-dir", "{folder}"),
    ),
    "mlserver": Peer(
        "MLServer, V2 JSON",
        "mls",
        MLSERVER,
        8855,
        V2,
        make_v2_request,
        ("-c", START_MLSERVER, "{folder}"),
        {
            "model-settings.json": '{"name": "echo", "implementation": "mls.Echo"}',
            "settings.json": '{"http_port": 8855, "grpc_port": 8856, "metrics_port": 8857, "parallel_workers": 0}',
        },
    ),
    "ray": Peer("Ray Serve, JSON", "rays", RAY, 8858, "/echo"),
    "triton": Peer("Triton by pytriton, V2 binary", "trit", TRITON, 8859, V2, binary=True),
}
