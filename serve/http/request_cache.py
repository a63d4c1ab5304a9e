"""Requests of which the JSON was read before: a client repeats it, and only the tensors behind it differ.

To read the JSON of a small request and to write that of its answer takes a third of the server's time for it.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from laconic.arrays import Array, Arrays
from serve.asgi.wire import BINARY, Answer
from serve.protocol.infer_request import InferRequest

MOST = 256
"""Requests of a model that are remembered: all lengths of a text, for one client library."""
LONGEST = 4096
"""Bytes of JSON. Longer ones carry data, which does not repeat."""


class TensorPlace(NamedTuple):
    """Where the bytes of a tensor lie. offset: behind the JSON."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


class KnownAnswer(NamedTuple):
    """The JSON of an answer whose tensors follow in binary, and their shapes."""

    json: bytes
    shapes: list[tuple[int, ...]]


class KnownRequest:
    """What the JSON of a request says, where all its tensors follow in binary. size: their bytes."""

    __slots__ = ("_answer", "_places", "id", "outputs", "rows", "size", "timeout")

    def __init__(self, request: InferRequest) -> None:
        self.id = request.id
        self.outputs = request.outputs
        self.timeout = request.timeout
        shape = next(iter(request.inputs.values())).shape
        self.rows = shape[0] if shape else 1
        self.size = 0
        self._places: list[TensorPlace] = []
        for name, array in request.inputs.items():
            self._places.append(TensorPlace(name, array.dtype, array.shape, self.size))
            self.size += array.nbytes
        self._answer: KnownAnswer | None = None

    def read(self, body: bytes, start: int) -> InferRequest:
        """Read the request with the tensors of this body, as views of it. start: where they begin."""
        return InferRequest(id=self.id, inputs=self._view(body, start), outputs=self.outputs, timeout=self.timeout)

    def copy_tensors(self, body: bytes, start: int) -> Arrays:
        """Copy the tensors of this body to arrays of their own. start: where they begin."""
        return {name: array.copy() for name, array in self._view(body, start).items()}

    def _view(self, body: bytes, start: int) -> Arrays:
        return {name: np.ndarray(shape, dtype, body, start + offset) for name, dtype, shape, offset in self._places}

    def remember_answer(self, answer: Answer, outputs: Arrays) -> None:
        """Keep the JSON of an answer, if all its tensors follow in binary."""
        if all(self.outputs.values()):
            arrays = [outputs[name] for name in self.outputs]
            json = answer.body[: len(answer.body) - sum(array.nbytes for array in arrays)]
            # In one step: large answers are written in threads, several at a time.
            self._answer = KnownAnswer(json, [array.shape for array in arrays])

    def write(self, outputs: Arrays) -> Answer | None:
        """Write the answer with these outputs, if one with the same shapes was remembered."""
        arrays: list[Array] = [outputs[name] for name in self.outputs]
        answer = self._answer
        if answer is None or [array.shape for array in arrays] != answer.shapes:
            return None
        length = (b"inference-header-content-length", b"%d" % len(answer.json))
        body = b"".join([answer.json, *[np.ascontiguousarray(array).data for array in arrays]])
        return Answer(body, content_type=BINARY, headers=[length])


class RequestCache:
    """The known requests of one model, by their JSON."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, KnownRequest] = OrderedDict()

    def get(self, json: bytes, size: int) -> KnownRequest | None:
        """Return the request with this JSON, if it is known. size: the bytes behind it."""
        known = self._known.get(json)
        return known if known is not None and known.size == size else None

    def add(self, json: bytes, size: int, request: InferRequest) -> KnownRequest | None:
        """Remember a request that was answered, if all its tensors follow its JSON. size: the bytes behind the JSON."""
        arrays = request.inputs.values()
        # The bytes of a BOOL tensor are checked whenever they are read.
        if (
            len(json) > LONGEST
            or sum(array.nbytes for array in arrays) != size
            or any(array.dtype.kind == "b" for array in arrays)
        ):
            return None
        known = self._known[json] = KnownRequest(request)
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return known
