"""OpenAI's transcriptions of recordings: `POST /v1/audio/transcriptions`."""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from laconic.errors import DataError, InputError
from serve.asgi.wire import Answer, Headers, to_json
from serve.generation.recording_writer import RecordingWriter, strip_pieces
from serve.generation.timed_window import TimedText
from serve.http.endpoint import BodyEndpoint, ModelCall
from serve.http.event_stream import EVENTS, EventStream
from serve.http.task_endpoint import read_fields
from serve.model_repository.model import Model
from serve.openai.openai_shape import describe_openai_error, to_openai_answer
from serve.openai.transcription_request import (
    DividedPart,
    Segment,
    TranscribingTask,
    Transcript,
    TranscriptionRequest,
    format_transcript,
)
from serve.requests.memory_budget import Reservation
from serve.requests.offload import offload
from serve.requests.public_errors import InvalidParameter
from serve.security.keys import count_rows, name_caller

TEXT = b"text/plain; charset=utf-8"
Pieces = AsyncGenerator[tuple[int, str], None]
"""The text of a recording as it is written: each piece with the number of its part."""
TimedTexts = AsyncGenerator[TimedText, None]
"""The segments of a recording as they are written."""


class Transcribe(BodyEndpoint[TranscriptionRequest]):
    """What is said in a recording of any length, which is read in windows, or divided where it is quiet."""

    pattern = re.compile(r"/v1/audio/transcriptions")

    def refuse(self, error: BaseException) -> Answer:
        return to_openai_answer(error)

    async def read_content(self, body: bytes, headers: Headers, reservation: Reservation) -> Any:
        return choose_values(await read_fields(body, headers.get(b"content-type", b"")))

    def read_request(self, match: re.Match[str], content: Any) -> TranscriptionRequest:
        return TranscriptionRequest.read(content)

    async def respond(self, call: ModelCall[TranscriptionRequest]) -> Answer:
        request, model = call.request, call.model
        task = find_task(model)
        prefix = find_prefix(request, model)
        parts = await offload(task.divide_recording, request.file, long=True)
        call.reservation.add(sum(part.nbytes for part in parts))  # a file may be a thousandth of its waveform
        duration, timed = parts[-1].end, None
        if isinstance(writer := model.writer, RecordingWriter) and (len(parts) > 1 or request.has_times):
            timed = await self._write_timed(call, writer, parts, prefix)
        if request.is_stream:
            pieces = self._write(call, parts, prefix) if timed is None else to_pieces(timed)
            first = await anext(pieces, None)  # what goes wrong before it has a status of its own
            return EventStream(
                b"",
                content_type=EVENTS,
                scope=call.scope,
                receive=call.receive,
                events=stream(first, pieces),
                end=call.end,
                done=b"",
                describe_error=describe_openai_error,
            )
        if timed is None:
            transcript = await self._transcribe(call, parts, prefix)
        else:
            transcript = await collect(timed, duration)
        content = format_transcript(transcript, request.response_format)
        return Answer(content.encode(), content_type=TEXT) if isinstance(content, str) else Answer(to_json(content))

    async def _transcribe(
        self, call: ModelCall[TranscriptionRequest], parts: Sequence[DividedPart], prefix: tuple[int, ...]
    ) -> Transcript:
        """Write parts down, each as a recording of its own."""
        if call.request.heat or prefix:
            texts = [""] * len(parts)
            async for number, text in self._write(call, parts, prefix):
                texts[number] += text
        else:
            prediction = await call.model.predict([part.sample for part in parts], timeout=call.timeout)
            texts = [answer["text"] for answer in prediction.answers]
        return Transcript.join([Segment(part.start, part.end, text) for part, text in zip(parts, texts, strict=True)])

    async def _write_timed(
        self,
        call: ModelCall[TranscriptionRequest],
        writer: RecordingWriter,
        parts: Sequence[DividedPart],
        prefix: tuple[int, ...],
    ) -> TimedTexts | None:
        """Begin to write a recording down with timestamps; return None where the model has none."""
        if writer.timed is None:
            return None
        self._check(parts)
        count_rows(len(parts))
        recording = await offload(writer.task.read_windows, parts, long=True)
        call.reservation.add(recording.nbytes)
        timeout = call.timeout or self.settings.deadline
        return writer.write_timed(
            recording, writer.timed, prefix=prefix, temperature=call.request.heat, timeout=timeout, key=name_caller()
        )

    def _check(self, parts: Sequence[DividedPart]) -> None:
        """Raise InputError for more parts than the server takes."""
        if len(parts) > (most := self.settings.max_rows):
            raise InputError(f"the recording has {len(parts)} parts, and this server takes {most} at once")

    def _write(
        self, call: ModelCall[TranscriptionRequest], parts: Sequence[DividedPart], prefix: tuple[int, ...]
    ) -> Pieces:
        """Write parts down, token by token where the model does. Raises InputError for more than the server takes."""
        samples, writer = [part.sample for part in parts], call.model.writer
        self._check(parts)
        if not isinstance(writer, RecordingWriter):
            return predict_each(call.model, samples, call.timeout)
        count_rows(len(samples))
        timeout = call.timeout or self.settings.deadline
        return writer.write(samples, prefix=prefix, temperature=call.request.heat, timeout=timeout, key=name_caller())


