"""The predict endpoint: raw samples in, answers out."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import Headers as MultipartHeaders
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from laconic.errors import InputError
from serve.asgi.body import read_json
from serve.asgi.wire import Answer, Headers, to_json
from serve.http.endpoint import ModelEndpoint, read_timeout
from serve.model_repository.model import Model
from serve.observation.tracing import count_step
from serve.requests.memory_budget import Reservation
from serve.requests.offload import offload
from serve.settings.server_settings import MIB

MAX_FILES = 256
"""The most files of one upload; all are kept in memory."""
PRINTED = 64
"""Answers that are printed in one go, without letting other threads run: 2 ms for embeddings of 384 numbers."""
PARSED = 1 << 16
"""Bytes of a form that are parsed in one go, before the event loop does something else."""


class InMemoryParser(MultiPartParser):
    """Keeps files in memory: the body is bounded already, and the server may have no disk to write to."""

    spool_max_size = 1024 * MIB

    def close(self) -> None:
        """Close all files: a form that is cut off within a file has one that it does not hold."""
        for file in self._files_to_close_on_error:
            file.close()


class Predict(ModelEndpoint):
    """`{"model": name, "answers": [...]}` with one answer per sample, for raw samples."""

    pattern = re.compile(r"/v1/models/([^/]+)/predict")

    async def respond(self, model: Model, body: bytes, headers: Headers, reservation: Reservation) -> Answer:
        values = await self._read_samples(body, headers.get(b"content-type", b""), model, reservation)
        answers, _ = await model.predict(values, timeout=read_timeout(headers))
        started = time.monotonic_ns()
        answer = await write_answers(model.name, answers)
        count_step("write", model.statistics.write, started)
        reservation.add(len(answer.body))
        return answer

    async def _read_samples(
        self, body: bytes, content_type: bytes, model: Model, reservation: Reservation
    ) -> list[Any]:
        """Read samples from JSON, unless the content type says that the body is a form, or a file that the task
        takes."""
        kind = content_type.partition(b";")[0].strip().lower()
        if kind == b"multipart/form-data":
            return await read_form(body, content_type, model.task.field)
        if model.task.upload is not None and model.task.upload.matches(kind.decode("latin-1")):
            return [body]
        return choose_samples(await read_json(body, self.settings, reservation), model)


async def write_answers(model: str, answers: list[Any]) -> Answer:
    """Write the HTTP answer. Many are printed off the event loop, a few at a time: 3,000 embeddings are 12 MB of
    JSON."""
    if len(answers) <= PRINTED:
        return Answer(to_json({"model": model, "answers": answers}))
    pieces = [
        (await offload(to_json, answers[start : start + PRINTED], long=True))[1:-1]
        for start in range(0, len(answers), PRINTED)
    ]
    return Answer(b"".join([b'{"model":', to_json(model), b',"answers":[', b",".join(pieces), b"]}"]))


def choose_samples(content: Any, model: Model) -> list[Any]:
    """Choose the samples of a request in JSON. Raises InputError."""
    key = model.task.field
    if not isinstance(content, dict) or set(content) != {key}:
        received = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise InputError(
            f"model {model.name!r} does {model.task.name} and takes an object {{{key!r}: ...}} with one sample "
            f"or a list of samples, not {received}"
        )
    samples = content[key]
    if not isinstance(samples, list):
        return [samples]
    if not samples:
        raise InputError(f"{key!r} is an empty list: give at least one sample")
    return samples


async def read_form(body: bytes, content_type: bytes, key: str) -> list[Any]:
    """Read the values of the task's key in a form. Raises InputError."""
    fields = await read_fields(body, content_type)
    if key not in fields:
        raise InputError(f"the form has no {key!r}, only {sorted(fields)}. Try: curl -F {key}=@FILE")
    return fields[key]


async def read_fields(body: bytes, content_type: bytes) -> dict[str, list[Any]]:
    """Read the fields of a form by name: files as bytes, others as text. Raises InputError."""

    async def stream() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), PARSED):
            yield body[start : start + PARSED]
            await asyncio.sleep(0)

    headers = MultipartHeaders(raw=[(b"content-type", content_type)])
    parser = InMemoryParser(headers, stream(), max_files=MAX_FILES, max_part_size=MIB)
    try:
        form = await parser.parse()
        fields: dict[str, list[Any]] = {}
        for name, value in form.multi_items():
            fields.setdefault(name, []).append(await value.read() if isinstance(value, UploadFile) else value)
        return fields
    except (MultiPartException, KeyError) as error:
        raise InputError(f"the form does not read: {getattr(error, 'message', error)}") from None
    finally:
        parser.close()
