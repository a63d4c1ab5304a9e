"""Recordings of any length are read in windows with timestamps, as by transformers, or divided where they are quiet,
and written down part by part: by OpenAI's own client."""

import io
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import httpx
import models
import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Running, eventually, running

from compress.pipeline import compress
from laconic.arrays import Array
from laconic.artifacts.artifact import Artifact
from laconic.cache import Cache
from laconic.errors import InputError
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.encoder_decoder_session import EncoderDecoderSession
from laconic.tasks.audio import make_tone
from laconic.tasks.recording_parts import TranscribedRecording, find_cuts
from laconic.tasks.speech_to_text import SpeechToText
from serve.generation.generation_worker import GenerationWorker
from serve.generation.recording_writer import RecordingWriter
from serve.generation.timed_window import TimedTokens, TimedWindow
from serve.openai.transcription_request import Segment, Transcript, format_transcript

RATE = 16_000


def encode(waveform: Array, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, waveform, rate, format="WAV")
    return file.getvalue()


@settings(max_examples=60)
@given(st.integers(0, 4000), st.sampled_from([20, 100, 333]), st.floats(1.0, 5.0), st.integers(0, 9))
def test_parts_are_no_longer_than_the_model_takes_and_of_about_one_length(
    length: int, rate: int, longest: float, seed: int
) -> None:
    waveform = np.random.default_rng(seed).standard_normal(length).astype(np.float32)
    bounds = [0, *find_cuts(waveform, rate, longest), length]
    sizes = [end - start for start, end in pairwise(bounds)]
    assert all(0 <= size <= longest * rate for size in sizes)
    assert len(sizes) <= 1 or min(sizes) >= 0.3 * longest * rate
    assert len(sizes) <= 1 + 2 * length / (longest * rate)


