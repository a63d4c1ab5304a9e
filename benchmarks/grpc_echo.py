"""What a call over gRPC costs the server: an echo of 384 numbers, in calls per CPU-second, beside grpc.aio and HTTP.

    python benchmarks/grpc_echo.py

"bare grpc.aio" reads the bytes of a call and sends them back: what gRPC alone costs in Python. Laconic runs the model
of `serving.py`, an identity in ONNX Runtime, over gRPC and over HTTP in V2's binary form. All get the same load in
turn, in rounds; only the processor time of the server's processes counts.
"""

import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from results import Results, make_parser
from serving import SIZE, Target, make_rows, start, start_laconic, wait_until_ready

from laconic.errors import LaconicError
from serve.grpc.grpc_messages import serialize
from serve.grpc.grpc_service import NAME
from serve.grpc.inference_pb2 import ModelInferRequest

BARE, OVER_GRPC, OVER_HTTP = "bare grpc.aio", "Laconic, gRPC", "Laconic, V2 binary over HTTP"
BARE_PORT, GRPC_PORT = 8860, 8861
METHOD = f"/{NAME}/ModelInfer"
PROGRAM = f"""
import asyncio, grpc

async def echo(body, context):
    return body

async def main():
    server = grpc.aio.server()
    calls = {{"ModelInfer": grpc.unary_unary_rpc_method_handler(echo)}}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("{NAME}", calls),))
    server.add_insecure_port("127.0.0.1:{BARE_PORT}")
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""
READY = 60
"""Seconds in which a server has to answer."""


@dataclass
class GrpcTarget(Target):
    """A running server that is called over gRPC."""

    async def measure(self, clients: int, seconds: float) -> float:
        """Return calls per CPU-second, of callers that each send the next one when they are answered."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            await asyncio.wait_for(channel.channel_ready(), READY)
            call = channel.unary_unary(METHOD)
            before, end = self.cpu_seconds(), time.monotonic() + seconds

            async def send() -> int:
                number = 0
                while time.monotonic() < end:
                    if not await call(self.request):
                        raise LaconicError(f"{self.name} answered nothing")
                    number += 1
                return number

            counts = await asyncio.gather(*(send() for _ in range(clients)))
            return sum(counts) / (self.cpu_seconds() - before)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--clients", default="16,64")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    results = Results(publish=arguments.publish)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = start_targets(folder, stack)
        for target in targets:
            asyncio.run(target.measure(4, arguments.seconds / 2))
        for clients in map(int, arguments.clients.split(",")):
            rates: dict[str, list[float]] = {target.name: [] for target in targets}
            for _ in range(arguments.rounds):
                for target in targets:
                    rates[target.name].append(asyncio.run(target.measure(clients, arguments.seconds)))
            print(f"\n{clients} callers, {arguments.rounds} rounds:\n")
            head = ["server", "calls per CPU-second", "of bare grpc.aio (range)", "of Laconic over HTTP (range)"]
            results.table(f"{clients} callers", head, make_rows(rates, (BARE, OVER_HTTP)))


def start_targets(folder: Path, stack: ExitStack) -> list[Target]:
    """Start the bare server and Laconic's, which is called in two ways."""
    path = folder / "bare_grpc.py"
    path.write_text(PROGRAM, encoding="utf-8")
    numbers = np.ones((1, SIZE), np.float32)
    tensor = ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=numbers.shape)
    message = ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[numbers.tobytes()])
    body = serialize(message)
    bare = start(BARE, [sys.executable, str(path)], BARE_PORT, body, stack)
    laconic = start_laconic(folder, stack, "--grpc-port", str(GRPC_PORT))
    asyncio.run(wait_until_ready(laconic))
    laconic.name = OVER_HTTP
    return [
        GrpcTarget(BARE, bare.process, BARE_PORT, body),
        GrpcTarget(OVER_GRPC, laconic.process, GRPC_PORT, body),
        laconic,
    ]


if __name__ == "__main__":
    main()
