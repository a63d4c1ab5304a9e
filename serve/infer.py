"""The hot path: V2 inference, `POST /v2/models/{name}[/versions/{version}]/infer`."""

import re

from laconic.arrays import Arrays
from serve import kserve
from serve.body import OFFLOAD_FROM, Reservation
from serve.endpoint import Endpoint, read_timeout
from serve.model import VERSION, Model
from serve.offload import offload
from serve.wire import Answer, Headers, pack


class Infer(Endpoint):
    """Tensors in, tensors out."""

    pattern = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")

    async def respond(self, model: Model, body: bytes, headers: Headers, reservation: Reservation) -> Answer:
        header_length = headers.get(b"inference-header-content-length")
        split = len(body) if header_length is None else kserve.read_length(header_length, len(body))
        if split <= OFFLOAD_FROM:
            request = kserve.read_request(body, split, model.outputs, self.settings)
        else:
            request = await offload(kserve.read_request, body, split, model.outputs, self.settings, long=True)
        timeout = read_timeout(headers) if request.timeout is None else request.timeout
        outputs = await model.infer(request.inputs, timeout=timeout)
        size = sum(outputs[name].nbytes for name in request.outputs)
        if size <= OFFLOAD_FROM:
            return write(request, outputs, model.name, headers)
        answer = await offload(write, request, outputs, model.name, headers, long=True)
        reservation.add(len(answer.body))
        return answer


def write(request: kserve.Request, outputs: Arrays, model: str, headers: Headers) -> Answer:
    """The HTTP answer, compressed if the client asked for it."""
    return pack(kserve.write_answer(request, outputs, model=model, version=VERSION), headers)
