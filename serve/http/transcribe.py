"""OpenAI's transcriptions of recordings: `POST /v1/audio/transcriptions`."""

import re
import time
from typing import Any

from serve.asgi.body import read_body
from serve.asgi.wire import Answer, Receive, Scope, WhileConnected, to_json
from serve.http.endpoint import Endpoint, read_timeout
from serve.http.task_endpoint import read_fields
from serve.model_repository.model import Model
from serve.openai.openai_shape import InvalidParameter, to_openai_answer
from serve.openai.transcription_request import Segment, TranscribingTask, TranscriptionRequest, format_segments
from serve.requests.memory_budget import Reservation
from serve.requests.offload import offload

TEXT = b"text/plain; charset=utf-8"


class Transcribe(Endpoint):
    """What is said in a recording of any length, which is divided where it is quiet."""

    pattern = re.compile(r"/v1/audio/transcriptions")

    def refuse(self, error: BaseException) -> Answer:
        return to_openai_answer(error)

    async def _answer(self, match: re.Match[str], scope: Scope, receive: Receive, reservation: Reservation) -> Answer:
        headers = dict(scope["headers"])
        body = await read_body(headers, receive, self.settings.max_body, reservation)
        started = time.monotonic_ns()
        async with WhileConnected(scope, receive):
            fields = await read_fields(body, headers.get(b"content-type", b""))
            request = TranscriptionRequest.read(choose_values(fields))
            model = self.repository.get(request.model)
            task = find_task(model)
            model.users += 1
            try:
                model.check_ready()
                parts = await offload(task.divide_recording, request.file, long=True)
                reservation.add(sum(part.nbytes for part in parts))  # a file may be a thousandth of its waveform
                prediction = await model.predict([part.sample for part in parts], timeout=read_timeout(headers))
            except BaseException as error:
                model.statistics.count_failure(started, error)
                raise
            finally:
                model.users -= 1
            model.statistics.count_success(started)
            pairs = zip(parts, prediction.answers, strict=True)
            segments = [Segment(part.start, part.end, answer["text"]) for part, answer in pairs]
            content = format_segments(segments, request.response_format)
            return Answer(content.encode(), content_type=TEXT) if isinstance(content, str) else Answer(to_json(content))


def find_task(model: Model) -> TranscribingTask:
    """Return the task of a model that writes down what is said. Raises InvalidParameter for any other."""
    if not isinstance(model.task, TranscribingTask):
        raise InvalidParameter("model", f"model {model.name!r} does {model.task.name}, and writes no recordings down")
    return model.task


def choose_values(fields: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the fields of a form, each with its one value, but for those whose names say that they are lists. Raises
    InvalidParameter for one that is there twice."""
    for name, values in fields.items():
        if len(values) > 1 and not name.endswith("[]"):
            raise InvalidParameter(name, f"{name[:40]!r} is there {len(values)} times. Give it once")
    return {name: values if name.endswith("[]") else values[0] for name, values in fields.items()}
