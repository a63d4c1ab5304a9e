"""The hot path: V2 inference, `POST /v2/models/{name}[/versions/{version}]/infer`."""

import re
import time
from weakref import WeakKeyDictionary

from laconic.arrays import Arrays
from serve.asgi.wire import Answer, Headers, pack
from serve.http import kserve
from serve.http.endpoint import ModelEndpoint, read_timeout
from serve.http.request_cache import KnownRequest, RequestCache
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.observation.tracing import TRACE, count_step
from serve.protocol.infer_request import InferRequest
from serve.requests.memory_budget import MemoryBudget, Reservation
from serve.requests.offload import OFFLOAD_FROM, offload
from serve.security.keys import count_rows
from serve.settings.server_settings import Settings


class Infer(ModelEndpoint):
    """Tensors in, tensors out."""

    pattern = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")

    def __init__(self, repository: Repository, settings: Settings, budget: MemoryBudget) -> None:
        super().__init__(repository, settings, budget)
        self._known: WeakKeyDictionary[Model, RequestCache] = WeakKeyDictionary()

    def respond_at_once(self, model: Model, body: bytes, headers: Headers) -> Answer | None:
        length = headers.get(b"inference-header-content-length")
        if length is None or model.batcher.inline is None or TRACE.get() is not None:
            return None
        split = kserve.read_length(length, len(body))
        known = self._known_of(model).get(body[:split], len(body) - split)
        if known is None:
            return None
        started = time.monotonic_ns()
        inputs = known.copy_tensors(body, split)
        model.task.check_values(inputs)
        count_rows(known.rows)
        read = time.monotonic_ns()
        outputs = model.batcher.run_at_once(inputs, known.rows)
        if outputs is None:
            return None
        ran = time.monotonic_ns()
        answer = known.write(outputs)
        if answer is None:
            return None
        answer = pack(answer, headers)
        model.statistics.encode.observe(read - started)
        model.statistics.write.observe(time.monotonic_ns() - ran)
        return answer

    async def respond(self, model: Model, body: bytes, headers: Headers, reservation: Reservation) -> Answer:
        header_length = headers.get(b"inference-header-content-length")
        split = len(body) if header_length is None else kserve.read_length(header_length, len(body))
        started = time.monotonic_ns()
        known = None if header_length is None else self._known_of(model).get(body[:split], len(body) - split)
        if known is not None:
            request = known.read(body, split)
        elif split <= OFFLOAD_FROM:
            request = kserve.read_request(body, split, model.outputs, self.settings)
        else:
            request = await offload(kserve.read_request, body, split, model.outputs, self.settings, long=True)
        count_step("encode", model.statistics.encode, started)
        timeout = read_timeout(headers) if request.timeout is None else request.timeout
        outputs = await model.infer(request.inputs, timeout=timeout)
        started = time.monotonic_ns()
        if known is None and header_length is not None:
            known = self._known_of(model).add(body[:split], len(body) - split, request)
        if sum([array.nbytes for array in outputs.values()]) <= OFFLOAD_FROM:
            answer = write(request, known, outputs, model, headers)
        else:
            answer = await offload(write, request, known, outputs, model, headers, long=True)
            reservation.add(len(answer.body))
        count_step("write", model.statistics.write, started)
        return answer

    def _known_of(self, model: Model) -> RequestCache:
        """Return the known requests of a model, which are forgotten with it."""
        known = self._known.get(model)
        if known is None:
            known = self._known[model] = RequestCache()
        return known


def write(request: InferRequest, known: KnownRequest | None, outputs: Arrays, model: Model, headers: Headers) -> Answer:
    """Write the HTTP answer, compressed if the client asked for it."""
    answer = known.write(outputs) if known is not None else None
    if answer is None:
        answer = kserve.write_answer(request, outputs, model=model.name, version=model.version)
        if known is not None:
            known.remember_answer(answer, outputs)
    return pack(answer, headers)
