"""The KServe V2 protocol over gRPC, `inference.GRPCInferenceService`, with the queue, deadlines and limits of HTTP."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial

import grpc

from laconic.errors import INTERRUPTS
from serve.grpc import inference_pb2 as pb
from serve.grpc.grpc_call import Call, Context, call, read
from serve.grpc.grpc_messages import RequestHead, parse_request, read_request, serialize
from serve.grpc.grpc_responses import FINAL, write_final, write_response, write_streamed
from serve.model_repository.repository import Repository
from serve.observation.tracing import count_step, end_trace
from serve.requests.memory_budget import MemoryBudget, Reservation
from serve.requests.offload import OFFLOAD_FROM, offload
from serve.requests.public_errors import to_public_error
from serve.security.keys import count_request
from serve.settings.server_settings import Settings

NAME = "inference.GRPCInferenceService"
STREAMED = 32
"""Requests of one stream that are under way at a time. What follows waits in the connection."""


class InferenceService:
    """Answers the protocol's calls. budget: what all requests of the server may hold."""

    def __init__(self, repository: Repository, settings: Settings, budget: MemoryBudget) -> None:
        self.repository = repository
        self.settings = settings
        self.budget = budget
        self._readers: set[asyncio.Task[None]] = set()

    def handler(self, control: Mapping[str, Call]) -> grpc.GenericRpcHandler:
        """Make the calls, as gRPC's server takes them. control: those that run no model."""
        calls = {
            "ModelInfer": call(self.settings, self.infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.stream),
            **control,
        }
        return grpc.method_handlers_generic_handler(NAME, calls)

    def close(self) -> None:
        """Read no further requests from streams, which end when those under way are answered."""
        for reader in self._readers:
            reader.cancel()

    async def infer(self, body: bytes, context: Context) -> bytes:
        """Answer a ModelInferRequest. Raises what goes wrong."""
        reservation = Reservation(self.budget)
        try:
            reservation.add(len(body))
            head, raw = parse_request(body)
            return await self._infer(head, raw, context, reservation, write_response)
        finally:
            reservation.release()

    async def stream(self, _: object, context: Context) -> None:
        """Run the requests of a stream at the same time, to share batches, and answer them in their order."""
        under_way = asyncio.Semaphore(STREAMED)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()

        async def read_all() -> None:
            try:
                while await under_way.acquire() and (body := await read(context)) is not None:
                    answers.put_nowait(tasks.create_task(self._answer(body, context)))
            finally:
                answers.put_nowait(None)

        with end_trace():
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(read_all())
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
                while (task := await answers.get()) is not None:
                    await context.write(await task)
                    under_way.release()

    async def _answer(self, body: bytes, context: Context) -> bytes:
        """Answer one request of a stream, or say what went wrong with it."""
        reservation = Reservation(self.budget)
        given_id = ""
        try:
            count_request()
            reservation.add(len(body))
            head, raw = parse_request(body)
            given_id = head.message.id
            write = write_final if any(FINAL[0] == name for name in head.message.parameters) else write_streamed
            return await self._infer(head, raw, context, reservation, write)
        except (*INTERRUPTS, asyncio.CancelledError):
            raise
        except BaseException as error:  # noqa: BLE001 - the stream goes on
            response = pb.ModelInferResponse(id=given_id)
            text = str(to_public_error(error))
            return serialize(pb.ModelStreamInferResponse(error_message=text, infer_response=response))
        finally:
            reservation.release()

    async def _infer(
        self,
        head: RequestHead,
        raw: list[memoryview],
        context: Context,
        reservation: Reservation,
        write: Callable[..., bytes],
    ) -> bytes:
        message = head.message
        model = self.repository.get(message.model_name, message.model_version)
        model.users += 1
        started = time.monotonic_ns()
        try:
            if message.ByteSize() <= OFFLOAD_FROM:
                request = read_request(head, raw, model.outputs)
            else:
                request = await offload(read_request, head, raw, model.outputs, long=True)
            count_step("encode", model.statistics.encode, started)
            deadlines = [each for each in (request.timeout, context.time_remaining()) if each is not None]
            outputs = await model.infer(request.inputs, timeout=min(deadlines, default=None))
            ran = time.monotonic_ns()
            finish = partial(write, request, outputs, model=model.name, version=model.version)
            if sum(outputs[name].nbytes for name in request.outputs) <= OFFLOAD_FROM:
                response = finish()
            else:
                response = await offload(finish, long=True)
                reservation.add(len(response))
        except BaseException as error:
            model.statistics.count_failure(started, error)
            raise
        finally:
            model.users -= 1
        count_step("write", model.statistics.write, ran)
        model.statistics.count_success(started)
        return response