async def predict_each(model: Model, samples: Sequence[Any], timeout: float | None) -> Pieces:
    """Yield the text of each part as a whole."""
    for number, sample in enumerate(samples):
        prediction = await model.predict([sample], timeout=timeout)
        yield number, prediction.answers[0]["text"]


async def stream(first: tuple[int, str] | None, pieces: Pieces) -> AsyncGenerator[dict[str, str], None]:
    """Yield the events of a transcript. first: the first of the pieces."""
    whole, last = "", -1
    piece = first
    try:
        while piece is not None:
            number, text = piece
            delta = f" {text}" if whole and number != last and text else text
            last = number
            if delta:
                whole += delta
                yield {"type": "transcript.text.delta", "delta": delta}
            piece = await anext(pieces, None)
        yield {"type": "transcript.text.done", "text": whole}
    finally:
        await pieces.aclose()


async def to_pieces(timed: TimedTexts) -> Pieces:
    """Yield the text of all segments, as that of one part, as they come."""
    async with aclosing(timed), aclosing(strip_pieces(each.text async for each in timed)) as texts:
        async for text in texts:
            yield 0, text


async def collect(timed: TimedTexts, duration: float) -> Transcript:
    """Make a transcript of all segments that are not empty. duration: of the recording, in seconds."""
    texts, language = [], ""
    async with aclosing(timed):
        async for each in timed:
            texts.append(each)
            language = each.language
    segments = [Segment(each.start, each.end, text) for each in texts if (text := each.text.strip())]
    return Transcript("".join(each.text for each in texts).strip(), segments, duration, language)


def find_task(model: Model) -> TranscribingTask:
    """Return the task of a model that writes down what is said. Raises InvalidParameter for any other."""
    if not isinstance(model.task, TranscribingTask):
        raise InvalidParameter("model", f"model {model.name!r} does {model.task.name}, and writes no recordings down")
    return model.task


def find_prefix(request: TranscriptionRequest, model: Model) -> tuple[int, ...]:
    """Find the tokens that the text begins with where the request names its language; none where it does not. Raises
    InvalidParameter for what the model does not do."""
    writer, generation = model.writer, model.task.generation
    if not isinstance(writer, RecordingWriter) and request.heat:
        raise InvalidParameter("temperature", "'temperature' must be 0: with this model the likeliest text is written")
    if not request.language:
        return ()
    if not isinstance(writer, RecordingWriter) or generation is None or not generation.languages:
        raise InvalidParameter("language", "'language' is not supported: this model has its own. Leave it out")
    try:
        return writer.task.find_prefix(request.language)
    except DataError:
        raise InvalidParameter(
            "language", f"the model does not know the language {request.language[:40]!r}. Give its code, such as 'en'"
        ) from None


def choose_values(fields: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the fields of a form, each with its one value, but for those whose names say that they are lists. Raises
    InvalidParameter for one that is there twice."""
    for name, values in fields.items():
        if len(values) > 1 and not name.endswith("[]"):
            raise InvalidParameter(name, f"{name[:40]!r} is there {len(values)} times. Give it once")
    return {name: values if name.endswith("[]") else values[0] for name, values in fields.items()}
