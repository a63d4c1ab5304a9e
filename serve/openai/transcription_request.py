"""Requests of `POST /v1/audio/transcriptions`, a form with a recording; and the formats of their answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, runtime_checkable

from pydantic import Field

from serve.openai.request_body import RequestBody
from serve.requests.public_errors import InvalidParameter

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]


class DividedPart(Protocol):
    """A part of a recording."""

    @property
    def start(self) -> float:
        """Seconds from the beginning of the recording."""

    @property
    def end(self) -> float:
        """Seconds from the beginning of the recording."""

    @property
    def sample(self) -> Any:
        """The part, as the task takes it."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in memory."""


@runtime_checkable
class TranscribingTask(Protocol):
    """What is asked of the task of a model that writes down what is said."""

    def divide_recording(self, file: bytes) -> Sequence[DividedPart]:
        """Divide a recording into parts that the model takes. Raises InputError."""


class TranscriptionRequest(RequestBody):
    """A recording to write down. file: its bytes. Fields of a form are texts."""

    file: bytes = Field(min_length=1)
    response_format: Format = "json"
    timestamp_granularities: list[Literal["segment"]] | None = Field(None, alias="timestamp_granularities[]")
    temperature: str | None = Field(None, pattern=r"^[0-9]{0,2}(\.[0-9]{0,20})?$")
    stream: Literal["", "true", "True", "false", "False"] | None = None
    language: str | None = None
    prompt: str | None = None

    def refuse_unsupported(self) -> None:
        if self.heat > 1:
            raise InvalidParameter("temperature", "'temperature' does not fit: it is between 0 and 1")
        if self.is_stream and self.response_format not in ("json", "text"):
            raise InvalidParameter("response_format", "a stream has no response_format but 'json' and 'text'")
        if self.prompt:
            raise InvalidParameter("prompt", "'prompt' is not supported. Leave it out")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidParameter(
                "timestamp_granularities[]", "'timestamp_granularities[]' needs response_format=verbose_json"
            )

    @property
    def is_stream(self) -> bool:
        """Whether the text is sent while it is written."""
        return self.stream in ("true", "True")

    @property
    def has_times(self) -> bool:
        """Whether the answer says when what is said."""
        return self.response_format in ("srt", "verbose_json", "vtt")

    @property
    def heat(self) -> float:
        """The temperature."""
        return float(f"0{self.temperature or ''}")


@dataclass(frozen=True)
class Segment:
    """What is said in a part of a recording. start, end: in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """What is said in a recording. duration: in seconds. language: its code, where it is known."""

    text: str
    segments: Sequence[Segment]
    duration: float
    language: str = ""

    @classmethod
    def join(cls, segments: Sequence[Segment]) -> Self:
        """Make the transcript of a recording that was written down part by part."""
        text = " ".join(segment.text for segment in segments if segment.text)
        return cls(text, segments, segments[-1].end if segments else 0.0)


def format_transcript(transcript: Transcript, kind: Format) -> dict[str, Any] | str:
    """Format what was written down: an object, or a text."""
    text, segments = transcript.text, transcript.segments
    if kind == "json":
        return {"text": text}
    if kind == "text":
        return f"{text}\n"
    if kind == "verbose_json":
        parts = [
            {"id": index, "start": round(each.start, 3), "end": round(each.end, 3), "text": each.text}
            for index, each in enumerate(segments)
        ]
        named = {"language": transcript.language} if transcript.language else {}
        return {
            "task": "transcribe",
            **named,
            "duration": round(transcript.duration, 3),
            "text": text,
            "segments": parts,
        }
    mark = "," if kind == "srt" else "."
    cues = [
        f"{index}\n{format_time(each.start, mark)} --> {format_time(each.end, mark)}\n{each.text}\n"
        for index, each in enumerate(segments, 1)
    ]
    return "\n".join((["WEBVTT\n"] if kind == "vtt" else []) + cues)


def format_time(seconds: float, mark: str) -> str:
    """Format a time of subtitles, as 00:01:02,345. mark: in front of the milliseconds."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}{mark}{thousandths:03}"