def test_a_recording_is_cut_where_it_is_quiet() -> None:
    waveform = make_tone(np.random.default_rng(0), 10 * RATE, RATE) + 0.1
    for pause in (2.7, 5.2, 7.6):
        waveform[round(pause * RATE) : round((pause + 0.2) * RATE)] = 0
    cuts = [cut / RATE for cut in find_cuts(waveform, RATE, 3)]
    assert len(cuts) == 3
    assert all(start < cut < start + 0.2 for cut, start in zip(cuts, (2.7, 5.2, 7.6), strict=True))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, for recordings of up to a second, with all timestamps."""
    folder = tmp_path_factory.mktemp("whisper") / "source"
    settings = {"task": "transcribe", "max_initial_timestamp_index": 20, "suppress_tokens": [257, 258, 262]}
    return models.save_whisper(folder, times=51, **settings)


@pytest.fixture(scope="module")
def whisper(source: Path) -> Artifact:
    folder = source.parent
    recipe = Recipe.parse({"source": str(source), "stages": [], "engine_only": "onnxruntime"})
    return compress(recipe, folder / "whisper.laconic", steps=Steps(quiet=True), cache=Cache(folder / "cache")).artifact


@pytest.fixture(scope="module")
def server(whisper: Artifact) -> Iterator[Running]:
    with running(whisper.path) as server:
        yield server


@pytest.fixture
def untimed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model as if it had no timestamps."""
    monkeypatch.setattr(writer_of(server), "timed", None)


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def recording() -> bytes:
    rng = np.random.default_rng(0)
    mono = np.concatenate([make_tone(rng, RATE // 2, RATE) for _ in range(7)])
    return encode(np.stack([mono, mono], axis=1))


def write_by_transformers(source: Path, spectrogram: Array, **options: Any) -> tuple[str, list[tuple[Any, ...]]]:
    """The text, and the segments that are not empty, each with its start and end."""
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(source).eval()
    tokenizer = transformers.WhisperTokenizer.from_pretrained(source)
    greedy = {"num_beams": 1, "do_sample": False, "condition_on_prev_tokens": False}
    mask = torch.ones(1, spectrogram.shape[1], dtype=torch.int64)
    whole = {"attention_mask": mask, "return_timestamps": True, "return_segments": True}
    written = model.generate(torch.from_numpy(spectrogram)[None], **whole, **greedy, **options)
    texts = [tokenizer.decode(each["tokens"], skip_special_tokens=True) for each in written["segments"][0]]
    times = [(float(each["start"]), float(each["end"])) for each in written["segments"][0]]
    segments = [(text.strip(), *both) for text, both in zip(texts, times, strict=True) if text.strip()]
    return str(tokenizer.decode(written["sequences"][0], skip_special_tokens=True)).strip(), segments


@pytest.mark.parametrize("named", [{}, {"language": "fr"}])
def test_windows_with_timestamps_are_written_as_by_transformers(
    client: openai.OpenAI, source: Path, whisper: Artifact, recording: bytes, named: dict[str, str]
) -> None:
    task = whisper.task()
    assert isinstance(task, SpeechToText)
    spectrogram = task.read_windows(task.divide_recording(recording)).spectrogram
    text, segments = write_by_transformers(source, spectrogram, **named)
    assert len(segments) > 4
    asked: Any = {"model": "whisper", "file": ("a.wav", recording), **named}
    whole = client.audio.transcriptions.create(**asked, response_format="verbose_json")
    assert whole.text == text
    assert [each.text for each in whole.segments] == [text for text, *_ in segments]
    times = [(each.start, each.end) for each in whole.segments]
    np.testing.assert_allclose(times, [times for _, *times in segments], atol=0.021)  # theirs round a half step down
    assert float(whole.duration) == 3.5
    assert whole.language == named.get("language", whole.language) in ("en", "fr")
    assert client.audio.transcriptions.create(**asked).text == text
    *deltas, done = client.audio.transcriptions.create(**asked, stream=True)
    assert "".join(each.delta for each in deltas) == text == done.text
    assert len(deltas) > 4
    assert client.audio.transcriptions.create(**asked, response_format="srt").count(" --> ") == len(segments)


@pytest.mark.usefixtures("untimed")
def test_parts_are_answered_as_each_of_them_alone(
    client: openai.OpenAI, server: Running, whisper: Artifact, recording: bytes
) -> None:
    task = whisper.task()
    assert isinstance(task, TranscribedRecording)
    parts = task.divide_recording(recording)
    assert len(parts) >= 4
    assert (parts[0].start, parts[-1].end) == (0, 3.5)
    with server.client() as http:
        samples = [{**part.sample, "array": part.sample["array"].tolist()} for part in parts]
        answers = http.post("/v1/models/whisper/predict", json={"audio": samples}).json()["answers"]
    texts = [answer["text"] for answer in answers]
    assert any(texts)
    joined = " ".join(text for text in texts if text)
    file = ("speech.wav", recording)
    assert client.audio.transcriptions.create(model="whisper", file=file).text == joined
    whole = client.audio.transcriptions.create(
        model="whisper", file=file, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert whole.text == joined
    assert whole.segments is not None
    assert [each.text for each in whole.segments] == texts
    assert [each.start for each in whole.segments] == pytest.approx([part.start for part in parts], abs=1e-3)
    assert float(whole.duration) == 3.5
    kinds: Any = ("text", "srt", "vtt")
    plain, srt, vtt = (
        str(client.audio.transcriptions.create(model="whisper", file=file, response_format=kind)) for kind in kinds
    )
    assert plain.strip() == joined
    assert "00:00:00,000 --> " in srt
    assert vtt.startswith("WEBVTT\n")


@pytest.mark.usefixtures("untimed")
def test_a_stream_has_the_same_text_piece_by_piece(client: openai.OpenAI, recording: bytes) -> None:
    file = ("speech.wav", recording)
    whole = client.audio.transcriptions.create(model="whisper", file=file).text
    *deltas, done = client.audio.transcriptions.create(model="whisper", file=file, stream=True)
    assert done.type == "transcript.text.done"
    assert done.text == whole
    assert {each.type for each in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 8
    assert "".join(each.delta for each in deltas if each.type == "transcript.text.delta") == whole


@pytest.mark.usefixtures("untimed")
def test_the_language_and_the_temperature_are_those_of_the_request(
    client: openai.OpenAI, server: Running, whisper: Artifact, recording: bytes
) -> None:
    task: Any = whisper.task()
    language = task.tokenizer.id_to_token(task.settings.languages[1])[2:-2]
    texts = [
        client.audio.transcriptions.create(model="whisper", file=("a.wav", recording), **options).text
        for options in ({"language": language}, {"language": language}, {"temperature": 0.9})
    ]
    assert texts[0] == texts[1] != texts[2]
    settings = task.settings.model_copy(update={"languages": (), "forced_decoder_ids": task.find_prefix(language)})
    (part, *_) = task.divide_recording(recording)
    with whisper.open() as session:
        cast(EncoderDecoderSession, session).generation = settings
        expected = session.run(task.encode_request(task.parse(part.sample)))
    assert texts[0].startswith(task.decode(expected, [part])[0]["text"])
    assert worker_of(server).admission.ledger.used == 0


def test_a_client_that_leaves_frees_its_blocks(server: Running, recording: bytes) -> None:
    with server.client() as http:
        body = {"model": (None, "whisper"), "stream": (None, "true"), "file": ("a.wav", recording)}
        with http.stream("POST", "/v1/audio/transcriptions", files=body) as answer:
            next(answer.iter_lines())
    assert eventually(lambda: server.app.repository.get("whisper").users == 0)
    assert eventually(lambda: worker_of(server).admission.ledger.used == 0)


def writer_of(server: Running) -> RecordingWriter:
    writer = server.app.repository.get("whisper").writer
    assert isinstance(writer, RecordingWriter)
    return writer


def worker_of(server: Running) -> GenerationWorker:
    return writer_of(server).worker


def test_a_short_recording_is_one_part(client: openai.OpenAI, server: Running) -> None:
    file = encode(make_tone(np.random.default_rng(1), RATE // 2, RATE))
    with server.client() as http:
        (answer,) = http.post("/v1/models/whisper/predict", files={"audio": file}).json()["answers"]
    asked: Any = {"model": "whisper", "file": ("a.wav", file)}
    assert client.audio.transcriptions.create(**asked).text == answer["text"]
    timed = client.audio.transcriptions.create(**asked, response_format="verbose_json")
    assert timed.segments
    assert all((each.start, each.end) != (0, 0.5) for each in timed.segments)


@pytest.mark.parametrize(
    ("text", "segments", "step"),
    [
        ([], [(0, 25)], 25),
        ([100, 7], [(0, 25, 7)], 25),
        ([104, 7], [(0, 4, 7)], 25),  # no second time, so the first is the end, as in transformers
        ([100, 7, 112], [(0, 12, 7)], 25),
        ([103, 7, 112, 112, 8], [(3, 12, 7)], 12),  # written again in the next window
        ([103, 7, 112, 115, 8, 9, 120], [(3, 12, 7), (15, 20, 8, 9)], 25),  # nothing is said behind a last time
        ([103, 7, 112, 115, 8, 120, 120], [(3, 12, 7), (15, 20, 8)], 20),
    ],
)
def test_pairs_of_times_divide_what_is_written(text: list[int], segments: list[tuple[int, ...]], step: int) -> None:
    window = TimedWindow(100, 25)
    made = [segment for token in text if (segment := window.add(token)) is not None]
    last, steps = window.finish()
    assert [*made, *([last] if last else [])] == [
        TimedTokens(start, end, tuple(rest)) for start, end, *rest in segments
    ]
    assert steps == step


@pytest.mark.parametrize(
    ("fields", "told", "parameter"),
    [
        ({"language": "xx"}, "does not know the language 'xx'", "language"),
        ({"prompt": "x"}, "'prompt' is not supported", "prompt"),
        ({"temperature": "1.5"}, "between 0 and 1", "temperature"),
        ({"temperature": "warm"}, "'temperature' does not fit", "temperature"),
        ({"stream": "perhaps"}, "'stream' does not fit", "stream"),
        ({"stream": "true", "response_format": "srt"}, "a stream has no response_format but", "response_format"),
        ({"response_format": "xml"}, "'response_format' does not fit", "response_format"),
        ({"timestamp_granularities[]": "segment"}, "needs response_format=verbose_json", "timestamp_granularities[]"),
        ({"timestamp_granularities[]": "word"}, "does not fit", "timestamp_granularities[]"),
        ({"beam": "3"}, "unknown parameter 'beam'", "beam"),
        ({"file": "no file"}, "'file' does not fit", "file"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    server: Running, recording: bytes, fields: dict[str, str], told: str, parameter: str
) -> None:
    files = {} if "file" in fields else {"file": ("a.wav", recording)}
    body = {"model": (None, "whisper"), **{name: (None, value) for name, value in fields.items()}, **files}
    answer = post(server, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert told in error["message"]
    assert error["param"] == parameter


def test_what_is_no_recording_or_no_form_is_refused_in_one_sentence(server: Running, recording: bytes) -> None:
    for file, told in ((b"RIFF", "not an audio file"), (encode(np.zeros(5)), "expected at least"), (b"", "'file'")):
        answer = post(server, {"model": (None, "whisper"), "file": ("a.wav", file)})
        assert answer.status_code == 400, answer.text
        assert told in answer.json()["error"]["message"]
    with server.client() as http:
        assert http.post("/v1/audio/transcriptions", json={"model": "whisper"}).status_code == 400
        described = http.get("/openapi.json").json()["paths"]["/v1/audio/transcriptions"]["post"]
        assert set(described["requestBody"]["content"]) == {"multipart/form-data"}
    assert post(server, {"file": ("a.wav", recording)}).json()["error"]["param"] == "model"
    missing = post(server, {"model": (None, "other"), "file": ("a.wav", recording)})
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def post(server: Running, body: dict[str, Any]) -> httpx.Response:
    with server.client() as http:
        return http.post("/v1/audio/transcriptions", files=body)


def test_waveforms_count_as_memory_of_the_requests_under_way(whisper: Artifact) -> None:
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(60 * RATE), RATE, format="FLAC")
    assert len(silence.getvalue()) < 100_000
    with running(whisper.path, max_in_flight=2_000_000, max_body=1_000_000) as server:
        answer = post(server, {"model": (None, "whisper"), "file": ("a.flac", silence.getvalue())})
        assert answer.status_code == 429
        assert "hold all of the" in answer.json()["error"]["message"]


def test_subtitles_have_times_in_hours() -> None:
    segments = [Segment(0.0, 1.5, "one"), Segment(3661.0005, 3662.25, "two")]
    assert format_transcript(Transcript.join(segments), "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\none\n\n2\n01:01:01,000 --> 01:01:02,250\ntwo\n"
    )
    assert format_transcript(Transcript.join([]), "json") == {"text": ""}


def test_a_recording_that_would_not_fit_in_memory_is_refused(whisper: Artifact) -> None:
    task = whisper.task()
    assert isinstance(task, TranscribedRecording)
    with pytest.raises(InputError, match="more than 24,000,000"):
        task.divide_recording(encode(np.zeros(24_000_100, np.int16)))
