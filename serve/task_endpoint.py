"""The predict endpoint: raw samples in, answers out."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.datastructures import Headers as MultipartHeaders
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from laconic.errors import InputError
from serve.model import Model
from serve.offload import offload
from serve.server_settings import MIB, Settings
from serve.wire import (
    Answer,
    ClientGone,
    Headers,
    Receive,
    Scope,
    from_json,
    read_body,
    to_answer,
    to_json,
    while_connected,
)

MAX_FILES = 256
"""The most files of one upload; all are kept in memory."""
PRINTED = 64
"""Answers that are printed in one go, without letting other threads run: 2 ms for embeddings of 384 numbers."""
HUNG_UP = 499
"""The status of a request whose client has disconnected."""


class InMemoryParser(MultiPartParser):
    """Keeps files in memory: the body is bounded already, and the server may have no disk to write to."""

    spool_max_size = 1024 * MIB


async def predict(model: Model, settings: Settings, scope: Scope, receive: Receive) -> Answer:
    """Answer one request with `{"model": name, "answers": [...]}`, one answer per sample."""
    headers: Headers = dict(scope["headers"])
    started, success = time.monotonic_ns(), False
    try:
        body = await read_body(headers, receive, settings.max_body)
        async with while_connected(receive):
            values = await read_samples(body, headers.get(b"content-type", b""), model)
            answer = await write_answers(model.name, await model.predict(values))
        success = True
    except ClientGone:
        answer = Answer(b"", HUNG_UP)
    except Exception as error:  # noqa: BLE001 - an exception that gets out costs the client its connection
        answer = to_answer(error)
    finally:
        model.statistics.count_request(started, success=success)
    return answer


async def write_answers(model: str, answers: list[Any]) -> Answer:
    """The HTTP answer. Many are printed off the event loop, a few at a time: 3,000 embeddings are 12 MB of JSON."""
    if len(answers) <= PRINTED:
        return Answer(to_json({"model": model, "answers": answers}))
    pieces = [
        (await offload(to_json, answers[start : start + PRINTED], long=True))[1:-1]
        for start in range(0, len(answers), PRINTED)
    ]
    return Answer(b"".join([b'{"model":', to_json(model), b',"answers":[', b",".join(pieces), b"]}"]))


async def read_samples(body: bytes, content_type: bytes, model: Model) -> list[Any]:
    """The samples of a request: JSON unless the content type says that it is a form, or a file that the task takes."""
    kind = content_type.partition(b";")[0].strip().lower()
    if kind == b"multipart/form-data":
        return await read_form(body, content_type, model.task.field)
    if model.task.upload is not None and model.task.upload.matches(kind.decode("latin-1")):
        return [body]
    content = from_json(body)
    key = model.task.field
    if not isinstance(content, dict) or set(content) != {key}:
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise InputError(
            f"model {model.name!r} does {model.task.name} and takes an object {{{key!r}: ...}} with one sample "
            f"or a list of samples, not {found}"
        )
    samples = content[key]
    if not isinstance(samples, list):
        return [samples]
    if not samples:
        raise InputError(f"{key!r} is an empty list: give at least one sample")
    return samples


async def read_form(body: bytes, content_type: bytes, key: str) -> list[Any]:
    """The values of the task's key in a form: files as bytes, fields as text. Raises InputError."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    headers = MultipartHeaders(raw=[(b"content-type", content_type)])
    try:
        parser = InMemoryParser(headers, stream(), max_files=MAX_FILES, max_part_size=MIB)
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise InputError(f"the form does not read: {getattr(error, 'message', error)}") from None
    samples = [await value.read() if isinstance(value, UploadFile) else value for value in form.getlist(key)]
    await form.close()
    if not samples:
        raise InputError(f"the form has no {key!r}, only {sorted(set(form))}. Try: curl -F {key}=@FILE")
    return samples
